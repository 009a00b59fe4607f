"""Trees of values that remember where each of them was written, and how one tree is laid over another.

A YAML file becomes such a tree. Defaults are laid under a case, and values of a matrix into their places. Errors point
into it. Knows nothing of YAML's syntax, and nothing of what the keys mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attncheck.errors import CaseFileError

_KEY_SHOWN = 60

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where something stands: lines and columns count from 1; ``key`` is the dotted path from the file's root."""

    file: str
    line: int
    column: int
    key: str

    def fault(self, reason: str, *, value: object = None, allowed: str = "") -> CaseFileError:
        """The error that points here."""
        return CaseFileError(
            reason,
            file=self.file,
            line=self.line,
            column=self.column,
            key=self.key,
            value=value,
            allowed=allowed,
        )


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value; ``text`` is how it was written."""

    place: Place
    value: Value
    text: str
    size: int = 1
    height: int = 1


@dataclass(frozen=True, slots=True)
class Items:
    """A list. ``size`` counts all values below and itself, ``height`` the levels."""

    place: Place
    items: tuple["Tree", ...]
    size: int = 1
    height: int = 1


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping from names to values; ``names`` says where each name stands."""

    place: Place
    entries: Mapping[str, "Tree"]
    names: Mapping[str, Place]
    size: int = 1
    height: int = 1


Tree = Scalar | Items | Table


def plain(tree: Tree) -> Any:
    """The tree as dicts, lists and scalars."""
    if isinstance(tree, Table):
        return {name: plain(value) for name, value in tree.entries.items()}
    if isinstance(tree, Items):
        return [plain(item) for item in tree.items]
    return tree.value


def describe(tree: Tree) -> str:
    """What kind of value this is, for messages."""
    if isinstance(tree, Table):
        return "a mapping"
    if isinstance(tree, Items):
        return "a list"
    if tree.value is None:
        return "nothing"
    if isinstance(tree.value, bool):
        return "a truth value"
    return "a text" if isinstance(tree.value, str) else "a number"


def join_key(path: str, name: str) -> str:
    """``path.name``, with very long names cut."""
    shown = name if len(name) <= _KEY_SHOWN else name[:_KEY_SHOWN] + "..."
    return f"{path}.{shown}" if path else shown


def merge(base: Tree, over: Tree) -> Tree:
    """``over`` laid over ``base``: mappings are merged key by key at every level, anything else is replaced."""
    if not isinstance(base, Table) or not isinstance(over, Table):
        return over
    entries = dict(base.entries)
    for name, value in over.entries.items():
        entries[name] = merge(entries[name], value) if name in entries else value
    return Table(over.place, entries, {**base.names, **over.names})


def put(tree: Table, path: Sequence[str], value: Tree, place: Place, *, merging: bool) -> Table:
    """``tree`` with ``value`` at ``path``; missing mappings on the way are made.

    ``merging`` lays a mapping over one that stands there, instead of replacing it. ``place`` is where the path was
    written. Raises :class:`~attncheck.errors.CaseFileError` if the way leads through something that is no mapping.
    """
    name, *rest = path
    below = tree.entries.get(name)
    if rest:
        inner = Table(place, {}, {}) if below is None else below
        if not isinstance(inner, Table):
            raise place.fault(
                f"{name} is {describe(inner)} on line {inner.place.line}, so there is no {'.'.join(rest)} in it",
                allowed=f"write {name} as a mapping there",
            )
        value = put(inner, rest, value, place, merging=merging)
    elif below is not None and merging:
        value = merge(below, value)
    return Table(tree.place, {**tree.entries, name: value}, {**tree.names, name: place})
