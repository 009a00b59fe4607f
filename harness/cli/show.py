"""The commands ``show``, ``list`` and ``new``."""

import json
import keyword
import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from enum import Enum, StrEnum
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attncheck.errors import QuestionError, SelectionError, unwritable
from attncheck.harness.cli import common
from attncheck.harness.cli.common import print_foreign, terminal_width
from attncheck.harness.cli.options import Given, with_options
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import PathSpec, RequestSpec, TreeOptions
from attncheck.reports.analysis.phrases import plural

if TYPE_CHECKING:
    from attncheck.cases.model import Case
    from attncheck.reference.step_spec import BatchSpec

# Draws an attention mask as characters. Loads no torch.
#
# `#`: visible. `.`: hidden. `+`: a cell of several rows or keys, some of them visible.

_HIDDEN, _SOME, _VISIBLE = ".+#"

MOST_LINES = 16
"""Maximum number of lines of a picture; if there are more rows, each line shows several."""


def visible_keys(layer: LayerSpec, position: int, keys: int, request: RequestSpec | None = None) -> list[range]:
    """Return which of ``keys`` keys the row at ``position`` sees, not counting what a tree mask hides.

    ``request``: the one with the row, for its image spans and first keys.

    >>> visible_keys(LayerSpec(num_heads=1, num_kv_heads=1, head_size=8, sliding_window=3), 5, 9)
    [range(3, 6)]
    """
    first, end = 0, keys
    left, right = layer.window if layer.rswa_window is None else (layer.rswa_window - 1, 0)
    if layer.is_causal:
        end = min(end, position + 1)
    if right >= 0:
        end = min(end, position + right + 1)
    if left >= 0:
        first = max(first, position - left)
    if layer.attn_chunk_size is not None:
        chunk = position // layer.attn_chunk_size
        first = max(first, chunk * layer.attn_chunk_size)
        end = min(end, (chunk + 1) * layer.attn_chunk_size)
    for span_first, span_last in request.mm_req_doc_ranges if request is not None else ():
        if span_first <= position <= span_last:
            first, end = min(first, span_first), max(end, min(span_last + 1, keys))
    first_keys = [] if request is None else [range(min(request.rswa_prefix_len, first))]
    return [*first_keys, range(first, max(first, end))]


def hidden_nodes(path: PathSpec, row: int) -> list[int]:
    """Return the draft tokens of a tree that ``row`` must not see: all but itself and its ancestors.

    Empty without a tree.
    """
    if not isinstance(path.options, TreeOptions):
        return []
    parents, node = path.options.parents, row
    seen = {row}
    while (node := parents[node]) >= 0:
        seen.add(node)
    return [other for other in range(len(parents)) if other not in seen]


def draw_mask(layer: LayerSpec, path: PathSpec, request: RequestSpec, width: int) -> list[str]:
    """Return the lines of the picture, at most ``width`` characters wide; rows run downwards, keys to the right.

    The first line has the number of rows and keys, and how many of them a character covers.
    """
    keys, rows = request.num_keys(layer), request.num_rows(path)
    tall = -(-rows // MOST_LINES)
    wide = max(-(-keys // width), 1)
    scale = f", a character is {tall} x {wide}" if tall * wide > 1 else ""
    if layer.index_topk is not None:
        scale += f"; of the visible keys of a row, an indexer chooses at most {layer.index_topk}"
    lines = [f"{plural(rows, 'row')} x {plural(keys, 'key')}{scale}"]
    start = keys - rows  # the rows are aligned to the end of the keys
    for top in range(0, rows, tall):
        block = range(top, min(top + tall, rows))
        seen = [visible_keys(layer, start + row, keys, request) for row in block]
        hidden = [[start + node for node in hidden_nodes(path, row)] for row in block]
        cells = (range(left, min(left + wide, keys)) for left in range(0, keys, wide))
        lines.append("".join(_character(cell, seen, hidden) for cell in cells))
    return lines


def _character(cell: range, seen: Sequence[Sequence[range]], hidden: Sequence[Sequence[int]]) -> str:
    """Return the character for the keys of ``cell``; ``seen``, ``hidden``: the visible and hidden keys of each row."""
    count = 0
    for parts, nodes in zip(seen, hidden, strict=True):
        for part in parts:
            common = range(max(part.start, cell.start), min(part.stop, cell.stop))
            count += len(common) - sum(node in common for node in nodes)
    if not count:
        return _HIDDEN
    return _VISIBLE if count == len(cell) * len(seen) else _SOME


# `attncheck show`: describes one case, in words and pictures, or as YAML. Loads no torch.

SHOWN_REQUESTS = 12
"""Maximum rows of the table of requests."""
SHOWN_MASKS = 3
"""Maximum pictures of masks."""
MOST_ROWS = 2**14
"""Maximum rows of a request whose mask is drawn."""

_ALWAYS = ("dtype", "block_size", "layout")
"""Fields that are shown even at their defaults."""


@with_options(
    *("suites", "settings"), suites={"help": "Built-in suites, YAML files, or all. Default: all, smoke first."}
)
def show(
    _context: typer.Context,
    given: Given,
    *,
    case: Annotated[str, typer.Argument(metavar="CASE", help="Its id or suite/id.", autocompletion=common.cases)],
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print the case as a complete case file.")] = False,
) -> int:
    """Show a case: layer, cache, requests, masks and checks.

    If several cases match, the first one is shown and the others are listed.
    """
    found = _find(case, given.get("suites", []), given.get("settings", []))
    if as_yaml:
        from attncheck.cases.yaml_text import case_yaml

        typer.echo(case_yaml(found[0]), nl=False)
    else:
        print_foreign("\n".join(case_lines(found[0], terminal_width())))
    if len(found) > 1:
        names = ", ".join(other.id for other in found[1:9])
        more = ", ..." if len(found) > 9 else ""
        typer.echo(f"{len(found)} cases match; this is the first. The others: {names}{more}", err=True)
    return 0


def _find(pattern: str, suites: list[str], settings: list[str]) -> "Sequence[Case]":
    """Return the cases that match.

    Raises:
        QuestionError: there is none, or a suite cannot be read.
    """
    from attncheck.cases.loader import load_suite, select, suite_names
    from attncheck.harness.run.selection import select_cases

    if not suites:
        found = next((name for name in suite_names() if select(load_suite(name), [pattern])), None)
        if found is None:
            close = get_close_matches(pattern, [each.id for name in suite_names() for each in load_suite(name)], n=1)
            hint = f"did you mean {close[0]!r}?" if close else "for a case file, give --suite FILE"
            raise SelectionError(f"no case of the built-in suites matches {pattern!r}; {hint}")
        suites = [found]
    return select_cases(suites, [pattern], (), settings).cases


def case_lines(case: "Case", width: int) -> list[str]:
    """Return the description of a case for a terminal of ``width`` columns."""
    from attncheck.backends.declarations import needs_of
    from attncheck.harness.run.selection import checks_of, unanswered_reasons
    from attncheck.reports.terminal.columns import wrap

    path = case.batch.path
    about = {
        "layer": _fields(case.layer),
        "cache": _fields(case.cache) if _has_pages(case) else "none",
        "path": " ".join(part for part in (path.name, _fields(path.options) if path.options else "") if part),
        "padding": _fields(case.batch.padding),
        "table": _fields(case.batch.block_table),
        "inputs": ", ".join(case.inputs or ()),
        "needs": ", ".join(needs_of(case.layer, case.cache, case.batch, frozenset())),
        "checks": ", ".join(checks_of(case, None)),
        "not examined": "; ".join(unanswered_reasons(case)),
        "hash": f"{case.hash}, from {case.origin}",
    }
    lines = [case.key, *([wrap(case.description, width=width)] if case.description else []), ""]
    lines += [wrap(f"{name:<8}{text}", width=width) for name, text in about.items() if text]
    return [*lines, "", *_requests(case), *_masks(case, width)]


def _fields(spec: object) -> str:
    """Return the fields of a dataclass that differ from their defaults, as ``name=value``."""
    given = {field.name: (getattr(spec, field.name), field.default) for field in fields(spec)}  # type: ignore[arg-type]
    return ", ".join(
        f"{name}={_word(value)}"
        for name, (value, default) in given.items()
        if default is MISSING or value != default or name in _ALWAYS
    )


def _word(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return f"({_fields(value)})" if hasattr(value, "__dataclass_fields__") else str(value)


def _requests(case: "Case") -> list[str]:
    from attncheck.reports.terminal.columns import table

    size, rows = case.cache.block_size, []
    extras = [name for name in ("encoder_len", "shared_prefix") if any(getattr(each, name) for each in case.batch)]
    for request in case.batch.requests:
        keys = request.num_keys(case.layer)
        pages = f"{-(-keys // size)}, {(keys - 1) % size + 1} of {size} in the last" if keys else "none"
        lengths = (request.count, request.query_len, request.context_len, request.total_len)
        others = [str(getattr(request, name)) for name in extras]
        rows.append([*map(str, lengths), *others, *([pages] if _has_pages(case) else [])])
    headings = ["requests", "query_len", "context", "seq_len", *extras, *(["pages"] if _has_pages(case) else [])]
    lines = table([headings, *rows[:SHOWN_REQUESTS]]).splitlines()
    left_out = len(rows) - SHOWN_REQUESTS
    return [*lines, *([f"and {left_out} more rows"] if left_out > 0 else [])]


def _has_pages(case: "Case") -> bool:
    from attncheck.backends.declarations import STATE_PATH

    return case.layer.has_cache and case.batch.path.name != STATE_PATH


def _masks(case: "Case", width: int) -> list[str]:
    """Return a picture of the mask for up to :data:`SHOWN_MASKS` distinct requests, largest first."""
    from attncheck.backends.declarations import OTHER_PATHS

    path = case.batch.path
    if path.name in OTHER_PATHS:
        return []

    def size(request: "RequestSpec") -> tuple[int, int]:
        return request.num_rows(path), request.num_keys(case.layer)

    # The request with the most rows shows most of the mask.
    different = {(size(each), each.context_len): each for each in case.batch.requests}
    largest_first = sorted(different.values(), key=size, reverse=True)
    drawn = [each for each in largest_first if each.num_rows(path) <= MOST_ROWS][:SHOWN_MASKS]
    lines = ["", "mask: # visible, . hidden, + partly"] if drawn else []
    for request in drawn:
        lines += ["", *draw_mask(case.layer, path, request, width)]
    left_out = len(different) - len(drawn)
    return [*lines, *(["", f"not drawn: {plural(left_out, 'more mask')}"] if left_out else [])]


# `attncheck list`: names of backends, suites, cases and checks. Loads no torch and no backend.


class Listable(StrEnum):
    """What can be listed."""

    BACKENDS = "backends"
    SUITES = "suites"
    CASES = "cases"
    CHECKS = "checks"
    CLAIMS = "claims"
    PROFILES = "profiles"
    CONTRACT = "contract"
    SCHEMA = "schema"


class SchemaSubject(StrEnum):
    """What the schema is for: a case file, a line of a run file, or a statement of conformance."""

    CASES = "cases"
    RUN = "run"
    STATEMENT = "statement"


@with_options(
    *("suites", "cases", "keywords"),
    suites={"help": "Built-in suites, YAML files, or all. Default: all, and smoke for cases."},
)
def list_names(
    _context: typer.Context,
    given: Given,
    *,
    what: Annotated[
        Listable | None,
        typer.Argument(
            help="Default: backends, suites and checks. claims: what vLLM's classes declare, and what measures it. "
            "profiles: what a statement of conformance can be about. "
            "contract: what differs between two versions of vLLM's contract. schema: a JSON schema."
        ),
    ] = None,
    of: Annotated[
        SchemaSubject, typer.Option("--of", help="The schema of a case file, a line of a run file, or a statement.")
    ] = SchemaSubject.CASES,
    old: Annotated[str, typer.Option("--from", metavar="VERSION", help="With contract: a version of vLLM.")] = "0.31",
    new: Annotated[str, typer.Option("--to", metavar="VERSION", help="With contract: a later one.")] = "0.32",
) -> int:
    """List names, changes of vLLM's contract, or a JSON schema.

    `attncheck doctor` shows which backends can run on this machine.
    """
    suites = given.get("suites", [])
    if what is None and given:
        what = Listable.CASES
    tables = {Listable.BACKENDS: _backends, Listable.SUITES: lambda: _suites(suites), Listable.CHECKS: _checks}
    if what == Listable.CASES:
        _cases(suites, given.get("cases", []), given.get("keywords", ""))
    elif what == Listable.SCHEMA:
        _schema(of)
    elif what == Listable.CLAIMS:
        _claims()
    elif what == Listable.PROFILES:
        _profiles()
    elif what == Listable.CONTRACT:
        _contract(old, new)
    elif what is not None:
        tables[what]()
    else:
        for number, (name, table) in enumerate(tables.items()):
            typer.echo(("\n" if number else "") + name)
            table()
    return 0


def _print(rows: list[list[str]]) -> None:
    from tabulate import tabulate

    lead = sum(max(len(row[column]) for row in rows) + 2 for column in range(len(rows[0]) - 1))
    folded = [[*row[:-1], textwrap.fill(row[-1], max(terminal_width() - lead, 20))] for row in rows]
    print_foreign(tabulate(folded, tablefmt="plain", disable_numparse=True))


def _backends() -> None:
    from attncheck.backends.registry import FAMILIES, ONLY_NAMED, builtin_names, entry_points

    rows = [[name, "built in"] for name in builtin_names()]
    rows += [[name, "built in; run when named"] for name in sorted(ONLY_NAMED - FAMILIES.keys())]
    rows += [[name, f"built in; run when one is named, such as {example}"] for name, example in FAMILIES.items()]
    rows += [[name, f"entry point {point.value}"] for name, point in sorted(entry_points().items())]
    _print(rows)


def _suites(names: list[str]) -> None:
    from attncheck.cases.loader import load_suite, suite_names
    from attncheck.harness.run.options import split_commas

    suites = [load_suite(name) for name in split_commas(names) or suite_names()]
    _print([[suite.name, plural(len(suite), "case"), suite.description] for suite in suites])


def _cases(suites: list[str], patterns: list[str], keywords: str) -> None:
    from attncheck.harness.run.selection import select_cases

    for found in select_cases(suites or ["smoke"], patterns, keywords=keywords).cases:
        typer.echo(f"{found.key}  {_batch(found.batch)}")


def _batch(batch: "BatchSpec") -> str:
    """Return the batch as a string of the batch grammar, or a summary if the grammar cannot express it."""
    from attncheck.cases.grammar import format_batch
    from attncheck.errors import SpecError

    try:
        return format_batch(batch.requests)
    except SpecError:
        return f"{batch.num_requests} requests, {batch.num_tokens} new tokens, up to {batch.max_seq_len} long"


def _schema(of: SchemaSubject) -> None:
    if of is SchemaSubject.RUN:
        from attncheck.reports.run_file.schema import run_file_schema as described
    elif of is SchemaSubject.STATEMENT:
        from attncheck.harness.run.statement import statement_schema as described
    else:
        from attncheck.cases.schema import json_schema as described

    typer.echo(json.dumps(described(), indent=2))


def _profiles() -> None:
    from attncheck.cases.profile import load_profile, profile_names

    profiles = [load_profile(name) for name in profile_names()]
    _print([[each.name, f"version {each.version}", each.description] for each in profiles])


def _claims() -> None:
    """Print each declaration of vLLM's contract, which class has it, and what measures it."""
    from attncheck.backends.claims import CLAIMS
    from attncheck.reports.audit.claims import measured_by

    rows = []
    for claim in CLAIMS.values():
        way = measured_by(claim.unexamined, claim.feature, claim.check, claim.form)
        rows.append([claim.member, claim.of, f"{way}: {claim.unexamined}" if claim.unexamined else way])
    _print(rows)


def _contract(old: str, new: str) -> None:
    """Print each member of vLLM's contract that differs, and what a class must do."""
    from attncheck.backends.contract_changes import contract_changes
    from attncheck.reports.terminal.columns import wrap

    for step in contract_changes(old, new):
        print_foreign(f"vLLM {step['old']} to {step['new']}, vllm/v1/attention/backend.py\n")
        for each in step["changes"]:
            lines = [f"{each['member']}: {each['change']}"]
            lines += [f"  {key + ':':<5}{each[key]}" for key in ("was", "now", "do") if key in each]
            print_foreign("\n".join(wrap(line, width=terminal_width()) for line in lines) + "\n")


def _checks() -> None:
    from attncheck.reference.spec import CHECKS

    rows = []
    for name, info in CHECKS.items():
        rows += [[name, info.establishes], ["", f"does not detect: {info.cannot_see}"]]
        if info.applies_to == "engine":
            rows.append(["", "runs by attncheck engine only"])
        elif info.by_default == "nowhere":
            rows.append(["", f"runs only if it is named, as by --check {name}"])
        elif info.by_default == "on CUDA":
            rows.append(["", "needs a CUDA device"])
    _print(rows)


# `attncheck new backend`: writes a small correct backend and its test, as a start. Loads no torch and no backend.
#
# The files are templates of `harness/cli/templates` with the name filled in.


class BackendKind(StrEnum):
    """Form of the backend."""

    FUNCTION = "function"
    CLASSES = "classes"
    VLLM = "vllm"


TEMPLATES = {BackendKind.FUNCTION: "function.py", BackendKind.CLASSES: "classes.py", BackendKind.VLLM: "vllm_class.py"}


def new_backend(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the module.")],
    kind: Annotated[
        BackendKind,
        typer.Option(help="One function, classes of attncheck's contract, or a class of the installed vLLM."),
    ] = BackendKind.FUNCTION,
    output: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write into.")] = Path(),
) -> int:
    """Write a small correct backend, NAME.py, and its test, test_NAME.py.

    Replace the kernel in NAME.py by your own. Existing files are not overwritten.
    """
    from attncheck.backends.registry import INSTALL_VLLM

    texts = template_files(kind, name)
    paths = [output / file for file in texts]
    if there := [str(path) for path in paths if path.exists()]:
        raise QuestionError(f"{' and '.join(there)}: there already; nothing was written")
    try:
        output.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts.values(), strict=True):
            with path.open("x", encoding="utf-8", newline="\n") as file:
                file.write(text)
    except OSError as error:
        raise unwritable(f"--output {output}: {error.filename}", error) from error
    typer.echo(f"written: {', '.join(map(str, paths))}")
    typer.echo(f"  {shlex.join(['attncheck', 'run', '--backend', backend_ref(kind, name, output)])}")
    typer.echo(f"  {shlex.join(['pytest', str(paths[1])])}")
    if kind == BackendKind.VLLM and find_spec("vllm") is None:
        typer.echo(f"vLLM is not installed here: {INSTALL_VLLM}, or import attncheck.backends.contract in its place")
    return 0


def backend_ref(kind: BackendKind, name: str, folder: Path) -> str:
    """Return the argument of ``--backend`` for a backend written into ``folder``."""
    place = folder / f"{name}.py"
    typed = place if place.parent.name else f"./{place}"
    return f"{'vllm:' if kind == BackendKind.VLLM else ''}{typed}:{_class_name(name)}"


def template_files(kind: BackendKind, name: str) -> dict[str, str]:
    """Return two files by name: the backend of ``kind`` called ``name``, and its test.

    Raises:
        QuestionError: ``name`` is not a valid module name, is taken, or would hide an installed module.
    """
    template, test = (_template(file) for file in (TEMPLATES[kind], "examined.py"))
    if kind == BackendKind.VLLM:
        test = test.replace('f"{', 'f"vllm:{')
    if reason := _name_reason(name, template):
        raise QuestionError(f"a backend cannot be called {name!r}: {reason}")
    return {f"{name}.py": _named(template, name), f"test_{name}.py": _named(test, name)}


def _template(file: str) -> str:
    return (files("attncheck.harness.cli") / "templates" / file).read_text(encoding="utf-8")


def _named(template: str, name: str) -> str:
    """Return the template, which is for a backend called ``mine``, for the backend ``name``."""
    words = {"mine": name, "Mine": _class_name(name), "MINE": name.upper()}
    return re.sub(r"(?<![A-Za-z0-9])(mine|Mine|MINE)(?![A-Za-z0-9])", lambda match: words[match[1]], template)


def _class_name(name: str) -> str:
    """Return the class name for a module name: ``MyKernel`` for ``my_kernel``."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def _name_reason(name: str, template: str) -> str:
    """Return why ``name`` cannot be used; empty if it can."""
    from attncheck.backends.registry import known_names

    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
        return "it names a Python module, of letters, digits and underscores, a letter first"
    if keyword.iskeyword(name) or keyword.iskeyword(_class_name(name)):
        return "it is a word of Python's"
    if name in known_names():
        return f"that is a registered backend; taken are {', '.join(known_names())}"
    if _class_name(name) != "Mine" and re.search(rf"\b{_class_name(name)}\b", template):
        return f"its class would be called {_class_name(name)}, as another name in the file"
    if _is_installed(name):
        return f"{name}.py would hide an installed module of that name"
    return ""


def _is_installed(name: str) -> bool:
    """Return whether ``import name`` finds a module outside the current folder, which ``python -m`` searches too."""
    if (spec := find_spec(name)) is None:
        return False
    places = (spec.origin, *(spec.submodule_search_locations or ()))
    return all(Path(place).parent != Path.cwd() for place in places if place)
