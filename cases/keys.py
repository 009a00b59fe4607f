"""Reads a case from the tree that its keys, the defaults and the values of a matrix form together.

In order: the batch and its path; the batches before it and the layers beside it; the case; and a suite with other
defaults, ``decode{cache.block_size: 32, layer.head_size: 128}``. Such defaults are for backends that do not support the
page size, layout or head size of a suite. They replace the suite's ``defaults``. A case keeps the keys it sets itself,
so that no two cases become equal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from types import MappingProxyType
from typing import get_args

from attncheck.cases.consistency import check_first_keys, check_inputs, check_meaning, implied_path
from attncheck.cases.grammar import parse_batch
from attncheck.cases.model import Case, Tolerance
from attncheck.cases.validation import Mistakes, known_keys, locate, names_of, suggestion, text_of, validate
from attncheck.cases.yaml_tree import Items, Scalar, Table, Tree, describe, join_key, merge, parse_yaml, plain, put
from attncheck.errors import BatchSpecError, CaseFileError, SelectionError, SpecError
from attncheck.reference.spec import BACKEND_CHECKS, FORMER_CHECKS, MODIFIERS, LayerSpec
from attncheck.reference.step_spec import (
    PATH_OPTIONS,
    PATHS,
    BatchSpec,
    BlockTableSpec,
    CacheSpec,
    InputName,
    PaddingSpec,
    PathSpec,
    RequestSpec,
    StridesSpec,
)


def read_batch(tree: Tree, path: PathSpec) -> BatchSpec:
    """Return a batch from any of its forms: a string, a list of requests, or ``{requests, padding, block_table}``."""
    padding, block_table, requests = PaddingSpec(), BlockTableSpec(), tree
    if isinstance(tree, Table):
        if "query_len" in tree.entries:
            raise tree.place.fault("a batch is a list, even of one request", allowed="write [{query_len: ..., ...}]")
        known_keys(tree, ("requests", "padding", "block_table"), "a batch")
        if "requests" not in tree.entries:
            raise tree.place.fault("requests is missing", allowed="give a batch string or a list of requests")
        requests = tree.entries["requests"]
        if "padding" in tree.entries:
            padding = validate(PaddingSpec, tree.entries["padding"], "padding")
        if "block_table" in tree.entries:
            block_table = validate(BlockTableSpec, tree.entries["block_table"], "the block table")
    try:
        return BatchSpec(requests=_read_requests(requests), padding=padding, block_table=block_table, path=path)
    except SpecError as error:  # above MAX_TOKENS; the reason states the number
        raise requests.place.fault(error.reason, allowed=error.allowed) from error


def read_path(tree: Tree) -> PathSpec:
    """Return a path from its name, with the default options, or from ``{name: options}``."""
    options: Tree = tree
    if isinstance(tree, Table):
        if len(tree.entries) != 1:
            raise tree.place.fault(
                f"a case has one path, and here are {len(tree.entries)}", allowed="write {name: options}"
            )
        ((name, options),) = tree.entries.items()
        place = tree.names[name]
    elif isinstance(tree, Items):
        raise tree.place.fault("a case has one path", allowed="write a name, or {name: options}")
    else:
        name, place = text_of(tree, "path"), tree.place
        options = Table(replace(place, key=join_key(place.key, name)), {}, {})
    if name not in PATHS:
        raise place.fault("unknown path", value=name, allowed=suggestion(name, PATHS))
    kind = PATH_OPTIONS[name]
    if kind is not None and not isinstance(options, Table):
        names = ", ".join(f"{field.name}: ..." for field in fields(kind))
        raise options.place.fault(f"options of the path {name} have names", allowed=f"write {{{name}: {{{names}}}}}")
    if kind is not None:
        return PathSpec(name=name, options=validate(kind, options, f"the path {name}"))
    if not isinstance(options, Table) or options.entries:
        raise options.place.fault(f"the path {name} has no options", allowed=f"write path: {name}")
    return PathSpec(name=name)


_parsed = lru_cache(maxsize=4096)(parse_batch)


def _read_requests(tree: Tree) -> tuple[RequestSpec, ...]:
    if isinstance(tree, Scalar) and isinstance(tree.value, str):
        try:
            return _parsed(tree.value)
        except BatchSpecError as error:
            reason = f"{error.reason} (at character {error.position + 1})"
            raise tree.place.fault(reason, value=tree.value, allowed=error.allowed) from error
    if not isinstance(tree, Items):
        raise tree.place.fault(
            f"a batch cannot be {describe(tree)}",
            value=tree.text if isinstance(tree, Scalar) else None,
            allowed="write a string such as 2q1s128, or a list of {query_len, seq_len, count}",
        )
    if not tree.items:
        raise tree.place.fault("a batch needs a request", allowed="give at least one")
    for item in tree.items:
        if isinstance(item, Scalar) and isinstance(item.value, str):
            raise item.place.fault(
                "a list holds requests as mappings",
                value=item.value,
                allowed="write {query_len, seq_len, count}, or the whole batch as one string",
            )
    return tuple(validate(RequestSpec, item, "a request") for item in tree.items)


DIFFERENT_KEYS = (
    "scale",
    *(name for name, modifier in MODIFIERS.items() if modifier.argument is not None),
    "kv_sharing",
    "head_size",
)
"""Keys in which the layers of one step may differ. A layer of another head size has its own builder and pages."""

_MOST = 16
"""Most batches and most layers that a case may name; each takes as much work as the case itself."""


def read_after(tree: Tree, layer: LayerSpec, cache: CacheSpec, path: PathSpec) -> tuple[BatchSpec, ...]:
    """Return the batches before a case's own, each on the case's path if valid, else on the path the layer implies."""
    batches = []
    for item in _list(tree, "after", "batches"):
        batch = read_batch(item, path)
        # Each batch has its own pool, as large as needed.
        room = replace(cache, num_blocks=None)
        try:
            check_meaning(layer, room, batch)
        except SpecError as own:
            if path.name == "fast_prefill":  # its builder accepts no batch of another path
                raise item.place.fault(own.reason, value=own.value, allowed=own.allowed) from own
            batch = replace(batch, path=implied_path(layer))
            try:
                check_meaning(layer, room, batch)
            except SpecError as error:
                raise item.place.fault(error.reason, value=error.value, allowed=error.allowed) from error
        batches.append(batch)
    return tuple(batches)


def read_layers(tree: Tree, own: Tree, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> tuple[LayerSpec, ...]:
    """Return the layers of a step from mappings of the keys in which they differ from the case's own layer."""
    layers = []
    for item in _list(tree, "layers", "mappings"):
        if not isinstance(item, Table):
            raise item.place.fault(
                f"a layer must be a mapping, and this is {describe(item)}", allowed="write {} for a twin"
            )
        made = validate(LayerSpec, merge(own, item), "a layer")
        for field in fields(LayerSpec):
            if field.name not in DIFFERENT_KEYS and getattr(made, field.name) != getattr(layer, field.name):
                allowed = f"layers of one step may differ in {', '.join(DIFFERENT_KEYS)}"
                place = item.names.get(field.name, item.place)
                raise place.fault("a step has no layers that differ in this", value=field.name, allowed=allowed)
        try:
            check_meaning(made, cache, batch)
        except SpecError as error:
            raise item.place.fault(error.reason, value=error.value, allowed=error.allowed) from error
        layers.append(made)
    return tuple(layers)


def differences(layer: LayerSpec, own: LayerSpec) -> dict[str, object]:
    """Return the keys of ``layer`` that differ from a case's own layer, as ``layers`` lists them."""
    given = {name: getattr(layer, name) for name in DIFFERENT_KEYS}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in given.items()
        if value != getattr(own, name)
    }


def _list(tree: Tree, key: str, content: str) -> tuple[Tree, ...]:
    if not isinstance(tree, Items):
        raise tree.place.fault(
            f"{key} must be a list of {content}, and this is {describe(tree)}", allowed="write [...]"
        )
    if len(tree.items) > _MOST:
        raise tree.place.fault(f"{key} is too long", value=len(tree.items), allowed=f"at most {_MOST}")
    return tuple(tree.items)


INPUTS: tuple[InputName, ...] = get_args(InputName)


def read_case(tree: Table, suite: str, name: str, description: str, origin: str) -> Case:
    """Return the case of a fully merged tree; raise :class:`CaseFileError` with all its mistakes."""
    for key, what in (("layer", "the layer's head counts and head size"), ("batch", "the requests")):
        if key not in tree.entries:
            raise tree.place.fault(f"{key} is missing", allowed=f"give {what} here or in defaults")
    mistakes, entries = Mistakes(), tree.entries
    cache, path, checks, tolerance, inputs, strides = CacheSpec(), PathSpec(), None, None, None, None
    with mistakes.kept():
        layer = validate(LayerSpec, entries["layer"], "a layer")
        path = implied_path(layer)
    if "cache" in entries:
        with mistakes.kept():
            cache = validate(CacheSpec, entries["cache"], "a cache")
    if "path" in entries:
        with mistakes.kept():
            path = read_path(entries["path"])
    with mistakes.kept():
        batch = read_batch(entries["batch"], path)
    if "checks" in entries:
        with mistakes.kept():
            checks = _read_checks(entries["checks"])
    if "tolerance" in entries:
        with mistakes.kept():
            tolerance = validate(Tolerance, entries["tolerance"], "a tolerance")
    if "inputs" in entries:
        with mistakes.kept():
            named = names_of(entries["inputs"], "input", INPUTS)
            inputs = tuple(each for each in INPUTS if each in named)
    if "strides" in entries:
        with mistakes.kept():
            strides = validate(StridesSpec, entries["strides"], "strides")
    mistakes.raise_all()
    try:
        check_meaning(layer, cache, batch)
        check_inputs(layer, cache, inputs)
        check_first_keys(layer, batch)
    except SpecError as error:
        raise _point(tree, error) from error
    after = read_after(entries["after"], layer, cache, path) if "after" in entries else ()
    layers = read_layers(entries["layers"], entries["layer"], layer, cache, batch) if "layers" in entries else ()
    return Case(
        suite=suite,
        id=name,
        layer=layer,
        cache=cache,
        batch=batch,
        checks=checks,
        tolerance=tolerance,
        inputs=inputs,
        after=after,
        layers=layers,
        strides=strides,
        description=description,
        origin=origin,
    )


def _read_checks(tree: Tree) -> tuple[str, ...]:
    names = [FORMER_CHECKS.get(name, name) for name in names_of(tree, "check", BACKEND_CHECKS, FORMER_CHECKS)]
    if not names:
        raise tree.place.fault("no check is left", allowed="leave checks out for all that apply")
    return tuple(check for check in BACKEND_CHECKS if check in names)


def _point(tree: Table, error: SpecError) -> CaseFileError:
    """Return a :class:`SpecError` of a whole case as an error at the value it names, or at its nearest parent."""
    parts = [int(part) if part.isdigit() else part for part in error.field.split(".")]
    place = locate(tree, parts)
    return place.fault(error.reason, value=error.value, allowed=error.allowed)


VARIED_KEYS: Mapping[str, type] = MappingProxyType({"layer": LayerSpec, "cache": CacheSpec})


def split_variant(ref: str) -> tuple[str, str]:
    """Return the suite's name or path, and the defaults in braces after it (braces included, empty without any)."""
    name, brace, rest = ref.partition("{")
    return (name, brace + rest) if brace and rest.endswith("}") else (ref, "")


def with_defaults(ref: str, settings: Sequence[str]) -> str:
    """Return ``ref`` with ``key=value`` settings appended to its own; a setting that it already has is not repeated.

    Raise SelectionError for a setting of another form.
    """
    if not settings:
        return ref
    name, braces = split_variant(ref)
    written = braces[1:-1].strip()
    given = [written] if written else []
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise SelectionError(f"--set {setting!r}: give KEY=VALUE, such as cache.block_size=32")
        entry = f"{key.strip()}: {value.strip()}"
        if entry not in written.split(", "):
            given.append(entry)
    return f"{name}{{{', '.join(given)}}}"


def read_defaults(braces: str, ref: str) -> Table:
    """Return the mapping in braces, with its dotted keys resolved.

    Raise CaseFileError, with ``ref`` instead of a file, unless it holds keys of a layer or a cache with their values.
    """
    written: Tree = parse_yaml(braces, ref)
    if not isinstance(written, Table):
        raise written.place.fault(
            f"defaults are a mapping, and this is {describe(written)}", allowed="write {cache.block_size: 32}"
        )
    laid = Table(written.place, {}, {})
    for key, value in written.entries.items():
        path, place = tuple(key.split(".")), written.names[key]
        if path[0] not in VARIED_KEYS or len(path) < 2 or "" in path:
            meant = [f"{above}.{key}" for above, spec in VARIED_KEYS.items() if key in (f.name for f in fields(spec))]
            allowed = f"did you mean {meant[0]}?" if meant else "a dotted key below layer or cache"
            raise place.fault("braces cannot replace this key", value=key[:60], allowed=allowed)
        if isinstance(value, Scalar) and value.value is None and not value.text:
            raise place.fault("a default needs a value", value=key[:60], allowed=f"write {key[:60]}: VALUE")
        laid = put(laid, path, value, place, merging=True)
    return laid


def page_defaults(cache: Tree | None, over: Table | None) -> dict[str, str]:
    """Return ``cache.block_size`` and ``cache.layout`` of cases that leave them out, except keys that ``over`` gives.

    ``cache``: the cache of a file's defaults.
    """
    written, given = (
        table.entries if isinstance(table, Table) else {} for table in (cache, over and over.entries.get("cache"))
    )
    values = {
        name: plain(written[name]) if name in written else getattr(CacheSpec(), name)
        for name in ("block_size", "layout")
    }
    return {f"cache.{name}": str(value) for name, value in values.items() if name not in given}
