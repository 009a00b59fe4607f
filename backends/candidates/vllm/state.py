"""vLLM's classes for layers with a state, such as ``vllm:GDN_ATTN``: their builders, and the layers that use them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from attncheck.backends import interpreter
from attncheck.backends.candidates.vllm import interpreted, package
from attncheck.backends.candidates.vllm.builder import VLLMBuilder
from attncheck.backends.candidates.vllm.config import their_config
from attncheck.backends.candidates.vllm.selection import named_after
from attncheck.backends.candidates.vllm.state_layers import LAYERS, VLLMStateImpl, even_head_size
from attncheck.backends.candidates.vllm.trial import names_missing_parts
from attncheck.backends.contract import CommonAttentionMetadata
from attncheck.backends.state import StateBackend, StateSpec
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, RecurrenceOptions


class StateSpaceBuilder(VLLMBuilder):
    """The builder of :attr:`their_backend`."""

    @classmethod
    def their_config(cls, plain: Any, layers: Mapping[str, Any], spec: Any) -> Any:
        """Return the config of a model with the usual chunks of Mamba-2."""
        return their_config(plain, layers, model={"mamba_chunk_size": 256, **even_head_size(plain)})

    @classmethod
    def spec_of(cls, layer: Any, config: Any, spec: Any) -> Any:
        """Return vLLM's spec of the states of ``spec``; a state with one element if that is the spec of a KV cache."""
        specs = package.module("vllm.v1.kv_cache_interface")
        if not isinstance(spec, StateSpec):
            return specs.MambaSpec(block_size=spec.block_size, shapes=((1,),), dtypes=(spec.dtype,))
        return specs.MambaSpec(
            block_size=spec.block_size,
            shapes=spec.shapes,
            dtypes=spec.dtypes,
            num_speculative_blocks=spec.num_speculative_blocks,
        )

    @names_missing_parts("builder")
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        num_accepted_tokens: Tensor | None = None,
    ) -> Any:
        """See the contract of attention; a step of a layer with a state has ``num_accepted_tokens`` if it has drafts.

        vLLM's runner pads requests only for graphs, which a CPU does not have. So padding requests are left out.
        """
        if not isinstance(self.kv_cache_spec, StateSpec):
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata = _without_padding(common_attn_metadata)
        common = self._translated(metadata)
        drafts: dict[str, Any] = {}
        if num_accepted_tokens is not None:
            lengths = metadata.query_start_loc_cpu.diff()
            drafts["num_accepted_tokens"] = num_accepted_tokens[: metadata.num_reqs]
            drafts["num_decode_draft_tokens_cpu"] = (lengths - 1).masked_fill(common.is_prefilling, -1)
        with interpreted.launches():
            return self.theirs.build(common_prefix_len, common, **drafts)

    def _translated(self, metadata: CommonAttentionMetadata) -> Any:
        common = super()._translated(metadata)
        if isinstance(self.kv_cache_spec, StateSpec):
            columns = 1 + self.kv_cache_spec.num_speculative_blocks
            table = common.block_table_tensor[:, :columns]  # vLLM's has no others, and so other strides
            common.block_table_tensor = table.clone(memory_format=torch.contiguous_format)
        else:
            common.block_table_tensor = common.block_table_tensor[:, :1]
        return common


def _without_padding(metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
    count = int((metadata.query_start_loc_cpu.diff() > 0).sum())
    return replace(
        metadata,
        query_start_loc=metadata.query_start_loc[: count + 1],
        query_start_loc_cpu=metadata.query_start_loc_cpu[: count + 1],
        seq_lens=metadata.seq_lens[:count],
        seq_lens_cpu=metadata.seq_lens_cpu[:count],
        num_computed_tokens_cpu=metadata.num_computed_tokens_cpu[:count],
        num_reqs=count,
        num_actual_tokens=int(metadata.query_start_loc_cpu[count]),
        block_table_tensor=metadata.block_table_tensor[:count],
    )


class StateSpaceBackend(StateBackend):
    """A class of vLLM's for layers with a state, such as ``vllm:MAMBA2``.

    In a case of attention, only its builder is driven. It gets what vLLM's runner passes: a spec of the state, and for
    each request the page that holds its state.
    """

    builder_only = True
    their_backend: ClassVar[type[Any]]
    """vLLM's class."""

    their_layer: ClassVar[type[VLLMStateImpl] | None]
    """The layer that runs in cases of layers with a state; None if attncheck has none for this class."""

    @classmethod
    def get_kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """See the contract."""
        raise NotImplementedError("a layer with a state has no cache of keys and values")

    @classmethod
    def unsupported_reasons(cls, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """See the contract; only the batch of a case of attention is used."""
        options = batch.path.options
        if not isinstance(options, RecurrenceOptions):
            others = [] if batch.path.name == "paged" else [f"path {batch.path.name}: its builder is given plain steps"]
            return super().unsupported_reasons(layer, cache, batch) + others
        if cls.their_layer is None:
            return ["attncheck runs no kernels of this class, only its builder"]
        return super().unsupported_reasons(layer, cache, batch) or cls.their_layer.refusals(layer, options)

    @classmethod
    def unavailable_case_reasons(cls, device: str, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """See the contract; kernels that cannot be launched, or that were never run by attncheck."""
        if cls.their_layer is None or not isinstance(batch.path.options, RecurrenceOptions):
            return []
        if cls.their_layer.is_of_triton:
            return interpreted.missing_triton()
        on_cpu = package.platform().is_cpu()
        return [] if on_cpu else ["attncheck runs the kernels of this layer that are built for CPUs, not Triton's"]

    @classmethod
    def required_environment(cls, device: str) -> dict[str, str]:
        """See the contract; Triton kernels need a variable on a CPU."""
        needs_triton = cls.their_layer is not None and cls.their_layer.is_of_triton
        return interpreter.required_environment(device) if needs_triton else {}

    @classmethod
    def version(cls) -> str:
        """Return vLLM's version, marked if kernels are interpreted."""
        is_marked = cls.their_layer is not None and cls.their_layer.is_of_triton
        return interpreter.marked(package.version()) if is_marked else package.version()


def state_space_backend(theirs: type[Any]) -> type[StateSpaceBackend]:
    """Return the candidate for a class of vLLM's for layers with a state."""
    builder = named_after(theirs, StateSpaceBuilder, "Builder", {})
    layer = LAYERS.get(theirs.get_name())
    impl = named_after(theirs, layer or VLLMStateImpl, "Impl", {})
    members: dict[str, Any] = {
        "supported_layouts": ("NHD", "HND"),
        "supported_devices": (package.platform().device_type,),
        "supported_rules": () if layer is None else (layer.their_rule,),
        "max_speculative_tokens": None if layer is None else layer.max_drafts,
        "their_layer": layer,
        "get_name": staticmethod(theirs.get_name),
        "get_impl_cls": staticmethod(lambda: impl),
        "get_builder_cls": staticmethod(lambda: builder),
    }
    return named_after(theirs, StateSpaceBackend, "", members)
