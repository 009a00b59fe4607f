"""The contract of a first-generation backend: its properties and factories, its metadata builder, its graph state.

Names and signatures are vLLM's. Once per step, a model runner prepares a builder and builds metadata. It replays a
graph for a batch of decodes that fits a captured size; the state refills the tensors that the graph reads.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Generic

from torch import Tensor

from attncheck.reference.v0.impl import AttentionImpl
from attncheck.reference.v0.metadata import AttentionMetadata, TAttentionMetadata


class AttentionMetadataBuilder(ABC, Generic[TAttentionMetadata]):
    """Converts the scheduler's data of one step into metadata; one builder per input builder."""

    @abstractmethod
    def __init__(self, input_builder: Any) -> None:
        """Store the input builder, which owns the scheduler's data of every step."""
        raise NotImplementedError

    @abstractmethod
    def prepare(self) -> None:
        """Start a batch before its sequence groups are collected, and discard the state of the last batch."""
        raise NotImplementedError

    @abstractmethod
    def build(
        self, seq_lens: list[int], query_lens: list[int], cuda_graph_pad_size: int, batch_size: int
    ) -> TAttentionMetadata:
        """Return the step's metadata.

        seq_lens, query_lens: of every sequence of the batch; with a graph, ``seq_lens`` includes the padding.
        cuda_graph_pad_size: padding sequences up to the captured size; -1 if no graph is used.
        batch_size: sequences including the padding.
        """
        raise NotImplementedError


class AttentionState(ABC):
    """The tensors that captured graphs of one model runner read, and their refilling before a replay."""

    @abstractmethod
    def __init__(self, runner: Any) -> None:
        """Store the model runner."""
        raise NotImplementedError

    @abstractmethod
    def graph_capture(self, max_batch_size: int) -> AbstractContextManager[None]:
        """Return the context of the captures of all sizes, largest first; it holds buffers for ``max_batch_size``."""
        raise NotImplementedError

    @abstractmethod
    def graph_clone(self, batch_size: int) -> "AttentionState":
        """Return a state for the graph of one size; called during capture."""
        raise NotImplementedError

    @abstractmethod
    def graph_capture_get_metadata_for_batch(
        self, batch_size: int, is_encoder_decoder_model: bool = False
    ) -> AttentionMetadata:
        """Return metadata of a batch of decodes for a capture; the graph will read its tensors."""
        raise NotImplementedError

    @abstractmethod
    def get_graph_input_buffers(self, attn_metadata: Any, is_encoder_decoder_model: bool = False) -> dict[str, Tensor]:
        """Return, by name, the tensors of captured metadata into which each replay copies its values."""
        raise NotImplementedError

    @abstractmethod
    def prepare_graph_input_buffers(
        self, input_buffers: dict[str, Tensor], attn_metadata: Any, is_encoder_decoder_model: bool = False
    ) -> None:
        """Refill those tensors in place from a step's metadata."""
        raise NotImplementedError

    @abstractmethod
    def begin_forward(self, model_input: Any) -> None:
        """Prepare a step; called once per step, before its metadata is built."""
        raise NotImplementedError


class AttentionBackend(ABC):
    """Properties and factories of one kernel library: static and class members only, never instantiated."""

    accept_output_buffer: ClassVar[bool] = False
    """Whether ``forward`` writes to an ``output`` allocated by its caller; if not, it may return a new tensor."""

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """Return a stable, unique, upper-case name."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl[Any]]:
        """Return the impl class, instantiated once per layer."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        """Return the class of the builder's metadata."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def get_state_cls() -> type[AttentionState]:
        """Return the state class, instantiated once per model runner."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        """Return the builder class, instantiated once per input builder."""
        raise NotImplementedError

    @classmethod
    def make_metadata(cls, *args: Any, **kwargs: Any) -> AttentionMetadata:
        """Return an object of ``get_metadata_cls()``."""
        return cls.get_metadata_cls()(*args, **kwargs)

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Return the logical shape of a layer's cache; raise ``ValueError`` if no kernel supports that block size."""
        raise NotImplementedError

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        """Return the physical order of the logical dimensions; raising (the default) means the logical order."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def swap_blocks(src_kv_cache: Tensor, dst_kv_cache: Tensor, src_to_dst: Tensor) -> None:
        """Copy blocks of one cache into another, in place on ``dst_kv_cache``; ``src_kv_cache`` is not modified.

        src_to_dst: int64 ``[pairs, 2]`` on the host, rows (source block, destination block).
        """
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def copy_blocks(kv_caches: list[Tensor], src_to_dists: Tensor) -> None:
        """Copy blocks within every layer's cache, in place.

        src_to_dists: int64 ``[pairs, 2]`` on the caches' device, rows (source block, destination block). A source may
            occur in several rows, a destination in one.
        """
        raise NotImplementedError

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """Return (module, qualified name), by which layers are grouped."""
        return (cls.__module__, cls.__qualname__)
