"""The keys ``batch`` and ``path`` of a case file, in each of their forms."""

from dataclasses import fields, replace
from functools import lru_cache

from attncheck.cases.grammar import parse_batch
from attncheck.cases.tree import Items, Scalar, Table, Tree, describe, join_key
from attncheck.cases.validation import known_keys, suggestion, text_of, validate
from attncheck.errors import BatchSpecError, SpecError
from attncheck.reference.spec import PATH_OPTIONS, PATHS, BatchSpec, BlockTableSpec, PaddingSpec, PathSpec, RequestSpec


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


@lru_cache(maxsize=4096)
def _parsed(text: str) -> tuple[RequestSpec, ...]:
    return parse_batch(text)


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
