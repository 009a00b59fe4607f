"""Parses YAML text into a tree that records the place of every value and key, and merges one tree over another.

Untrusted files are safe: no tags, no code, bounded nodes and depth, aliases counted at full size. Scalars follow YAML
1.2: ``010`` is 10, ``1e3`` a number, ``yes`` and ``1:30`` strings. No key occurs twice. The module does not depend on
the keys.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

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


MAX_BYTES = 2**20
"""Largest size of a file, in bytes."""
MAX_NODES = 100_000
"""Most values in a file; an alias counts each time it is used."""
MAX_DEPTH = 40
"""Most levels of nesting."""
_MAX_DIGITS = 40

_CONTROL = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)
"""Control characters, text-direction characters, line separators, and code points that are not characters."""
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_SPECIAL: Mapping[str, Value] = (
    dict.fromkeys(("", "~", "null", "Null", "NULL"), None)
    | dict.fromkeys(("true", "True", "TRUE"), True)
    | dict.fromkeys(("false", "False", "FALSE"), False)
    | dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf"))
    | dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf"))
    | dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan"))
)
_ADVICE = (
    ("cannot start any token", "quote the text, and indent with blanks"),
    ("mapping values are not allowed", "quote a text that contains ': ', and see that keys of one mapping line up"),
    ("did not find expected ',' or", "see whether a bracket or brace is not closed"),
    ("expected ',' or", "see whether a bracket or brace is not closed"),
    ("could not find expected ':'", "a key is followed by a colon and a blank"),
    ("unexpected end of stream", "see whether a quote is not closed"),
)


def read_text(path: Path, *, instead: str = "") -> str:
    """Return the text of a file; ``instead`` is the hint for a file that does not exist.

    Raise :class:`CaseFileError` for a file that cannot be read, is larger than :data:`MAX_BYTES` or is not UTF-8.
    """
    start = Place(str(path), 1, 1, "")
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except IsADirectoryError as error:
        raise CaseFileError("this is a directory", file=str(path), allowed="name one file") from error
    except FileNotFoundError as error:
        raise CaseFileError("there is no such file", file=str(path), allowed=instead) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise CaseFileError(f"cannot be read: {reason}", file=str(path)) from error
    if len(data) > MAX_BYTES:
        raise start.fault(f"larger than {MAX_BYTES} bytes", allowed="split the file; in a case file, use matrix")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        place = Place(str(path), before.count(b"\n") + 1, error.start - before.rfind(b"\n"), "")
        raise place.fault(f"byte 0x{data[error.start]:02X} is not UTF-8", allowed="save the file as UTF-8") from error


def parse_yaml(text: str, file: str) -> Tree:
    """Return the tree of the single document in ``text``; errors name ``file``.

    Raise :class:`CaseFileError`, with line and column, for anything but plain, small, safe YAML.
    """
    for bad in _CONTROL.finditer(text):
        line = text.count("\n", 0, bad.start()) + 1
        column = bad.start() - text.rfind("\n", 0, bad.start())
        raise CaseFileError(
            f"character U+{ord(bad[0]):04X} is not allowed in YAML",
            file=file,
            line=line,
            column=column,
            allowed="a case file is plain UTF-8 text",
        )
    root = _Composer(_events(text, file), file).document()
    if root is None:
        raise Place(file, 1, 1, "").fault("the file is empty", allowed="a case file has suite: and cases:")
    return root


def _events(text: str, file: str) -> Iterator[yaml.Event]:
    """Yield the parser's events, and convert its errors. libyaml's parser, if available, is ten times faster."""
    try:
        yield from yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else None
        problem = error.problem or error.context or "cannot be read"
        advice = next((advice for phrase, advice in _ADVICE if phrase in problem), "see the line before, too")
        lines = text.split("\n")
        here = lines[mark.line] if mark and mark.line < len(lines) else ""
        if "\t" in here[: len(here) - len(here.lstrip())]:
            problem, advice = "a tab in the indentation", "indent with blanks: YAML allows no tabs there"
        raise CaseFileError(
            f"not YAML: {problem}",
            file=file,
            line=line,
            column=mark.column + 1 if mark else None,
            allowed=advice,
        ) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise CaseFileError(f"not YAML: {error}", file=file, allowed="a case file is plain UTF-8 YAML") from error


class _Composer:
    """Builds a tree from events, and counts nodes and depth on the way, so that recursion stays within MAX_DEPTH."""

    def __init__(self, events: Iterator[yaml.Event], file: str) -> None:
        self.events, self.file = events, file
        self.nodes = 0
        # Still open ones are None. Values without an anchor are stored under None, which is no alias's name.
        self.anchors: dict[str | None, Tree | None] = {}

    def document(self) -> Tree | None:
        """Return the tree of the single document, or None if there is none."""
        root = None
        for event in self.events:
            if not isinstance(event, yaml.DocumentStartEvent):
                continue
            if root is not None:
                raise self._place(event, "").fault("a second document begins", allowed="one file holds one document")
            root = self._value(next(self.events), "", 0)
        return root

    def _value(self, event: Any, key: str, depth: int) -> Tree:
        """Return the tree that begins with ``event``, below ``depth`` collections."""
        place = self._place(event, key)
        if isinstance(event, yaml.AliasEvent):
            return self._aliased(event.anchor, place, depth)
        if event.tag is not None:
            raise place.fault(f"the tag {event.tag} is not allowed", allowed="case files hold plain values only")
        self._count(1, depth + 1, place)
        tree: Tree
        if isinstance(event, yaml.ScalarEvent):
            tree = Scalar(place, _resolve(event.value, place, is_plain=event.implicit[0]), event.value)
        else:
            self.anchors[event.anchor] = None
            tree = (self._items if isinstance(event, yaml.SequenceStartEvent) else self._table)(place, depth)
        self.anchors[event.anchor] = tree
        return tree

    def _items(self, place: Place, depth: int) -> Items:
        values: list[Tree] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            values.append(self._value(event, f"{place.key}[{len(values)}]", depth + 1))
        return Items(place, tuple(values), *_extent(values))

    def _table(self, place: Place, depth: int) -> Table:
        entries: dict[str, Tree] = {}
        names: dict[str, Place] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            name = self._name(event, place.key, depth + 1)
            at = self._place(event, join_key(place.key, name))
            if name in names:
                raise at.fault(f"this key is on line {names[name].line} already", allowed="keep one of the two")
            names[name] = at
            entries[name] = self._value(next(self.events), at.key, depth + 1)
        size, height = _extent(entries.values())
        if "<<" in entries:
            entries, names = _with_merge_key(entries, names)
        return Table(place, entries, names, size, height)

    def _name(self, event: yaml.Event, key: str, depth: int) -> str:
        """Return the key of a mapping; ``key`` is the mapping's own."""
        if not isinstance(event, yaml.ScalarEvent):
            raise self._place(event, key).fault("a key must be a single word", allowed="write name: value")
        scalar = self._value(event, key, depth)
        name = event.value
        is_merge = event.implicit[0] and name == "<<"
        if isinstance(scalar, Scalar) and not isinstance(scalar.value, str) and not is_merge:
            raise scalar.place.fault(
                f"a key must be a text, and this is {describe(scalar)}", value=name, allowed="quote it, or name it"
            )
        return name

    def _aliased(self, anchor: str | None, place: Place, depth: int) -> Tree:
        if anchor not in self.anchors:
            raise place.fault(f"nothing before this line is called &{anchor}", allowed="define the anchor first")
        tree = self.anchors[anchor]
        if tree is None:
            raise place.fault(f"*{anchor} contains itself", allowed="an alias may name only what is complete")
        self._count(tree.size, depth + tree.height, place)
        return tree

    def _place(self, event: yaml.Event, key: str) -> Place:
        mark = event.start_mark
        if mark is None:  # every event of a parser has one; the type allows for events made by hand
            raise ValueError(f"{event!r} has no place in {self.file}")
        return Place(self.file, mark.line + 1, mark.column + 1, key)

    def _count(self, nodes: int, depth: int, place: Place) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            raise place.fault(
                f"more than {MAX_NODES} values", allowed="use matrix, split the file, or use fewer aliases of aliases"
            )
        if depth > MAX_DEPTH:
            raise place.fault(f"nested more than {MAX_DEPTH} deep", allowed="a case file needs a handful of levels")


def _extent(values: Collection[Tree]) -> tuple[int, int]:
    """Return size and height of a collection of these values."""
    return 1 + sum(value.size for value in values), 1 + max((value.height for value in values), default=0)


def _resolve(text: str, place: Place, *, is_plain: bool) -> Value:
    """Return the value of a scalar by YAML 1.2's core schema; quoted scalars are strings."""
    if _CONTROL.search(text):
        raise place.fault("an escape gives a control character", value=text, allowed="use printable text")
    if not is_plain:
        return text
    if text in _SPECIAL:
        return _SPECIAL[text]
    if not _FLOAT.fullmatch(text) and not _INT.fullmatch(text):
        return text
    if len(text) > _MAX_DIGITS:
        raise place.fault(f"a number of {len(text)} characters", value=text, allowed="no case needs so long a number")
    if _INT.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    return float(text)


def _with_merge_key(entries: dict[str, Tree], names: dict[str, Place]) -> tuple[dict[str, Tree], dict[str, Place]]:
    """Resolve ``<<: *base``: the mapping's own keys take precedence, then the sources in order."""
    source = entries.pop("<<")
    place = names.pop("<<")
    for base in source.items if isinstance(source, Items) else (source,):
        if not isinstance(base, Table):
            raise place.fault(f"<< takes a mapping, and this is {describe(base)}", allowed="write <<: *name")
        entries = {**base.entries, **entries}
        names = {**base.names, **names}
    return entries, names
