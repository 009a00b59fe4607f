"""``torch.nn.functional.scaled_dot_product_attention`` as a candidate: pages are gathered, and attended to.

A right and simple baseline for CPU and CUDA, and what a user of plain torch would write. Soft cap, sinks and the
log-sum-exp are out of SDPA's reach, and declared so. Requests of equally many rows, few each, are one batched call that
reads their lengths on the device, so that it can stand in a CUDA graph; of other steps each request is a call of its
own, with lengths from the host.

SDPA chooses a kernel for each call. The impl records which; ``torch_sdpa:KERNEL`` prefers one of them.
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
"""Rows a request up to which a uniform step is batched. Longer ones are prompts, for which SDPA's own causal mask is
cheaper; where a graph is captured, all that tells them from drafts to verify is how many rows they have."""


KERNELS: Mapping[str, SDPBackend] = MappingProxyType(
    {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
)
"""SDPA's kernels by the names that records and ``torch_sdpa:KERNEL`` use."""

_NAMES = MappingProxyType({kernel: name for name, kernel in KERNELS.items()})

_ONLY_ON_CUDA = ("efficient", "cudnn")


class SDPABackend(PagedBackend):
    """Any head size, any block size, both layouts. Graphs of uniform steps: see :class:`SDPABuilder`."""

    kernels: ClassVar[tuple[SDPBackend, ...]] = (KERNELS["flash"], KERNELS["efficient"], KERNELS["math"])
    """The kernels that SDPA may choose, the preferred one first.

    cuDNN is left out: it builds a plan for each shape, and torch prefers it on some GPUs and not on others."""

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
        }
    )
    conventions = Conventions(padded_rows="finite")
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
    supported_attn_types = tuple(AttentionType)

    @classmethod
    def from_argument(cls, argument: str) -> "type[SDPABackend]":
        """Return the backend whose calls run the kernel ``argument``, or ``math`` where SDPA refuses that kernel.

        Raises ValueError for a name that is not in :data:`KERNELS`.
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

    @staticmethod
    def get_name() -> str:
        return "TORCH_SDPA"

    @staticmethod
    def get_impl_cls() -> type["SDPAImpl"]:
        return SDPAImpl

    @staticmethod
    def get_builder_cls() -> type["SDPABuilder"]:
        return SDPABuilder

    @staticmethod
    def get_metadata_cls() -> type["SDPAMetadata"]:
        return SDPAMetadata

    @classmethod
    def version(cls) -> str:
        has_cudnn = KERNELS["cudnn"] in cls.kernels
        return f"torch {torch.__version__}" + (f", cuDNN {torch.backends.cudnn.version()}" if has_cudnn else "")


class SDPAMetadata(PagedMetadata):
    """A step of the SDPA backend."""


class SDPABuilder(PagedBuilder):
    """Makes them. A graph of a uniform step stays right; every replay costs as much as its longest lengths would."""

    backend = SDPABackend
    metadata_cls = SDPAMetadata
    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Single tokens only, where more drafts are verified at once than are batched."""
        speculative = getattr(vllm_config, "speculative_config", None)
        drafts = 0 if speculative is None else speculative.num_speculative_tokens or 0
        return cls.cudagraph_support if drafts < UNIFORM_ROWS else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class SDPAImpl(PagedImpl):
    """One layer."""

    backend: ClassVar[type[SDPABackend]] = SDPABackend
    metadata_cls = SDPAMetadata

    def write(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        write_slots(layer, key, value, key_cache, value_cache, slot_mapping)

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
        """``[rows, num_heads, value head size]``."""
        query_1qHD, key_1kHD, value_1kHD = query[None], piece.key[None], piece.value[None]
        # One prompt from its start: SDPA's own causal mask is the same (top left and bottom right coincide).
        is_plain = params.causal and params.window[0] < 0 and self.alibi_slopes is None and piece.tree is None
        if is_plain and piece.first_position == 0:
            return self._attention(query_1qHD, key_1kHD, value_1kHD, None, is_causal=True)[0]
        ahead = (piece.key_positions()[None, :] - piece.query_positions()[:, None])[None]
        seen = _seen(params, ahead, piece.tree)
        if (slopes := self.slopes_on(ahead.device)) is not None:
            mask: Tensor | None = _alibi_mask(slopes, seen, ahead)
        else:
            mask = None if bool(seen.all()) else seen[:, None]
        out_1qHD = self._attention(query_1qHD, key_1kHD, value_1kHD, mask)
        return _where_seen(out_1qHD, seen.any(-1))[0]

    def _attend_uniform(
        self, params: AttentionParams, query: Tensor, piece: UniformRequests, tree: Tensor | None
    ) -> Tensor:
        """``[rows, num_heads, value head size]``; padding rows are 0 like rows that see nothing."""
        ahead = piece.key_positions[:, None, :] - piece.query_positions[:, :, None]
        seen = _seen(params, ahead, tree)
        if not params.causal:  # what lies behind the last key lies ahead of every row
            seen &= piece.exists[:, None, :]
        slopes = self.slopes_on(ahead.device)
        mask = seen[:, None] if slopes is None else _alibi_mask(slopes, seen, ahead)
        query_nqHD = query.unflatten(0, piece.query_positions.shape)
        out_nqHD = self._attention(query_nqHD, piece.key, piece.value, mask)
        return _where_seen(out_nqHD, seen.any(-1) & piece.is_real).flatten(0, 1)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool = False
    ) -> Tensor:
        """SDPA of ``n`` requests: ``[n, rows, num_heads, value head size]``, anything where a row sees nothing.

        key, value: ``[n, keys, num_kv_heads, head size]``. mask: ``[n, 1 or num_heads, rows, keys]``; None: all.
        """
        if key.shape[1] == 0:
            return query.new_zeros(*query.shape[:3], self.head_size_v)
        # SDPA's CPU kernel masks before it scales: a scale of 0 or below would turn its -inf into NaN or +inf.
        signed = query if self.scale > 0 else query * (-1 if self.scale < 0 else 0)
        tensors = [signed, key, value]
        if mask is not None and mask.dtype == torch.float32:
            # The bias is a float mask; in half precision slope * distance would lose the distance, so all is float32.
            tensors = [tensor.float() for tensor in tensors]
        query_nHqD, key_nHkD, value_nHkD = (tensor.transpose(1, 2) for tensor in tensors)
        asked: dict[str, Any] = {
            "attn_mask": mask,
            "is_causal": is_causal,
            "scale": abs(self.scale) or 1.0,
            "enable_gqa": self.num_heads != self.num_kv_heads,
        }
        # The function by which SDPA itself chooses.
        choice = SDPBackend(torch._fused_sdp_choice(query_nHqD, key_nHkD, value_nHkD, **asked))
        self.chosen_kernels.add(_NAMES[choice])
        return scaled_dot_product_attention(query_nHqD, key_nHkD, value_nHkD, **asked).transpose(1, 2)


def _alibi_mask(slopes: Tensor, seen: Tensor, ahead: Tensor) -> Tensor:
    """``slope * (key position - query position)``, -inf where a row does not see: ``[n, heads, rows, keys]``."""
    bias = slopes[:, None, None] * ahead[:, None].to(torch.float32)
    return bias.masked_fill(~seen[:, None], -torch.inf)


def _seen(params: AttentionParams, ahead: Tensor, tree: Tensor | None) -> Tensor:
    """Which row sees which key: bool, of the shape of ``ahead`` (``[n, rows, keys]``, how far a key lies ahead)."""
    left, right = params.window
    seen = ahead <= 0 if params.causal else torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        seen &= ahead >= -left
    if right >= 0:
        seen &= ahead <= right
    if tree is not None:
        # New keys are numbered by how far they lie ahead of the first row; older ones are seen like the root, by all.
        column = ahead[:, :1].clamp(0, len(tree) - 1).expand_as(ahead)
        seen &= tree.expand(len(ahead), -1, -1).gather(2, column)
    return seen


def _where_seen(out: Tensor, seen: Tensor) -> Tensor:
    """``out`` (``[n, rows, heads, size]``) where a row (``[n, rows]``) sees anything, else 0."""
    return out.masked_fill(~seen[:, :, None, None], 0.0)
