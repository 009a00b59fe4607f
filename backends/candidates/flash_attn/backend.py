"""Dao-AILab's FlashAttention-2 (``flash-attn``) as a candidate over pages of a multiple of 256 tokens.

It calls two functions: ``flash_attn_with_kvcache``, which may split the keys of a request, for steps with few and
equally many rows per request, and ``flash_attn_varlen_func`` for all other steps, including encoders. It has not been
run on a GPU yet.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.base import machine
from attncheck.backends.candidates.flash_attn.layer import (
    PAGE_SIZES,
    FlashBackend,
    FlashImpl,
    PackedBuilder,
    PackedMetadata,
    longest_query,
)
from attncheck.backends.contract import AttentionLayer, AttentionType, Conventions, MultipleOf
from attncheck.backends.uniform import uniform_query_len

_KNOWN_SERIES = "2.8"
"""Version series whose signatures and kernels these modules are written against (2.8.3)."""


def library_version() -> str:
    """Return the installed version, or "". flash-attn 4 is another distribution with the same package name."""
    return machine.installed_version("flash-attn") or ""


def missing_library_reasons() -> list[str]:
    """Return why the library cannot be called here, without importing it; an empty list if it can."""
    found = library_version()
    if not found:
        return ["flash-attn is not installed"]
    if found.split(".")[:2] != _KNOWN_SERIES.split("."):
        return [f"flash-attn {found}: written against {_KNOWN_SERIES}"]
    return []


def library_functions() -> Any:
    """Import and return the module with ``flash_attn_varlen_func`` and ``flash_attn_with_kvcache``."""
    return importlib.import_module("flash_attn")


UNIFORM_ROWS = 16
"""Maximum rows per request of a step that counts as decoding, or as verifying drafts."""


class FlashAttnBackend(FlashBackend):
    """Backend for head sizes up to 256 that are multiples of 8; both layouts; window and soft cap in any combination.

    ALiBi's bias is ``slope * j`` under the causal mask, which shifts only the log-sum-exp, and ``-slope * |i - j|``
    under any other mask. Two combinations are not supported: with a causal window the output is right but the
    log-sum-exp is measured from another position, and where a row sees later keys the bias differs from the contract's.
    """

    features = frozenset(
        {"sliding_window", "logits_soft_cap", "alibi", "non_causal", "lse", "kv_sharing", "short_keys"}
    )
    conventions = Conventions(alibi_reference="zero", padded_rows="finite")
    supported_attn_types = tuple(AttentionType)

    get_name = staticmethod(lambda: "FLASH_ATTN")
    get_impl_cls = staticmethod(lambda: FlashAttnImpl)
    get_builder_cls = staticmethod(lambda: FlashAttnBuilder)

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        return [PAGE_SIZES]

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        reasons = [*super().unavailable_reasons(device), *missing_library_reasons()]
        return reasons or machine.import_reasons("flash_attn")

    @classmethod
    def score_reasons(cls, scale: float, *, has_alibi: bool, has_window: bool) -> list[str]:
        reasons = super().score_reasons(scale, has_alibi=has_alibi, has_window=has_window)
        if has_alibi and has_window:
            reasons.append("ALiBi beside a sliding window: the log-sum-exp is then measured from another place")
        return reasons

    @classmethod
    def version(cls) -> str:
        found = library_version()
        return ", ".join([super().version(), *([f"flash-attn {found}"] if found else [])])


class FlashAttnBuilder(PackedBuilder):
    """Builder of :class:`PackedMetadata`."""

    backend = FlashAttnBackend


class FlashAttnImpl(FlashImpl):
    """One layer."""

    backend = FlashAttnBackend

    def answer(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        caches: tuple[Tensor, Tensor] | None,
        metadata: PackedMetadata,
    ) -> tuple[Tensor, Tensor]:
        query_len = uniform_query_len(metadata, UNIFORM_ROWS)
        # A graph for mixed lengths may be captured with equal ones; its max_query_len is then not their length.
        if caches is None or query_len is None or query_len != metadata.common.max_query_len:
            return self._packed(query, key, value, caches, metadata)
        return self._uniform(query.unflatten(0, (-1, query_len)), *caches, metadata)

    def _uniform(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: PackedMetadata
    ) -> tuple[Tensor, Tensor]:
        """Attend with ``query [requests, rows, heads, size]``; padding, which has no keys, gets 0."""
        common, num_reqs = metadata.common, len(query)
        out, lse = library_functions().flash_attn_with_kvcache(
            query,
            key_cache,
            value_cache,
            cache_seqlens=common.seq_lens[:num_reqs],
            block_table=common.block_table_tensor[:num_reqs],
            return_softmax_lse=True,
            **self._scores(metadata, query.device),
        )
        self.chosen_kernels.add("FA2 flash_attn_with_kvcache")
        return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    def _packed(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        caches: tuple[Tensor, Tensor] | None,
        metadata: PackedMetadata,
    ) -> tuple[Tensor, Tensor]:
        """Attend to requests of any lengths; without caches, key and value have the rows of the same requests."""
        common, is_paged = metadata.common, caches is not None
        out, lse, _ = library_functions().flash_attn_varlen_func(
            query,
            *((key, value) if caches is None else caches),
            cu_seqlens_q=common.query_start_loc,
            cu_seqlens_k=metadata.cu_seq_lens if is_paged else common.query_start_loc,
            max_seqlen_q=longest_query(metadata),
            max_seqlen_k=common.max_seq_len if is_paged else longest_query(metadata),
            return_attn_probs=True,  # returns the log-sum-exp; without dropout no probabilities are stored
            block_table=common.block_table_tensor if is_paged else None,
            **self._scores(metadata, query.device),
        )
        self.chosen_kernels.add("FA2 flash_attn_varlen_func")
        return out, lse.t()

    def _scores(self, metadata: PackedMetadata, device: torch.device) -> dict[str, Any]:
        """Return the arguments on scores that both functions share."""
        params = self.params(metadata)
        return {
            "softmax_scale": self.scale,
            "causal": params.causal,
            "window_size": params.window,
            "softcap": self.logits_soft_cap or 0.0,
            "alibi_slopes": self.slopes_on(device),
        }
