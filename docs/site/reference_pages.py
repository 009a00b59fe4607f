"""Pages that the code writes: a hook of mkdocs, which adds them to the site and to no folder.

They are the pages of the reference, the reports of the kept runs, and the site of these runs in ``measured``. Importing
this module and writing every page loads neither torch nor mkdocs.
"""

import inspect
import json
import re
import runpy
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import typer.main
import yaml
from docstrings import plain

import attncheck
from attncheck.backends.conventions import Conventions
from attncheck.backends.declarations import required_features
from attncheck.cases.loader import load_suite, suite_names
from attncheck.cases.schema import json_schema
from attncheck.harness.cli.app import app
from attncheck.harness.cli.show import BackendKind, template_files
from attncheck.reference import spec, step_spec
from attncheck.reference.lazy_exports import homes
from attncheck.reports.audit.page import render as render_audit
from attncheck.reports.markdown.run import render_run
from attncheck.reports.run_file.store import Run, read_run, run_files
from attncheck.reports.site.build import names_of, read_runs, write_site

MADE = "Generated from the code of this version.\n"
EVIDENCE = Path(__file__).parents[1] / "evidence"
TESTS = Path(__file__).parents[2] / "tests" / "miniatures"
SHOWN_OF_CONTRACT = (
    "contract.AttentionBackend",
    "contract.KVCacheSpec",
    "contract.AttentionMetadata",
    "impl.AttentionImpl",
    "impl.MLAAttentionImpl",
    "impl.AttentionLayer",
    "conventions.Conventions",
    "declarations.MultipleOf",
    "paged.PagedBackend",
    "paged.PagedImpl",
    "paged_metadata.PagedMetadata",
    "paged_metadata.PagedBuilder",
    "kernel.kernel_backend",
)


def table(headings: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table; a bar within a cell is escaped, and a newline becomes a blank."""
    heads = list(headings)
    lines = [heads, ["---"] * len(heads), *rows]
    cells = ([" ".join(str(cell).split()).replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def code(value: object) -> str:
    """Return the value as Markdown code; nothing for an empty one."""
    return f"`{value}`" if str(value) else ""


_WHERE = {"everywhere": "", "on CUDA": ", on CUDA", "nowhere": ", by name"}
"""What the page of the checks adds to a check, by where it runs by default."""


def checks() -> str:
    """Return the page of the checks."""
    rows = [
        (code(name), info.establishes, info.cannot_see, f"{info.applies_to}{_WHERE[info.by_default]}")
        for name, info in spec.CHECKS.items()
    ]
    former = "".join(
        f"\n`{old}` is the former name of `{new}`. A case file and a command line may use either.\n"
        for old, new in spec.FORMER_CHECKS.items()
    )
    return (
        "# Checks\n\nThis page lists every check, what it establishes and what it cannot detect.\n"
        f"{MADE}[How attncheck checks a backend](../how-it-judges.md) explains how each check works.\n\n"
        + table(("check", "establishes", "cannot detect", "examines"), rows)
        + "\nA check marked `by name` runs only if `--check` or the case names it. One marked `on CUDA` also runs by\n"
        + "default on a GPU.\n"
        + former
    )


def features() -> str:
    """Return the page of the features and conventions, with how many cases of the built-in suites need each feature."""
    cases = [case for name in suite_names() for case in load_suite(name)]
    needed = Counter(name for case in cases for name in required_features(case.layer, case.cache, case.batch))
    keys = {modifier.feature: f"layer.{key}" for key, modifier in spec.MODIFIERS.items()}
    rows = [(code(name), code(keys.get(name, "")), needed[name]) for name in spec.FEATURES]
    return (
        "# Features and conventions\n\nThis page lists the features that a backend can declare, and the conventions.\n"
        f"{MADE}[Declare what a backend supports](../backends.md#features) explains each feature.\n\n## Features\n\n"
        "The last column counts the cases that need the feature, among all cases of the built-in suites.\n\n"
        + table(("feature", "modifier that needs it", "cases"), rows)
        + "\n## Conventions\n\n"
        + table(
            ("convention", "default"), [(code(each.name), code(repr(each.default))) for each in fields(Conventions)]
        )
        + "\n## Forms\n\nReports also count cases by these forms: "
        + ", ".join(map(code, spec.FORMS))
        + ".\n\n## Paths\n\n"
        + table(
            ("path", "options"),
            [
                (code(name), ", ".join(code(each.name) for each in fields(kind)) if kind is not None else "")
                for name, kind in step_spec.PATH_OPTIONS.items()
            ],
        )
    )


def kind_of(schema: Mapping[str, Any]) -> str:
    """Return the type of a value of the schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind_of(each) for each in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(code(each) for each in schema["enum"])
    if "const" in schema:
        return code(schema["const"])
    if schema.get("type") == "array":
        return f"list of {kind_of(schema.get('items', {}))}"
    names = {"object": "mapping", "null": "null", "string": "text", "boolean": "true or false"}
    return names.get(schema.get("type", ""), schema.get("type", "any value"))


def bounds_of(schema: Mapping[str, Any]) -> str:
    """Return the limits of a number of the schema, such as ``above 0``."""
    words = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}
    alternatives = [schema, *schema.get("anyOf", ())]
    return ", ".join(f"{word} {each[key]}" for each in alternatives for key, word in words.items() if key in each)


def keys_of(properties: Mapping[str, Any]) -> str:
    """Return the table of the keys of a mapping of the schema."""
    return table(
        ("key", "value", "limits", "default", "meaning"),
        [
            (
                code(key),
                kind_of(each),
                bounds_of(each),
                code(each["default"]) if "default" in each else "",
                each.get("description", ""),
            )
            for key, each in properties.items()
        ],
    )


def case_keys() -> str:
    """Return the page of the keys of a case file."""
    schema = json_schema()
    case = schema["properties"]["cases"]["items"]["properties"]
    parts = [
        (
            "# Keys of a case file\n\nThis page lists every key of a case file, with its type and default.\n"
            f"{MADE}[Case files](../case-files.md) explains the keys with examples. `attncheck list schema` prints the "
            "same as JSON schema.\n\n## File\n\n"
        ),
        keys_of(schema["properties"]),
        "\n## Case\n\n`defaults` takes the keys from `layer` to `strides`.\n\n",
        keys_of(case),
    ]
    for name, each in schema["$defs"].items():
        parts += [f"\n## {name}\n\n", plain(each["description"]) + "\n\n" if each.get("description") else ""]
        mappings = [each, *(option for option in each.get("anyOf", ()) if "properties" in option)]
        shown = [keys_of(mapping["properties"]) for mapping in mappings if mapping.get("properties")]
        parts += shown or [f"{kind_of(each)}\n"]
    return "".join(parts)


def command_line() -> str:
    """Return the page of the command line."""
    parts = [
        (
            "# Command line\n\nThis page lists every command with its arguments and options.\n"
            f"{MADE}`attncheck COMMAND -h` prints the same.\n"
        )
    ]
    commands = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    while commands:
        name = next(iter(commands))
        command = commands.pop(name)
        nested = getattr(command, "commands", {})
        commands = {f"{name} {inner}": each for inner, each in nested.items()} | commands
        parts.append(f"\n## attncheck {name}\n\n{plain(inspect.cleandoc(command.help or ''))}\n")
        options, arguments = [], []
        for each in command.params:
            if getattr(each, "hidden", False):
                continue
            names = f"{', '.join([*each.opts, *each.secondary_opts])} {value_of(each)}".rstrip()
            text = plain(getattr(each, "help", "") or "")
            if each.param_type_name == "argument":
                arguments.append((code(each.metavar or each.name.upper()), text))
            else:
                options.append((code(names), text))
        parts += [f"\n{table(('argument', 'meaning'), arguments)}"] if arguments else []
        parts += [f"\n{table(('option', 'meaning'), options)}"] if options else []
    return "".join(parts)


def value_of(option: Any) -> str:
    """Return the placeholder of the value that an option takes, or its choices; nothing for a flag."""
    if getattr(option, "is_flag", False):
        return ""
    kind = option.type_descriptor.annotation
    if option.metavar is None and isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(each.value for each in kind)
    return option.metavar or option.name.upper()


def documented(names: Iterable[str]) -> str:
    """Return the directives by which mkdocstrings documents the names."""
    return "".join(f"\n::: {name}\n" for name in names)


def python() -> str:
    """Return the page of the names of ``attncheck`` itself."""
    own = [f"{home}.{name}" for name, home in attncheck._HOME.items() if name != "kernel_backend"]
    return (
        "# Python\n\nThis page documents the names that `import attncheck` offers.\n"
        f"{MADE}`kernel_backend` is on the page of [the contract](contract.md).\n\n## Names\n{documented(own)}"
    )


def contract() -> str:
    """Return the page of the contract of a backend."""
    names = [f"attncheck.backends.{name}" for name in SHOWN_OF_CONTRACT]
    return (
        "# The contract of a backend\n\nThis page documents the classes that a backend derives from or receives.\n"
        f"{MADE}`attncheck.backends.contract` exports them, apart from `kernel_backend` and the classes `Paged...`.\n"
        "`CommonAttentionMetadata` and `AttentionMetadataBuilder` are on the page of [the reference](functions.md).\n"
        f"[Templates](templates.md) shows a whole backend.\n\n## Names\n{documented(names)}"
    )


def functions() -> str:
    """Return the page of the functions and classes of ``attncheck.reference``."""
    rooms: dict[str, list[str]] = {"attention": [], "utilities": []}
    for name, home in homes(str(Path(__file__).parents[2] / "reference" / "__init__.py")).items():
        room = home.removeprefix("attncheck.reference.").split(".")[0]
        if room in rooms and name[0] != "_" and name not in ("logger", "M"):
            rooms[room].append(f"{home}.{name}")
    parts = [f"\n## {room.capitalize()}\n{documented(names)}" for room, names in rooms.items()]
    return (
        "# Functions of the reference\n\nThis page documents `attncheck.reference`: attention in plain torch, and the "
        f"metadata utilities of vLLM.\n{MADE}Import each name from `attncheck.reference`.\n" + "".join(parts)
    )


FAULTS = """\
# Faults of backends, and what each costs

This page lists faults that attncheck's tests give to backends, and how each fault changes a run.

Each row is a backend of `tests/miniatures/faults.py`. A test examines it beside `torch_sdpa`, over four small cases.
The fault occurs in one of them, and changes no other record. No process is left. [Crashes](../crashes.md) explains the
outcomes.

The last column is the time in seconds that the fault adds to a run of two backends, on two busy cores. Differences
below 0.5 s mean nothing. A crash costs two process starts: one to repeat the case, one for the next case. A hang also
costs the limit of 5 s twice.
"""


def faults() -> str:
    """Return the page of the faults that attncheck's own tests give to backends."""
    parts = [FAULTS]
    for section, found in yaml.safe_load((TESTS / "faults.yaml").read_text(encoding="utf-8")).items():
        rows = []
        for name, row in found.items():
            outcome = code(row["outcome"]) + (f", {code(row['recurrence'])}" if "recurrence" in row else "")
            rows.append((f"{code(name)}: {row['does']}", outcome, row.get("record", ""), row["seconds"]))
        parts.append(f"\n## {section}\n\n{table(('fault', 'outcome', 'the record contains', 'seconds'), rows)}")
    return "".join(parts)


COST = """\
# What a run costs

This page shows how long attncheck takes. Seconds differ from machine to machine. So each cost is divided by a yardstick
of the same machine, measured in the same minutes. Each column is a measurement of one version: the ratio, and the
seconds it comes from. `python benchmarks/cost.py --append docs/cost.jsonl` adds one, on an idle machine.

{table}

- *first verdict*: `attncheck run --backend ./mine.py:Mine --case decode.float16 --check numerics`, from the command to
  its end, with a process of the backend's own. *verdict after a save*: the same under a former option
  `--watch`, from the save.
- *smoke*: the sum of the durations of the records. `torch_sdpa` declares `UNIFORM_BATCH`, `reference` `NEVER`.
- *smoke of five backends*: the command for `torch_sdpa`, `reference`, `flex_attention`, `reference_mla` and
  `torch_mla` on the CPU, from its start to its end; *user time*: that of all its processes.
- *smoke of ... on a GPU*: the command for one backend, once *cold* and once *warm*, with compiled kernels and stored
  truths. *GPU busy*: the sampled share of that time in which a kernel ran.
- *truths of smoke*: problems, truths and budgets of the cases of suite `smoke`, computed on one core.
- *ten cases*: four of suite `mixed` and six of `decode`, examined by all checks, for the second time in one process.
  The yardstick is a test in vLLM's style: metadata, one `forward`, torch's own attention for each request, one
  `allclose`.
- *float64 prefill*: the reference on one causal prompt of 4,096 tokens. A ratio of 2 is half the rate of a matmul.
- *default run*: `attncheck run` without arguments.

*Again* means with the truths that the run before stored. Parts of one process are CPU seconds, commands are wall time.
Both are the best of several, except for runs of whole suites.
"""


def cost() -> str:
    """Return the page of the measurements of ``benchmarks/cost.py``."""
    benchmark = runpy.run_path(str(EVIDENCE.parents[1] / "benchmarks" / "cost.py"))
    lines = (EVIDENCE.parent / "cost.jsonl").read_text(encoding="utf-8").splitlines()
    return COST.format(table=benchmark["table"]([json.loads(line) for line in lines]))


def templates() -> str:
    """Return the page of the files that ``attncheck new backend`` writes."""
    shown = {
        "function": "A function",
        "classes": "Classes of attncheck's contract",
        "vllm": "Classes of vLLM's interface",
    }
    parts = [
        f"\n## {title}\n\n`attncheck new backend mine --kind {kind}` writes:\n\n"
        f"```python\n{template_files(BackendKind(kind), 'mine')['mine.py']}```\n"
        for kind, title in shown.items()
    ]
    return (
        "# Files that `attncheck new backend` writes\n\nThis page shows three small and correct backends.\n"
        f"{MADE}[Add a backend](../adding-a-backend.md) explains the kinds.\n" + "".join(parts)
    )


PAGES: Mapping[str, Callable[[], str]] = {
    "checks": checks,
    "features": features,
    "case-keys": case_keys,
    "command-line": command_line,
    "python": python,
    "contract": contract,
    "functions": functions,
    "templates": templates,
    "faults": faults,
    "cost": cost,
}


REPORTS: Mapping[str, tuple[str, str]] = {
    "measured-support": ("What the built-in candidates support", "cpu-2026-11-26/candidates.jsonl.xz"),
    "vllm-cpu-attn": ("CPU_ATTN of vLLM 0.32.0", "vllm-0.32.0/cpu-attn.jsonl.xz"),
    "vllm-triton-attn": ("TRITON_ATTN of vLLM 0.32.0, interpreted", "vllm-0.32.0/triton-attn.jsonl.xz"),
    "vllm-mla": ("The latent backends of vLLM 0.32.0", "vllm-0.32.0/mla.jsonl.xz"),
    "vllm-audit": ("The attention classes of vLLM 0.32.0: declared and measured", "vllm-0.32.0/audit.jsonl.xz"),
    "vllm-utilities": ("The metadata utilities of vLLM 0.32.0", "vllm-0.32.0/utilities.jsonl.xz"),
    "xformers-vllm": ("xformers_vllm, vLLM's former xformers design", "cpu-2026-11-26/xformers-vllm.jsonl.xz"),
}
"""Title and run file of each page that is the report of a run."""


def report(name: str) -> str:
    """Return the page of a kept run: its Markdown report, or its audit, under a title of its own."""
    title, path = REPORTS[name]
    run: Run = read_run(EVIDENCE / path)
    text = render_audit(run) if name == "vllm-audit" else render_run(run).partition("\n")[2]
    return f"# {title}\n\nThis page is the report of the run file `docs/evidence/{path}`.\n\n{text.lstrip()}"


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to the site."""
    from mkdocs.structure.files import File

    pages = {name: page() for name, page in PAGES.items()} | {name: report(name) for name in REPORTS}
    for name, content in pages.items():
        files.append(File.generated(config, f"generated/{name}.md", content=content))
    for path, content in kept_runs():
        files.append(File.generated(config, f"measured/{path}", content=content))
    return files


def kept_runs() -> Iterable[tuple[str, str]]:
    """Yield path and text of each file of the site of the kept runs."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "site"
        write_site(*read_runs(names_of(run_files(EVIDENCE)), 2), output)
        for path in sorted(output.rglob("*.*")):
            yield path.relative_to(output).as_posix(), path.read_text(encoding="utf-8")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with the labels of an issue's title, such as ``[Bug][CPU]``, as text and not as a link."""
    is_issue = page.file.src_uri.startswith("upstream/")
    return (
        re.sub(r"^# (?:\[[^]]*\])+", lambda match: re.sub(r"([][])", r"\\\1", match[0]), markdown)
        if is_issue
        else markdown
    )
