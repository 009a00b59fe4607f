"""The batches of a vLLM benchmark file: ``batch_specs``, ``batch_spec_ranges`` and ``batch_sizes``."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from attncheck.cases.grammar import format_batch, parse_batch
from attncheck.cases.tree import Items, Place, Scalar, Table, Tree, describe
from attncheck.cases.validation import known_keys, text_of
from attncheck.errors import BatchSpecError
from attncheck.reference.spec import MAX_TOKENS, RequestSpec

_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_RANGE_KEYS = ("start", "stop", "step", "end_inclusive")


@dataclass(frozen=True)
class Batch:
    """One batch: its string, its place in the file, and its requests."""

    text: str
    place: Place
    requests: tuple[RequestSpec, ...]


def read_batches(root: Table, limit: int) -> list[Batch]:
    """Return every batch of the file in order, multiplied by the batch sizes; at most ``limit``.

    Raise :class:`CaseFileError` for an invalid batch, or for more than ``limit`` batches.
    """
    written: list[tuple[str, Place]] = []
    if "batch_specs" in root.entries:
        items = items_of(root.entries["batch_specs"], "batch_specs")
        written.extend((text_of(item, "a batch"), item.place) for item in items)
    if "batch_spec_ranges" in root.entries:
        for item in items_of(root.entries["batch_spec_ranges"], "batch_spec_ranges"):
            written.extend(_expand(item, limit - len(written)))
    batches = [Batch(text, place, _parse(text, place)) for text, place in written]
    if "batch_sizes" not in root.entries:
        return batches
    sizes = items_of(root.entries["batch_sizes"], "batch_sizes")
    if len(sizes) * len(batches) > limit:
        raise root.names["batch_sizes"].fault(f"more than {limit} batches", allowed="shorten a list, or split the file")
    return [_multiplied(batch, size) for size in sizes for batch in batches]


def items_of(tree: Tree, what: str) -> tuple[Tree, ...]:
    """Return the items of a non-empty list; raise :class:`CaseFileError` for any other value."""
    if not isinstance(tree, Items) or not tree.items:
        found = "an empty one" if isinstance(tree, Items) else describe(tree)
        raise tree.place.fault(f"{what} must be a list, and this is {found}", allowed="give a list")
    return tree.items


def whole_number(tree: Tree, what: str, at_least: int) -> int:
    """Return an integer of at least ``at_least``; raise :class:`CaseFileError` for any other value."""
    value = tree.value if isinstance(tree, Scalar) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        shown = tree.text if isinstance(tree, Scalar) else describe(tree)
        raise tree.place.fault(f"{what} must be a whole number, at least {at_least}", value=shown, allowed="give one")
    return value


def _parse(text: str, place: Place) -> tuple[RequestSpec, ...]:
    try:
        return parse_batch(text)
    except BatchSpecError as error:
        reason = f"{error.reason} (at character {error.position + 1})"
        raise place.fault(reason, value=text, allowed=error.allowed) from error


def _multiplied(batch: Batch, size: Tree) -> Batch:
    factor = whole_number(size, "a batch size", 1)
    if len(batch.requests) > 1:
        raise batch.place.fault(
            "batch_sizes multiplies batches of one segment, and this has more",
            value=batch.text,
            allowed="leave batch_sizes out, or write the segments as batches of their own",
        )
    request = batch.requests[0]
    requests = (replace(request, count=min(request.count * factor, MAX_TOKENS)),)
    text = format_batch(requests)
    return Batch(text, batch.place, _parse(text, size.place))


def _expand(tree: Tree, room: int) -> Iterator[tuple[str, Place]]:
    """Yield the strings of one template: all combinations of its ranges in the order written, the last one fastest."""
    if not isinstance(tree, Table) or "template" not in tree.entries:
        raise tree.place.fault(
            "a range is a mapping with a template", allowed="write template: q{n}s1k, n: {start, ...}"
        )
    template = text_of(tree.entries["template"], "template")
    place = tree.entries["template"].place
    names = [name for name in tree.entries if name != "template"]
    fields = _FIELD.findall(template)
    if set(fields) != set(names) or "{" in _FIELD.sub("", template):
        raise place.fault(
            f"the template has the fields {sorted(set(fields))}, and ranges are given for {sorted(names)}",
            value=template,
            allowed="give one range a field",
        )
    ranges = [_range(tree.entries[name], name) for name in names]
    count = math.prod(len(values) for values in ranges)
    if count > room:
        raise place.fault(
            f"this template gives {count} batches",
            value=template,
            allowed=f"there is room for {max(room, 0)} more in one file: shorten a range, or split the file",
        )
    for values in itertools.product(*ranges):
        yield _filled(template, names, values), place


def _filled(template: str, names: list[str], values: tuple[int, ...]) -> str:
    for name, value in zip(names, values, strict=True):
        template = template.replace(f"{{{name}}}", str(value))
    return template


def _range(tree: Tree, name: str) -> range:
    if not isinstance(tree, Table):
        raise tree.place.fault(f"the range of {name} is a mapping", allowed="write {start, stop, step}")
    known_keys(tree, _RANGE_KEYS, "a range")
    for key in ("start", "stop"):
        if key not in tree.entries:
            raise tree.place.fault(f"the range of {name} lacks its {key}", allowed="write {start, stop, step}")
    start = whole_number(tree.entries["start"], "start", 0)
    stop = whole_number(tree.entries["stop"], "stop", 0)
    if stop > MAX_TOKENS:
        raise tree.entries["stop"].place.fault("stop is too large", value=stop, allowed=f"give at most {MAX_TOKENS}")
    step = whole_number(tree.entries["step"], "step", 1) if "step" in tree.entries else 1
    values = range(start, stop + (1 if _is_true(tree.entries.get("end_inclusive")) else 0), step)
    if not values:
        raise tree.place.fault(f"the range of {name} is empty", allowed="let stop lie beyond start")
    return values


def _is_true(tree: Tree | None) -> bool:
    if tree is None:
        return True
    if isinstance(tree, Scalar) and isinstance(tree.value, bool):
        return tree.value
    raise tree.place.fault("end_inclusive must be true or false", allowed="write true or false")
