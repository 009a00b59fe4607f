"""The metadata builder: converts the contract's arguments and metadata to vLLM's, and calls vLLM's builder."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from attncheck.backends.candidates.vllm import interpreted, package
from attncheck.backends.candidates.vllm.cache import their_spec
from attncheck.backends.candidates.vllm.config import soft_cap_entry, their_config
from attncheck.backends.candidates.vllm.layers import current, has_value_size, set_value_size
from attncheck.backends.candidates.vllm.trial import names_missing_parts
from attncheck.backends.contract import AttentionCGSupport, CommonAttentionMetadata, KVCacheSpec
from attncheck.backends.paged_metadata import topk_indices_of, with_own_host_tensors
from attncheck.reference.utilities.builder import AttentionMetadataBuilder


def their_metadata() -> type[Any]:
    """Return vLLM's ``CommonAttentionMetadata``. Raise ImportError if there is none."""
    found: type[Any] = package.find(
        "CommonAttentionMetadata", "vllm.v1.attention.backend", "vllm.v1.attention.backends.utils"
    )
    return found


def has_upper_bounds(theirs: type[Any]) -> bool:
    """Return whether lengths on the host may be upper bounds in vLLM's metadata; without the field they are exact."""
    return "seq_lens_cpu_upper_bound" in {field.name for field in fields(theirs)}


def their_fields(metadata: CommonAttentionMetadata, theirs: type[Any]) -> dict[str, Any]:
    """Return constructor arguments of ``theirs``, vLLM's ``CommonAttentionMetadata``, from ``metadata`` alone.

    Host tensors are copies, because vLLM 0.32's runner refills its own only after ``forward``.
    """
    metadata = with_own_host_tensors(metadata)
    there = {field.name for field in fields(theirs)}
    shared = {field.name: getattr(metadata, field.name) for field in fields(metadata) if field.name in there}
    derived = {
        "seq_lens_cpu_upper_bound": metadata.seq_lens_cpu.clone(),
        "max_logits_per_req": _max_logits(metadata),
    }
    return shared | {name: value for name, value in derived.items() if name in there}


def step_fields(
    metadata: CommonAttentionMetadata, theirs: type[Any], *, positions: Tensor, num_drafts: int = 0
) -> dict[str, Any]:
    """Return constructor arguments for a step given to a builder, including what only a model runner has.

    positions: int64 ``[num_actual_tokens]``, the position of every token in its request. num_drafts: draft tokens that
    a decoding request may have besides its own.
    """
    there = {field.name for field in fields(theirs)}
    known: dict[str, Any] = {"positions": positions, "is_prefilling": _is_prefilling(metadata, num_drafts)}
    if not has_upper_bounds(theirs):
        # A version that has upper bounds has these, too, but its runner sets them to None if they may not be exact.
        known["_seq_lens_cpu"] = metadata.seq_lens_cpu.clone()
        known["_num_computed_tokens_cpu"] = metadata.num_computed_tokens_cpu.clone()
    if "encoder_seq_lens_cpu" in there and metadata.encoder_seq_lens is not None:
        # In versions with both, the name without suffix is the device's; in versions with one, it is the host's.
        on_device = torch.from_numpy(metadata.encoder_seq_lens).to(metadata.seq_lens.device)
        known |= {"encoder_seq_lens": on_device, "encoder_seq_lens_cpu": metadata.encoder_seq_lens}
    return their_fields(metadata, theirs) | {name: value for name, value in known.items() if name in there}


def fill_positions(metadata: CommonAttentionMetadata, buffer: Tensor) -> Tensor:
    """Write each token's position in its request to the front of ``buffer`` (int64), 0 for padding; return the view."""
    starts = metadata.query_start_loc.long()
    row = torch.arange(metadata.num_actual_tokens, device=starts.device)
    request = torch.searchsorted(starts[1:], row, right=True).clamp(max=metadata.num_reqs - 1)
    # Lengths on the host may be upper bounds. Those of an encoder may be shorter than the query.
    positions = (metadata.seq_lens[request] - starts[request + 1] + row).clamp(min=0)
    return buffer[: len(row)].copy_(positions.masked_fill(row >= starts[-1], 0))


def _is_prefilling(metadata: CommonAttentionMetadata, num_drafts: int) -> Tensor:
    """Return bool ``[R]``, host: requests without context, and those with more rows than a decode; padding is False.

    A runner compares with the length of the prompt, which the metadata lack. So the last token of a prompt, if it is a
    chunk of its own, counts as a decode.
    """
    query_lens = metadata.query_start_loc_cpu.diff()
    fresh = metadata.num_computed_tokens_cpu[: len(query_lens)] <= 0
    return (query_lens > 0) & (fresh | (query_lens > 1 + num_drafts))


def _max_logits(metadata: CommonAttentionMetadata) -> int | None:
    """Return the maximum number of logits indices of a request, or None if the batch has none set."""
    if metadata.logits_indices_padded is None or metadata.num_logits_indices is None:
        return None
    indices = metadata.logits_indices_padded[: metadata.num_logits_indices].tolist()
    owners = np.searchsorted(metadata.query_start_loc_cpu[1:].numpy(), np.array(indices), side="right")
    return int(np.bincount(owners).max(initial=0)) if indices else 0


class VLLMBuilder(AttentionMetadataBuilder[Any]):
    """The builder of :attr:`their_backend`."""

    their_backend: ClassVar[type[Any]]
    """vLLM's class."""

    supports_update_block_table = supports_draft_decode_metadata_update = False

    @names_missing_parts("builder")
    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        """See the contract."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        chunk_size = getattr(kv_cache_spec, "attention_chunk_size", None)
        if chunk_size is not None:
            raise NotImplementedError(
                f"attention_chunk_size {chunk_size}: vLLM runs chunks as virtual requests, "
                "and passes no chunk size to a builder"
            )
        layers = _their_layers(layer_names, vllm_config)
        self.config = self.their_config(vllm_config, layers, kv_cache_spec)
        self.spec = self.spec_of(next(iter(layers.values()), None), self.config, kv_cache_spec)
        made = self.their_builder(kv_cache_spec)
        if has_value_size(self.their_backend):
            set_value_size(self.their_backend, kv_cache_spec.head_size_v)
        with current(self.config):
            self.theirs = made(self.spec, layer_names, self.config, device)
        self.reorder_batch_threshold = self.theirs.reorder_batch_threshold
        for claim in ("supports_update_block_table", "supports_draft_decode_metadata_update"):
            setattr(self, claim, getattr(self.theirs, claim, False))
        self._metadata_cls = their_metadata()
        speculative = vllm_config.speculative_config
        self._num_drafts = 0 if speculative is None else speculative.num_speculative_tokens
        # One buffer for all steps, because a captured graph reads it again.
        self._positions = self._position_buffer(vllm_config.scheduler_config.max_num_batched_tokens)

    @classmethod
    def their_config(cls, plain: Any, layers: Mapping[str, Any], spec: KVCacheSpec) -> Any:
        """Return vLLM's config for a group of ``layers`` (vLLM's, by name) with the cache of ``spec``."""
        caps = [layer.impl.logits_soft_cap for layer in layers.values() if hasattr(layer.impl, "logits_soft_cap")]
        return their_config(plain, layers, model=soft_cap_entry(next(iter(caps), None)))

    @classmethod
    def spec_of(cls, layer: Any, config: Any, spec: KVCacheSpec) -> Any:
        """Return vLLM's spec of the cache of ``layer``, a layer of vLLM's; if it is None, use only ``spec``."""
        return their_spec(layer, cls.their_backend, config, spec)

    @classmethod
    def their_builder(cls, spec: KVCacheSpec) -> type[Any]:
        """Return vLLM's builder class for such a group."""
        made: type[Any] = cls.their_backend.get_builder_cls()
        return made

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return the level that vLLM's builder declares for this config and spec."""
        made = cls.their_builder(kv_cache_spec)
        if not hasattr(made, "get_cudagraph_support"):
            return AttentionCGSupport[made.cudagraph_support.name]
        config = cls.their_config(vllm_config, {}, kv_cache_spec)
        spec = cls.spec_of(None, config, kv_cache_spec)
        with current(config):
            return AttentionCGSupport[made.get_cudagraph_support(config, spec).name]

    def get_varlen_cudagraph_max_query_len(self, _config: Any, _spec: Any) -> int | None:
        """Return what vLLM's builder declares for its own config; None if it has no such method."""
        method = getattr(self.theirs, "get_varlen_cudagraph_max_query_len", None)
        with current(self.config):
            return None if method is None else method(self.config, self.spec)

    @names_missing_parts("builder")
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """See the contract."""
        with interpreted.launches():
            return self.theirs.build(common_prefix_len, self._translated(common_attn_metadata), fast_build)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """See the contract; the runner's dummy requests count as decodes, not as prefills."""
        common = self._translated(common_attn_metadata)
        if getattr(common, "is_prefilling", None) is not None:
            common.is_prefilling = torch.zeros_like(common.is_prefilling)
        with interpreted.launches():
            return self.theirs.build_for_cudagraph_capture(common)

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> Any:
        """See the contract."""
        with interpreted.launches():
            return self.theirs.build_for_drafting(self._translated(common_attn_metadata), draft_index)

    def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
        """Return what vLLM's builder makes of its metadata for another block table, for a builder that claims to."""
        with interpreted.launches():
            return self.theirs.update_block_table(metadata, blk_table, slot_mapping)

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Update the metadata of vLLM's builder in place, for a builder that claims to do so in a graph."""
        with interpreted.launches():
            self.theirs.update_draft_decode_metadata(metadata)

    def _translated(self, metadata: CommonAttentionMetadata) -> Any:
        if topk_indices_of(metadata) is not None:
            raise NotImplementedError("topk_indices: vLLM's layers have an indexer only for classes of is_sparse")
        if metadata.num_actual_tokens > len(self._positions):
            self._positions = self._position_buffer(metadata.num_actual_tokens)
        positions = fill_positions(metadata, self._positions)
        made = self._metadata_cls
        return made(**step_fields(metadata, made, positions=positions, num_drafts=self._num_drafts))

    def _position_buffer(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros(num_tokens, dtype=torch.int64, device=self.device)


def _their_layers(layer_names: list[str], vllm_config: Any) -> dict[str, Any]:
    """Return the layers of the group in vLLM's form, by name, as far as the contract's config has them."""
    known = vllm_config.compilation_config.static_forward_context
    found = {name: known[name] for name in layer_names if name in known}
    return {
        name: attn_layer.impl.join(attn_layer) for name, attn_layer in found.items() if hasattr(attn_layer.impl, "join")
    }
