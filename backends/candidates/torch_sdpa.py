"""``torch.nn.functional.scaled_dot_product_attention`` as a candidate: gathers pages, then attends.

It is a simple and correct baseline for CPU and CUDA, like code that a user of plain torch would write. SDPA supports
neither soft cap nor sinks nor the log-sum-exp. Requests with equally many rows, at most :data:`UNIFORM_ROWS` each, are
one batched call. That call reads lengths on the device, so a CUDA graph can capture it. In other steps each request is
a separate call, with lengths from the host.

SDPA chooses a kernel for each call, and the impl records it. ``torch_sdpa:KERNEL`` prefers one of them.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attncheck.backends.base.gathering import UnpagedRequest, unpaged_requests
from attncheck.backends.contract import AttentionCGSupport, AttentionLayer, AttentionType, Conventions
from attncheck.backends.paged import PagedBackend, PagedImpl
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata
from attncheck.backends.uniform import UniformRequests, uniform_query_len, uniform_requests, write_slots
from attncheck.reference.attention.params import AttentionParams

UNIFORM_ROWS = 16
"""Maximum rows per request of a uniform step that is batched.

Longer requests are prompts, for which SDPA's own causal mask is cheaper. When a graph is captured, only the number of
rows distinguishes prompts from drafts to verify.
"""


KERNELS: Mapping[str, SDPBackend] = MappingProxyType(
    {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
)
"""SDPA's kernels, by their names in records and in ``torch_sdpa:KERNEL``."""

_NAMES = MappingProxyType({kernel: name for name, kernel in KERNELS.items()})

_ONLY_ON_CUDA = ("efficient", "cudnn")


class SDPABackend(PagedBackend):
    """Backend for any head size, any block size and both layouts. For CUDA graphs see :class:`SDPABuilder`."""

    kernels: ClassVar[tuple[SDPBackend, ...]] = (KERNELS["flash"], KERNELS["efficient"], KERNELS["math"])
    """The kernels that SDPA may choose, in order of preference.

    cuDNN is excluded: it builds a plan for each shape, and torch prefers it only on some GPUs.
    """

    packing = "split_second"
    features = frozenset(
        {
            "sliding_window",
            "alibi",
            "alibi_non_causal",
            "non_causal",
            "head_size_v",
            "kv_sharing",
            "fp8_kv",
            "fp8_per_head",
            "output_quant",
            "short_keys",
            "tree",
            "sparse",
        }
    )
    conventions = Conventions(padded_rows="finite", cache_strides="any", any_topk_indices=True)
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
    supported_attn_types = tuple(AttentionType)

    @classmethod
    def from_argument(cls, argument: str) -> "type[SDPABackend]":
        """Return the backend whose calls run the kernel ``argument``, or ``math`` if SDPA refuses that kernel.

        Raise ValueError for a name that is not in :data:`KERNELS`.
        """
        if argument not in KERNELS:
            raise ValueError(f"torch_sdpa has no kernel {argument!r}; known: {', '.join(KERNELS)}")
        impl: type[SDPAImpl] = type("PinnedSDPAImpl", (SDPAImpl,), {"__module__": __name__})
        members = {
            "__module__": __name__,
            "kernels": tuple(dict.fromkeys((KERNELS[argument], KERNELS["math"]))),
            "supported_devices": ("cuda",) if argument in _ONLY_ON_CUDA else cls.supported_devices,
            "get_impl_cls": staticmethod(lambda: impl),
        }
        pinned = type("PinnedSDPABackend", (cls,), members)
        impl.backend = pinned
        return pinned

    get_name = staticmethod(lambda: "TORCH_SDPA")
    get_impl_cls = staticmethod(lambda: SDPAImpl)
    get_builder_cls = staticmethod(lambda: SDPABuilder)

    @classmethod
    def version(cls) -> str:
        has_cudnn = KERNELS["cudnn"] in cls.kernels
        return f"torch {torch.__version__}" + (f", cuDNN {torch.backends.cudnn.version()}" if has_cudnn else "")


class SDPABuilder(PagedBuilder):
    """Builder of :class:`PagedMetadata`.

    A graph of a uniform step stays right; every replay costs as much as the longest lengths that it allows.
    """

    backend = SDPABackend
    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return the level, reduced to single tokens if more drafts are verified at once than are batched."""
        speculative = getattr(vllm_config, "speculative_config", None)
        drafts = 0 if speculative is None else speculative.num_speculative_tokens or 0
        return cls.cudagraph_support if drafts < UNIFORM_ROWS else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class SDPAImpl(PagedImpl):
    """One layer."""

    backend: ClassVar[type[SDPABackend]] = SDPABackend

    write = staticmethod(write_slots)

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        caches: tuple[Tensor, Tensor] | None,
        metadata: PagedMetadata,
        output: Tensor,
        output_lse: Tensor | None,
    ) -> None:
        params, dtype = self.params(metadata), query.dtype
        query_len = uniform_query_len(metadata, UNIFORM_ROWS)
        with sdpa_kernel(list(self.backend.kernels), set_priority=True):
            if query_len is None:
                for piece in unpaged_requests(params, metadata, layer, key, value, caches, dtype):
                    output[piece.rows] = self._attend_piece(params, query[piece.rows], piece)
                return
            tree = metadata.tree if metadata.tree is not None and len(metadata.tree) == query_len else None
            for part in uniform_requests(params, metadata, query_len, layer, key, value, caches, dtype):
                output[part.rows] = self._attend_uniform(params, query[part.rows], part, tree)

    def _attend_piece(self, params: AttentionParams, query: Tensor, piece: UnpagedRequest) -> Tensor:
        query_1qHD, key_1kHD, value_1kHD = query[None], piece.key[None], piece.value[None]
        # For one prompt from its start, SDPA's own causal mask is the same (top left and bottom right coincide).
        is_plain = params.causal and params.window[0] < 0 and self.alibi_slopes is None and piece.tree is None
        is_plain = is_plain and piece.chosen is None
        if is_plain and piece.first_position == 0:
            return self._attention(query_1qHD, key_1kHD, value_1kHD, None, is_causal=True)[0]
        ahead = (piece.key_positions()[None, :] - piece.query_positions()[:, None])[None]
        seen = _seen(params, ahead, piece.tree)
        if piece.chosen is not None:
            seen &= piece.chosen
        if (slopes := self.slopes_on(ahead.device)) is not None:
            mask: Tensor | None = _alibi_mask(slopes, seen, ahead)
        else:
            mask = None if bool(seen.all()) else seen[:, None]
        out_1qHD = self._attention(query_1qHD, key_1kHD, value_1kHD, mask)
        return _where_seen(out_1qHD, seen.any(-1))[0]

    def _attend_uniform(
        self, params: AttentionParams, query: Tensor, piece: UniformRequests, tree: Tensor | None
    ) -> Tensor:
        """Return ``[rows, num_heads, value head size]``; padding rows are 0, as are rows that see nothing."""
        ahead = piece.key_positions[:, None, :] - piece.query_positions[:, :, None]
        seen = _seen(params, ahead, tree)
        if piece.chosen is not None:
            seen &= piece.chosen
        if not params.causal:  # positions beyond the last key are ahead of every row
            seen &= piece.exists[:, None, :]
        slopes = self.slopes_on(ahead.device)
        mask = seen[:, None] if slopes is None else _alibi_mask(slopes, seen, ahead)
        query_nqHD = query.unflatten(0, piece.query_positions.shape)
        out_nqHD = self._attention(query_nqHD, piece.key, piece.value, mask)
        return _where_seen(out_nqHD, seen.any(-1) & piece.is_real).flatten(0, 1)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool = False
    ) -> Tensor:
        """Call SDPA for ``n`` requests; return ``[n, rows, num_heads, value head size]``.

        Rows that see nothing hold anything. key, value: ``[n, keys, num_kv_heads, head size]``. mask: ``[n, 1 or
        num_heads, rows, keys]``; None if every row sees every key.
        """
        if key.shape[1] == 0:
            return query.new_zeros(*query.shape[:3], self.head_size_v)
        # SDPA's CPU kernel masks before it scales: a scale <= 0 would turn its -inf into NaN or +inf.
        signed = query if self.scale > 0 else query * (-1 if self.scale < 0 else 0)
        tensors = [signed, key, value]
        if mask is not None and mask.dtype == torch.float32:
            # The bias is a float mask. In half precision, slope * distance loses the distance, so use float32.
            tensors = [tensor.float() for tensor in tensors]
        query_nHqD, key_nHkD, value_nHkD = (tensor.transpose(1, 2) for tensor in tensors)
        arguments: dict[str, Any] = {
            "attn_mask": mask,
            "is_causal": is_causal,
            "scale": abs(self.scale) or 1.0,
            "enable_gqa": self.num_heads != self.num_kv_heads,
        }
        # SDPA itself chooses with this function.
        choice = SDPBackend(torch._fused_sdp_choice(query_nHqD, key_nHkD, value_nHkD, **arguments))
        self.chosen_kernels.add(_NAMES[choice])
        return scaled_dot_product_attention(query_nHqD, key_nHkD, value_nHkD, **arguments).transpose(1, 2)


def _alibi_mask(slopes: Tensor, seen: Tensor, ahead: Tensor) -> Tensor:
    """Return ``slope * (key position - query position)``, -inf where a row does not see: ``[n, heads, rows, keys]``."""
    bias = slopes[:, None, None] * ahead[:, None].to(torch.float32)
    return bias.masked_fill(~seen[:, None], -torch.inf)


def _seen(params: AttentionParams, ahead: Tensor, tree: Tensor | None) -> Tensor:
    """Return which rows see which keys, bool; ``ahead [n, rows, keys]`` is key position minus query position."""
    left, right = params.window
    seen = ahead <= 0 if params.causal else torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        seen &= ahead >= -left
    if right >= 0:
        seen &= ahead <= right
    if tree is not None:
        # New keys are numbered by their distance from the first row. Like the root, older keys are seen by all rows.
        column = ahead[:, :1].clamp(0, len(tree) - 1).expand_as(ahead)
        seen &= tree.expand(len(ahead), -1, -1).gather(2, column)
    return seen


def _where_seen(out: Tensor, seen: Tensor) -> Tensor:
    return out.masked_fill(~seen[:, :, None, None], 0.0)
