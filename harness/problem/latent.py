"""Multi-head latent attention in a problem: its up-projections, and the equivalent ordinary attention.

A problem of such a layer holds the contents of its cache: latent rows as ``keys`` (``[N, 1, L]``) and rotated parts as
``values`` (``[N, 1, E]``). The up-projections turn them into the keys (``[N, H, P + E]``) and values (``[N, H, V]``)
of the naive form, with one KV head per query head. The weights depend on the layer's sizes and dtype alone, not on
batch or seed, and differ between heads.

The products are exact in float64 in any order of summation, and so equal on every machine. Cache rows are multiples of
2**-30 below 2, weights are multiples of 2**-16, and a sum below 2**7 fits 53 bits. Only if the cache holds codes may
the last of these bits differ; queries derived from such keys are rounded to far fewer bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.harness.problem.random_stream import RandomStream
from attncheck.reference.spec import LayerSpec

_STEP = 2.0**-16
"""Step between weights before rounding to the layer's dtype, finer than any coarser dtype can represent."""


@dataclass(frozen=True)
class UpProjections:
    """The two halves of ``kv_b_proj``, in the layer's dtype: ``w_uk [L, H, P]`` and ``w_uv [L, H, V]``."""

    w_uk: Tensor
    w_uv: Tensor

    def keys(self, latent: Tensor, rotary: Tensor) -> Tensor:
        """Return float64 keys of the naive form, ``[N, H, P + E]``: up-projected, then the part shared by all heads."""
        nope = torch.einsum("nl,lhp->nhp", latent[:, 0].double(), self.w_uk.double())
        return torch.cat([nope, rotary.double().expand(-1, nope.shape[1], -1)], dim=-1)

    def values(self, latent: Tensor) -> Tensor:
        """Return float64 values of the naive form, ``[N, H, V]``."""
        return torch.einsum("nl,lhv->nhv", latent[:, 0].double(), self.w_uv.double())

    def fused(self) -> Tensor:
        """Return the weight of ``kv_b_proj``, ``[H * (P + V), L]``: per head the rows for keys, then for values."""
        return torch.cat([self.w_uk, self.w_uv], dim=-1).flatten(1).T.contiguous()

    def to(self, device: torch.device) -> "UpProjections":
        """Return the same weights on a device."""
        return UpProjections(self.w_uk.to(device), self.w_uv.to(device))


def make_up_projections(layer: LayerSpec, dtype: torch.dtype) -> UpProjections | None:
    """Return the weights of a layer with ``mla``, else None; keys and values have the variance of other layers."""
    if layer.mla is None:
        return None
    rank, heads = layer.mla.kv_lora_rank, layer.num_heads
    sizes = (layer.mla.qk_nope_head_dim, layer.mla.v_head_dim)
    stream = RandomStream("up-projections", rank, heads, *sizes)
    # A uniform number in -most .. most has variance most**2 / 3, so a sum of ``rank`` products keeps the variance.
    most = round((3 / rank) ** 0.5 / _STEP)
    w_uk, w_uv = (
        ((stream.integers(rank * heads * size, 2 * most + 1) - most).double() * _STEP)
        .reshape(rank, heads, size)
        .to(dtype)
        for size in sizes
    )
    return UpProjections(w_uk, w_uv)
