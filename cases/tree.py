"""Trees of values with their place in a file, and the merging of one tree over another.

A YAML file is parsed into such a tree. A case is merged over the defaults, and matrix values are put into it. Errors
point to places. The module depends neither on YAML's syntax nor on the keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attncheck.errors import CaseFileError

_KEY_SHOWN = 60

Value = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Place:
    """Position of a value: lines and columns count from 1; ``key`` is the dotted path from the file's root."""

    file: str
    line: int
    column: int
    key: str

    def fault(self, reason: str, *, value: object = None, allowed: str = "") -> CaseFileError:
        """Return an error that points here."""
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
    """A single value; ``text`` is its spelling in the file."""

    place: Place
    value: Value
    text: str
    size: int = 1
    height: int = 1


@dataclass(frozen=True, slots=True)
class Items:
    """A list. ``size`` counts the values below it and itself, ``height`` the levels."""

    place: Place
    items: tuple["Tree", ...]
    size: int = 1
    height: int = 1


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping from names to values; ``names`` has the place of each name."""

    place: Place
    entries: Mapping[str, "Tree"]
    names: Mapping[str, Place]
    size: int = 1
    height: int = 1


Tree = Scalar | Items | Table


def plain(tree: Tree) -> Any:
    """Return the tree as dicts, lists and scalars."""
    if isinstance(tree, Table):
        return {name: plain(value) for name, value in tree.entries.items()}
    if isinstance(tree, Items):
        return [plain(item) for item in tree.items]
    return tree.value


def describe(tree: Tree) -> str:
    """Return the kind of value, for messages."""
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
    """Return ``path.name``, with names above 60 characters cut."""
    shown = name if len(name) <= _KEY_SHOWN else name[:_KEY_SHOWN] + "..."
    return f"{path}.{shown}" if path else shown


def merge(base: Tree, over: Tree) -> Tree:
    """Return ``over`` merged over ``base``: mappings key by key at every level; other values are replaced."""
    if not isinstance(base, Table) or not isinstance(over, Table):
        return over
    entries = dict(base.entries)
    for name, value in over.entries.items():
        entries[name] = merge(entries[name], value) if name in entries else value
    return Table(over.place, entries, {**base.names, **over.names})


def put(tree: Table, path: Sequence[str], value: Tree, place: Place, *, merging: bool) -> Table:
    """Return ``tree`` with ``value`` at ``path``; missing mappings on the way are created.

    ``merging`` merges a mapping over an existing one instead of replacing it. ``place`` is the place of the path in the
    file. Raise :class:`~attncheck.errors.CaseFileError` if the path leads through a value that is not a mapping.
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
