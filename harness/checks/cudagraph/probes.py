"""The probes: batches that are captured and replayed, and which of them a case needs."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, cycle
from typing import Literal

from attncheck.reference.spec import AttentionCGSupport, LayerSpec
from attncheck.reference.step_spec import CacheSpec
from attncheck.reports.analysis.phrases import plural

# A probe as data: the graphs to capture, and the steps to run with them.

Lengths = tuple[int, int]
"""(query_len, seq_len) of one request."""


DRAFT_UPDATE = "supports_draft_decode_metadata_update"
"""vLLM's claim that ``update_draft_decode_metadata`` in a graph makes ``build`` between its replays unnecessary."""

BLOCK_TABLE = "supports_update_block_table"
"""vLLM's claim that ``update_block_table`` makes metadata right that were built from another block table."""


@dataclass(frozen=True)
class Bucket:
    """The shape of one captured graph. ``query_len``: that of every request, or None for any that fit the tokens."""

    num_reqs: int
    num_tokens: int
    query_len: int | None

    @property
    def dummy_query_lens(self) -> tuple[int, ...]:
        """Query lengths at capture: the tokens divided equally, with the remainder added to the last request."""
        each, rest = divmod(self.num_tokens, self.num_reqs)
        return (*[each] * (self.num_reqs - 1), each + rest)

    def part(self, number: int) -> "Bucket":
        """Return the bucket of one of ``number`` micro-batches of equal size."""
        return replace(self, num_reqs=self.num_reqs // number, num_tokens=self.num_tokens // number)

    def __str__(self) -> str:
        rows = "in all" if self.query_len is None else "each"
        tokens = self.num_tokens if self.query_len is None else self.query_len
        return f"{plural(self.num_reqs, 'request')} of {plural(tokens, 'token')} {rows}"


@dataclass(frozen=True)
class ProbeStep:
    """One step. ``bucket``: the index of the graph's bucket, or None for a step without a graph.

    ``draft_index``: build metadata by ``build_for_drafting`` with this index, or by ``build`` if None. ``gains_pages``:
    first run a step of the same requests with one page less each, whose output is not judged.
    """

    requests: tuple[Lengths, ...]
    bucket: int | None = 0
    draft_index: int | None = None
    gains_pages: bool = False


@dataclass(frozen=True)
class Probe:
    """Buckets to capture in order with one impl, then steps in order. ``establishes`` completes "shows that ...".

    ``dummy_lens``: ``seq_lens`` at capture, either the query lengths or, as in older engines, the maximum. ``drafts``:
    number of speculative tokens in the builder's config. ``num_builders``: number of builders that build each step from
    the same common metadata, each with its own graphs. ``num_micro_batches``: number of parts of the batch, each with
    its own builder; all metadata are built before one graph runs all parts. ``claim``: the claim that the
    probe examines instead of its level, or "".
    """

    name: str
    level: AttentionCGSupport
    establishes: str
    buckets: tuple[Bucket, ...]
    steps: tuple[ProbeStep, ...]
    dummy_lens: Literal["shortest", "longest"] = "shortest"
    drafts: int = 0
    claim: str = ""
    num_builders: int = 1
    num_micro_batches: int = 1


# The probes that measure a CUDA-graph level: sequences of captures and steps as in a model runner.
#
# A probe belongs to the level whose batches it runs. Probes are pure data for a given layer and cache; their lengths
# lie around the edges of pages, windows and chunks.

SINGLE = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
UNIFORM = AttentionCGSupport.UNIFORM_BATCH
ALWAYS = AttentionCGSupport.ALWAYS

VERIFIED = range(2, 9)
"""Query lengths of uniform batches: 1 + K for K draft tokens. 5, 6 and 7 do not fill a tile of a power of two."""

PAIRED = frozenset({"decode", "long decode", "verify 2", "verify, longest dummies", "mixed", "long prefill"})
"""Names of the probes of each level that reveal most faults. They run on every pair of traits."""

ALIKE = (frozenset({"verify 3", "verify 5", "verify 7"}), frozenset({"verify 4", "verify 6", "verify 8"}))
"""Sets of probes that differ in query length only: the odd lengths and the even ones."""

_FARTHEST = 4096
"""Longest window or chunk with steps at its edge. A graph's frozen values show at shorter lengths as well."""

_LONG = 520
"""A length that exceeds one byte and the usual limit of kernels for short contexts (512). Dummies have length 1."""

_MANY = 34
"""More requests than threads in a warp (32)."""

_TWO_TILES = 256
"""Rows in two of the largest tiles in use: two dummies of 128 rows fill two tiles, but 255 rows plus 1 fill three."""


def probes_of(layer: LayerSpec, cache: CacheSpec) -> tuple[Probe, ...]:
    """Return the probes of all levels, lowest level first."""
    edge = -(-16 // cache.block_size) * cache.block_size
    reach = max(layer.key_limits, default=0)
    reach = reach if reach <= _FARTHEST else 0
    return (*_single(edge, reach), *_uniform(edge, reach), *_mixed(edge, reach))


def _single(edge: int, reach: int) -> Iterator[Probe]:
    """Yield decodes of one token. ``edge``: the length of whole pages. ``reach``: that of the window or chunk, or 0."""
    lens = (edge - 1, 7, 2 * edge + 3, 1, reach + 2, edge, reach + edge + 1, edge + 1)
    full = _decodes(*lens)
    eight, four, one = (Bucket(n, n, 1) for n in (8, 4, 1))
    other = ((1, 9), (edge + 5, edge + 5), (20, 40), (3, edge + 2), *full[2:])
    yield Probe(
        "decode",
        SINGLE,
        "replays follow lengths that grow, cross a page and shrink, in other pages",
        (eight,),
        (ProbeStep(full), ProbeStep(_decodes(*(n + 1 for n in lens))), ProbeStep(_decodes(1, 2, 3, 1, 5, 2, 4, 1))),
    )
    yield Probe(
        "padded decode",
        SINGLE,
        "a graph serves fewer requests than it was captured for, and pages that a request gains between two replays",
        (eight,),
        (ProbeStep(full[:5]), ProbeStep(full[6:7]), ProbeStep(full[1:], gains_pages=True)),
    )
    yield Probe(
        "buckets",
        SINGLE,
        "graphs of several sizes, captured largest first, and steps without a graph do not disturb each other",
        (eight, four, one),
        (
            ProbeStep(full),
            ProbeStep(full[2:6], 1),
            ProbeStep(full[6:7], 2),
            ProbeStep(other, None),
            ProbeStep(_decodes(*lens, 3, edge + 2, 12), None),
            ProbeStep(full[2:], 0),
            ProbeStep(full[:3], 1),
            ProbeStep(full[1:2], 2),
        ),
    )
    yield Probe(
        "long decode",
        SINGLE,
        "a graph captured with the shortest lengths serves contexts of hundreds of keys",
        (Bucket(3, 3, 1),),
        (ProbeStep(_decodes(_LONG + 3, 3, _LONG // 2)),),
    )
    yield Probe(
        "many requests",
        SINGLE,
        "a graph serves more than a few requests",
        (Bucket(_MANY, _MANY, 1),),
        (ProbeStep(_decodes(*(1 + 5 * n % edge for n in range(_MANY - 1)))),),
    )
    yield Probe(
        "longest dummies",
        SINGLE,
        "a graph captured with the longest lengths serves short ones",
        (four,),
        (ProbeStep(_decodes(1, 2, 5, 3)), ProbeStep(full[3:7])),
        dummy_lens="longest",
    )
    yield Probe(
        "two builders",
        SINGLE,
        "builders of two groups of layers can be fed from one metadata",
        (four,),
        (ProbeStep(full[5:]),),
        num_builders=2,
    )
    yield Probe(
        "drafting",
        SINGLE,
        "metadata of draft steps, each a token longer, reach the graph",
        (four,),
        (
            ProbeStep(_decodes(edge - 1, 5, reach + 3)),
            ProbeStep(_decodes(edge, 6, reach + 4), draft_index=0),
            ProbeStep(_decodes(edge + 1, 7, reach + 5), draft_index=1),
            ProbeStep(full[4:]),
        ),
        drafts=3,
    )
    yield Probe(
        "micro-batches",
        SINGLE,
        "one graph serves two micro-batches, whose metadata are built before the first of them is computed",
        (eight,),
        (ProbeStep(full[:7]),),
        num_micro_batches=2,
    )


def _uniform(edge: int, reach: int) -> Iterator[Probe]:
    """Yield verifications of K drafts: each request has 1 + K rows, and one is a prompt of exactly that length."""
    for q in VERIFIED:
        yield Probe(
            f"verify {q}",
            UNIFORM,
            f"a graph of {q} rows a request serves contexts of any length, a fresh prompt, and fewer requests",
            (Bucket(4, 4 * q, q),),
            (ProbeStep(((q, edge + q // 2), (q, q), (q, reach + 2 * edge + 1 + q))),),
            drafts=q - 1,
        )
    four = Bucket(4, 16, 4)
    two = Bucket(2, 8, 4)
    yield Probe(
        "verify buckets",
        UNIFORM,
        "graphs of several sizes and steps without a graph do not disturb each other while drafts are verified",
        (four, two),
        (
            ProbeStep(((4, edge + 2), (4, 4), (4, 2 * edge + 3), (4, 9))),
            ProbeStep(((4, reach + 6), (4, 4)), 1),
            ProbeStep(((1, 9), (1, edge + 1), (edge + 5, edge + 5), (30, 41)), None),
            ProbeStep(((1, 9), (4, edge + 4), (2, 7), (1, 3)), None),
            ProbeStep(tuple((4, 4 + 5 * n) for n in range(6)), None),
            ProbeStep(((4, 5), (4, edge + 4)), 0),
            ProbeStep(((4, 2 * edge),), 1),
        ),
        drafts=3,
    )
    yield Probe(
        "verify and draft",
        UNIFORM,
        "graphs of verification and of draft steps, for as many requests, do not disturb each other",
        (four, Bucket(4, 4, 1)),
        (
            ProbeStep(((4, edge + 2), (4, 4), (4, 9))),
            ProbeStep(_decodes(edge + 3, 5, 10), 1, draft_index=0),
            ProbeStep(_decodes(edge + 4, 6, 11), 1, draft_index=1),
            ProbeStep(((3, 7), (3, 3), (3, edge + 5), (3, reach + 9)), None),
            ProbeStep(((4, _LONG + 6), (4, 4)), 0),
        ),
        drafts=3,
    )
    yield Probe(
        "verify, many requests",
        UNIFORM,
        "a graph serves more than a few requests while drafts are verified",
        (Bucket(_MANY, 2 * _MANY, 2),),
        (ProbeStep(tuple((2, 2 + 5 * n % edge) for n in range(_MANY - 1))),),
        drafts=1,
    )
    yield Probe(
        "verify, longest dummies",
        UNIFORM,
        "a graph captured with the longest lengths serves short ones",
        (four,),
        (ProbeStep(((4, 4), (4, 6), (4, edge + 1), (4, 5))),),
        dummy_lens="longest",
        drafts=3,
    )


def _mixed(edge: int, reach: int) -> Iterator[Probe]:
    """Yield mixed batches: decodes, extends and prompts in one graph."""
    big = Bucket(4, 24, None)
    small = Bucket(4, 8, None)
    yield Probe(
        "mixed",
        ALWAYS,
        "one graph serves decodes, extends and prompts in any proportion",
        (big,),
        (
            ProbeStep(((1, edge + 1), (1, 9), (9, 9))),
            ProbeStep(((17, 17), (1, 2), (5, edge + 2), (1, 2 * edge + 3))),
            ProbeStep(_decodes(edge, 1, reach + edge + 1, 7)),
            ProbeStep(((7, 7), (11, reach + 14))),
        ),
    )
    yield Probe(
        "long prefill",
        ALWAYS,
        "a prompt longer than any that was captured is served",
        (big,),
        (
            ProbeStep(((24, 24),)),
            ProbeStep(((1, 5), (20, reach + _LONG + 20))),
            ProbeStep(((23, 2 * edge + 23),)),
        ),
    )
    yield Probe(
        "tiles",
        ALWAYS,
        "a long prompt beside a decode is served where the dummies filled fewer tiles of rows",
        (Bucket(2, _TWO_TILES, None),),
        (
            ProbeStep(((1, 9), (_TWO_TILES - 1, _TWO_TILES - 1))),
            ProbeStep(((_TWO_TILES - 60, _TWO_TILES), (1, edge + 1))),
        ),
    )
    yield Probe(
        "mixed buckets",
        ALWAYS,
        "graphs of several sizes and steps without a graph do not disturb each other",
        (big, small),
        (
            ProbeStep(((1, 3), (4, edge + 3), (12, 12))),
            ProbeStep(((1, edge + 2), (5, 5)), 1),
            ProbeStep(((1, 9), (edge + 25, edge + 25), (20, 40)), None),
            ProbeStep(((1, 1), (1, reach + 2), (15, edge + 15)), 0),
            ProbeStep(((8, reach + 8),), 1),
        ),
    )
    yield Probe(
        "mixed drafts",
        ALWAYS,
        "one graph serves requests that verify different numbers of drafts",
        (Bucket(4, 16, None),),
        (
            # With its padding, the step has as many rows as if every request verified three drafts.
            ProbeStep(((4, edge + 2), (1, 9), (2, 2 * edge + 1), (3, 3))),
            ProbeStep(((4, 4), (4, edge + 3), (4, 9), (4, reach + 6))),
            ProbeStep(((1, edge), (3, reach + edge + 4))),
        ),
        drafts=3,
    )
    yield Probe(
        "mixed, longest dummies",
        ALWAYS,
        "a graph captured with the longest lengths serves short ones",
        (big,),
        (ProbeStep(((1, 2), (3, 5), (6, 6))),),
        dummy_lens="longest",
    )


def _decodes(*seq_lens: int) -> tuple[Lengths, ...]:
    return tuple((1, seq_len) for seq_len in seq_lens)


# Assign probes to the layers and caches of a run, so that together they cover what a graph fault may depend on.
#
# A graph fault depends on a probe and often on one trait of a layer or cache, such as a window, a dtype or a page size.
# So every pair of a trait and a probe runs on some layer, but not every probe on every layer. Of probes that
# differ in one number only, each trait meets one. The first probes of each level also meet every pair of traits, such
# as a window with pages of 32 tokens. Faults that need more traits are missed if the right probe runs on no layer
# with all of them.

Trait = tuple[str, object]
"""Name and value, such as ``("dtype", "float16")``."""


def traits_of(layer: LayerSpec, cache: CacheSpec) -> frozenset[Trait]:
    """Return the traits that select which code of a backend runs.

    Numbers that only change values, such as a window size or a scale, are no traits. Head sizes and group sizes are no
    traits either, because at least one probe runs on every layer, and so on every size.
    """
    traits: set[Trait] = {
        ("dtype", layer.dtype),
        ("block_size", cache.block_size),
        ("layout", cache.layout),
        ("pool_order", cache.pool_order),
        ("kv_cache_dtype", cache.kv_cache_dtype),
    }
    traits |= {(name, True) for name in layer.modifiers if name != "sliding_window"}
    if layer.sliding_window is not None:
        traits.add(("sliding_window", "left" if layer.is_causal else "both sides"))
    is_on = {
        "non_causal": not layer.is_causal,
        "head_size_v": layer.value_head_size != layer.head_size,
        "kv_sharing": layer.kv_sharing,
        "sinks_dtype": layer.sinks_dtype is not None,
        "mla": layer.mla is not None,
        "rswa_window": layer.rswa_window is not None,
        "index_topk": layer.index_topk is not None,
        "output_quant": layer.output_quant is not None,
        "query_quant": layer.query_quant,
        "scales per head": any(isinstance(scale, tuple) for scale in (cache.k_scale, cache.v_scale, cache.q_scale)),
    }
    return frozenset(traits | {(name, True) for name, holds in is_on.items() if holds})


def plainest(traits: Sequence[frozenset[Trait]]) -> int:
    """Return the index of the layer with the fewest traits. Break ties by the most common traits, then by order.

    Other layers are expected to show the faults of this one, so it should have most in common with them.
    """
    layers = Counter(trait for own in traits for trait in own)
    return min(range(len(traits)), key=lambda index: (len(traits[index]), -sum(layers[each] for each in traits[index])))


def assign_probes(
    traits: Sequence[frozenset[Trait]],
    probes: Sequence[str],
    paired: Collection[str] = (),
    alike: Collection[Collection[str]] = (),
) -> tuple[frozenset[str], ...]:
    """Return the probes of each layer: all of them for the plainest layer, at least one for each other.

    Each trait of a layer meets each probe, except that of each set in ``alike`` it meets one, each probe of the set as
    often. Each pair of traits of a layer meets the probes in ``paired``. A layer without a probe gets one of
    ``paired``, each as often. Among layers that add equally many traits to a probe, the one with the fewest probes gets
    it.
    """
    if not probes:
        return (frozenset(),) * len(traits)
    plain = plainest(traits)
    assigned: list[set[str]] = [set() for _ in traits]
    assigned[plain].update(probes)
    pairs = [own | {frozenset(pair) for pair in combinations(own, 2)} for own in traits]
    sets = [[probe for probe in probes if probe in names] for names in alike]
    sets += [[probe] for probe in probes if not any(probe in names for names in alike)]
    for names in filter(None, sets):
        following = cycle(names)
        owned: Sequence[frozenset[object]] = pairs if names[0] in paired else traits
        missing = frozenset().union(*owned) - owned[plain]
        while missing:
            gains = [len(missing & own) for own in owned]
            best = min(range(len(owned)), key=lambda index: (-gains[index], len(assigned[index])))
            assigned[best].add(next(following))
            missing -= owned[best]
    enough = [probe for probe in probes if probe in paired] or probes
    for number, own in enumerate(own for own in assigned if not own):
        own.add(enough[number % len(enough)])
    return tuple(map(frozenset, assigned))
