"""Packs the requests of a step into calls of flex_attention, and computes which keys each row sees."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from attncheck.backends.base.gathering import UnpagedRequest
from attncheck.reference.attention.params import AttentionParams

BLOCK = 128
"""Rows, and keys, per block of the mask."""


@dataclass(frozen=True)
class Call:
    """Requests packed for one call of the kernel.

    rows: the rows of query and output, in order.
    key, value: ``[keys, num_kv_heads, head size]``.
    own: per row, int64, the packed index of the row's own position.
    low, high: per row, int64, the interval ``low <= k < high`` of keys that it sees.
    first_low, first_high: likewise the interval of first keys that it sees beyond its window; None if no row has any.
    node: in a tree of drafts, the tree row of each row; of the interval's new keys it sees only those in ``tree``.
    tree: bool ``[Q, Q]``.
    """

    rows: list[slice]
    key: Tensor
    value: Tensor
    own: Tensor
    low: Tensor
    high: Tensor
    node: Tensor | None = None
    tree: Tensor | None = None
    first_low: Tensor | None = None
    first_high: Tensor | None = None

    def cut(self, cut: slice) -> "Call":
        """Return the call restricted to some of its rows, with the same keys."""
        return self._with_rows(lambda values: values[cut])

    def of_heads(self, group: int, multiple: int) -> "Call":
        """Return the call with each row ``group`` times, padded to a ``multiple`` with rows that see nothing."""
        missing = -len(self.own) * group % multiple
        return self._with_rows(lambda values: pad(values.repeat_interleave(group), (0, missing)))

    def of_keys(self, copies: int) -> "Call":
        """Return the call with the KV heads ``copies`` times, and two keys at least; no row sees an added key."""
        missing = max(2 - len(self.key), 0)
        if copies == 1 and not missing:
            return self
        key, value = (pad(each.repeat(1, copies, 1), (0, 0, 0, 0, 0, missing)) for each in (self.key, self.value))
        return replace(self, key=key, value=value)

    def _with_rows(self, change: Callable[[Tensor], Tensor]) -> "Call":
        of_rows = {name: getattr(self, name) for name in ("own", "low", "high", "node", "first_low", "first_high")}
        changed: dict[str, Any] = {name: change(values) for name, values in of_rows.items() if values is not None}
        return replace(self, **changed)


def pack_requests(params: AttentionParams, requests: list[UnpagedRequest]) -> Call:
    """Return one call for ``requests``.

    The index of a key is its position minus its request's first key, plus the number of keys packed before. The
    interval of a row is limited to the keys of its own request.
    """
    own, low, high, first_low, first_high = [], [], [], [], []
    packed = 0
    tree = requests[0].tree
    for piece in requests:
        index = piece.query_positions() - piece.first_key + packed
        left, right = params.window
        end = packed + len(piece.key)
        reach = 0 if params.causal else right
        least = index - left if left >= 0 else torch.zeros_like(index)
        most = index + reach if reach >= 0 else torch.full_like(index, end - 1)
        if params.attn_chunk_size is not None:
            position, chunk = piece.query_positions(), params.attn_chunk_size
            first = index - position % chunk
            least, most = torch.maximum(least, first), torch.minimum(most, first + chunk - 1)
        for span in piece.doc_ranges:
            # The interval of a row contains its own key, so that it stays one interval with the row's span.
            span_first, span_last = (position - piece.first_key + packed for position in span)
            is_inside = (index >= span_first) & (index <= span_last)
            least = torch.where(is_inside, least.clamp(max=span_first), least)
            most = torch.where(is_inside, most.clamp(min=span_last), most)
        low.append(least.clamp(packed, end))
        high.append((most + 1).clamp(packed, end))
        own.append(index)
        first_low.append(torch.full_like(index, packed))
        first_high.append((index + 1).clamp(packed, packed + piece.first_keys))
        packed = end
    has_first_keys = any(piece.first_keys for piece in requests)
    return Call(
        rows=[piece.rows for piece in requests],
        key=torch.cat([piece.key for piece in requests]),
        value=torch.cat([piece.value for piece in requests]),
        own=torch.cat(own),
        low=torch.cat(low),
        high=torch.cat(high),
        node=None
        if tree is None
        else torch.cat([torch.arange(piece.num_rows, device=tree.device) for piece in requests]),
        tree=tree,
        first_low=torch.cat(first_low) if has_first_keys else None,
        first_high=torch.cat(first_high) if has_first_keys else None,
    )


def block_mask(call: Call) -> BlockMask:
    """Return the mask of a call: what each row sees, and which key blocks each row block sees partly or completely."""
    low, high, num_rows, num_keys = call.low, call.high, len(call.low), len(call.key)

    def sees(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        inside = (key >= at(low, row)) & (key < at(high, row))
        if call.first_low is not None and call.first_high is not None:
            inside = inside | ((key >= at(call.first_low, row)) & (key < at(call.first_high, row)))
        if call.node is None or call.tree is None:
            return inside
        # The tree row of the key; negative for the context.
        other = key - (at(call.own, row) - at(call.node, row))
        return inside & ((other < 0) | at(call.tree, at(call.node, row), other.clamp(0, len(call.tree) - 1)))

    # Blocks that no row sees are left out. Rows that see a whole block are not compared with their intervals. There is
    # one key block too many, since torch recompiles for a single one.
    is_seen, is_whole = _seen_blocks(low, high, num_keys)
    if call.first_low is not None and call.first_high is not None:
        is_seen = is_seen | _seen_blocks(call.first_low, call.first_high, num_keys)[0]
    is_whole = is_whole & (call.tree is None)
    return BlockMask.from_kv_blocks(
        *_listed(is_seen & ~is_whole),
        *_listed(is_whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(num_rows, num_keys),
        compute_q_blocks=False,  # they are for gradients
    )


def _seen_blocks(low: Tensor, high: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Return bool ``[row blocks, key blocks]`` twice: which blocks some row sees in part, and which all rows see whole.

    ``low``, ``high``: the interval of each row.
    """
    missing = -len(low) % BLOCK
    begin = pad(low.where(low < high, num_keys), (0, missing), value=num_keys).view(-1, BLOCK, 1)
    end = pad(high.where(low < high, 0), (0, missing)).view(-1, BLOCK, 1)
    first = torch.arange(0, num_keys + BLOCK, BLOCK, device=low.device)
    is_seen = (begin.amin(1) < first + BLOCK) & (end.amax(1) > first)
    return is_seen, (begin.amax(1) <= first) & (end.amin(1) >= first + BLOCK)


def _listed(is_block: Tensor) -> tuple[Tensor, Tensor]:
    """Return, per row of ``is_block``, the number of true entries, and the indices of true entries before others."""
    indices = is_block.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return is_block.sum(-1, dtype=torch.int32)[None, None], indices.to(torch.int32)[None, None]


def at(values: Tensor, *index: Tensor) -> Tensor:
    """Return ``values[index]`` in a modifier."""
    # The operator is called directly because indexing with brackets takes most of an eager call's time.
    found: Tensor = torch.ops.aten.index(values, index)
    return found
