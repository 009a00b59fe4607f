"""A case as one line and as flat keys, for reports that load no case file.

``shape_of`` is for readers. ``keys_of`` is for the analysis that compares failing cases with passing ones.
"""

from dataclasses import asdict, fields, is_dataclass, replace

from attncheck.cases.grammar import format_batch
from attncheck.cases.keys import differences
from attncheck.cases.model import Case
from attncheck.errors import SpecError
from attncheck.reference.step_spec import BatchSpec, PathSpec, RecurrenceOptions

KeyValue = bool | int | float | str

_LONGEST_BATCH = 60
"""Most characters of a batch string in a line."""

_LONGEST_TUPLE = 8
"""Most values of a tuple, such as slopes, that are written out."""

_PLAIN_FIELDS = frozenset({"num_heads", "num_kv_heads", "head_size", "dtype", "block_size", "layout", "num_blocks"})
"""Fields that are reported separately, and the size of the pool, which does not matter."""


def shape_of(case: Case) -> str:
    """Return heads, sizes, dtype, cache, batch and modifiers: ``10 heads, 2 KV heads (group 5), head size 64, ...``."""
    layer, cache = case.layer, case.cache
    options = case.batch.path.options
    if isinstance(options, RecurrenceOptions) and options.rule == "short_conv":
        parts = [_count(layer.num_heads, "channel"), _count(layer.head_size, "tap")]
    else:
        groups = f"{_count(layer.num_kv_heads, 'KV head')} (group {layer.num_heads // layer.num_kv_heads})"
        parts = [_count(layer.num_heads, "head"), groups, f"head size {layer.head_size}"]
    parts.append(layer.dtype)
    if layer.has_cache:
        parts.append(f"pages of {cache.block_size} {cache.layout}")
    parts += [f"{name} {value}" for name, value in _given(layer, cache if layer.has_cache else None)]
    parts.append(f"batch {batch_of(case.batch)}")
    parts += ["with a shared prefix"] if any(request.shared_prefix for request in case.batch.requests) else []
    padding = case.batch.padding
    if padding.requests or padding.tokens:
        parts.append(f"padded by {_count(padding.requests, 'request')} and {_count(padding.tokens, 'token')}")
    parts += [f"{name} {value}" for name, value in _around(case.batch)]
    if case.batch.path.name != "paged":
        given = ", ".join(f"{name} {value}" for name, value in _given(options))
        parts.append(f"path {case.batch.path.name}{f' ({given})' if given else ''}")
    parts += [] if case.inputs is None else [f"inputs {' '.join(case.inputs)}"]
    parts += [f"after {_batches(case)}"] if case.after else []
    parts += [f"beside {_layers(case)}"] if case.layers else []
    parts += [f"{name.removeprefix('strides.')} {form}" for name, form in _strides(case)]
    return ", ".join(parts)


def batch_of(batch: BatchSpec) -> str:
    """Return the batch as its string, or its size if the string is too long or cannot express it."""
    try:
        text = format_batch(batch.requests)
    except SpecError:
        text = ""
    if text and len(text) <= _LONGEST_BATCH:
        return text
    return f"of {batch.num_requests} requests, {batch.num_tokens} new tokens, seq_len up to {batch.max_seq_len}"


def keys_of(case: Case) -> dict[str, KeyValue]:
    """Return the properties that distinguish cases, by case key (``cache.block_size``), and flags derived from them.

    Fields at their default are left out, except sizes, dtype, layout and options of the path. Tuples and nested specs
    are one string.
    """
    layer, batch = case.layer, case.batch
    requests = batch.requests
    always: dict[str, KeyValue] = {
        "layer.num_heads": layer.num_heads,
        "layer.num_kv_heads": layer.num_kv_heads,
        "layer.group_size": layer.num_heads // layer.num_kv_heads,
        "layer.head_size": layer.head_size,
        "layer.dtype": str(layer.dtype),
        "batch.num_requests": batch.num_requests,
        "batch.max_query_len": max(request.query_len for request in requests),
        "batch.max_seq_len": batch.max_seq_len,
        "batch.min_seq_len": min(request.total_len for request in requests),
    }
    if layer.has_cache:
        always |= {"cache.block_size": case.cache.block_size, "cache.layout": str(case.cache.layout)}
    flags = {
        "batch has a decode": any(r.query_len == 1 and r.context_len > 0 for r in requests),
        "batch has a prefill with context": any(r.query_len > 1 and r.context_len > 0 for r in requests),
        "batch has a prefill without context": any(r.context_len == 0 for r in requests),
        "batch shares a prefix": any(r.shared_prefix for r in requests),
        "batch is padded": bool(batch.padding.requests or batch.padding.tokens),
    }
    given: dict[str, KeyValue] = {
        f"layer.{name}" if hasattr(layer, name) else f"cache.{name}": value
        for name, value in _given(layer, case.cache if layer.has_cache else None)
    }
    padding = {"batch.padding.requests": batch.padding.requests, "batch.padding.tokens": batch.padding.tokens}
    given |= {name: count for name, count in padding.items() if count}
    given |= {f"batch.{name}": value for name, value in _around(batch)}
    path: dict[str, KeyValue] = {} if batch.path.name == "paged" else {"path": batch.path.name}
    path |= {f"path.{name}": value for name, value in _options(batch.path)}
    inputs: dict[str, KeyValue] = {} if case.inputs is None else {"inputs": ", ".join(case.inputs)}
    company: dict[str, KeyValue] = {"after": _batches(case)} if case.after else {}
    company |= {"layers": _layers(case)} if case.layers else {}
    inputs |= dict(_strides(case))
    return always | {name: True for name, holds in flags.items() if holds} | given | path | inputs | company


def _batches(case: Case) -> str:
    return ", ".join(batch_of(batch) for batch in case.after)


def _layers(case: Case) -> str:
    given = [differences(layer, case.layer) for layer in case.layers]
    return ", ".join(" ".join(f"{key} {value}" for key, value in own.items()) or "a layer like it" for own in given)


def _strides(case: Case) -> list[tuple[str, str]]:
    """Return the memory layout of each operand, by case key; empty if the case does not specify it."""
    return [] if case.strides is None else [(f"strides.{name}", form) for name, form in asdict(case.strides).items()]


def _around(batch: BatchSpec) -> list[tuple[str, KeyValue]]:
    """Return the padding and block-table options of the batch that differ from their default, by key."""
    padding = replace(batch.padding, requests=0, tokens=0)
    return [
        (f"{name}.{field}", value)
        for name, spec in (("padding", padding), ("block_table", batch.block_table))
        for field, value in _given(spec)
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _given(*specs: object) -> list[tuple[str, KeyValue]]:
    """Return name and value of each field that differs from its default and is not reported separately."""
    return [
        (field.name, _word(value))
        for spec in specs
        if spec is not None
        for field in fields(spec)  # type: ignore[arg-type]
        if field.name not in _PLAIN_FIELDS and (value := getattr(spec, field.name)) != field.default
    ]


def _options(path: PathSpec) -> list[tuple[str, KeyValue]]:
    """Return name and value of each option of a path that is not None."""
    if path.options is None:
        return []
    values = [(field.name, getattr(path.options, field.name)) for field in fields(path.options)]
    return [(name, _word(value)) for name, value in values if value is not None]


def _word(value: object) -> KeyValue:
    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, tuple):
        return str(list(value)) if len(value) <= _LONGEST_TUPLE else f"{len(value)} values"
    if is_dataclass(value):
        given = [(field.name, getattr(value, field.name)) for field in fields(value)]
        return " ".join(f"{name} {own}" for name, own in given if own is not None)
    return str(value)
