"""``varlen_attn`` of torch as a candidate: pages where the kernels take them, packed keys elsewhere.

Where the installed function takes a page table, pages of a multiple of 256 tokens are read in place. Other pages, and
all pages with torch 2.11, are gathered into packed rows first, which its time includes. Not run on a GPU yet. Must not
know: cases, the reference's code.
"""

from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.candidates.flash_attn import limits
from attncheck.backends.candidates.flash_attn.layer import FlashBackend, FlashImpl, longest_query
from attncheck.backends.candidates.flash_attn.metadata import PackedBuilder, PackedMetadata
from attncheck.backends.candidates.torch_varlen import signature
from attncheck.backends.candidates.torch_varlen.packing import packed
from attncheck.backends.contract import AttentionLayer, AttentionType, Conventions


class TorchVarlenBackend(FlashBackend):
    """Any block size, both layouts. Soft cap and ALiBi are out of ``varlen_attn``'s reach, and declared so."""

    features = frozenset({"sliding_window", "non_causal", "lse", "kv_sharing", "short_keys"})
    conventions = Conventions(padded_rows="finite")
    supported_attn_types = tuple(AttentionType)

    @staticmethod
    def get_name() -> str:
        return "TORCH_VARLEN"

    @staticmethod
    def get_impl_cls() -> type["TorchVarlenImpl"]:
        return TorchVarlenImpl

    @staticmethod
    def get_builder_cls() -> type["TorchVarlenBuilder"]:
        return TorchVarlenBuilder

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        return [*super().unavailable_reasons(device), *signature.missing_reasons()]

    @classmethod
    def version(cls) -> str:
        return f"torch {torch.__version__}"


class TorchVarlenBuilder(PackedBuilder):
    """Makes steps."""

    backend = TorchVarlenBackend


class TorchVarlenImpl(FlashImpl):
    """One layer."""

    backend = TorchVarlenBackend

    @cached_property
    def _known(self) -> frozenset[str]:
        return signature.parameters()

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
        if signature.takes_pages(self._known) and caches[0].shape[1] % limits.PAGE_SIZES.base == 0:
            pages: dict[str, Any] = {"block_table": common.block_table_tensor, "seqused_k": common.seq_lens}
            if "num_splits" in self._known:
                pages["num_splits"] = 1  # split keys are combined wrongly over pages (pytorch issue 194167)
            return self._call(query, *caches, metadata.cu_seq_lens, common.max_seq_len, metadata, pages)
        rows = packed(self.params(metadata), metadata, layer, caches, query.dtype)
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
        """``varlen_attn``. Its log-sum-exp comes as ``[heads, rows]``, though the documentation says the reverse."""
        params, asked = self.params(metadata), dict(options)
        if "enable_gqa" in self._known:
            asked["enable_gqa"] = True
        elif key is not None and value is not None and self.num_heads != self.num_kv_heads:
            # Equally many heads is all that the older function documents.
            key, value = (rows.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for rows in (key, value))
        left, right = params.window
        varlen = signature.module()
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
            window_size=(left, 0 if params.causal else right),  # a tuple: (-1, 0) is recognised by comparison
            **asked,
        )
        return out, lse.t()
