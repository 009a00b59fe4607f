"""Attention without pages: contiguous rows, keys and values, and which row sees which key.

Truths, budgets and hypotheses are computed from it, by a formulation independent of the paged one that backends are
driven through.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from attncheck.reference import AttentionParams, Precision, paged_attention, varlen_attention, visible

HiddenKeys = Callable[[int, Tensor, Tensor], Tensor]
"""``(request, row positions [a, 1], key positions [1, b])`` -> bool, True for lost keys; broadcasts to ``[a, b]``."""


class RowPlaces(NamedTuple):
    """The place of each row, int64 ``[T]`` each.

    num_keys: keys of its request. first_key: index of the request's first key among all keys. node: index of the row
    within its request. context_len: position of the first row of its request.
    """

    num_keys: Tensor
    first_key: Tensor
    node: Tensor
    context_len: Tensor


@dataclass(frozen=True)
class UnpagedAttention:
    """The arguments of one unpaged attention: ``query [T, H, D]``, ``keys [N, Hkv, D]``, ``values [N, Hkv, Dv]``.

    ``tree``: bool ``[Q, Q]``; row ``i`` of a request sees its new key ``m`` only if ``tree[i, m]``. None for no tree.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    tree: Tensor | None = None

    def to(self, device: torch.device) -> "UnpagedAttention":
        """Return the same arguments on ``device``."""
        return UnpagedAttention(
            self.query.to(device),
            self.keys.to(device),
            self.values.to(device),
            self.cu_seqlens_q.to(device),
            self.cu_seqlens_k.to(device),
            None if self.tree is None else self.tree.to(device),
        )

    def of_requests(self, first: int, end: int) -> "UnpagedAttention":
        """Return the arguments of requests ``first .. end - 1``; the tensors share memory."""
        rows, keys = self.cu_seqlens_q[first : end + 1], self.cu_seqlens_k[first : end + 1]
        own_rows, own_keys = slice(int(rows[0]), int(rows[-1])), slice(int(keys[0]), int(keys[-1]))
        return replace(
            self,
            query=self.query[own_rows],
            keys=self.keys[own_keys],
            values=self.values[own_keys],
            cu_seqlens_q=rows - rows[0],
            cu_seqlens_k=keys - keys[0],
        )

    def attend(
        self, params: AttentionParams, precision: Precision | None = None, hidden: HiddenKeys | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return output ``[T, H, Dv]`` and LSE ``[T, H]`` of the reference, in float64 unless ``precision`` is given.

        Keys for which ``hidden`` is True are not seen; positions do not change.
        """
        precision = precision or Precision()
        if self.tree is None and hidden is None:
            return varlen_attention(
                self.query, self.keys, self.values, self.cu_seqlens_q, self.cu_seqlens_k, params, precision=precision
            )
        starts, lens = self.cu_seqlens_k[:-1], self.num_keys
        width = max(int(lens.max()), 1)
        # Use pages of one token: the contiguous keys are then a cache, and its block table is simple arithmetic.
        table = torch.minimum(starts[:, None] + torch.arange(width, device=starts.device), self.cu_seqlens_k[-1] - 1)
        mask = None if hidden is None else (lambda r, q, k: visible(params, q, k) & ~hidden(r, q, k))
        return paged_attention(
            self.query,
            self.keys[:, None],
            self.values[:, None],
            table,
            lens,
            self.cu_seqlens_q,
            params,
            tree_mask=self.tree,
            mask_fn=mask,
            precision=precision,
        )

    def attend_weighted(self, params: AttentionParams) -> tuple[Tensor, Tensor, Tensor]:
        """Return output and LSE in float64, and the output for absolute values, ``sum P |V|``, ``[T, H, Dv]``.

        ``sum P |V|`` bounds the effect of rounding the products; it has the weights of the output.
        """
        size = params.value_head_size
        both = replace(self, values=torch.cat([self.values, self.values.abs()], dim=-1))
        out, lse = both.attend(replace(params, head_size_v=2 * size))
        return out[..., :size].contiguous(), lse, out[..., size:].contiguous()

    @cached_property
    def num_keys(self) -> Tensor:
        """int64 ``[R]``: keys of each request."""
        return self.cu_seqlens_k[1:] - self.cu_seqlens_k[:-1]

    @cached_property
    def num_rows(self) -> Tensor:
        """int64 ``[R]``: rows of each request."""
        return self.cu_seqlens_q[1:] - self.cu_seqlens_q[:-1]

    @cached_property
    def places(self) -> RowPlaces:
        """The place of each row."""
        fields = torch.stack([self.num_keys, self.cu_seqlens_k[:-1], self.cu_seqlens_q[:-1], self.num_rows])
        num_keys, first_key, first_row, num_rows = fields.repeat_interleave(self.num_rows, dim=1)
        node = torch.arange(len(num_keys), device=num_keys.device) - first_row
        return RowPlaces(num_keys, first_key, node, num_keys - num_rows)

    def sees(self, params: AttentionParams, q_pos: Tensor, k_pos: Tensor, context_len: Tensor | int) -> Tensor:
        """Return a bool tensor, True where a row sees a key by :func:`~attncheck.reference.visible` and the tree.

        It has the broadcast shape of the positions. ``context_len``: position of the first row of the request, one
        number or one per row.
        """
        seen = visible(params, q_pos, k_pos)
        if self.tree is None:
            return seen
        row, node = q_pos - context_len, k_pos - context_len
        return seen & (self.tree[row, node.clamp(0, len(self.tree) - 1)] | (node < 0))

    def sees_packed(self, params: AttentionParams, rows: slice, keys: slice) -> Tensor:
        """Return bool ``[rows, keys]``: which of these keys each of these rows sees; none of another request."""
        num_keys, first_key, node, context_len = (field[rows, None] for field in self.places)
        k_pos = torch.arange(keys.start, keys.stop, device=first_key.device) - first_key
        own = (k_pos >= 0) & (k_pos < num_keys)
        return own & self.sees(params, context_len + node, k_pos, context_len)
