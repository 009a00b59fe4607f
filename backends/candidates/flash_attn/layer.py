"""Shared by the candidates over FlashAttention-2's kernels: limits, metadata, declarations, and storing of results.

A candidate derives from :class:`FlashBackend` and :class:`FlashImpl`, and implements :meth:`FlashImpl.answer`. The
limits were read in ``csrc/flash_attn`` of flash-attn 2.8.3 and its copy in torch.
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from attncheck.backends.base.machine import gpu_reasons
from attncheck.backends.contract import AttentionLayer, CommonAttentionMetadata
from attncheck.backends.declarations import MultipleOf
from attncheck.backends.paged import PagedBackend, PagedImpl
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec

_HEAD_SIZES = tuple(range(8, 257, 8))
"""Head sizes of keys and values, which must be equal."""

PAGE_SIZES = MultipleOf(256)
"""Sizes of pages that the kernels read in place, through a block table."""

_LOWEST_CAPABILITY = (8, 0)
"""Minimum compute capability, that of Ampere."""


def scale_reasons(scale: float) -> list[str]:
    """Return why the kernels cannot scale scores by ``scale``; an empty list if they can.

    They find the maximum score before they scale, and subtract the scaled maximum. With a negative scale the
    exponentials overflow, and with 0 masked scores become NaN.
    """
    return [] if scale > 0 else [f"scale {scale:g}: FlashAttention-2 needs one above 0"]


@dataclass
class PackedMetadata(PagedMetadata):
    """Metadata of one step. ``cu_seq_lens``: int32 ``[R + 1]``, device, 0 and the running sums of ``seq_lens``."""

    cu_seq_lens: Tensor = field(kw_only=True)


class PackedBuilder(PagedBuilder):
    """Builder of :class:`PackedMetadata`.

    The sums are in one buffer, which the next ``build`` overwrites, so that a graph reads them at each replay. No CUDA
    graph level is declared, since no graph has been captured yet.
    """

    metadata_cls = PagedMetadata

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        room = 0 if vllm_config is None else vllm_config.scheduler_config.max_num_seqs
        self._sums = self._zeros(room)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PackedMetadata:
        step = super().build(common_prefix_len, common_attn_metadata, fast_build)
        num_reqs = len(common_attn_metadata.seq_lens)
        if len(self._sums) <= num_reqs:
            self._sums = self._zeros(num_reqs)
        torch.cumsum(common_attn_metadata.seq_lens, 0, dtype=torch.int32, out=self._sums[1 : num_reqs + 1])
        return PackedMetadata(**vars(step), cu_seq_lens=self._sums[: num_reqs + 1])

    def _zeros(self, num_reqs: int) -> Tensor:
        return torch.zeros(num_reqs + 1, dtype=torch.int32, device=self.device)


class FlashBackend(PagedBackend):
    """Backend for half precision on NVIDIA GPUs; pages of any strides whose head dimension is contiguous."""

    supported_dtypes = (torch.float16, torch.bfloat16)
    supported_devices = ("cuda",)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(_HEAD_SIZES)

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        return [*super().unavailable_reasons(device), *gpu_reasons(device, _LOWEST_CAPABILITY)]

    @classmethod
    def unsupported_reasons(cls, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        has_alibi, has_window = layer.alibi_slopes is not None, layer.sliding_window is not None
        own = cls.score_reasons(layer.softmax_scale, has_alibi=has_alibi, has_window=has_window)
        return [*super().unsupported_reasons(layer, cache, batch), *own]

    @classmethod
    def score_reasons(cls, scale: float, *, has_alibi: bool, has_window: bool) -> list[str]:
        """Return why the kernels cannot compute such scores, beyond the declarations; an empty list if they can."""
        return scale_reasons(scale)


class FlashImpl(PagedImpl):
    """One layer. The library has no writer for slots, so the harness writes new keys and values."""

    backend: ClassVar[type[FlashBackend]]
    metadata_cls = PackedMetadata
    brings_writer = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reasons = self.backend.score_reasons(
            self.scale, has_alibi=self.alibi_slopes is not None, has_window=self._window_size is not None
        )
        if reasons:
            raise NotImplementedError(f"{self.backend.get_name()}: {'; '.join(reasons)}")

    def write(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        raise RuntimeError(f"{self.backend.get_name()} has no cache writer")

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
        name = self.backend.get_name()
        if not isinstance(metadata, PackedMetadata):
            raise TypeError(f"{name}: attn_metadata is a {type(metadata).__qualname__}, not a PackedMetadata")
        if not metadata.num_rows:
            return
        if caches is None and (key is None or value is None):
            raise ValueError(f"{name}: a layer without a cache needs key and value")
        rows = query[: metadata.num_rows]
        out, lse = self.answer(layer, rows, key, value, caches, metadata)
        store_results(metadata, out, lse, output, output_lse)

    @abstractmethod
    def answer(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        caches: tuple[Tensor, Tensor] | None,
        metadata: PackedMetadata,
    ) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of the step's rows: ``[rows, heads, size]`` and float32 ``[rows, heads]``.

        query: ``[rows, heads, size]``, at least one row. The other arguments are those of ``attend``; either ``caches``
        is given, or ``key`` and ``value`` are.
        """


def longest_query(metadata: PagedMetadata) -> int:
    """Return the bound of query lengths for a call on packed sequences; at least 2.

    At 1 the kernels may assume that every request, padding included, has exactly one row, and rearrange the rows.
    """
    return max(2, metadata.common.max_query_len)


def store_results(metadata: PagedMetadata, out: Tensor, lse: Tensor, output: Tensor, output_lse: Tensor | None) -> None:
    """Copy the results of a step's rows (``[rows, heads, size]``, ``[rows, heads]``) to ``output`` and ``output_lse``.

    In a captured graph some rows may be padding, which a call on packed sequences leaves unwritten; they become 0 and
    -inf. The log-sum-exp of rows that see nothing, which the kernels set to +inf, becomes -inf.
    """
    rows = len(out)
    is_row = torch.arange(rows, device=out.device) < metadata.common.query_start_loc[-1:]
    torch.where(is_row[:, None, None], out, out.new_zeros(()), out=output[:rows])
    if output_lse is not None:
        output_lse[:rows] = lse.masked_fill(~is_row[:, None] | torch.isposinf(lse), -torch.inf)
