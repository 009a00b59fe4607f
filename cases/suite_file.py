"""Reads attncheck's case files: ``suite``, ``defaults`` and ``cases`` with their matrices.

Each expanded case is first merged into one tree (defaults, the case's own keys, the matrix values) and then read, so
that each mistake is reported at its place in the file.
"""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from attncheck.cases.keys import page_defaults, read_case
from attncheck.cases.model import Case, Suite
from attncheck.cases.validation import Mistakes, known_keys, text_of
from attncheck.cases.yaml_tree import Items, Place, Scalar, Table, Tree, describe, plain, put
from attncheck.errors import CaseFileError, SeveralMistakesError

MAX_CASES = 100_000
"""Most cases of a file, after expansion of its matrices."""

MAX_CONTENT = 5_000_000
"""Most content of these cases: the number of values, plus half of the characters of strings."""

FILE_KEYS = ("suite", "description", "defaults", "cases")
SETTABLE_KEYS = ("layer", "cache", "batch", "path", "after", "layers", "checks", "tolerance", "inputs", "strides")
"""Keys that defaults and matrices may set."""
CASE_KEYS = ("id", "description", "weight", *SETTABLE_KEYS, "matrix")

_MERGED_KEYS = ("layer", "cache")
_ID = re.compile(r"[A-Za-z0-9_.-]+")
_ID_RULE = "use letters, digits, '_', '.' and '-' only"


@dataclass(frozen=True)
class _Axis:
    """One axis of a matrix: the dotted path it sets, its values, and the form of each in an id."""

    path: tuple[str, ...]
    place: Place
    values: tuple[tuple[Tree, str], ...]


def read_suite(root: Table, path: Path, over: Table | None = None) -> Suite:
    """Return the suite that ``root`` describes, with ``over`` merged over its defaults; ``path`` is only stored.

    A case that is valid without ``over`` but not with it, such as a shared prefix that no longer fills whole pages, is
    skipped and listed in the suite's notes. Raise :class:`CaseFileError` with the mistakes of all cases.
    """
    known_keys(root, FILE_KEYS, "a case file")
    if "suite" not in root.entries:
        raise root.place.fault("suite is missing", allowed="give the suite's name")
    name = _identifier(root.entries["suite"], "suite")
    description = text_of(root.entries["description"], "description") if "description" in root.entries else ""
    defaults = root.entries.get("defaults", Table(root.place, {}, {}))
    if not isinstance(defaults, Table):
        raise _not_a("mapping", "defaults", defaults)
    known_keys(defaults, SETTABLE_KEYS, "defaults")
    own = defaults
    for key, value in over.entries.items() if over is not None else ():
        defaults = put(defaults, (key,), value, value.place, merging=True)
    written = root.entries.get("cases")
    if written is None:
        raise root.place.fault("cases is missing", allowed="give a list of cases")
    if not isinstance(written, Items) or not written.items:
        raise _not_a("list of cases", "cases", written)
    cases: list[Case] = []
    content = 0
    left_out: dict[str, CaseFileError] = {}
    seen: dict[str, Case] = {}
    mistakes = Mistakes()
    for item in written.items:
        with mistakes.kept():
            if not isinstance(item, Table):
                raise _not_a("mapping with an id and a batch", "a case", item)
            known_keys(item, CASE_KEYS, "a case")
            content += _content_of(item, defaults)
            if content > MAX_CONTENT:
                raise item.place.fault(
                    "up to here the cases hold too many values in all",
                    value=content,
                    allowed=f"at most {MAX_CONTENT} a file: shorten an axis or a batch, or split the file",
                )
            for full, case, place in _expand(item, defaults, name, len(cases)):
                if isinstance(case, CaseFileError):
                    if over is None or case.file != item.place.file or not _is_right(item, own, name, full):
                        is_plain = full == plain(item.entries["id"]) and not case.key.startswith("defaults.")
                        raise case if is_plain else _in_case(case, full, item.place)
                    left_out[full] = case
                    continue
                if case.id in seen:
                    where = seen[case.id].origin.rpartition(":")[2]
                    is_matrix = place.line == int(where)
                    raise place.fault(
                        "two values of the matrix give this id" if is_matrix else "two cases have this id",
                        value=case.id,
                        allowed=f"the first is on line {where}: rename one of them",
                    )
                seen[case.id] = case
                cases.append(case)
    mistakes.raise_all()
    if not cases:
        raise next(iter(left_out.values()))
    notes = tuple(
        f"{full} is left out, since it is invalid with these defaults: {error.reason}"
        + ("" if str(error.value) in error.reason.split() else f" (found {error.value})")
        for full, error in left_out.items()
    )
    return Suite(
        name=name,
        description=description,
        cases=tuple(cases),
        path=path,
        notes=notes,
        page_defaults=page_defaults(own.entries.get("cache"), over),
    )


def _content_of(item: Table, defaults: Table) -> int:
    """Return the number of values in the cases of one entry of ``cases``; an invalid matrix counts as none."""
    matrix = item.entries.get("matrix")
    own = _weight(defaults) + sum(_weight(value) for name, value in item.entries.items() if name != "matrix")
    axes = (
        [axis.items for axis in matrix.entries.values() if isinstance(axis, Items)] if isinstance(matrix, Table) else []
    )
    count = math.prod(len(axis) for axis in axes)
    varied = sum(_weight(value) * count // len(axis) for axis in axes for value in axis)
    return own * count + varied


def _weight(tree: Tree) -> int:
    """Return the number of values in a tree, plus half of the characters of its strings."""
    if isinstance(tree, Scalar):
        return 1 + len(tree.text) // 2
    return 1 + sum(map(_weight, tree.items if isinstance(tree, Items) else tree.entries.values()))


def _is_right(item: Table, defaults: Table, suite: str, name: str) -> bool:
    """Return whether the case ``name`` of one entry of ``cases`` is valid with these defaults."""
    return any(full == name and isinstance(case, Case) for full, case, _ in _expand(item, defaults, suite, 0))


def _expand(item: Table, defaults: Table, suite: str, before: int) -> Iterator[tuple[str, Case | CaseFileError, Place]]:
    """Yield id, case and the id's place for each case of one entry of ``cases``; an invalid case is its error."""
    if "id" not in item.entries:
        raise item.place.fault("id is missing", allowed=f"give the case a name: {_ID_RULE}")
    place = item.entries["id"].place
    name = _identifier(item.entries["id"], "id")
    laid = defaults
    for key in SETTABLE_KEYS:
        if key in item.entries:
            laid = put(laid, (key,), item.entries[key], item.names[key], merging=key in _MERGED_KEYS)
    axes = _read_matrix(item.entries["matrix"]) if "matrix" in item.entries else ()
    combinations = math.prod(len(axis.values) for axis in axes)
    total = before + combinations
    if total > MAX_CASES:
        raise item.names.get("matrix", place).fault(
            f"with these {combinations} the file describes {total} cases",
            allowed=f"at most {MAX_CASES} cases a file: shorten an axis, or split the file",
        )
    origin = f"{item.place.file}:{item.place.line}"
    description = text_of(item.entries["description"], "description") if "description" in item.entries else ""
    weight = _weight_of(item.entries["weight"], combinations) if "weight" in item.entries else None
    for values in itertools.product(*(axis.values for axis in axes)):
        tree = laid
        for axis, (value, _) in zip(axes, values, strict=True):
            tree = put(tree, axis.path, value, axis.place, merging=axis.path[0] in _MERGED_KEYS)
        full = f"{name}.{'-'.join(written for _, written in values)}" if values else name
        case: Case | CaseFileError
        try:
            case = replace(read_case(replace(tree, place=item.place), suite, full, description, origin), weight=weight)
        except CaseFileError as error:
            case = error
        yield full, case, place


def _weight_of(tree: Tree, combinations: int) -> float:
    value = tree.value if isinstance(tree, Scalar) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-30 <= value <= 1e30:
        shown = tree.text if isinstance(tree, Scalar) else describe(tree)
        raise tree.place.fault(
            "a weight is a number from 1e-30 to 1e30", value=shown, allowed="say how often the case came"
        )
    if combinations > 1:
        raise tree.place.fault(
            f"{combinations} cases cannot share one weight", value=value, allowed="write each case by itself"
        )
    return float(value)


def _read_matrix(tree: Tree) -> tuple[_Axis, ...]:
    if not isinstance(tree, Table) or not tree.entries:
        raise _not_a("mapping from dotted keys to lists", "matrix", tree)
    axes = []
    for key, values in tree.entries.items():
        place = tree.names[key]
        path = tuple(key.split("."))
        if path[0] not in SETTABLE_KEYS or "" in path:
            allowed = f"an axis is a dotted key below {', '.join(SETTABLE_KEYS)}, such as layer.dtype"
            raise place.fault("a matrix cannot set this key", value=key[:60], allowed=allowed)
        if not isinstance(values, Items) or not values.items:
            raise _not_a("list of values", f"the axis {key[:60]}", values)
        written = tuple((value, _in_id(value, n)) for n, value in enumerate(values.items, start=1))
        axes.append(_Axis(path, place, written))
    return tuple(axes)


def _in_id(value: Tree, position: int) -> str:
    """Return the form of an axis value in an id: as in the file if that is safe, else its position."""
    if isinstance(value, Scalar):
        if value.value is None:
            return "null"
        if isinstance(value.value, bool):
            return str(value.value).lower()
        text = value.text.replace("+", "") if not isinstance(value.value, str) else value.text
        if _ID.fullmatch(text):
            return text
    return f"v{position}"


def _identifier(tree: Tree, what: str) -> str:
    text = text_of(tree, what)
    if not _ID.fullmatch(text):
        raise tree.place.fault(f"{what} cannot be typed on a command line", value=text, allowed=_ID_RULE)
    return text


def _in_case(error: CaseFileError, name: str, place: Place) -> CaseFileError:
    """Return the error with the name of the expanded case, because several cases may use the same value."""
    if isinstance(error, SeveralMistakesError):
        return SeveralMistakesError([_in_case(each, name, place) for each in error.errors])
    line = f" of line {place.line}" if error.file == place.file else ""  # not if the value replaces a default
    return CaseFileError(
        f"{error.reason}, in case {name}{line}",
        file=error.file,
        line=error.line,
        column=error.column,
        key=error.key,
        value=error.value,
        allowed=error.allowed,
    )


def _not_a(wanted: str, what: str, tree: Tree) -> CaseFileError:
    value = plain(tree) if isinstance(tree, Scalar) else None
    found = "an empty one" if not isinstance(tree, Scalar) and not plain(tree) else describe(tree)
    return tree.place.fault(f"{what} must be a {wanted}, and this is {found}", value=value, allowed=f"give a {wanted}")
