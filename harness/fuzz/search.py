"""Random cases: axes, constants of the backend's source, pairs, and the search for failures."""

import ast
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from importlib.util import find_spec
from itertools import chain, combinations, count, islice, product
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from attncheck.backends import registry
from attncheck.cases.consistency import check_inputs, check_meaning, implied_path
from attncheck.cases.model import Case
from attncheck.errors import SpecError
from attncheck.harness.run.selection import checks_of, unanswered_reasons
from attncheck.reference.spec import (
    MODIFIERS,
    AttentionType,
    LayerSpec,
    MLASpec,
    Modifier,
    OutputQuantSpec,
    modifiers_of_kind,
)
from attncheck.reference.step_spec import (
    BatchSpec,
    BlockTableSpec,
    CacheSpec,
    CausalConv1dOptions,
    DCPOptions,
    FastPrefillOptions,
    MicroBatchOptions,
    PaddingSpec,
    PathSpec,
    PCPOptions,
    RecurrenceOptions,
    RecurrenceRule,
    RequestSpec,
    SpecDecodeOptions,
    SplitKVOptions,
    StridesSpec,
    TreeOptions,
)

# The values that drawn cases may have for every key. Extend this module for a new key.
#
# Keys are the dotted names of fields of `LayerSpec` and `CacheSpec`, and some about the batch, which
# :mod:`attncheck.harness.fuzz.search` turns into requests. A field of type bool, Enum or Literal needs no entry: all
# its values are drawn. Any other field needs an entry in `VALUES`, or in `NOT_DRAWN` with its reason; a test enforces
# this. The first value of a key is its plain value. A value may be a function of the choice so far; keys it depends on
# precede it.

Axes = Mapping[str, tuple[Any, ...]]
"""The values of each key, the plain one first."""

Choice = Mapping[str, Any]
"""The chosen values of keys; keys that are missing have their plain value."""


def _per_head(key: str, numbers: tuple[float, ...]) -> Callable[[Choice], tuple[float, ...]]:
    """Return a value with one of ``numbers`` for each head; ``key``: the key with the number of heads."""

    def value(choice: Choice) -> tuple[float, ...]:
        return tuple(numbers[head % len(numbers)] for head in range(choice[key]))

    value.__name__ = f"per_head_{numbers[0]}"
    return value


def _at_element_2_31(choice: Choice) -> int:
    """Return a first page just below element 2^31 of the keys, so that 32-bit offsets overflow in the batch.

    A host reserves such a pool and does not fill it.
    """
    size = choice["cache.block_size"] * choice["layer.num_kv_heads"] * choice["layer.head_size"]
    return max(2**31 // int(size) - 1, 1)


def _path(name: str, options: Any = None) -> PathSpec:
    return PathSpec(name=name, options=options)


GROUP = "layer.group"
"""Query heads per KV head; multiplied by ``layer.num_kv_heads`` it gives ``layer.num_heads``."""

VALUES: Axes = MappingProxyType(
    {
        "layer.num_kv_heads": (1, 2, 3, 4),
        GROUP: (1, 2, 3, 4, 7, 8),
        "layer.head_size": (64, 32, 16, 8, 80, 96, 112, 128, 192, 256),
        "layer.head_size_v": (None, 16, 32, 64, 128),
        "layer.scale": (None, 0.03, 0.4, 1.0),
        "layer.sinks_dtype": (None, "float32"),
        "layer.mla": (
            None,
            MLASpec(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32),
            MLASpec(kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, workspace=32),
        ),
        "layer.output_quant": (None, OutputQuantSpec(scale=0.02), OutputQuantSpec(scale=0.25)),
        "cache.block_size": (16, 1, 4, 8, 12, 32, 64, 128),
        "cache.k_scale": (1.0, 0.5, 0.037, _per_head("layer.num_kv_heads", (0.25, 0.6, 0.11))),
        "cache.v_scale": (1.0, 0.25, 0.083, _per_head("layer.num_kv_heads", (0.5, 0.07, 0.3))),
        "cache.q_scale": (1.0, 0.3),
        "cache.manager_block_size": (None, lambda choice: 3 * choice["cache.block_size"]),
        "cache.first_block": (None, 2, 37, 32760, 65530, _at_element_2_31),
        "padding.requests": (0, 1, 3),
        "padding.tokens": (0, 1, 5, 17),
        "padding.unmapped_tokens": (0, 1, 8),
        "padding.key_rows": (0, 2),
        "batch.block_table": (
            BlockTableSpec(),
            BlockTableSpec(extra_columns=5),
            BlockTableSpec(row_gap=3),
            BlockTableSpec(null_pages=True),
        ),
        "batch.requests": (1, 2, 3, 5, 9),
        "batch.queries": ("mixed", "one", "uniform", "prompts"),
        "batch.contexts": ("mixed", "none", "edges", "long", "fewer keys than rows", "beyond 16 bits"),
        "batch.shared_prefix": (False, True),
        "batch.order": ("as drawn", "short first", "long first"),
        "path": (
            None,
            _path("spec_decode", SpecDecodeOptions(num_speculative_tokens=1)),
            _path("spec_decode", SpecDecodeOptions(num_speculative_tokens=3)),
            _path("tree", TreeOptions()),
            _path("tree", TreeOptions(parents=(-1, 0, 0, 1, 2, 2))),
            _path("local"),
            _path("cascade"),
            _path("split_kv", SplitKVOptions()),
            _path("split_kv", SplitKVOptions(parts=3)),
            _path("dcp", DCPOptions()),
            _path("dcp", DCPOptions(size=3, interleave=4)),
            _path("pcp", PCPOptions()),
            _path("pcp", PCPOptions(size=3)),
            _path("micro_batch", MicroBatchOptions(cuts=(1,))),
            _path("fast_prefill", FastPrefillOptions()),
            _path("fast_prefill", FastPrefillOptions(rows=3)),
            _path("merge"),
            _path("causal_conv1d", CausalConv1dOptions()),
            _path("causal_conv1d", CausalConv1dOptions(channels=65, width=2, bias=False)),
        ),
        "after": (False, True),
        "layers": (False, True),
        "strides": (
            None,
            StridesSpec(query="contiguous", key="padded", value="offset"),
            StridesSpec(query="padded", key="odd", value="fused", output="fused"),
            StridesSpec(query="transposed", key="transposed", value="contiguous", output="transposed"),
            StridesSpec(query="odd", key="offset", value="transposed", output="padded"),
        ),
        "inputs": (
            None,
            ("needles", "coordinates"),
            ("needles", "large_scores"),
            ("needles", "equal_scores", "views"),
            ("needles", "negative_scores", "views"),
        ),
    }
)
"""The values of keys whose types do not enumerate them."""

RECURRENCES: tuple[PathSpec, ...] = tuple(
    _path("recurrence", options)
    for rule in get_args(RecurrenceRule)
    for options in (
        RecurrenceOptions(rule=rule),
        RecurrenceOptions(rule=rule, state_dtype="bfloat16"),
        RecurrenceOptions(rule=rule, num_speculative_tokens=3),
        RecurrenceOptions(rule=rule, mamba_cache_mode="all"),
        RecurrenceOptions(rule=rule, qk_l2norm=False),
        RecurrenceOptions(rule=rule, activation=None, bias=False),
    )
    if options.qk_l2norm or rule in ("gdn", "kda")  # other rules do not normalise
    if options.bias or rule == "short_conv"
    if options.state_dtype == "float32" or rule != "short_conv"  # whose states have the layer's dtype
)
"""The values of ``path`` for backends of layers with a state, which declare no other path."""

NOT_DRAWN: Mapping[str, str] = MappingProxyType(
    {
        "layer.num_heads": f"follows from {GROUP}",
        "cache.num_blocks": "the default has room for the batch; less is refused, more is what first_block needs",
        "batch.requests.query_len": "batch.queries, in drawing.py",
        "batch.requests.seq_len": "batch.contexts, in drawing.py",
        "batch.requests.count": "equal requests side by side test the same",
        "batch.requests.encoder_len": "follows from layer.attn_type",
        "batch.requests.shared_prefix": "batch.shared_prefix",
        "batch.requests.mm_req_doc_ranges": "few backends declare image spans; the suite mm_prefix has their edges",
        "batch.requests.rswa_prefix_len": "few backends declare first keys; the suite mm_prefix has their edges",
        "layer.index_topk": "few backends declare sparse attention; the suite sparse has its edges",
        "layer.rswa_window": "as batch.requests.rswa_prefix_len, without which it is a sliding window",
        "batch.padding": "padding.requests and padding.tokens",
        "batch.path": "path",
        "checks": "an option of the command",
        "tolerance": "a case may loosen its budget, and none of these needs it",
        "weight": "how often a batch came: it changes no input",
    }
)
"""Fields of a case that are not keys: what determines them, or why nothing does."""

_KEY_LIMITS = tuple(f"layer.{name}" for name in modifiers_of_kind("keys"))

GUIDED: tuple[str, ...] = (
    "layer.head_size",
    "cache.block_size",
    *_KEY_LIMITS,
    "batch.requests",
)
"""Keys that also get the constants of the backend's code, and their neighbours."""

_MOST = MappingProxyType(
    {
        "layer.head_size": 256,
        "cache.block_size": 256,
        **dict.fromkeys(_KEY_LIMITS, 4096),
        "batch.requests": 65,
    }
)


_MOST_INTERPRETED = MappingProxyType(
    {
        "layer.num_kv_heads": 2,
        GROUP: 4,
        "layer.head_size": 64,
        "layer.head_size_v": 64,
        **dict.fromkeys(_KEY_LIMITS, 64),
        "cache.block_size": 32,
        "batch.requests": 3,
    }
)


def all_axes(constants: Iterable[int] = ()) -> dict[str, tuple[Any, ...]]:
    """Return the values of every key; ``constants``: numbers of the backend's code, tried with -1, 0 and +1."""
    found = {
        f"{name}.{field.name}": _typed_values(get_type_hints(spec)[field.name], field.default)
        for name, spec in (("layer", LayerSpec), ("cache", CacheSpec))
        for field in fields(spec)
        if f"{name}.{field.name}" not in (VALUES.keys() | NOT_DRAWN.keys()) and field.name not in MODIFIERS
    }
    axes = dict(VALUES) | {f"layer.{name}": _drawn(modifier) for name, modifier in MODIFIERS.items()} | found
    for key in GUIDED:
        near = sorted({n for c in constants for n in (c - 1, c, c + 1) if 1 <= n <= _MOST[key]})
        axes[key] = tuple(dict.fromkeys((*axes[key], *near)))
    return axes


def _drawn(modifier: Modifier) -> tuple[Any, ...]:
    return tuple(_per_head("layer.num_heads", each) if isinstance(each, tuple) else each for each in modifier.drawn)


def few_and_small(axes: Axes) -> dict[str, tuple[Any, ...]]:
    """Return the values that interpreted kernels compute within seconds; the plain value of each key always stays."""

    def is_small(key: str, value: Any) -> bool:
        return value not in ("long", "beyond 16 bits") and not (
            isinstance(value, int) and value > _MOST_INTERPRETED.get(key, value)
        )

    return {key: (values[0], *(each for each in values[1:] if is_small(key, each))) for key, values in axes.items()}


def plain(axes: Axes) -> dict[str, Any]:
    """Return the plain value of each key."""
    return {key: values[0] for key, values in axes.items()}


def _typed_values(hint: Any, default: Any) -> tuple[Any, ...]:
    """Return all values of a bool, an Enum, a Literal or a union of these with None, the default first.

    Raises:
        TypeError: the type does not enumerate its values; the key belongs in ``VALUES`` or ``NOT_DRAWN``.
    """
    if get_origin(hint) is Literal:
        values: tuple[Any, ...] = get_args(hint)
    elif hint is bool:
        values = (False, True)
    elif hint is type(None):
        values = (None,)
    elif isinstance(hint, type) and issubclass(hint, Enum):
        values = tuple(hint)
    elif get_args(hint):
        values = tuple(chain.from_iterable(_typed_values(each, MISSING) for each in get_args(hint)))
    else:
        raise TypeError(f"{hint}: give the values of this field in VALUES, or the reason in NOT_DRAWN")
    return values if default is MISSING else tuple(dict.fromkeys((default, *values)))


# Pairwise covering: a small set of choices in which every two values of two keys occur together.
#
# Greedy, like AETG (Cohen et al. 1997): each row starts with an uncovered pair. Every other key gets the value that
# covers most pairs with the values before it. The same seed gives the same rows.

_Value = tuple[str, Hashable]


class PairwiseCover:
    """The pairs of values of ``axes`` that have not occurred together yet."""

    def __init__(self, axes: Axes, seed: int) -> None:
        self._axes, self._random = axes, Random(seed)
        self._rank = {key: rank for rank, key in enumerate(axes)}
        self._left: dict[tuple[_Value, _Value], None] = dict.fromkeys(
            ((a, x), (b, y)) for a, b in combinations(axes, 2) for x, y in product(axes[a], axes[b])
        )

    def __len__(self) -> int:
        return len(self._left)

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield rows until no pair is left; after each, the caller calls :meth:`cover` with the values it kept.

        Each pair is tried among other values, then alone. After that it counts as impossible.
        """
        while self._left:
            pair = next(iter(self._left))
            yield self._filled(dict(pair))
            if pair in self._left:  # not kept, perhaps because of the other values
                yield dict(pair)
                self._left.pop(pair, None)

    def cover(self, kept: Mapping[str, Any]) -> int:
        """Mark the pairs of the kept values as covered, and return how many of them were uncovered."""
        before = len(self._left)
        for one, other in combinations(sorted(kept.items(), key=lambda item: self._rank[item[0]]), 2):
            self._left.pop((one, other), None)
        return before - len(self._left)

    def _filled(self, row: dict[str, Any]) -> dict[str, Any]:
        keys = [key for key in self._axes if key not in row]
        self._random.shuffle(keys)
        for key in keys:
            values = list(self._axes[key])
            self._random.shuffle(values)
            row[key] = max(values, key=lambda value: self._gain((key, value), row))
        return row

    def _gain(self, value: _Value, row: Mapping[str, Any]) -> int:
        rank = self._rank[value[0]]
        return sum(
            ((value, each) if rank < self._rank[each[0]] else (each, value)) in self._left for each in row.items()
        )


# Finds the constants in a backend's code: sizes of tiles, splits, pages and heads. Imports none of that code.
#
# They are read from the syntax tree of the backend's file and of the other files in its package.

LEAST, MOST = 3, 4096
"""Range of constants: smaller ones occur in all code, and larger lengths take long."""

KEPT = 24
"""Number of constants that are kept, those of the highest weight."""


def constants_of(ref: str) -> tuple[int, ...]:
    """Return the integer constants in the backend's code, highest weight first; empty if there is no source."""
    weights: Counter[int] = Counter()
    for file in sources_of(ref):
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        weights.update(_weights(tree))
    ranked = sorted(weights, key=lambda number: (-weights[number], number))
    return tuple(ranked[:KEPT])


def sources_of(ref: str) -> tuple[Path, ...]:
    """Return the Python file of a backend, or all files of its package if it has one of its own."""
    place, _, _ = registry.BUILTIN.get(ref, ref).rpartition(":")
    file = Path(place or ref)
    if file.suffix == ".py":
        return (file,) if file.is_file() else ()
    try:
        spec = find_spec(place or ref)
    except (ImportError, ValueError):
        return ()
    if spec is None or spec.origin is None:
        return ()
    own = Path(spec.origin)
    in_package = own.parent.name not in ("candidates", "site-packages") and (own.parent / "__init__.py").is_file()
    return tuple(sorted(own.parent.rglob("*.py"))) if in_package else (own,)


def _weights(tree: ast.AST) -> Counter[int]:
    """Return the number of occurrences of each number in the code.

    Numbers in comparisons, arithmetic, assignments, defaults and calls count four times.
    """
    found: Counter[int] = Counter()
    for node in ast.walk(tree):
        is_relevant = isinstance(
            node, ast.Compare | ast.BinOp | ast.Assign | ast.AnnAssign | ast.keyword | ast.arguments | ast.Call
        )
        for child in ast.iter_child_nodes(node):
            number = child.value if isinstance(child, ast.Constant) else None
            if isinstance(number, int) and not isinstance(number, bool) and LEAST <= number <= MOST:
                found[number] += 4 if is_relevant else 1
    return found


# Builds a case from chosen values: draws lengths around relevant edges, and resolves invalid combinations.
#
# If a combination is invalid, the key that the error names gets its plain value. `Drawn.kept` has the values that
# remain.

SUITE = "fuzz"
"""The suite name of drawn cases."""

_PATHS_WITH_ROWS = ("split_kv", "dcp", "cascade", "spec_decode", "tree", "fast_prefill", "local", "pcp", "micro_batch")
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
    chosen |= _sizes_of_rule(chosen.get("path") or plain(axes)["path"])
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


def _sizes_of_rule(path: PathSpec | None) -> dict[str, int]:
    """Return the sizes that the rule of a layer with a state determines."""
    match path:
        case PathSpec(options=RecurrenceOptions(rule="mamba1")):
            return {"layer.num_kv_heads": 1, "layer.head_size_v": 1}
        case PathSpec(options=RecurrenceOptions(rule="short_conv")):
            return {"layer.num_kv_heads": 1, "layer.head_size_v": 1, "layer.head_size": 4}  # taps
        case PathSpec(options=RecurrenceOptions(rule="linear")):
            return {GROUP: 1}
    return {}


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
    check_inputs(layer, cache, values["inputs"])
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
    units = [size for size in (cache.block_size, *layer.key_limits, *lengths.edges) if size > 1]
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
        requests = _sharing(requests, cache.pages_per_block * cache.block_size, everyone=path.name == "cascade")
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
    needed = max(layer.key_limits, default=1) + 1 if layer.position_modifiers else 0
    lacking = needed - request.total_len
    if lacking <= 0 or request.encoder_len is not None or request.context_len < 0:
        return request
    query_len = request.query_len + (0 if layer.has_cache else lacking)
    return replace(request, query_len=query_len, seq_len=request.total_len + lacking)


def _query_len(kind: str, path: PathSpec, units: Sequence[int], uniform: int, longest: int, random: Random) -> int:
    match path.options:
        case SpecDecodeOptions(num_speculative_tokens=drafts):
            return random.choice((1 + drafts, random.randint(1, 1 + drafts)))
        case TreeOptions(parents=parents):
            return len(parents)
        case FastPrefillOptions(rows=rows):
            return rows + random.choice((1, 2, 9))
        case DCPOptions() if random.random() < 0.5:
            return 1
        case RecurrenceOptions(num_speculative_tokens=drafts) if drafts and random.random() < 0.5:
            return random.randint(1, 1 + drafts)
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


# The order of drawn cases: all pairs of values first, then random ones, with lengths at constants of the code.
#
# Keys get the values that the backend declares. Occasionally a value is drawn that it does not declare: the backend
# must refuse the case or compute the right result.

ReasonsAgainst = Callable[[Sequence[Case]], Sequence[tuple[str, ...]]]
"""Function that returns, for each case, why the backend does not support it; empty if it does."""

UNDECLARED_ONE_IN = 10
"""One in this many drawn cases has a value that the backend does not declare."""

GRAPHS_ONE_IN = 40
"""One in this many drawn cases is examined for its CUDA-graph level, which takes as long as many other checks."""

_AT_ONCE = 64


@dataclass(frozen=True)
class DrawnQuestion:
    """A drawn case, and the checks to run on it."""

    case: Case
    checks: tuple[str, ...]


@dataclass(frozen=True)
class DeclaredAxes:
    """The values that a backend declares in a plain case, and those that it does not."""

    declared: Axes
    undeclared: Axes


def declared_axes(reasons_against: ReasonsAgainst, constants: Sequence[int]) -> DeclaredAxes:
    """Return which values of each key the backend declares, changing one key of a plain case at a time.

    The plain case is the first that the backend declares, over all combinations of dtype, sizes and latent cache; if
    there is none, over those of layers with a state. If it declares none of them, every value counts as declared.
    """
    axes = all_axes(constants)
    forms = ("layer.mla", "layer.dtype", "layer.head_size", "cache.block_size", "layer.attn_type")
    base = _first_declared(axes, forms, reasons_against)
    if base is None:
        of_states = {**axes, "path": RECURRENCES}
        base = _first_declared(of_states, ("path", "layer.dtype", "layer.head_size"), reasons_against)
        axes = axes if base is None else of_states
    if base is None:
        return DeclaredAxes(axes, {})
    first = {
        key: (base.get(key, values[0]), *(v for v in values if v != base.get(key, values[0])))
        for key, values in axes.items()
    }
    tried = [(key, value) for key, values in first.items() for value in values[1:]]
    drawn = [draw_case(first, {key: value}, Lengths(), 0, "declared") for key, value in tried]
    cases = [(key, value, each.case) for (key, value), each in zip(tried, drawn, strict=True) if each and each.kept]
    answers = reasons_against([case for _, _, case in cases])
    refused = {
        key: [v for (k, v, _), reasons in zip(cases, answers, strict=True) if reasons and k == key] for key in first
    }
    return DeclaredAxes(
        {key: tuple(v for v in values if v not in refused[key]) for key, values in first.items()},
        {key: tuple(values) for key, values in refused.items() if values},
    )


def _first_declared(axes: Axes, forms: Sequence[str], reasons_against: ReasonsAgainst) -> dict[str, Any] | None:
    choices = (dict(zip(forms, values, strict=True)) for values in product(*(axes[key] for key in forms)))
    return next(_declared_choices(axes, choices, reasons_against), None)


def _declared_choices(
    axes: Axes, choices: Iterator[dict[str, Any]], reasons_against: ReasonsAgainst
) -> Iterator[dict[str, Any]]:
    while some := list(islice(choices, _AT_ONCE)):
        known = [(choice, case) for choice in some if (case := _plain_batch(axes, choice)) is not None]
        answers = reasons_against([case for _, case in known])
        yield from (choice for (choice, _), reasons in zip(known, answers, strict=True) if not reasons)


def _plain_batch(axes: Axes, choice: Mapping[str, Any]) -> Case | None:
    """Return the case of one decode with these values, or None if they are not valid together."""
    drawn = draw_case(axes, {**choice, "batch.queries": "one"}, Lengths(), 0, "plain")
    return drawn.case if drawn is not None and choice.items() <= {**plain(axes), **drawn.kept}.items() else None


def questions(
    axes: DeclaredAxes, reasons_against: ReasonsAgainst, lengths: Lengths, seed: int, checks: tuple[str, ...] | None
) -> Iterator[DrawnQuestion]:
    """An endless supply of drawn cases with checks to run. ``checks``: None for all that apply."""
    numbers, random = count(1), Random(seed)
    for drawn in _cases(axes, lengths, seed, numbers, random):
        (reasons,) = reasons_against([drawn])
        if unanswered_reasons(drawn):
            continue
        made = checks_of(drawn, checks)
        if reasons:
            made = tuple(check for check in made if check == "refusals")
            if random.randrange(UNDECLARED_ONE_IN):
                continue
        elif checks is None and random.randrange(GRAPHS_ONE_IN):
            made = tuple(check for check in made if check != "cudagraph")
        if made:
            yield DrawnQuestion(drawn, made)


def _cases(axes: DeclaredAxes, lengths: Lengths, seed: int, numbers: Iterator[int], random: Random) -> Iterator[Case]:
    cover = PairwiseCover(axes.declared, seed)
    for row in cover.rows():
        number = next(numbers)
        drawn = draw_case(axes.declared, _with_undeclared(row, axes, random), lengths, seed + number, f"case-{number}")
        if drawn is not None and cover.cover(drawn.kept):
            yield drawn.case
    while True:
        choice = _with_undeclared(_by_chance(axes.declared, random), axes, random)
        number = next(numbers)
        drawn = draw_case(axes.declared, choice, lengths, seed + number, f"case-{number}")
        if drawn is not None:
            yield drawn.case


def _with_undeclared(choice: Mapping[str, Any], axes: DeclaredAxes, random: Random) -> Mapping[str, Any]:
    """Return the choice; one time in :data:`UNDECLARED_ONE_IN`, replace one value by one that is not declared."""
    if not axes.undeclared or random.randrange(UNDECLARED_ONE_IN):
        return choice
    key = random.choice(sorted(axes.undeclared))
    return {key: random.choice(axes.undeclared[key]), **{k: v for k, v in choice.items() if k != key}}


def _by_chance(axes: Axes, random: Random) -> dict[str, Any]:
    """Return values of some keys. Their number is drawn first, so that few and many together are equally likely."""
    keys = [key for key, values in axes.items() if len(values) > 1]
    return {key: random.choice(axes[key]) for key in random.sample(keys, random.randint(0, len(keys)))}
