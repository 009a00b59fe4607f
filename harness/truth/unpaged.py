"""A question of attention without pages: rows, keys and values behind one another, and who sees whom.

What truth, budget and hypotheses are computed from, by a formulation beside the paged one that candidates are driven
through.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from attncheck.reference import AttentionParams, Precision, paged_attention, varlen_attention, visible

HiddenKeys = Callable[[int, Tensor, Tensor], Tensor]
"""(request, row positions ``[a, 1]``, key positions ``[1, b]``) -> bool, broadcastable to ``[a, b]``: lost keys."""


class RowPlaces(NamedTuple):
    """Of each row, int64 ``[T]``.

    num_keys: of its request. first_key: where these begin among all keys. node: which row of its request it is.
    context_len: position of the first row of its request.
    """

    num_keys: Tensor
    first_key: Tensor
    node: Tensor
    context_len: Tensor


@dataclass(frozen=True)
class UnpagedAttention:
    """The arguments of one unpaged attention: ``query [T, H, D]``, ``keys [N, Hkv, D]``, ``values [N, Hkv, Dv]``.

    ``tree``: bool ``[Q, Q]``, row ``i`` of a request may see its new key ``m`` only where ``tree[i, m]``; None: no
    tree.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    tree: Tensor | None = None

    def to(self, device: torch.device) -> "UnpagedAttention":
        """The same on a device."""
        return UnpagedAttention(
            self.query.to(device),
            self.keys.to(device),
            self.values.to(device),
            self.cu_seqlens_q.to(device),
            self.cu_seqlens_k.to(device),
            None if self.tree is None else self.tree.to(device),
        )

    def of_requests(self, first: int, end: int) -> "UnpagedAttention":
        """The question of requests ``first .. end - 1`` alone; the tensors share memory."""
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
        """Output ``[T, H, Dv]`` and LSE ``[T, H]`` of the reference, in float64 unless ``precision`` says otherwise.

        Keys that are ``hidden`` are lost; positions stay what they are.
        """
        precision = precision or Precision()
        if self.tree is None and hidden is None:
            return varlen_attention(
                self.query, self.keys, self.values, self.cu_seqlens_q, self.cu_seqlens_k, params, precision=precision
            )
        starts, lens = self.cu_seqlens_k[:-1], self.num_keys
        width = max(int(lens.max()), 1)
        # Pages of one token: the keys as they stand are a cache, and its table is arithmetic.
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
        """Output and LSE in float64, and what the output would be if all values were positive, ``[T, H, Dv]``.

        ``sum P |V|`` bounds what roundings of the products can do; it shares the weights with the output.
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
        """Where each row stands."""
        fields = torch.stack([self.num_keys, self.cu_seqlens_k[:-1], self.cu_seqlens_q[:-1], self.num_rows])
        num_keys, first_key, first_row, num_rows = fields.repeat_interleave(self.num_rows, dim=1)
        node = torch.arange(len(num_keys), device=num_keys.device) - first_row
        return RowPlaces(num_keys, first_key, node, num_keys - num_rows)

    def sees(self, params: AttentionParams, q_pos: Tensor, k_pos: Tensor, context_len: Tensor | int) -> Tensor:
        """Bool of the positions' broadcast shape: :func:`~attncheck.reference.visible`, and the tree.

        ``context_len``: position of the first row, of the request or of each row's.
        """
        seen = visible(params, q_pos, k_pos)
        if self.tree is None:
            return seen
        row, node = q_pos - context_len, k_pos - context_len
        return seen & (self.tree[row, node.clamp(0, len(self.tree) - 1)] | (node < 0))

    def sees_packed(self, params: AttentionParams, rows: slice, keys: slice) -> Tensor:
        """Bool ``[rows, keys]``: which of these keys each of these rows sees; none of another request."""
        num_keys, first_key, node, context_len = (field[rows, None] for field in self.places)
        k_pos = torch.arange(keys.start, keys.stop, device=first_key.device) - first_key
        own = (k_pos >= 0) & (k_pos < num_keys)
        return own & self.sees(params, context_len + node, k_pos, context_len)
