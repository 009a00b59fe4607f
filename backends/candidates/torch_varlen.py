"""``varlen_attn`` of torch as a candidate: over pages where the kernels support them, over packed keys elsewhere.

If the installed function accepts a page table, pages of a multiple of 256 tokens are read in place. Other pages, and
all pages with torch 2.11, are first gathered into packed rows; timings include that. The arguments of ``varlen_attn``
differ between releases, so its signature is inspected, not the version.
"""

import importlib
import inspect
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.base.gathering import unpaged_requests
from attncheck.backends.candidates.flash_attn.layer import (
    PAGE_SIZES,
    FlashBackend,
    FlashImpl,
    PackedBuilder,
    PackedMetadata,
    longest_query,
)
from attncheck.backends.contract import AttentionLayer, AttentionType, Conventions
from attncheck.backends.paged_metadata import PagedMetadata
from attncheck.reference.attention.params import AttentionParams


class TorchVarlenBackend(FlashBackend):
    """Backend for any block size and both layouts; ``varlen_attn`` supports neither soft cap nor ALiBi."""

    features = frozenset({"sliding_window", "non_causal", "lse", "kv_sharing", "short_keys"})
    conventions = Conventions(padded_rows="finite")
    supported_attn_types = tuple(AttentionType)

    get_name = staticmethod(lambda: "TORCH_VARLEN")
    get_impl_cls = staticmethod(lambda: TorchVarlenImpl)
    get_builder_cls = staticmethod(lambda: TorchVarlenBuilder)

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        return [*super().unavailable_reasons(device), *missing_varlen_reasons()]

    @classmethod
    def version(cls) -> str:
        return f"torch {torch.__version__}"


class TorchVarlenBuilder(PackedBuilder):
    """Builder of :class:`PackedMetadata`."""

    backend = TorchVarlenBackend


class TorchVarlenImpl(FlashImpl):
    """One layer."""

    backend = TorchVarlenBackend

    @cached_property
    def _known(self) -> frozenset[str]:
        return varlen_parameters()

    def answer(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        caches: tuple[Tensor, Tensor] | None,
        metadata: PackedMetadata,
    ) -> tuple[Tensor, Tensor]:
        common = metadata.common
        if caches is None:
            return self._call(query, key, value, common.query_start_loc, longest_query(metadata), metadata)
        if takes_pages(self._known) and caches[0].shape[1] % PAGE_SIZES.base == 0:
            pages: dict[str, Any] = {"block_table": common.block_table_tensor, "seqused_k": common.seq_lens}
            if "num_splits" in self._known:
                pages["num_splits"] = 1  # split keys are combined wrongly over pages (pytorch issue 194167)
            return self._call(query, *caches, metadata.cu_seq_lens, common.max_seq_len, metadata, pages)
        rows = packed_keys(self.params(metadata), metadata, layer, caches, query.dtype)
        return self._call(query, rows.key, rows.value, rows.ends, rows.longest, metadata)

    def _call(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_ends: Tensor,
        longest: int,
        metadata: PackedMetadata,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[Tensor, Tensor]:
        """Call ``varlen_attn``; its log-sum-exp is ``[heads, rows]``, although its documentation states the reverse."""
        params, arguments = self.params(metadata), dict(options)
        if "enable_gqa" in self._known:
            arguments["enable_gqa"] = True
        elif key is not None and value is not None and self.num_heads != self.num_kv_heads:
            # The older function is documented for equal numbers of heads only.
            key, value = (rows.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for rows in (key, value))
        left, right = params.window
        varlen = varlen_module()
        out, lse = varlen.varlen_attn(
            query,
            key,
            value,
            metadata.common.query_start_loc,
            key_ends,
            longest_query(metadata),
            longest,
            return_aux=varlen.AuxRequest(lse=True),
            scale=self.scale,
            window_size=(left, 0 if params.causal else right),  # must be a tuple: (-1, 0) is recognised by comparison
            **arguments,
        )
        self.chosen_kernels.add(flash_implementation())
        return out, lse.t()


_NEEDED = ("return_aux", "scale", "window_size")
_FOR_PAGES = ("block_table", "seqused_k")


def varlen_module() -> Any:
    """Import and return ``torch.nn.attention.varlen``; on demand, since loading torch's compiler takes seconds."""
    return importlib.import_module("torch.nn.attention.varlen")


def varlen_parameters() -> frozenset[str]:
    """Return the names of the arguments of ``varlen_attn``."""
    return frozenset(inspect.signature(varlen_module().varlen_attn).parameters)


def flash_implementation() -> str:
    """Return the FlashAttention that ``varlen_attn`` calls: torch's own FA2, or the activated replacement."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return (None if current is None else current()) or "FA2"


def takes_pages(known: frozenset[str]) -> bool:
    """Return whether keys may stay in pages for a ``varlen_attn`` with the arguments ``known``."""
    return known.issuperset(_FOR_PAGES)


def missing_varlen_reasons() -> list[str]:
    """Return why this torch's function cannot be called on a GPU; an empty list if it can."""
    if not torch.backends.cuda.is_flash_attention_available():
        return [f"torch {torch.__version__} was built without FlashAttention"]
    missing = [name for name in _NEEDED if name not in varlen_parameters()]
    return [f"torch {torch.__version__}: varlen_attn takes no {', '.join(missing)}"] if missing else []


@dataclass(frozen=True)
class PackedKeys:
    """The keys of a step, request by request, from the first key that some row sees to the request's last.

    key, value: ``[keys, num_kv_heads, head size]``. ends: int32 ``[R + 1]``, 0 and the end of each request's keys; a
    request without rows has none. longest: the maximum number of keys of one request.
    """

    key: Tensor
    value: Tensor
    ends: Tensor
    longest: int


def packed_keys(
    params: AttentionParams,
    metadata: PagedMetadata,
    layer: AttentionLayer,
    caches: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> PackedKeys:
    """Return the step's keys and values, gathered from their pages; the step must have rows.

    Lengths are read on the host, so such a step cannot be part of a CUDA graph.
    """
    found = list(unpaged_requests(params, metadata, layer, None, None, caches, dtype))
    lens = iter([len(piece.key) for piece in found])
    counts = [next(lens) if query_len else 0 for query_len in metadata.query_lens]
    ends = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=found[0].key.device)
    return PackedKeys(
        key=torch.cat([piece.key for piece in found]),
        value=torch.cat([piece.value for piece in found]),
        ends=ends,
        longest=max(counts),
    )
