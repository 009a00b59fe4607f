"""Converts trees into frozen specs with pydantic, with errors that point at the wrong value and state what is valid.

Trees pass through JSON text, because only there does pydantic validate nested values strictly. Results are cached,
because a matrix repeats the same layer many times.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from typing import Any, TypeVar, cast, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from attncheck.cases.yaml_tree import Items, Place, Scalar, Table, Tree, describe, join_key, plain
from attncheck.errors import CaseFileError, SeveralMistakesError, SpecError

T = TypeVar("T")

_WANTED: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "float_parsing": "a number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "tuple_type": "a list",
    "dataclass_type": "a mapping",
    "finite_number": "a finite number",
}
_BOUND: Mapping[str, tuple[str, str]] = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}

_ELEMENT = "an element of "


class Mistakes:
    """Collects the mistakes of several parts, so that one error lists them all."""

    def __init__(self) -> None:
        self._found: list[CaseFileError] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Return a context that catches and stores a CaseFileError; the rest of its block is skipped."""
        try:
            yield
        except CaseFileError as error:
            self._found.append(error)

    def raise_all(self) -> None:
        """Raise the stored errors, if any: one as it is, several as SeveralMistakesError."""
        if self._found:
            raise self._found[0] if len(self._found) == 1 else SeveralMistakesError(self._found)


def validate(kind: type[T], tree: Tree, what: str) -> T:
    """Return the frozen dataclass ``kind`` that ``tree`` describes; messages call it ``what`` ("a layer").

    Raise :class:`CaseFileError` for every wrong value, at its place. If there is a mistyped key, missing keys are not
    reported.
    """
    text = json.dumps(plain(tree), sort_keys=True)
    try:
        return cast("T", _validated(cast("Any", kind), text))
    except ValidationError as error:
        raise _translate(kind, tree, what, error) from error


def known_keys(tree: Table, known: Sequence[str], owner: str) -> None:
    """Raise :class:`CaseFileError` at the first key of ``tree`` that is not in ``known``."""
    for name, place in tree.names.items():
        if name not in known:
            raise unknown_key(place, name, known, owner)


def unknown_key(place: Place, name: str, known: Sequence[str], owner: str) -> CaseFileError:
    """Return the error for a key that ``owner`` does not have."""
    return place.fault(f"{owner} has no key {name[:60]!r}", allowed=suggestion(name, known))


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return the closest known name, if any, and all known names."""
    close = [each for each in known if name.startswith(f"{each}_")] or get_close_matches(name[:60], known, n=1)
    return f"did you mean {close[0]!r}? (known: {', '.join(known)})" if close else f"known: {', '.join(known)}"


def text_of(tree: Tree, what: str) -> str:
    """Return the string in ``tree``; raise :class:`CaseFileError` for any other value."""
    if isinstance(tree, Scalar) and isinstance(tree.value, str):
        return tree.value
    value = tree.text if isinstance(tree, Scalar) and tree.text else None
    raise tree.place.fault(f"{what} is a text, and this is {describe(tree)}", value=value, allowed="quote it")


def names_of(tree: Tree, kind: str, known: Sequence[str], former: Collection[str] = ()) -> tuple[str, ...]:
    """Return a list of distinct names from ``known`` or ``former``; raise CaseFileError for any other value."""
    if not isinstance(tree, Items):
        raise tree.place.fault(
            f"a list of names belongs here, and this is {describe(tree)}",
            value=plain(tree) if isinstance(tree, Scalar) else None,
            allowed=f"write [{known[0]}, ...]",
        )
    names: list[str] = []
    for item in tree.items:
        name = item.value if isinstance(item, Scalar) else None
        if not isinstance(name, str) or name not in (*known, *former):
            shown = item.text if isinstance(item, Scalar) else describe(item)
            raise item.place.fault(f"unknown {kind}", value=shown, allowed=suggestion(shown, known))
        if name in names:
            raise item.place.fault(f"the {kind} is named twice", value=name, allowed="name it once")
        names.append(name)
    return tuple(names)


def locate(tree: Tree, parts: Sequence[str | int]) -> Place:
    """Return the place of the deepest value on the path ``parts``; parts that are not keys are skipped."""
    return _walk(tree, parts)[0].place


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@lru_cache(maxsize=4096)
def _validated(kind: type, text: str) -> Any:
    return _adapter(kind).validate_json(text)


def _walk(tree: Tree, parts: Sequence[str | int]) -> tuple[Tree, tuple[str | int, ...]]:
    """Return the deepest value on the path, and the parts that led there (pydantic adds labels of union branches)."""
    way: list[str | int] = []
    for part in parts:
        if isinstance(tree, Table) and isinstance(part, str) and part in tree.entries:
            tree = tree.entries[part]
        elif isinstance(tree, Items) and isinstance(part, int) and part < len(tree.items):
            tree = tree.items[part]
        else:
            continue
        way.append(part)
    return tree, tuple(way)


def _translate(kind: type, tree: Tree, what: str, error: ValidationError) -> CaseFileError:
    """Return every mistake that pydantic found, as one error or as several."""
    errors = error.errors(include_url=False)
    found = [_unknown(kind, tree, what, each) for each in errors if each["type"] == "unexpected_keyword_argument"]
    # A missing key may be present under a mistyped name.
    left_out = {"unexpected_keyword_argument", "missing"} if found else set()
    by_field: dict[object, list[ErrorDetails]] = {}
    for each in errors:
        if each["type"] not in left_out:
            by_field.setdefault(each["loc"][:1], []).append(each)
    for same_field in by_field.values():
        # A union reports one error per branch. The branch that got furthest is the intended one.
        deepest = max(len(_walk(tree, each["loc"])[1]) for each in same_field)
        by_value: dict[object, list[ErrorDetails]] = {}
        for each in same_field:
            if len(way := _walk(tree, each["loc"])[1]) == deepest:
                # Several missing keys share the path of their owner, so loc distinguishes them.
                by_value.setdefault((way, each["loc"] if each["type"] == "missing" else ()), []).append(each)
        found += [_fault(kind, tree, what, meant) for meant in by_value.values()]
    return found[0] if len(found) == 1 else SeveralMistakesError(found)


def _unknown(kind: type, tree: Tree, what: str, error: ErrorDetails) -> CaseFileError:
    *above, name = error["loc"]
    owner, way = _walk(tree, above)
    known = [f.name for f in fields(_class_at(kind, way))]
    place = owner.names[str(name)] if isinstance(owner, Table) else owner.place
    return unknown_key(place, str(name), known, str(way[-1]) if way else what)


def _fault(kind: type, tree: Tree, what: str, meant: Sequence[ErrorDetails]) -> CaseFileError:
    """Return the mistake at one value; ``meant``: pydantic's error of each branch of a union."""
    value, way = _walk(tree, meant[0]["loc"])
    if meant[0]["type"] == "missing":
        return _missing(kind, value, way, meant[0])
    cause = meant[0].get("ctx", {}).get("error")
    if isinstance(cause, SpecError):
        return _spec_fault(value, cause)
    reason = " or ".join(dict.fromkeys(wanted(each) for each in meant))
    name, about = _name(way) or what, _about(kind, way)
    allowed = f"meaning of {name.removeprefix(_ELEMENT)}: {about}" if about else f"give {reason}"
    return value.place.fault(f"{name} must be {reason}", value=_shown(value), allowed=allowed)


def _spec_fault(tree: Tree, error: SpecError) -> CaseFileError:
    """Return a :class:`SpecError`, whose ``field`` is a dotted path below ``tree``, as an error with a place."""
    parts = [int(part) if part.isdigit() else part for part in error.field.split(".")]
    found, way = _walk(tree, parts)
    place = found.place
    if not way and isinstance(parts[-1], str):  # the field was left out, so the error points at its mapping
        place = Place(place.file, place.line, place.column, join_key(place.key, parts[-1]))
    return place.fault(error.reason, value=error.value, allowed=error.allowed)


def _missing(kind: type, owner: Tree, way: tuple[str | int, ...], error: ErrorDetails) -> CaseFileError:
    name = str(error["loc"][-1])
    place = Place(owner.place.file, owner.place.line, owner.place.column, join_key(owner.place.key, name))
    about = _about(kind, (*way, name))
    return place.fault(f"{name} is missing", allowed=f"give it ({about})" if about else "give it")


def wanted(error: ErrorDetails) -> str:
    """Return what pydantic would accept, in words that follow "must be"."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in _BOUND:
        name, word = _BOUND[kind]
        return f"{word} {context[name]}".removesuffix(".0")
    if kind in ("literal_error", "enum"):
        return f"one of {context['expected']}"
    return _WANTED.get(kind, error["msg"])


def _shown(value: Tree) -> object:
    if isinstance(value, Scalar):
        return "null" if value.value is None else value.value
    return describe(value)


def _name(way: tuple[str | int, ...]) -> str:
    names = [part for part in way if isinstance(part, str)]
    name = names[-1] if names else ""
    return f"{_ELEMENT}{name}" if way and isinstance(way[-1], int) else name


def _about(kind: type, way: tuple[str | int, ...]) -> str:
    """Return the description of the field at ``way``, from the spec."""
    names = [part for part in way if isinstance(part, str)]
    if not names:
        return ""
    owner = _class_at(kind, names[:-1])
    return next((f.metadata.get("description", "") for f in fields(owner) if f.name == names[-1]), "")


def _class_at(kind: type, way: Sequence[str | int]) -> Any:
    """Return the dataclass that has the fields at ``way`` below ``kind``."""
    for part in way:
        hint = get_type_hints(kind).get(str(part))
        kind = next((c for c in (hint, *get_args(hint)) if isinstance(c, type) and is_dataclass(c)), kind)
    return kind
