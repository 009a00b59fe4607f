"""The probes that measure a CUDA-graph level: sequences of captures and steps as in a model runner.

A probe belongs to the level whose batches it plays. Probes are pure data for a given layer and cache; their lengths lie
around the edges of pages, windows and chunks.
"""

from collections.abc import Iterator

from attncheck.harness.checks.cudagraph.probe import Bucket, Lengths, Probe, ProbeStep
from attncheck.reference.spec import AttentionCGSupport, CacheSpec, LayerSpec

SINGLE = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
UNIFORM = AttentionCGSupport.UNIFORM_BATCH
ALWAYS = AttentionCGSupport.ALWAYS

VERIFIED = range(2, 9)
"""Query lengths of uniform batches: 1 + K for K draft tokens. 5, 6 and 7 do not fill a tile of a power of two."""

PAIRED = frozenset({"decode", "long decode", "verify 2", "verify, longest dummies", "mixed", "long prefill"})
"""Names of the probes of each level that reveal most faults. They are played on every pair of traits."""

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
    reach = max(layer.sliding_window or 0, layer.attn_chunk_size or 0)
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
    four, two = Bucket(4, 16, 4), Bucket(2, 8, 4)
    yield Probe(
        "verify buckets",
        UNIFORM,
        "graphs of several sizes and steps without a graph do not disturb each other while drafts are verified",
        (four, two),
        (
            ProbeStep(((4, edge + 2), (4, 4), (4, 2 * edge + 3), (4, 9))),
            ProbeStep(((4, reach + 6), (4, 4)), 1),
            ProbeStep(((1, 9), (1, edge + 1), (edge + 5, edge + 5), (30, 41)), None),
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
    big, small = Bucket(4, 24, None), Bucket(4, 8, None)
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
        "mixed, longest dummies",
        ALWAYS,
        "a graph captured with the longest lengths serves short ones",
        (big,),
        (ProbeStep(((1, 2), (3, 5), (6, 6))),),
        dummy_lens="longest",
    )


def _decodes(*seq_lens: int) -> tuple[Lengths, ...]:
    return tuple((1, seq_len) for seq_len in seq_lens)
