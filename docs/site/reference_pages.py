"""Pages that the code writes: a hook of mkdocs, which adds them to the site and to no folder.

They are the pages of the reference, and the site of the kept runs in ``measured``. Importing this module and writing
every page loads neither torch nor mkdocs.
"""

import inspect
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import typer.main
from docstrings import plain

import attncheck
from attncheck.backends.conventions import Conventions
from attncheck.backends.declarations import required_features
from attncheck.cases.loader import load_suite, suite_names
from attncheck.cases.schema import json_schema
from attncheck.harness.cli.app import app
from attncheck.reference import spec
from attncheck.reference.lazy_exports import homes
from attncheck.reports.site.build import names_of, read_runs, run_files, write_site

MADE = "Generated from the code of this version.\n"
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
                for name, kind in spec.PATH_OPTIONS.items()
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
            f"{MADE}[Case files](../case-files.md) explains the keys with examples. `attncheck schema` prints the same "
            "as JSON schema.\n\n## File\n\n"
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
        f"[Classes of the contract](../backend-classes.md) shows a whole backend.\n\n## Names\n{documented(names)}"
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


PAGES: Mapping[str, Callable[[], str]] = {
    "checks": checks,
    "features": features,
    "case-keys": case_keys,
    "command-line": command_line,
    "python": python,
    "contract": contract,
    "functions": functions,
}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to the site."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        files.append(File.generated(config, f"generated/{name}.md", content=page()))
    for path, content in kept_runs():
        files.append(File.generated(config, f"measured/{path}", content=content))
    return files


def kept_runs() -> Iterable[tuple[str, str]]:
    """Yield path and text of each file of the site of the kept runs, without those of deliberately wrong backends."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "site"
        files = run_files(Path(__file__).parents[1] / "evidence")
        names = names_of(path for path in files if path.parent.name not in ("faults", "miniatures"))
        write_site(*read_runs(names, 2), output)
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
