"""The recurrence of the reference as a candidate: float64 inside, rounded once at the end."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.state import NULL_BLOCK_ID, WEIGHTS, StateBackend, StateImpl, as_matrices
from attncheck.reference.attention.recurrence import recurrence, recurrent_rows
from attncheck.reference.attention.short_convolution import causal_conv1d


class ReferenceStateBackend(StateBackend):
    """Backend of every rule and dtype of states."""

    get_name = staticmethod(lambda: "REFERENCE_STATE")
    get_impl_cls = staticmethod(lambda: ReferenceStateImpl)
    supported_mamba_cache_modes = ("none", "all")


class ReferenceStateImpl(StateImpl):
    """One layer."""

    def forward(
        self, layer: Any, inputs: Mapping[str, Tensor], states: Tensor, attn_metadata: Any, output: Tensor
    ) -> None:
        if self.rule == "short_conv":
            self._convolve(layer, inputs["x"], states, attn_metadata, output)
            return
        matrices = as_matrices(self.rule, states)
        weights = {name: getattr(layer, name).double() for name in WEIGHTS[self.rule]}
        starts = attn_metadata.query_start_loc.tolist()
        for request, slot in enumerate(attn_metadata.state_indices_tensor[:, 0].tolist()):
            first, end = starts[request], starts[request + 1]
            if first == end or slot == NULL_BLOCK_ID:
                continue
            rows = recurrent_rows(
                self.rule,
                {name: tensor[first:end].double() for name, tensor in inputs.items()},
                weights,
                scale=self.scale,
                qk_l2norm=self.qk_l2norm,
            )
            has_state = bool(attn_metadata.has_initial_states[request])
            state = matrices[attn_metadata.source(request)].double() if has_state else None
            stored = attn_metadata.destinations(request)
            out, after = recurrence(rows, state, keep=stored)
            output[first:end] = out.to(output.dtype).view_as(output[first:end])
            for row, written in stored.items():
                matrices[written] = after[row].to(states.dtype)

    def _convolve(self, layer: Any, x: Tensor, states: Tensor, metadata: Any, output: Tensor) -> None:
        past = self.head_size - 1
        bias = None if layer.bias is None else layer.bias.double()
        starts = metadata.query_start_loc.tolist()
        keeps_blocks = metadata.num_computed_tokens is not None
        for request, slot in enumerate(metadata.state_indices_tensor[:, 0].tolist()):
            first, end = starts[request], starts[request + 1]
            if first == end or slot == NULL_BLOCK_ID:
                continue
            new = x[first:end]
            before = new.new_zeros(past, new.shape[1])
            if metadata.has_initial_states[request]:
                oldest = int(metadata.num_accepted_tokens[request]) - 1
                source = metadata.source(request) if keeps_blocks else slot
                before = states[source, oldest : oldest + past]
            output[first:end] = causal_conv1d(
                new.double(),
                layer.weight.double(),
                bias,
                before.t()[None].double(),
                torch.tensor([0, len(new)]),
                torch.tensor([0]),
                torch.tensor([True]),
                activation=layer.activation,
            ).to(output.dtype)
            past_and_new = torch.cat([before, new])
            if request < metadata.num_decodes and not keeps_blocks:
                states[slot, : past + len(new) - 1] = past_and_new[1:]
                continue
            for row, written in metadata.destinations(request).items():
                states[written, :past] = past_and_new[row + 1 : row + 1 + past]
