"""Builds a case from chosen values: draws lengths around relevant edges, and resolves invalid combinations.

If a combination is invalid, the key that the error names gets its plain value. ``Drawn.kept`` has the values that
remain.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from attncheck.cases.consistency import check_meaning, implied_path
from attncheck.cases.model import Case
from attncheck.errors import SpecError
from attncheck.harness.fuzz.axes import GROUP, NOT_DRAWN, Axes, plain
from attncheck.reference.spec import (
    AttentionType,
    BatchSpec,
    CacheSpec,
    DCPOptions,
    FastPrefillOptions,
    LayerSpec,
    MicroBatchOptions,
    PaddingSpec,
    PathSpec,
    RequestSpec,
    SpecDecodeOptions,
    TreeOptions,
)

SUITE = "fuzz"
"""The suite name of drawn cases."""

_PATHS_WITH_ROWS = ("split_kv", "dcp", "cascade", "spec_decode", "tree", "fast_prefill", "local", "micro_batch")
"""Paths in which every row needs a key of its own."""


_MOST_ROWS_OF_LONG, _WIDEST_OF_LONG = 4, 128
"""Most new rows of a request with a context beyond 16 bits, and most elements of a query row of its layer."""


@dataclass(frozen=True)
class Lengths:
    """Limits for the lengths of requests.

    ``edges``: constants of the backend's code, around which lengths are drawn. ``most_keys``: maximum keys of a batch,
    over all requests, unless twice an edge is more.
    """

    edges: tuple[int, ...] = ()
    most_keys: int = 1200


@dataclass(frozen=True)
class Drawn:
    """A case, and the chosen values that it has."""

    case: Case
    kept: Mapping[str, Any]


def draw_case(axes: Axes, choice: Mapping[str, Any], lengths: Lengths, seed: int, name: str) -> Drawn | None:
    """Return the case of ``choice``, with the plain value of every other key; None if no valid case was found.

    ``seed``: seed of the lengths.
    """
    chosen = dict(choice)
    if chosen.get("layer.mla") is not None:  # a latent cache determines heads and sizes
        chosen["layer.num_kv_heads"] = 1
        chosen["layer.head_size"] = chosen["layer.mla"].kv_lora_rank + chosen["layer.mla"].qk_rope_head_dim
    for _ in range(len(chosen) + 1):
        try:
            case = _assembled(plain(axes) | chosen, lengths, Random(seed), name)
        except SpecError as error:
            key = _key_at_fault(error, chosen)
            if key is None:
                return None
            del chosen[key]
        else:
            return Drawn(case, {key: value for key, value in choice.items() if chosen.get(key) == value})
    return None


def _key_at_fault(error: SpecError, chosen: Mapping[str, Any]) -> str | None:
    """Return the chosen key that the error names, else one of the path or the lengths, else the latest; or None."""
    named = [f"layer.{error.field}", f"cache.{error.field}", ".".join(error.field.split(".")[:2])]
    if "requests" in error.field:
        named += ["batch.shared_prefix", "path", "batch.contexts", "batch.queries"]
    if error.field.startswith("path"):
        named.append("path")
    return next((key for key in (*named, *reversed(tuple(chosen))) if key in chosen), None)


def _assembled(values: dict[str, Any], lengths: Lengths, random: Random, name: str) -> Case:
    values["layer.num_heads"] = values["layer.num_kv_heads"] * values[GROUP]
    values |= {key: value(values) for key, value in values.items() if callable(value) and not isinstance(value, type)}
    layer = LayerSpec(**_fields(values, "layer"))
    cache = CacheSpec(**_fields(values, "cache"))
    path = values["path"] or implied_path(layer)
    requests = _requests(values, layer, cache, path, lengths, random)
    if isinstance(path.options, MicroBatchOptions):
        path = _cut(requests, layer, random)
    padding = PaddingSpec(**_fields(values, "padding"))
    batch = BatchSpec(requests=requests, padding=padding, path=path, block_table=values["batch.block_table"])
    check_meaning(layer, cache, batch)
    return Case(
        suite=SUITE,
        id=name,
        layer=layer,
        cache=cache,
        batch=batch,
        inputs=values["inputs"],
        after=tuple(_before(values, layer, cache, path, lengths, random)) if values["after"] else (),
        layers=tuple(_beside(layer, cache, batch)) if values["layers"] else (),
        strides=values["strides"],
    )


def _before(
    values: dict[str, Any], layer: LayerSpec, cache: CacheSpec, path: PathSpec, lengths: Lengths, random: Random
) -> Iterator[BatchSpec]:
    """Yield two batches that precede the case's own, on its path if that is valid, as in a case file."""
    for queries in random.sample(("mixed", "one", "uniform", "prompts"), 2):
        requests = _requests(values | {"batch.queries": queries}, layer, cache, path, lengths, random)
        try:
            batch = BatchSpec(requests=requests, path=path)
            check_meaning(layer, cache, batch)
        except SpecError as error:
            if path.name == "fast_prefill":
                raise SpecError(error.reason, field="after", value=True, allowed="false") from error
            batch = BatchSpec(requests=requests, path=implied_path(layer))
            check_meaning(layer, cache, batch)
        yield batch


def _beside(layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> Iterator[LayerSpec]:
    """Yield other layers of the same step that differ only in scale, or in having no window.

    A backend that declares ``layer`` declares these too.
    """
    others = [replace(layer, scale=layer.softmax_scale / 2)]
    others += (
        [] if layer.sliding_window is None or batch.block_table.null_pages else [replace(layer, sliding_window=None)]
    )
    for other in others:
        check_meaning(other, cache, batch)
        yield other


def _fields(values: Mapping[str, Any], spec: str) -> dict[str, Any]:
    left_out = NOT_DRAWN.keys() - {"layer.num_heads"} | {GROUP}
    return {
        key.removeprefix(f"{spec}."): value
        for key, value in values.items()
        if key.startswith(f"{spec}.") and key not in left_out
    }


def _requests(
    values: Mapping[str, Any],
    layer: LayerSpec,
    cache: CacheSpec,
    path: PathSpec,
    lengths: Lengths,
    random: Random,
) -> tuple[RequestSpec, ...]:
    """Return the requests of a batch that suits the path."""
    sizes = [cache.block_size, layer.sliding_window, layer.attn_chunk_size, *lengths.edges]
    units = [size for size in sizes if size and size > 1]
    uniform = random.choice((2, 3, 4, 8))
    requests: list[RequestSpec] = []
    longest = max(lengths.most_keys // 3, *units, 0) + 1
    room = max(lengths.most_keys, *(2 * unit for unit in units), 1)
    for _ in range(max(values["batch.requests"], 2 if path.name == "cascade" else 1)):
        query_len = _query_len(values["batch.queries"], path, units, uniform, min(longest, 300), random)
        context = min(_context(values["batch.contexts"], layer, units, query_len, random), longest)
        if path.name in _PATHS_WITH_ROWS:
            context = max(context, 0)
        encoder_len = None
        if layer.attn_type == AttentionType.ENCODER_DECODER:
            encoder_len, context = _length(units, random), max(context, 0)
        if not layer.has_cache:
            context = 0
        room -= query_len + max(context, encoder_len or 0, 0)
        if requests and room < 0:
            break
        if not requests and values["batch.contexts"] == "beyond 16 bits":
            query_len, context = min(query_len, _MOST_ROWS_OF_LONG), _beyond_16_bits(layer, random)
        requests.append(RequestSpec(query_len=query_len, seq_len=query_len + context, encoder_len=encoder_len))
    requests[0] = _long_enough(requests[0], layer)
    if values["batch.order"] != "as drawn":
        requests.sort(key=lambda each: each.query_len, reverse=values["batch.order"] == "long first")
    if values["batch.shared_prefix"] or path.name == "cascade":
        requests = _sharing(requests, cache.block_size, everyone=path.name == "cascade")
    return tuple(requests)


def _beyond_16_bits(layer: LayerSpec, random: Random) -> int:
    """Return a context whose last positions exceed 16 bits.

    Raises:
        SpecError: the layer has no cache, or its heads make so many keys expensive.
    """
    width = layer.num_heads * layer.head_size
    if not layer.has_cache or width > _WIDEST_OF_LONG:
        allowed = f"a cache, and at most {_WIDEST_OF_LONG} elements a row"
        raise SpecError("the request is too expensive", field="batch.contexts", value=width, allowed=allowed)
    return random.choice((2**15, 2**16)) + random.randint(-1, 20)


def _long_enough(request: RequestSpec, layer: LayerSpec) -> RequestSpec:
    """Return the request, lengthened if needed so that a modifier that depends on distances affects some key."""
    needed = max(layer.sliding_window or 1, layer.attn_chunk_size or 1) + 1 if layer.position_modifiers else 0
    lacking = needed - request.total_len
    if lacking <= 0 or request.encoder_len is not None or request.context_len < 0:
        return request
    query_len = request.query_len + (0 if layer.has_cache else lacking)
    return replace(request, query_len=query_len, seq_len=request.total_len + lacking)


def _query_len(kind: str, path: PathSpec, units: Sequence[int], uniform: int, longest: int, random: Random) -> int:
    match path.options:
        case SpecDecodeOptions(num_speculative_tokens=drafts):
            return 1 + drafts
        case TreeOptions(parents=parents):
            return len(parents)
        case FastPrefillOptions(rows=rows):
            return rows + random.choice((1, 2, 9))
        case DCPOptions() if random.random() < 0.5:
            return 1
    match kind:
        case "one":
            return 1
        case "uniform":
            return uniform
        case "prompts":
            return min(_length(units, random), longest)
    return random.choice((1, 1, 1, 2, 4, random.randint(5, 40), min(_length(units, random), longest)))


def _context(kind: str, layer: LayerSpec, units: Sequence[int], query_len: int, random: Random) -> int:
    match kind:
        case "none":
            return 0
        case "edges":
            return max(0, _length(units, random) - query_len * random.randint(0, 1))
        case "long":
            return random.randint(150, 500)
        case "fewer keys than rows":
            return -random.randint(0, query_len) if layer.is_causal else 0
    return random.choice(
        (0, random.randint(1, 40), max(0, _length(units, random) - query_len), random.randint(40, 300))
    )


def _length(units: Sequence[int], random: Random) -> int:
    """Return a length at an edge: one below, at, or one above a multiple of a unit."""
    unit = random.choice(units or (16,))
    return max(
        1, unit * random.choice((1, 1, 2, 3)) * (1 if unit > 100 else random.choice((1, 2))) + random.randint(-1, 1)
    )


def _sharing(requests: Sequence[RequestSpec], page: int, *, everyone: bool) -> list[RequestSpec]:
    """Return the requests, with a shared prefix for those that have at least one page of context.

    ``everyone``: extend requests with less context by a page, so that all share the prefix.
    """
    able = [each for each in requests if each.context_len >= page]
    if everyone and len(able) < len(requests):
        requests = [replace(each, seq_len=each.total_len + page) if each not in able else each for each in requests]
        able = list(requests)
    if len(able) < 2 and not (everyone and len(requests) > 1):
        return list(requests)
    shared = min(each.context_len for each in able) // page * page
    return [replace(each, shared_prefix=shared) if each in able else each for each in requests]


def _cut(requests: Sequence[RequestSpec], layer: LayerSpec, random: Random) -> PathSpec:
    """Return the path ``micro_batch`` with cuts between requests; a causal layer may also be cut within a request."""
    ends = [sum(each.query_len for each in requests[:count]) for count in range(1, len(requests))]
    tokens = sum(each.query_len for each in requests)
    anywhere = [random.randint(1, tokens - 1)] if layer.is_causal and tokens > 1 else []
    cuts = sorted(set(random.sample(ends, min(len(ends), random.randint(0, 2))) + anywhere))
    return PathSpec(name="micro_batch", options=MicroBatchOptions(cuts=tuple(cuts or [1])))
