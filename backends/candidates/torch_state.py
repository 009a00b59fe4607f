"""Layers with a state in plain torch: chunks of rows as matrix products, in float32.

A chunk has the form of flash-linear-attention's kernels (Gated DeltaNet, arXiv 2412.06464, section 3.3). With the delta
rule, the corrected values of its rows are the solution of a unit lower triangular system.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from attncheck.backends.state import NULL_BLOCK_ID, StateBackend, StateImpl, as_matrices

_CHUNK = 32


class TorchStateBackend(StateBackend):
    """Backend of every rule and dtype of states."""

    get_name = staticmethod(lambda: "TORCH_STATE")
    get_impl_cls = staticmethod(lambda: TorchStateImpl)
    supported_mamba_cache_modes = ("none", "all")


@dataclass(frozen=True)
class _Rows:
    """Some rows of one request, float32: query, key ``[T, H, K]``, value ``[T, H, V]``, log_decay ``[T, H, 1 or K]``.

    beta: ``[T, H]``, or None without the delta rule.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor | None = None

    def chunks(self, size: int, stops: Collection[int]) -> Iterator[tuple[int, "_Rows"]]:
        """Yield the last row of each chunk, and the chunk. A chunk has at most ``size`` rows, and ends at each stop."""
        first, count = 0, len(self.query)
        for last in range(count):
            if last in stops or last - first + 1 == size or last + 1 == count:
                at = slice(first, last + 1)
                beta = None if self.beta is None else self.beta[at]
                yield last, _Rows(self.query[at], self.key[at], self.value[at], self.log_decay[at], beta)
                first = last + 1


class TorchStateImpl(StateImpl):
    """One layer."""

    def forward(
        self, layer: Any, inputs: Mapping[str, Tensor], states: Tensor, attn_metadata: Any, output: Tensor
    ) -> None:
        pool = as_matrices(self.rule, states)
        starts = attn_metadata.query_start_loc.tolist()
        slots = attn_metadata.state_indices_tensor[:, 0].tolist()
        has_state = attn_metadata.has_initial_states.tolist()
        for request, slot in enumerate(slots):
            first, end = starts[request], starts[request + 1]
            if slot == NULL_BLOCK_ID or first == end:
                continue
            rows = self._rows(layer, {name: tensor[first:end].float() for name, tensor in inputs.items()})
            state = torch.zeros_like(pool[0], dtype=torch.float32)
            if has_state[request]:
                read = attn_metadata.source(request)
                state = pool[read].float()
            out = []
            stored = attn_metadata.destinations(request)
            size = 1 if request < attn_metadata.num_decodes else _CHUNK
            for last, chunk in rows.chunks(size, stored):
                of_rows, state = self._chunk(chunk, state)
                out.append(of_rows)
                if last in stored:
                    written = stored[last]
                    pool[written] = state.to(states.dtype)
            output[first:end] = torch.cat(out).to(output.dtype).view_as(output[first:end])

    def _rows(self, layer: Any, inputs: dict[str, Tensor]) -> _Rows:
        """Return the rows of a request in the terms of one recurrence."""
        if self.rule == "mamba1":
            return self._rows_of_mamba1(layer, **inputs)
        if self.rule == "mamba2":
            return self._rows_of_mamba2(layer, **inputs)
        if self.rule == "linear":
            return self._rows_of_linear(layer, **inputs)
        return self._rows_of_delta(**inputs)

    def _rows_of_mamba1(self, layer: Any, x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> _Rows:
        step = softplus(dt + layer.dt_bias)
        key = B[:, None].expand(-1, self.num_heads, -1)
        query = C[:, None].expand(-1, self.num_heads, -1)
        value = (step * x)[:, :, None]
        return _Rows(query, key, value, step[:, :, None] * layer.A)

    def _rows_of_mamba2(self, layer: Any, x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> _Rows:
        steps = softplus(dt + layer.dt_bias)
        value = steps[:, :, None] * x
        log_decay = (steps * layer.A)[:, :, None]
        return _Rows(self._of_heads(C), self._of_heads(B), value, log_decay)

    def _rows_of_linear(self, layer: Any, query: Tensor, key: Tensor, value: Tensor) -> _Rows:
        log_decay = -layer.slopes[None, :, None].expand(len(query), -1, 1)
        return _Rows(query * self.scale, key, value, log_decay)

    def _rows_of_delta(self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> _Rows:
        if self.qk_l2norm:
            query = query * (query.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
            key = key * (key.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        log_decay = g[:, :, None] if self.rule == "gdn" else g
        return _Rows(self._of_heads(query) * self.scale, self._of_heads(key), value, log_decay, beta)

    def _of_heads(self, grouped: Tensor) -> Tensor:
        """Repeat ``[T, G, K]`` for the heads of each group."""
        heads = torch.arange(self.num_heads, device=grouped.device)
        return grouped[:, heads // (self.num_heads // self.num_kv_heads)]

    def _chunk(self, rows: _Rows, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs ``[T, H, V]`` of a chunk, and the state after it. ``state``: ``[H, V, K]`` before it."""
        total = rows.log_decay.cumsum(0)
        size = len(total)
        ones = torch.ones(size, size, dtype=torch.bool, device=total.device)
        sees = ones.tril()[:, :, None, None]
        between = (total[:, None] - total[None]).masked_fill(~sees, -torch.inf).exp()
        since_start = total.exp()
        until_end = (total[-1] - total).exp()
        value = rows.value
        if rows.beta is not None:
            value = self._corrected(rows, rows.beta, between, since_start, state)
        scores = torch.einsum("thk,tihk,ihk->hti", rows.query, between, rows.key)
        out = torch.einsum("hti,ihv->thv", scores, value)
        out = out + torch.einsum("thk,hvk->thv", rows.query * since_start, state)
        kept = state * since_start[-1][:, None]
        return out, kept + torch.einsum("thk,thv->hvk", rows.key * until_end, value)

    def _corrected(self, rows: _Rows, of_rows: Tensor, between: Tensor, since_start: Tensor, state: Tensor) -> Tensor:
        """Return ``[T, H, V]``: beta times each value less what the state before its row returns for its key."""
        beta = of_rows.t()[:, :, None]
        overlap = torch.einsum("thk,tihk,ihk->hti", rows.key, between, rows.key)
        system = beta * overlap.tril(-1)
        known = torch.einsum("thk,hvk->htv", rows.key * since_start, state)
        right = beta * (rows.value.transpose(0, 1) - known)
        solved: Tensor = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        return solved.transpose(0, 1)
