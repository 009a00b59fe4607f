"""The part of the contract that one attention layer meets: its impl, and what the impl reads and is given.

Backends import from :mod:`attncheck.backends.contract`, which exports what they need of this module.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from attncheck.reference.spec import AttentionType

M = TypeVar("M")
"""The metadata a backend's builder makes and its impl reads."""


class AttentionLayer(Protocol):
    """What ``forward`` may read of the layer it serves.

    Scales are float32 tensors of one element, or of one per KV head; each dequantises (``value = code * scale``), and
    means nothing where there are no codes. The ``_float`` twins are host copies, since reading a tensor would
    synchronise.
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
    """A scale: its dtype, whether it is known beforehand (``static``) or taken from the data, and what shares one."""

    dtype: torch.dtype
    static: bool
    group_shape: GroupShape


@dataclass(frozen=True)
class QuantKey:
    """A quantised format, as vLLM's graph compiler names it; here static per-tensor FP8.

    >>> QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.float32, True, GroupShape(-1, -1))).scale.static
    True
    """

    dtype: torch.dtype
    scale: ScaleDesc
    scale2: ScaleDesc | None = None
    symmetric: bool = True


STATIC_FP8 = QuantKey(torch.float8_e4m3fn, ScaleDesc(torch.float32, static=True, group_shape=GroupShape(-1, -1)))
"""Codes of ``float8_e4m3fn`` under one scale for the whole tensor, known beforehand."""


class AttentionImpl(ABC, Generic[M]):
    """Runs the kernels of one attention layer."""

    brings_writer: ClassVar[bool] = True
    """Whether the backend writes the new K/V itself (in ``forward`` or ``do_kv_cache_update``). False: the harness
    writes them through the codec before ``forward``, and ``cache_write`` has nothing to examine."""

    chosen_kernels: Collection[str] = ()
    """Names of the kernels that ``forward`` has run so far, where a library chooses them; empty: not known.

    Records and reports show them. An impl that knows them replaces this by a collection of its own."""

    ignored_result: str = ""
    """What the latest call computed and could not hand over, in words; a finding about rows that were not written has
    it. Empty: nothing is known."""

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
        """Called with these ten by position; what the backend cannot do is refused here.

        num_kv_heads: None is num_heads; query head ``h`` uses KV head ``h // (num_heads // num_kv_heads)``.
        scale: multiplies the scores; any float, not only ``head_size ** -0.5``.
        alibi_slopes: one a query head; adds ``slope * (key position - query position)`` after scale and cap.
        sliding_window: ``w``: the query at position ``i`` sees keys ``i - w + 1 .. i``; mirrored if not causal.
        logits_soft_cap: ``c``: a score becomes ``c * tanh(score / c)`` before the mask; None or 0: no cap.
        kv_sharing_target_layer_name: the layer whose cache this one reads, and then does not write.

        A backend that declares ``sinks`` also gets ``sinks=`` (float32 ``[num_heads]``) for layers that have them, one
        that declares ``head_size_v`` gets ``head_size_v=`` where it differs.
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
        """Attention of the step's rows; ``[padded tokens, num_heads, value head size]``.

        query: ``[padded tokens, num_heads, head_size]``; rows from ``query_start_loc[-1]`` on hold anything, NaN too.
        key, value: ``[rows, num_kv_heads, head size]``; may be slices of one fused tensor, may be longer than the
            slot mapping, may be None where the cache was written elsewhere.
        kv_cache: one layer's cache in the backend's logical shape; empty for layers without one and in profiling.
        attn_metadata: None in the profiling run: read nothing, return finite values.
        output: where the backend has ``accept_output_buffer``: written in place and returned.
        output_scale: float32, one element, where :meth:`fused_output_quant_supported` said yes to the static key:
            ``output`` takes the codes of ``x / output_scale``. output_block_scale: likewise, of dynamic keys.

        A backend that declares ``lse`` is also given ``output_lse=`` (float32 ``[padded tokens, num_heads]``), which
        it writes in place.
        """
        raise NotImplementedError

    def do_kv_cache_update(
        self, layer: AttentionLayer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes the new K/V; called before ``forward`` where ``forward_includes_kv_cache_update`` is False."""
        raise NotImplementedError(f"{type(self).__name__} writes the cache in forward")

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        """Whether a quantisation that follows attention may be folded into ``forward``."""
        return False


MLA_KEYWORDS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "qk_head_dim",
    "v_head_dim",
    "kv_b_proj",
)
"""What the constructor of a layer with a latent cache is given by keyword, behind the ten."""


class MLAAttentionImpl(AttentionImpl[M]):
    """Multi-head latent attention.

    After the ten arguments (``head_size`` is that of a cache row, ``kv_lora_rank + qk_rope_head_dim``), ``__init__``
    takes :data:`MLA_KEYWORDS`. ``kv_b_proj`` has ``weight``, ``[num_heads * (qk_nope_head_dim + v_head_dim),
    kv_lora_rank]`` (of each head the rows for keys, then those for values); called on ``[n, kv_lora_rank]`` it returns
    the projected rows and None. Where the impl has ``process_weights_after_loading(act_dtype)``, it is called once,
    before the first step.
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
        """Attention of the step's rows; ``[tokens, num_heads * v_head_dim]``.

        hidden_states_or_cq: ``[tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim]``, once projected.
        kv_c_normed: ``[tokens, kv_lora_rank]``. k_pe: ``[tokens, 1, qk_rope_head_dim]``.
        """
        raise NotImplementedError


_CURRENT: ContextVar[Any] = ContextVar("current_vllm_config")
"""Set while impls and builders are constructed: an impl's ten arguments hold no config, as in vLLM."""


def get_current_vllm_config() -> Any:
    """The config of the layer being made: the object its builder is given, but that it holds no layers yet.

    Raises:
        RuntimeError: no layer is being made; keep what the constructor asked for.
    """
    try:
        return _CURRENT.get()
    except LookupError as error:
        raise RuntimeError(
            "no vllm_config is current: it can be asked for while impls and builders are made"
        ) from error


@contextmanager
def set_current_vllm_config(vllm_config: Any) -> Iterator[None]:
    """``vllm_config`` is the current one inside."""
    token = _CURRENT.set(vllm_config)
    try:
        yield
    finally:
        _CURRENT.reset(token)
