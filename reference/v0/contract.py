"""What a first-generation backend is: its facts and factories, its metadata builder, its graph state.

Names and signatures are vLLM's. A model runner prepares a builder and builds once a step; a batch of decodes that fits
a captured size is replayed: the state refills the tensors which the graph reads.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Generic

from torch import Tensor

from attncheck.reference.v0.impl import AttentionImpl
from attncheck.reference.v0.metadata import AttentionMetadata, TAttentionMetadata


class AttentionMetadataBuilder(ABC, Generic[TAttentionMetadata]):
    """Turns the scheduler's data of one step into metadata; made once per input builder."""

    @abstractmethod
    def __init__(self, input_builder: Any) -> None:
        """Remembers the input builder, which owns the scheduler's data of every step."""
        raise NotImplementedError

    @abstractmethod
    def prepare(self) -> None:
        """Starts a batch, before its sequence groups are collected: nothing of the last one survives."""
        raise NotImplementedError

    @abstractmethod
    def build(
        self, seq_lens: list[int], query_lens: list[int], cuda_graph_pad_size: int, batch_size: int
    ) -> TAttentionMetadata:
        """The step's metadata.

        seq_lens, query_lens: of every sequence of the batch; with a graph, ``seq_lens`` of the padding too.
        cuda_graph_pad_size: padding sequences up to the captured size; -1: no graph is used.
        batch_size: sequences including the padding.
        """
        raise NotImplementedError


class AttentionState(ABC):
    """What captured graphs of one model runner read, and how it is refilled before a replay."""

    @abstractmethod
    def __init__(self, runner: Any) -> None:
        """Remembers the model runner."""
        raise NotImplementedError

    @abstractmethod
    def graph_capture(self, max_batch_size: int) -> AbstractContextManager[None]:
        """Surrounds the captures of all sizes, the largest first; buffers for ``max_batch_size`` exist while open."""
        raise NotImplementedError

    @abstractmethod
    def graph_clone(self, batch_size: int) -> "AttentionState":
        """A state for the graph of one size; while capturing."""
        raise NotImplementedError

    @abstractmethod
    def graph_capture_get_metadata_for_batch(
        self, batch_size: int, is_encoder_decoder_model: bool = False
    ) -> AttentionMetadata:
        """Metadata of a batch of decodes to capture with; its tensors are what the graph will read."""
        raise NotImplementedError

    @abstractmethod
    def get_graph_input_buffers(self, attn_metadata: Any, is_encoder_decoder_model: bool = False) -> dict[str, Tensor]:
        """By name, the tensors of captured metadata into which each replay's values must be copied."""
        raise NotImplementedError

    @abstractmethod
    def prepare_graph_input_buffers(
        self, input_buffers: dict[str, Tensor], attn_metadata: Any, is_encoder_decoder_model: bool = False
    ) -> None:
        """Refills those tensors in place from a step's metadata."""
        raise NotImplementedError

    @abstractmethod
    def begin_forward(self, model_input: Any) -> None:
        """Called once a step, before its metadata is built."""
        raise NotImplementedError


class AttentionBackend(ABC):
    """Facts and factories of one kernel library: static and class members only, never instantiated."""

    accept_output_buffer: ClassVar[bool] = False
    """Whether ``forward`` fills an ``output`` made by its caller; without that it may return a tensor of its own."""

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """Stable, unique, upper case."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl[Any]]:
        """The class made once a layer."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        """The class of the builder's products."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def get_state_cls() -> type[AttentionState]:
        """The class made once a model runner."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        """The class made once an input builder."""
        raise NotImplementedError

    @classmethod
    def make_metadata(cls, *args: Any, **kwargs: Any) -> AttentionMetadata:
        """An object of ``get_metadata_cls()``."""
        return cls.get_metadata_cls()(*args, **kwargs)

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Logical shape of the cache of a layer; raises ``ValueError`` where no kernel has that block size."""
        raise NotImplementedError

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        """Physical order of the logical dimensions; raising (the default) means the logical order."""
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def swap_blocks(src_kv_cache: Tensor, dst_kv_cache: Tensor, src_to_dst: Tensor) -> None:
        """Copies blocks of one cache into another, in place on ``dst_kv_cache``; nothing comes back.

        src_to_dst: int64 ``[pairs, 2]`` on the host, rows (source block, destination block).
        """
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def copy_blocks(kv_caches: list[Tensor], src_to_dists: Tensor) -> None:
        """Copies blocks within every layer's cache, in place.

        src_to_dists: int64 ``[pairs, 2]`` on the caches' device, rows (source block, destination block); a source may
            stand in several rows, a destination in one.
        """
        raise NotImplementedError

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """(module, qualified name): the identity by which layers are grouped."""
        return (cls.__module__, cls.__qualname__)
