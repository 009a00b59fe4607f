"""Multi-head latent attention as a question: its up-projections, and the ordinary attention it equals.

A problem of such a layer holds what stands in its cache: latent rows as ``keys`` (``[N, 1, L]``) and the rotated parts
as ``values`` (``[N, 1, E]``). The up-projections turn them into the keys (``[N, H, P + E]``) and values
(``[N, H, V]``) of the naive form, a KV head for each query head. The weights belong to the layer: they depend on its
sizes alone, not on batch or seed, and heads differ.

The products are exact in float64, in whatever order they are summed, and so the same on every machine: cache rows are
multiples of 2**-30 below 2, weights multiples of 2**-16, and a sum that stays below 2**7 fits 53 bits. Only where the
cache holds codes may the last of these bits differ; queries made of such keys are rounded to far fewer.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.harness.problem.random_stream import RandomStream
from attncheck.reference.spec import LayerSpec

_STEP = 2.0**-16
"""Step between weights before they are rounded to the layer's dtype: more bits than any coarser dtype keeps."""


@dataclass(frozen=True)
class UpProjections:
    """The two halves of ``kv_b_proj``, in the layer's dtype: ``w_uk [L, H, P]`` and ``w_uv [L, H, V]``."""

    w_uk: Tensor
    w_uv: Tensor

    def keys(self, latent: Tensor, rotary: Tensor) -> Tensor:
        """Float64 keys of the naive form, ``[N, H, P + E]``: up-projected, then the part all heads share."""
        nope = torch.einsum("nl,lhp->nhp", latent[:, 0].double(), self.w_uk.double())
        return torch.cat([nope, rotary.double().expand(-1, nope.shape[1], -1)], dim=-1)

    def values(self, latent: Tensor) -> Tensor:
        """Float64 values of the naive form, ``[N, H, V]``."""
        return torch.einsum("nl,lhv->nhv", latent[:, 0].double(), self.w_uv.double())

    def fused(self) -> Tensor:
        """The weight of ``kv_b_proj``: ``[H * (P + V), L]``, of each head the rows for keys, then those for values."""
        return torch.cat([self.w_uk, self.w_uv], dim=-1).flatten(1).T.contiguous()

    def to(self, device: torch.device) -> "UpProjections":
        """The same on a device."""
        return UpProjections(self.w_uk.to(device), self.w_uv.to(device))


def make_up_projections(layer: LayerSpec, dtype: torch.dtype) -> UpProjections | None:
    """The weights of a layer with ``mla``, else None; keys and values come out with the variance of other layers'."""
    if layer.mla is None:
        return None
    rank, heads = layer.mla.kv_lora_rank, layer.num_heads
    sizes = (layer.mla.qk_nope_head_dim, layer.mla.v_head_dim)
    stream = RandomStream("up-projections", rank, heads, *sizes)
    # Uniform over -most .. most the variance is a third of most squared, and a sum of ``rank`` products keeps it.
    most = round((3 / rank) ** 0.5 / _STEP)
    w_uk, w_uv = (
        ((stream.integers(rank * heads * size, 2 * most + 1) - most).double() * _STEP)
        .reshape(rank, heads, size)
        .to(dtype)
        for size in sizes
    )
    return UpProjections(w_uk, w_uv)
