"""Queries whose output depends on every single key, and the keys and values that they need."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attncheck.harness.problem.chosen_keys import key_of_each_head
from attncheck.harness.problem.pages import Request, visible_span
from attncheck.reference import layer_params
from attncheck.reference.spec import LayerSpec

# Signatures: the request, position and head of a K or V row, encoded in the signs of its first channels.
#
# So a wrong read or write can be identified, not only detected. Magnitudes are kept: a row must use the whole mantissa
# of its dtype, or a cache that rounds would go undetected. An invertible hash scrambles the bits, so that they look
# random (constant channels in V would hide errors) and can still be decoded.

CHANNELS = 32
"""Channels of a signature; smaller head sizes have none."""

SMALLEST = 2.0**-10
"""Magnitude to which smaller signed channels are raised, so that the sign survives the narrowest dtype."""

_MASK = 0xFFFFFFFF
_FACTOR = 0x9E3779B1
_INVERSE = pow(_FACTOR, -1, 1 << 32)
_SALT = {"key": 0x243F6A88, "value": 0x85A308D3}


@dataclass(frozen=True)
class Coordinate:
    """The origin of a row, ``kind`` "key" or "value": request modulo 1024, position modulo 131072, head modulo 32."""

    kind: str
    request: int
    position: int
    head: int

    def __str__(self) -> str:
        kind = "K" if self.kind == "key" else "V"
        return f"{kind} of request {self.request}, position {self.position}, KV head {self.head}"


def sign(rows: Tensor, kind: str, requests: Tensor, positions: Tensor, smallest: float | Tensor = SMALLEST) -> None:
    """Set the signs of ``rows`` (``[n, Hkv, D]``) in place; ``requests`` and ``positions`` are int64 ``[n]``.

    ``smallest``: the magnitude to which signed channels are raised, a number or one per head (``[Hkv, 1]``).
    """
    heads = torch.arange(rows.shape[1])
    word = ((requests % 1024) << 22 | (positions % 131072) << 5)[:, None] | (heads % 32)
    code = _scramble(word ^ _SALT[kind])
    is_set = np.unpackbits(code.numpy().astype("<u4")[..., None].view(np.uint8), axis=-1, bitorder="little")
    size = torch.maximum(rows[..., :CHANNELS].abs(), torch.as_tensor(smallest, dtype=rows.dtype))
    # Many times as fast as torch.where, whose branches are unpredictable.
    rows[..., :CHANNELS] = torch.copysign(size, torch.from_numpy(is_set).to(rows.dtype) - 0.5)


def decode(row: Tensor) -> tuple[Coordinate, ...]:
    """Return the origins that the signs of one row (``[D]``) encode, as a key and as a value; empty for shorter rows.

    Any pattern decodes to some origin: trust it only if the row of that origin equals the row that was read.
    """
    if len(row) < CHANNELS:
        return ()
    word = sum(1 << i for i, s in enumerate(row[:CHANNELS].tolist()) if s > 0)
    for _ in range(2):
        word = (word ^ word >> 16) * _INVERSE & _MASK
    plain = {kind: word ^ salt for kind, salt in _SALT.items()}
    return tuple(Coordinate(kind, w >> 22, w >> 5 & 131071, w & 31) for kind, w in plain.items())


def _scramble(word: Tensor) -> Tensor:
    """Return 32-bit words, held in int64, mixed invertibly."""
    for _ in range(2):
        word = word * _FACTOR & _MASK
        word = word ^ (word >> 16)
    return word


# Trees of draft tokens: their visibility mask, and vLLM's notation for them.
#
# A tree is given by the parent of each new row. Row 0 is the root, the last verified token.


def ancestors(parents: Sequence[int]) -> Tensor:
    """Return bool ``[Q, Q]``: whether row ``m`` is row ``i`` itself or one of its ancestors. Parents precede children.

    >>> ancestors((-1, 0, 0, 1)).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 0, 1, 0],
            [1, 1, 0, 1]], dtype=torch.int32)
    """
    seen = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen[row] |= seen[parent]
    return seen


def token_tree(parents: Sequence[int]) -> str:
    """Return the rows after the root as vLLM's ``speculative_token_tree``: the path of child indices to each row.

    >>> token_tree((-1, 0, 0, 1))
    '[(0,), (1,), (0, 0)]'
    """
    children = [0] * len(parents)
    paths: list[tuple[int, ...]] = []
    for parent in parents:
        if parent < 0:
            paths.append(())
            continue
        paths.append((*paths[parent], children[parent]))
        children[parent] += 1
    return str(paths[1:])


# Queries for which small faults change the output: the key each row and head is aligned to, and the score it gets.
#
# Random inputs hardly detect faults: with n keys of near-uniform weight a lost key changes the output by 1/n. So each
# query is parallel to one key (a *needle*) at the position of a typical off-by-one error, with a gain that gives this
# key about half of the softmax weight. The heads of a row have different needles. A needle that the row must not see
# has no effect on the right answer and dominates a wrong one. Some rows get very large scores, or all equal ones.
#
# Everything is computed in float64 from integers and rounded to few significant bits, so that it is bitwise equal on
# every machine.

_LARGE_SCORE = 4096.0

_NEGATIVE_SCORES = (1024.0, 16384.0)
"""By how much all scores of a row are lowered: so far that ``exp`` is 0, and to below -10000, a usual mask."""

_NEGATIVE_CAPS = 3.0
"""With a soft cap, the largest score lies this many caps below 0: all capped ones are within 0.5 % of -cap."""

LEVEL_CHANNEL = 2.0
"""The last channel of every key if some rows need negative scores: through it, a query lowers all its scores alike."""

_KEY_VARIANCE = 4 / 3
"""Variance of a number uniform over [-2, 2)."""

_TILES = (16, 64, 128)

_OFFSETS = (0, 1, 0, -1, 0, -1, -1, 0, 0) + (0, -1) * len(_TILES) + (0,)
"""Offsets of the places in :func:`_targets`. Ends come first, so that rows with few heads test the likeliest errors."""

_ROWS_AT_ONCE = 1024
"""Most rows processed at once. Short requests are processed together; the limit bounds the memory for long ones."""


def needle_queries(
    layer: LayerSpec,
    keys: Tensor,
    requests: Sequence[Request],
    block_size: int,
    inputs: frozenset[str],
    tree: Tensor | None = None,
    topk_indices: Tensor | None = None,
) -> Tensor:
    """Return float64 queries ``[T, H, D]`` for ``keys`` (``[N, Hkv, D]``, the concatenated keys of all requests).

    ``tree``: bool ``[Q, Q]``, which new key each row of a request sees; None without a tree. ``topk_indices``: int32
    ``[T, K]``, the keys that each row sees; None without an indexer.
    """
    if not requests:
        return keys.new_zeros(0, layer.num_heads, layer.head_size, dtype=torch.float64)
    parts = [_row_queries(layer, keys, rows, block_size, inputs, tree, topk_indices) for rows in _rows_of(requests)]
    return torch.cat(parts)


class _Rows(NamedTuple):
    """Some rows of the batch, int64 ``[q]`` each.

    number: index in the batch. node: index in its request.
    num_keys, base: number and first index of its request's keys.
    doc_first, doc_last: positions of the ends of the row's image span; doc_last < doc_first without one.
    prefix_len: number of first keys that it sees beyond its window.
    """

    number: Tensor
    position: Tensor
    node: Tensor
    num_keys: Tensor
    base: Tensor
    doc_first: Tensor
    doc_last: Tensor
    prefix_len: Tensor

    @property
    def first(self) -> Tensor:
        """The position of the request's first row."""
        return self.position - self.node


def _rows_of(requests: Sequence[Request]) -> list[_Rows]:
    """Return the concatenated rows of all requests, in pieces of ``_ROWS_AT_ONCE``."""
    fields = [(r.first_row, r.first_position, 0, r.num_keys, r.base, 0, -1, r.prefix.rswa_prefix_len) for r in requests]
    of_request = np.repeat(fields, [request.rows for request in requests], axis=0)
    of_request[:, :3] += np.concatenate([np.arange(request.rows) for request in requests])[:, None]
    for request in requests:
        own = of_request[request.first_row : request.first_row + request.rows]
        for first, last in request.prefix.mm_req_doc_ranges:
            own[(own[:, 1] >= first) & (own[:, 1] <= last), 5:7] = first, last
    return [_Rows(*piece.unbind(dim=1)) for piece in torch.from_numpy(of_request).split(_ROWS_AT_ONCE)]


def _row_queries(
    layer: LayerSpec,
    keys: Tensor,
    rows: _Rows,
    block_size: int,
    inputs: frozenset[str],
    tree: Tensor | None,
    topk_indices: Tensor | None,
) -> Tensor:
    heads = torch.arange(layer.num_heads)
    number = rows.number[:, None]
    params = layer_params(layer)
    lo, hi = visible_span(params, rows.position, rows.num_keys, (rows.doc_first, rows.doc_last))
    if params.attn_chunk_size is not None:
        # Version 1 of the generator ignores the end of a chunk. That changes nothing if a causal mask hides more.
        _, hi = visible_span(replace(params, attn_chunk_size=None), rows.position, rows.num_keys)
    target, other = _targets(rows, block_size, lo, hi, number + heads, tree)
    if topk_indices is not None:
        indices = topk_indices[rows.number]
        target, other = key_of_each_head(indices, rows.position, number + heads)
        lo = hi - ((indices >= 0).sum(dim=1) - 1).clamp(min=0)  # as many keys as the row names
    # The key index wraps at the end of the batch: the neighbour of the last request is the first one.
    kv_head = heads // (layer.num_heads // layer.num_kv_heads)
    needle = keys[(rows.base[:, None] + target) % len(keys), kv_head].double()
    norm = needle.norm(dim=-1).clamp(min=1e-3)
    # First keys beyond the window weigh like as many keys before it.
    first_keys = torch.minimum(rows.prefix_len, lo)
    background, bias = _background(layer, rows.position, lo - first_keys, hi, target)
    score = _needle_score(norm, background - bias)
    kind = (number * 5 + heads) % 16
    if "needles" not in inputs:
        score = norm  # unit-variance scores: a plain random input
    if "large_scores" in inputs:
        far = 100 * layer.soft_cap if layer.soft_cap else _LARGE_SCORE
        large = kind % 4 == 1 if layer.soft_cap else kind == 7
        score = score.masked_fill(large, far)
    if "equal_scores" in inputs:
        score = score.masked_fill(kind == 11, 0.0)
    query = needle * _few_bits(score / (layer.softmax_scale or 1.0) / norm.square())[..., None]
    if layer.soft_cap and "needles" in inputs:
        second = keys[(rows.base[:, None] + other) % len(keys), kv_head].double()
        twins = (kind % 4 == 2) & (target != other)
        query = torch.where(twins[..., None], _twin_queries(layer, needle, second), query)
    if "negative_scores" in inputs:
        below = torch.where(kind % 8 == 0, *_NEGATIVE_SCORES)
        if layer.soft_cap:
            below = score + _NEGATIVE_CAPS * layer.soft_cap
        level = _few_bits(below / (layer.softmax_scale or 1.0) / needle[..., -1])
        query[..., -1] -= level.masked_fill(kind % 4 != 0, 0.0)
    limit = 3e4 if layer.dtype == "float16" else 1e30
    return query.clamp(-limit, limit)


def _targets(
    rows: _Rows, block_size: int, lo: Tensor, hi: Tensor, number: Tensor, tree: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the needle of each row and head, and a second key that the row sees: int64 ``[q, H]`` each.

    Visible places are both ends of what the row sees, page edges and tile edges, and in a tree the parent. Invisible
    places are one beyond either end, the neighbouring request's first key, and in a tree the nearest earlier row of
    another branch.
    """
    edges = torch.tensor((block_size, *_TILES))
    page, *tiles = (hi[:, None] // edges * edges).unbind(dim=1)
    first_page = (lo + block_size - 1) // block_size * block_size
    twice = [edge for edge in tiles for _ in range(2)]
    near = [hi, hi, lo, lo, page, page, hi, first_page, (lo + hi) // 2, *twice, rows.num_keys]
    places = torch.stack(near, dim=-1) + torch.tensor(_OFFSETS)
    valid = _within(places, lo, hi)
    exists = hi >= lo
    valid[:, 1] = exists & (hi + 1 < rows.num_keys)
    valid[:, 3] = exists & (lo > 0)
    valid[:, -1] = True
    if tree is None:
        seen = _within(places, lo, hi)
    else:
        branch_places, branch_valid = _tree_places(rows, lo, tree)
        places = torch.cat([branch_places, places], dim=-1)
        valid = torch.cat([branch_valid, valid], dim=-1)
        node = places - rows.first[:, None]
        among = (node < 0) | tree[rows.node].gather(1, node.clamp(0, len(tree) - 1))
        seen = valid & _within(places, lo, hi) & among
    if bool((rows.prefix_len > 0).any()):
        first_places, first_valid, first_seen = _first_key_places(rows, lo)
        places = torch.cat([first_places, places], dim=-1)
        valid = torch.cat([first_valid, valid], dim=-1)
        seen = torch.cat([first_seen, seen], dim=-1)
    target = _nth_valid(places, valid, number)
    seen[:, -1] |= ~seen.any(dim=-1)
    return target, _nth_valid(places, seen, number + 1)


def _within(places: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    return (places >= lo[:, None]) & (places <= hi[:, None])


def _first_key_places(rows: _Rows, lo: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ends of the first keys that rows see beyond their window: places ``[q, 3]``, valid ones, seen ones.

    They are the last of these keys, the key behind it, which is hidden unless the window begins there, and key 0.
    """
    end = rows.prefix_len
    places = torch.stack([end - 1, end, torch.zeros_like(end)], dim=-1)
    valid = (end > 0)[:, None] & (places < lo[:, None])
    return places, valid, valid & (places < end[:, None])


def _tree_places(rows: _Rows, lo: Tensor, tree: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of the nearest earlier row of another branch and of the parent, and whether they exist.

    Both are ``[q, 2]``.

    The tree's root is the request's first row.
    """
    node = torch.arange(len(tree))
    root = rows.first[:, None]
    earlier = node < rows.node[:, None]
    visible = tree[rows.node]
    places = [torch.where(kind & earlier, node, -1).amax(dim=1) for kind in (~visible, visible)]
    both = torch.stack(places, dim=-1) + root
    return both, (both >= root) & (both >= lo[:, None])


def _nth_valid(places: Tensor, valid: Tensor, n: Tensor) -> Tensor:
    """Return per row the ``n``-th (modulo their number) of the valid places; ``places, valid [q, P]``, ``n [q, H]``."""
    count = valid.cumsum(dim=-1)
    wanted = n % count[:, -1:]
    return places.gather(-1, (count[:, None, :] <= wanted[..., None]).sum(dim=-1))


def _background(layer: LayerSpec, positions: Tensor, lo: Tensor, hi: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log of the summed weights of all visible keys at score 0, and the ALiBi bias of the target.

    ``[q, H]`` each, or a shape that broadcasts to it.
    """
    count = (hi - lo + 1).clamp(min=1).double()[:, None]
    slopes = torch.tensor(layer.alibi_slopes or [0.0], dtype=torch.float64)
    to_first, to_last = ((end - positions).double()[:, None] * slopes for end in (lo, hi))
    steep = slopes.abs().clamp(min=1e-12)
    total = torch.maximum(to_first, to_last) + torch.log(torch.expm1(-steep * count) / torch.expm1(-steep))
    if layer.sink_logits is not None:
        total = torch.logaddexp(total, torch.tensor(layer.sink_logits, dtype=torch.float64))
    return total, (target - positions[:, None]).double() * slopes


def _needle_score(norm: Tensor, lead: Tensor) -> Tensor:
    """Return the score that gives the needle about the weight of all other keys together.

    A query along a key of norm n with score s spreads the other scores with variance v (s/n)^2, which adds half of that
    to the log of their sum. So s solves s = lead + v (s/n)^2 / 2; without a solution, the best s is returned.
    """
    a = _KEY_VARIANCE / 2 / norm.square()
    discriminant = (1 - 4 * a * lead).clamp(min=0)
    return ((1 - discriminant.sqrt()) / (2 * a)).clamp(min=1.0)


def _twin_queries(layer: LayerSpec, first: Tensor, second: Tensor) -> Tensor:
    """Return queries with which the first key scores 1.1 cap and the second min(1.5, cap / 2) less.

    Without the cap the first key clearly outweighs the second; with the cap it hardly does.
    """
    cap = layer.soft_cap or 1.0
    scale = layer.softmax_scale or 1.0
    s1 = 1.1 * cap / scale
    s2 = (1.1 * cap - min(1.5, 0.5 * cap)) / scale
    g11 = (first * first).sum(-1)
    g12 = (first * second).sum(-1)
    g22 = (second * second).sum(-1)
    determinant = (g11 * g22 - g12 * g12).clamp(min=1e-3)
    alpha = _few_bits((s1 * g22 - s2 * g12) / determinant)
    beta = _few_bits((s2 * g11 - s1 * g12) / determinant)
    return first * alpha[..., None] + second * beta[..., None]


def _few_bits(x: Tensor) -> Tensor:
    """Return ``x`` rounded to 8 significant bits, which removes last-bit differences between machines' logarithms."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 256).round() / 256, exponent)
