"""Layers with a state in plain torch: chunks of rows as matrix products, in float32.

A chunk has the form of flash-linear-attention's kernels (Gated DeltaNet, arXiv 2412.06464, section 3.3). With the delta
rule, the corrected values of its rows are the solution of a unit lower triangular system.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from attncheck.backends.contract import AttentionCGSupport, CommonAttentionMetadata
from attncheck.backends.state import (
    NULL_BLOCK_ID,
    StateBackend,
    StateImpl,
    StateMetadata,
    StateMetadataBuilder,
    as_matrices,
)

_CHUNK = 32


class TorchStateBackend(StateBackend):
    """Backend of every rule and dtype of states."""

    get_name = staticmethod(lambda: "TORCH_STATE")
    get_impl_cls = staticmethod(lambda: TorchStateImpl)
    get_builder_cls = staticmethod(lambda: TorchStateBuilder)
    supported_mamba_cache_modes = ("none", "all")


class TorchStateBuilder(StateMetadataBuilder):
    """Builder whose metadata of decodes stay in the same memory, so that graphs of decodes can be replayed."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._accepted = torch.ones(vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return UNIFORM_BATCH; NEVER with prefix caching, whose slots are computed for each step."""
        is_cached = kv_cache_spec.mamba_cache_mode == "all"
        return AttentionCGSupport.NEVER if is_cached else AttentionCGSupport.UNIFORM_BATCH

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        num_accepted_tokens: Tensor | None = None,
    ) -> StateMetadata:
        """Return the metadata of a step."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build, num_accepted_tokens)
        held = self._accepted[: len(metadata.num_accepted_tokens)]
        held.copy_(metadata.num_accepted_tokens)
        return replace(metadata, num_accepted_tokens=held)


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
                yield last, self.at(slice(first, last + 1))
                first = last + 1

    def at(self, rows: slice | Tensor) -> "_Rows":
        """Return some of the rows."""
        beta = None if self.beta is None else self.beta[rows]
        return _Rows(self.query[rows], self.key[rows], self.value[rows], self.log_decay[rows], beta)


class TorchStateImpl(StateImpl):
    """One layer."""

    def forward(
        self, layer: Any, inputs: Mapping[str, Tensor], states: Tensor, attn_metadata: Any, output: Tensor
    ) -> None:
        are_decodes = not attn_metadata.num_prefills and attn_metadata.num_computed_tokens is None
        if self.rule == "short_conv":
            convolve = self._convolve_decodes if are_decodes else self._convolve
            convolve(layer, inputs["x"], states, attn_metadata, output)
            return
        pool = as_matrices(self.rule, states)
        if are_decodes:
            self._decode(layer, inputs, pool, attn_metadata, output)
            return
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

    def _decode(
        self, layer: Any, inputs: Mapping[str, Tensor], pool: Tensor, metadata: StateMetadata, output: Tensor
    ) -> None:
        """Run a batch of decodes alone; no value of a tensor is read on the host."""
        slots = metadata.state_indices_tensor.long()
        starts = metadata.query_start_loc.long()
        lengths = starts.diff()
        rows = self._rows(layer, {name: tensor.float() for name, tensor in inputs.items()})
        read = slots.gather(1, metadata.num_accepted_tokens[:, None].long() - 1)[:, 0]
        state = pool[read].to(torch.float32)
        # The row behind the others takes the outputs of requests that have no more rows.
        out = torch.zeros(len(rows.query) + 1, *rows.value.shape[1:], device=output.device)
        for column in range(slots.shape[1]):
            has_row = (lengths > column) & (slots[:, 0] != NULL_BLOCK_ID)
            at = torch.where(has_row, starts[:-1] + column, len(rows.query))
            of_rows, state = self._step(rows.at(at.clamp(max=len(rows.query) - 1)), state)
            out[at] = of_rows
            written = slots[:, column]
            kept = pool[written]
            pool[written] = torch.where(has_row[:, None, None, None], state.to(pool.dtype), kept)
        output.copy_(out[:-1].view_as(output))

    def _step(self, rows: _Rows, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs ``[N, H, V]`` of one row each of N requests, and their states ``[N, H, V, K]``."""
        state = state * rows.log_decay.exp()[:, :, None]
        value = rows.value
        if rows.beta is not None:
            known = torch.einsum("nhvk,nhk->nhv", state, rows.key)
            value = rows.beta[:, :, None] * (value - known)
        state = state + torch.einsum("nhv,nhk->nhvk", value, rows.key)
        return torch.einsum("nhvk,nhk->nhv", state, rows.query), state

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

    def _rows_of_delta(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_gates: Tensor
    ) -> _Rows:
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

    def _convolve(self, layer: Any, x: Tensor, states: Tensor, metadata: StateMetadata, output: Tensor) -> None:
        """Run a short convolution, request by request."""
        past = self.head_size - 1
        keeps_blocks = metadata.num_computed_tokens is not None
        starts = metadata.query_start_loc.tolist()
        accepted = metadata.num_accepted_tokens.tolist()
        slots = metadata.state_indices_tensor[:, 0].tolist()
        for request, (slot, first, end) in enumerate(zip(slots, starts[:-1], starts[1:], strict=True)):
            if first == end or slot == NULL_BLOCK_ID:
                continue
            before = torch.zeros_like(states[0, :past])
            if metadata.has_initial_states[request]:
                source = metadata.source(request) if keeps_blocks else slot
                oldest = accepted[request] - 1
                before = states[source, oldest : oldest + past]
            past_and_new = torch.cat([before, x[first:end]])
            output[first:end] = self._weighted(layer, past_and_new).to(output.dtype)
            if request < metadata.num_decodes and not keeps_blocks:
                stored = past_and_new[1:]
                states[slot, : len(stored)] = stored
                continue
            for row, written in metadata.destinations(request).items():
                states[written, :past] = past_and_new[row + 1 : row + 1 + past]

    def _convolve_decodes(self, layer: Any, x: Tensor, states: Tensor, metadata: StateMetadata, output: Tensor) -> None:
        """Run a short convolution of decodes alone; no value of a tensor is read on the host."""
        past = self.head_size - 1
        slots = metadata.state_indices_tensor[:, 0].long()
        starts = metadata.query_start_loc.long()
        columns = torch.arange(metadata.state_indices_tensor.shape[1], device=x.device)
        has_row = (columns < starts.diff()[:, None]) & (slots != NULL_BLOCK_ID)[:, None]
        rows = torch.where(has_row, starts[:-1, None] + columns, len(x))
        oldest = metadata.num_accepted_tokens.long()[:, None] - 1
        before = states[slots[:, None], oldest + torch.arange(past, device=x.device)]
        past_and_new = torch.cat([before, x[rows.clamp(max=len(x) - 1)]], dim=1)
        # The row behind the others takes the outputs of requests that have no more rows.
        out = torch.zeros(len(x) + 1, x.shape[1], device=x.device)
        out[rows] = self._weighted(layer, past_and_new)
        output.copy_(out[:-1])
        stored = past_and_new[:, 1:]
        # The first of the states belongs to the first row, and each row adds one input.
        is_stored = torch.cat([has_row[:, :1].expand(-1, past - 1), has_row], dim=1)
        states[slots] = torch.where(is_stored[:, :, None], stored, states[slots])

    def _weighted(self, layer: Any, inputs: Tensor) -> Tensor:
        """Return the outputs ``[..., T, D]`` of inputs ``[..., taps - 1 + T, D]``."""
        windows = inputs.float().unfold(-2, self.head_size, 1)
        sums = torch.einsum("...tdk,dk->...td", windows, layer.weight.float())
        if layer.bias is not None:
            sums = sums + layer.bias.float()
        return silu(sums) if layer.activation == "silu" else sums
