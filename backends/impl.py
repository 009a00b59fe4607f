"""The per-layer part of the contract: the impl class, the layer attributes it reads, and the formats it is given.

Backends import these names from :mod:`attncheck.backends.contract`.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from attncheck.backends.context_parallel import get_dcp_world_size_and_rank
from attncheck.reference.spec import AttentionType

M = TypeVar("M")
"""The metadata class that a backend's builder creates and its impl reads."""


class AttentionLayer(Protocol):
    """The attributes that ``forward`` may read of its layer.

    Scales are float32 tensors with one element, or one per KV head. Each dequantises (``value = code * scale``) and has
    no meaning where there are no codes. The ``_float`` twins are host copies, since reading a tensor would synchronise.
    """

    _q_scale: Tensor
    _k_scale: Tensor
    _v_scale: Tensor
    _prob_scale: Tensor
    _q_scale_float: float
    _k_scale_float: float
    _v_scale_float: float


class GroupShape(NamedTuple):
    """The rows and columns that share one scale; -1 is the whole extent.

    Per tensor (-1, -1), per token (1, -1), per channel (-1, 1), blocks such as (1, 128).
    """

    row: int
    col: int


@dataclass(frozen=True)
class ScaleDesc:
    """Description of a scale: its dtype, whether it is known beforehand (``static``), and which elements share one.

    A scale that is not static is computed from the data.
    """

    dtype: torch.dtype
    static: bool
    group_shape: GroupShape


@dataclass(frozen=True)
class QuantKey:
    """A quantised format, with the name and fields of vLLM's graph compiler; here static per-tensor FP8.

    >>> QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.float32, True, GroupShape(-1, -1))).scale.static
    True
    """

    dtype: torch.dtype
    scale: ScaleDesc
    scale2: ScaleDesc | None = None
    symmetric: bool = True


STATIC_FP8 = QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.float32, static=True, group_shape=GroupShape(-1, -1)))
"""Codes of ``float8_e4m3fn`` with one static scale for the whole tensor."""


@dataclass(frozen=True)
class LayerArguments:
    """The arguments of an impl's constructor, in the order in which vLLM passes them by position.

    :meth:`AttentionImpl.__init__` documents them. An impl whose constructor is ``__init__(self, *args, **kwargs)``
    reads them by ``LayerArguments(*args, **kwargs)``, which raises ``TypeError`` for an unknown or a missing one.
    ``num_kv_heads`` is ``num_heads`` unless it is given, and ``head_size_v`` is ``head_size``.
    """

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int = None  # type: ignore[assignment]  # filled in below
    alibi_slopes: list[float] | None = None
    sliding_window: int | None = None
    kv_cache_dtype: str = "auto"
    logits_soft_cap: float | None = None
    attn_type: str = AttentionType.DECODER
    kv_sharing_target_layer_name: str | None = None
    _: KW_ONLY
    sinks: Tensor | None = None
    head_size_v: int = None  # type: ignore[assignment]  # filled in below

    def __post_init__(self) -> None:
        for name, default in (("num_kv_heads", self.num_heads), ("head_size_v", self.head_size)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)


@dataclass(frozen=True, kw_only=True)
class LatentArguments(LayerArguments):
    """The arguments for a layer with a latent cache: the keywords follow the arguments of every layer."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    qk_head_dim: int
    v_head_dim: int
    kv_b_proj: Any


MLA_KEYWORDS = tuple(each.name for each in fields(LatentArguments)[len(fields(LayerArguments)) :])
"""Keyword arguments of the constructor for layers with a latent cache, after the ten positional ones."""


class AttentionImpl(ABC, Generic[M]):
    """The kernels of one attention layer."""

    brings_writer: ClassVar[bool] = True
    """Whether the backend writes the new K/V itself, in ``forward`` or ``do_kv_cache_update``.

    If False, the harness writes them through the codec before ``forward``, and ``cache_write`` examines nothing.
    """

    supports_quant_query_input: bool = False
    """Whether ``forward`` takes FP8 queries (``float8_e4m3fn``) in a layer with an E4M3 cache: ``code * _q_scale``.

    vLLM's layer quantises the query if this is True. An impl may set it in its constructor.
    """

    chosen_kernels: Collection[str] = ()
    """Names of the kernels that ``forward`` has run so far, for libraries that choose among several; empty if unknown.

    Records and reports show them. An impl that has the names replaces this with its own collection.
    """

    ignored_result: str = ""
    """Text on a result that the latest call computed but could not deliver; "" if there is none.

    A finding about rows that were not written quotes it.
    """

    dcp_world_size: int
    """Ranks that share the keys of the layer; 1 except on the path ``ranks``. Set before ``__init__``, as in vLLM."""

    dcp_rank: int

    def __new__(cls, *_args: Any, **_keywords: Any) -> Self:
        """Return an instance that has the number of ranks and its rank."""
        self = super().__new__(cls)
        self.dcp_world_size, self.dcp_rank = get_dcp_world_size_and_rank()
        return self

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
        """Store the layer's parameters, and raise for those that the backend does not support.

        The harness passes these ten arguments by position.

        num_kv_heads: None means num_heads; query head ``h`` uses KV head ``h // (num_heads // num_kv_heads)``.
        scale: multiplies the scores; any float, not only ``head_size ** -0.5``.
        alibi_slopes: one per query head; ``slope * (key position - query position)`` is added after scale and cap.
        sliding_window: ``w``: the query at position ``i`` sees keys ``i - w + 1 .. i``; mirrored if not causal.
        logits_soft_cap: ``c``: a score becomes ``c * tanh(score / c)`` before the mask; None or 0: no cap.
        kv_sharing_target_layer_name: the layer whose cache this layer reads; this layer then writes none.

        A backend that declares ``sinks`` also gets ``sinks=`` for layers with sinks: ``[num_heads]``, float32 or
        the layer's dtype. A backend that declares ``head_size_v`` gets ``head_size_v=`` where it differs from
        ``head_size``.
        """
        raise NotImplementedError

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: M | None,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute attention for the rows of the step; return ``[padded tokens, num_heads, value head size]``.

        query: ``[padded tokens, num_heads, head_size]``; rows from ``query_start_loc[-1]`` on may hold anything, also
            NaN. FP8 codes if :attr:`supports_quant_query_input` is True and the layer has ``query_quant``.
        key, value: ``[rows, num_kv_heads, head size]``; may be slices of one fused tensor, may be longer than the slot
            mapping, may be None if the cache was written elsewhere.
        kv_cache: the layer's cache in the backend's logical shape; empty for layers without a cache and in profiling.
        attn_metadata: None in the profiling run: read nothing, and return finite values.
        output: given to backends with ``accept_output_buffer``; written in place and returned.
        output_scale: float32, one element, given if :meth:`fused_output_quant_supported` returned True for the static
            key: ``output`` takes the codes of ``x / output_scale``.
        output_block_scale: the same for dynamic keys.

        A backend that declares ``lse`` also gets ``output_lse=`` (float32 ``[padded tokens, num_heads]``), which it
        writes in place. Its memory is laid out as that of ``output``: the heads may precede the tokens.
        """
        raise NotImplementedError

    def do_kv_cache_update(
        self, layer: AttentionLayer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the new K/V; called before ``forward`` if ``forward_includes_kv_cache_update`` is False."""
        raise NotImplementedError(f"{type(self).__name__} writes the cache in forward")

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        """Return whether ``forward`` can include a quantisation that follows attention."""
        return False


class MLAAttentionImpl(AttentionImpl[M]):
    """Multi-head latent attention.

    After the ten arguments (``head_size`` is that of a cache row, ``kv_lora_rank + qk_rope_head_dim``), ``__init__``
    takes :data:`MLA_KEYWORDS`. ``kv_b_proj.weight`` has shape ``[num_heads * (qk_nope_head_dim + v_head_dim),
    kv_lora_rank]``: for each head the rows for keys, then those for values. Called on ``[n, kv_lora_rank]``,
    ``kv_b_proj`` returns the projected rows and None. If the impl has ``process_weights_after_loading(act_dtype)``, it
    is called once before the first step.
    """

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        hidden_states_or_cq: Tensor,
        kv_c_normed: Tensor | None,
        k_pe: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: M | None,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute attention for the rows of the step; return ``[tokens, num_heads * v_head_dim]``.

        hidden_states_or_cq: ``[tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim]``, already projected.
        kv_c_normed: ``[tokens, kv_lora_rank]``.
        k_pe: ``[tokens, 1, qk_rope_head_dim]``.
        """
        raise NotImplementedError


_CURRENT: ContextVar[Any] = ContextVar("current_vllm_config")
"""Set while impls and builders are constructed, because the ten arguments of an impl hold no config, as in vLLM."""


def get_current_vllm_config() -> Any:
    """Return the config of the layer under construction: the object its builder gets, without layers so far.

    Raises:
        RuntimeError: no layer is under construction. Store the config in the constructor if it is needed later.
    """
    try:
        return _CURRENT.get()
    except LookupError as error:
        raise RuntimeError(
            "no vllm_config is current: get_current_vllm_config works only while impls and builders are constructed"
        ) from error


@contextmanager
def set_current_vllm_config(vllm_config: Any) -> Iterator[None]:
    """Make ``vllm_config`` the current config inside the context."""
    token = _CURRENT.set(vllm_config)
    try:
        yield
    finally:
        _CURRENT.reset(token)
