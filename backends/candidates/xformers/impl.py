"""The impl of candidate ``xformers``: the library's operator or attncheck's kernel for each request of a step.

The library's split-K operator walks a page in tiles of ``BLOCK_N`` keys. Its check refuses a page size that is no
multiple of that; without the check it would read out of bounds. So the largest tile that divides the page is chosen,
the operator is named explicitly, and every call goes through the library's public function, which checks. The call is
a custom operator of torch, so that call recorders, such as the emulation of graphs, see an interpreted launch.

Imports xformers and Triton, and so is imported lazily.
"""

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.candidates.triton_unified.attention import unified_attention
from attncheck.backends.candidates.triton_unified.cache import reshape_and_cache
from attncheck.backends.candidates.xformers.backend import XFormersBackend, quiet_import
from attncheck.backends.contract import AttentionCGSupport, AttentionLayer, CommonAttentionMetadata
from attncheck.backends.interpreter import is_interpreted
from attncheck.backends.paged import PagedImpl
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata

with quiet_import():
    from xformers.ops import fmha
    from xformers.ops.fmha import attn_bias, triton_splitk

NO_EXTENSION = "xFormers wasn't build with CUDA support"
"""Reason that every operator of the library gives for GPU tensors if its compiled extension could not be loaded."""

TILES = (64, 32, 16)
"""Keys that a program reads at once, the operator's default first."""


class PagedSplitK(triton_splitk.FwOp):  # type: ignore[misc] # the library is untyped
    """The library's operator; if its kernel is interpreted, also for CPU and float32.

    The library chooses the number of key splits from the number of requests and the width of the table, not from
    lengths.
    """

    if is_interpreted():
        SUPPORTED_DEVICES = frozenset({"cuda", "cpu"})
        SUPPORTED_DTYPES = frozenset({*triton_splitk.FwOp.SUPPORTED_DTYPES, torch.float32})

    @classmethod
    def not_supported_reasons(cls, d: Any) -> list[str]:
        """Return the library's reasons except its missing extension, which this Triton operator does not use."""
        return [reason for reason in super().not_supported_reasons(d) if reason != NO_EXTENSION]

    @classmethod
    def get_extra_args(cls, **arguments: Any) -> dict[str, Any]:
        """Return tile, warps and stages; without a GPU the class's own, since the library would query the GPU model."""
        if torch.cuda.is_available():
            launch: dict[str, Any] = super().get_extra_args(**arguments)
            return launch
        return {
            "BLOCK_M": cls.BLOCK_M,
            "BLOCK_N": cls.BLOCK_N,
            "num_warps": cls.NUM_WARPS,
            "num_stages": cls.NUM_STAGES,
        }


_OPERATORS: dict[int, type[PagedSplitK]] = {
    tile: type(f"PagedSplitK{tile}", (PagedSplitK,), {"BLOCK_N": tile, "NAME": f"paged_triton_splitK_n{tile}"})
    for tile in TILES
}


def operator_for(page_size: int) -> type[PagedSplitK]:
    """Return the operator with the largest tile that divides the page; raise ``ValueError`` if none does."""
    for tile in TILES:
        if page_size % tile == 0:
            return _OPERATORS[tile]
    raise ValueError(f"page size {page_size} is no multiple of {TILES[-1]}")


def supported_head_sizes() -> list[int]:
    """Return, ascending, the sizes that the operator accepts, checked one by one up to its largest."""
    sizes = range(1, int(PagedSplitK.SUPPORTED_MAX_K) + 1)
    return [size for size in sizes if not PagedSplitK.shape_not_supported_reasons(1, 1, size, size)]


def single_token_bias(seq_lens: Tensor, block_table: Tensor, page_size: int) -> Any:
    """Return the library's bias for one query row per request, which refers to the tensors of the step.

    seq_lens: int32 ``[n]``; 0 is a row that sees nothing, whose output is 0. block_table: int32 ``[n, pages]``. Nothing
    is read from the device: the numbers on the host are bounds, and no length exceeds the table. Refilling the two
    tensors therefore changes the bias, also of a call in a CUDA graph.
    """
    requests, capacity = len(seq_lens), block_table.shape[1] * page_size
    starts = torch.arange(requests + 1, device=seq_lens.device)
    return attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(
        q_seqinfo=attn_bias._SeqLenInfo(
            seqstart=starts, max_seqlen=1, min_seqlen=1, seqstart_py=list(range(requests + 1))
        ),
        k_seqinfo=attn_bias._PaddedSeqLenInfo(
            seqstart=starts * capacity,
            max_seqlen=capacity,
            min_seqlen=0,
            seqstart_py=[request * capacity for request in range(requests + 1)],
            seqlen=seq_lens.contiguous(),
            seqlen_py=[capacity] * requests,
            padding=capacity,
        ),
        block_tables=block_table,
        page_size=page_size,
    )


def grouped_operands(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, keys and values in the library's form: ``[1, rows or tokens, num_kv_heads, group, head size]``.

    query: ``[rows, num_heads, head size]``. key_cache, value_cache: ``[blocks, page size, num_kv_heads, head size]``,
    viewable as one run of tokens (``RuntimeError`` if heads precede tokens).
    """
    num_kv_heads, head_size = key_cache.shape[2:]
    group = query.shape[1] // num_kv_heads
    key, value = (
        cache.view(1, -1, num_kv_heads, 1, head_size).expand(-1, -1, -1, group, -1)
        for cache in (key_cache, value_cache)
    )
    return query.view(1, -1, num_kv_heads, group, head_size), key, value


@torch.library.custom_op("attncheck::xformers_paged_decode", mutates_args=("output", "output_lse"))
def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    output: Tensor,
    output_lse: Tensor | None,
) -> None:
    """Attend, for each row ``i``, to the first ``seq_lens[i]`` keys of the pages in row ``i`` of the table.

    query, output: ``[n, num_heads, head size]``, the rows contiguous. key_cache, value_cache: ``[blocks, page size,
    num_kv_heads, head size]``, viewable as one run of tokens (``RuntimeError`` if heads precede tokens). block_table:
    int32 ``[n, pages]``. seq_lens: int32 ``[n]``, none beyond the table; 0 gives zeros. output_lse: float32 ``[n,
    num_heads]``, natural; -inf if a row sees nothing.

    Raises:
        ValueError: the operator's own check refuses dtypes, sizes or strides, with its reasons.
    """
    rows, num_heads, head_size = query.shape
    page_size = key_cache.shape[1]
    query_grouped, key, value = grouped_operands(query, key_cache, value_cache)
    bias, operator = single_token_bias(seq_lens, block_table, page_size), operator_for(page_size)
    with torch.cuda.device_of(query):
        if output_lse is None:
            out = fmha.memory_efficient_attention_forward(query_grouped, key, value, bias, scale=scale, op=operator)
        else:
            out, lse = fmha.memory_efficient_attention_forward_requires_grad(
                query_grouped, key, value, bias, scale=scale, op=operator
            )
            # [1, num_kv_heads, group, n], float64 for float32
            output_lse.copy_(lse[0].permute(2, 0, 1).reshape(rows, num_heads))
    output.copy_(out.view(rows, num_heads, head_size))


@paged_decode.register_fake
def _(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    output: Tensor,
    output_lse: Tensor | None,
) -> None:
    """Return nothing: the operator only mutates its arguments."""


UNIFIED = "attncheck's unified_attention"
"""Name in records of the kernel for all other rows."""


@dataclass
class XFormersMetadata(PagedMetadata):
    """Metadata of one step; the first ``num_decodes`` requests have one row each, rows ``[0, num_decodes)``."""

    num_decodes: int = 0


class XFormersBuilder(PagedBuilder):
    """Builder that counts decodes by the lengths on the host; the kernels read lengths on the device.

    A graph of single tokens holds the operator. Any other graph holds only attncheck's kernel, also for decodes in a
    replay, because a graph would freeze their number.
    """

    backend = XFormersBackend
    metadata_cls = XFormersMetadata
    cudagraph_support = AttentionCGSupport.ALWAYS
    reorder_batch_threshold = 1

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> XFormersMetadata:
        """Build the metadata; raise ValueError for a length beyond its table row, where the operator would read."""
        step = XFormersMetadata(**vars(super().build(common_prefix_len, common_attn_metadata, fast_build)))
        capacity = common_attn_metadata.block_table_tensor.shape[1] * self.kv_cache_spec.block_size
        longest = max(step.seq_lens, default=0)
        if longest > capacity:
            raise ValueError(
                f"{self.backend.get_name()}: seq_len {longest} exceeds the {capacity} slots of a table row"
            )
        step.num_decodes = sum(1 for _ in takewhile(lambda query_len: query_len == 1, step.query_lens))
        return step

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> XFormersMetadata:
        """Build the metadata for a capture; a mixed graph counts no decodes."""
        step = self.build(0, common_attn_metadata)
        # Dummy requests of a mixed graph may have one row each. Only the maximum query length distinguishes the graphs.
        if common_attn_metadata.max_query_len > 1:
            step.num_decodes = 0
        return step


class XFormersImpl(PagedImpl):
    """One layer."""

    backend = XFormersBackend
    metadata_cls = XFormersMetadata

    def write(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)

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
        if caches is None:
            raise RuntimeError(
                f"{self.backend.get_name()}: a layer of attn_type {self.attn_type} has no cache to attend to"
            )
        common, n = metadata.common, self._num_decodes(metadata)
        lens, table, starts = common.seq_lens, common.block_table_tensor, common.query_start_loc
        if n:
            lse = None if output_lse is None else output_lse[:n]
            paged_decode(query[:n], *caches, table[:n], lens[:n], self.scale, output[:n], lse)
            self.chosen_kernels.add(operator_for(caches[0].shape[1]).NAME)
        if n < metadata.num_rows:
            key_cache, value_cache = caches
            unified_attention(
                query[n:],
                key_cache,
                value_cache,
                output[n:],
                block_table=table[n:],
                seq_lens=lens[n:],
                query_start_loc=starts[n:] - n if n else starts,
                max_query_len=common.max_query_len,
                params=self.params(metadata),
                output_lse=None if output_lse is None else output_lse[n:],
            )
            self.chosen_kernels.add(UNIFIED)

    def _wrong_cache(self, kv_cache: Tensor, dtype: torch.dtype) -> list[str]:
        """Return what is wrong with the cache, also if it is not one run of tokens, before anything is written."""
        if wrong := super()._wrong_cache(kv_cache, dtype):
            return wrong
        strides = kv_cache.stride()
        is_run = kv_cache.shape[1] == 1 or strides[1] == kv_cache.shape[2] * strides[2]
        return [] if is_run else [f"kv_cache has strides {strides}: its tokens are not one run"]

    def _num_decodes(self, metadata: PagedMetadata) -> int:
        """Return the number of leading requests for the operator, which supports neither window nor soft cap."""
        is_plain = self.sliding_window[0] < 0 and self.logits_soft_cap is None
        return metadata.num_decodes if is_plain and isinstance(metadata, XFormersMetadata) else 0
