"""The contract of a first-generation backend: its properties and factories, its metadata builder, its graph state.

Names and signatures are vLLM's. Once per step, a model runner prepares a builder and builds metadata. It replays a
graph for a batch of decodes that fits a captured size; the state refills the tensors that the graph reads.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Generic, Protocol

from torch import Tensor

from attncheck.reference.spec import AttentionType
from attncheck.reference.v0.metadata import AttentionMetadata, TAttentionMetadata


class AttentionLayer(Protocol):
    """The attributes of a layer that the ``forward`` of its impl may read.

    Scales are float32 tensors of one element, or of one element per KV head. Each is a dequantisation factor
    (``value = code * scale``), and is 1.0 without quantisation. The ``_float`` attributes are copies on the host,
    because reading a tensor would synchronise.
    """

    _q_scale: Tensor
    _k_scale: Tensor
    _v_scale: Tensor
    _prob_scale: Tensor
    _q_scale_float: float
    _k_scale_float: float
    _v_scale_float: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any) -> Tensor:
        """Return the layer's attention over flat rows ``[tokens, heads * head_size]``, unflattened for the impl."""
        ...


class AttentionImpl(ABC, Generic[TAttentionMetadata]):
    """Runs the kernels of one attention layer."""

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        """Take these ten arguments, passed by position; raise for what the impl does not support.

        num_heads, num_kv_heads: query heads and KV heads (None means num_heads). Query head ``h`` reads KV head
            ``h // G``, where ``G = num_heads // num_kv_heads``.
        scale: factor on the scores, whatever the head size.
        alibi_slopes: one per query head; ``slope * (key position - query position)`` is added after scale and cap.
        sliding_window: ``w``: a query sees its own key and the ``w - 1`` keys before it. None for no window.
        logits_soft_cap: ``c``: a score becomes ``c * tanh(score / c)`` before the mask. None or 0 for no cap.
        kv_sharing_target_layer_name: another layer, whose cache is read and never written.

        Raise ``ValueError`` for an invalid value, ``NotImplementedError`` for what the kernels do not support.
        """
        raise NotImplementedError

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TAttentionMetadata,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of the step's rows, ``[padded tokens, num_heads, value head size]``.

        query: ``[padded tokens, num_heads, head_size]``. key, value: ``[padded tokens, num_kv_heads, head size]``.
        kv_cache: one layer's cache in the backend's logical shape; empty in the profiling run.
        attn_metadata: None in the profiling run, which must read nothing and return finite values.
        output: if the backend has ``accept_output_buffer``, written in place and returned.
        output_scale: one float32; the output is written quantised, ``value / scale``.
        output_block_scale: written by the impl: the scales of a dynamic block quantisation of the output.
        """
        raise NotImplementedError

    def fused_output_quant_supported(self, quant_key: Hashable) -> bool:
        """Return whether ``forward`` can write its output quantised to this format; False unless overridden.

        quant_key: the target format as a value: dtype, scale (its dtype, static or dynamic, granularity), second scale,
            symmetry. ``QuantKey`` of the backends' contract is one such type; the default does not read it.

        An impl that returns True applies ``output_scale`` (static) or ``output_block_scale`` (dynamic).
        """
        return False


class MLAAttentionImpl(AttentionImpl[TAttentionMetadata], Generic[TAttentionMetadata]):
    """Runs multi-head latent attention: the cache has one latent row per token, shared by all query heads."""

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
    ) -> None:
        """Take the ten arguments of every impl, without defaults, then the sizes and the up-projection of the latent.

        ``head_size`` is the width of a cache row, ``kv_lora_rank + qk_rope_head_dim``. ``qk_head_dim`` is
        ``qk_nope_head_dim + qk_rope_head_dim``. ``kv_b_proj`` projects the latent to ``qk_nope_head_dim + v_head_dim``
        per head.
        """
        raise NotImplementedError

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        hidden_states_or_cq: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        attn_metadata: TAttentionMetadata,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of the step's rows, ``[tokens, num_heads * v_head_dim]``.

        hidden_states_or_cq: ``[tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim]`` after projection.
        kv_c_normed: ``[tokens, kv_lora_rank]``. k_pe: ``[tokens, 1, qk_rope_head_dim]``.
        """
        raise NotImplementedError


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
