"""The contract of backends for layers with a state: Mamba, gated delta networks, linear attention, and convolutions.

Such a layer has no KV cache. Each request has a state of ``num_heads`` matrices, which its rows change in order. The
recurrence is defined in :mod:`attncheck.reference.attention.recurrence`. One step makes these calls, in this order,
under ``torch.no_grad()``::

    impl     = backend.get_impl_cls()(rule=, num_heads=, num_kv_heads=, head_size=, head_size_v=, scale=, qk_l2norm=)
    builder  = backend.get_builder_cls()(state_spec, layer_names, vllm_config, device)
    metadata = builder.build(common_prefix_len=0, common_attn_metadata=common, num_accepted_tokens=num_accepted_tokens)
    impl.forward(layer, inputs, states, metadata, output)

``layer`` has the weights of :data:`WEIGHTS` as float32 attributes, but those of ``short_conv`` have the layer's dtype.
``inputs`` maps the names of :data:`INPUTS` to tensors ``[T, ...]`` of all requests, one after another, and then padding
rows. ``g`` and ``beta`` are float32, all others are of the layer's dtype. For kernels that compute the gates, ``gdn``
also has ``a`` and ``b``: ``g = -exp(A_log) softplus(a + dt_bias)`` and ``beta = sigmoid(b)``. ``forward`` writes the
rows of all requests into ``output``, and the new states into ``states``. It changes nothing else.

A candidate derives from :class:`StateBackend` and :class:`StateImpl`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata
from attncheck.backends.dtypes import DTYPES
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import (
    BatchSpec,
    CacheSpec,
    MambaCacheMode,
    RecurrenceOptions,
    RecurrenceRule,
    StateDType,
)

NULL_BLOCK_ID = 0
"""The slot of padding requests. It is neither read nor written, as in vLLM."""

_MAMBA = ("x", "dt", "B", "C")
_ATTENDED = ("query", "key", "value")

INPUTS: Mapping[RecurrenceRule, tuple[str, ...]] = MappingProxyType(
    {
        "mamba1": _MAMBA,
        "mamba2": _MAMBA,
        "gdn": (*_ATTENDED, "g", "beta", "a", "b"),
        "kda": (*_ATTENDED, "g", "beta"),
        "linear": _ATTENDED,
        "short_conv": ("x",),
    }
)
"""The names of the inputs of each rule, whose shapes :func:`~attncheck.reference.attention.recurrence` documents.

The sizes by the names of a case are: D or H is ``num_heads``, G or the heads of keys ``num_kv_heads``, N or K
``head_size``, and P or V ``head_size_v``. ``short_conv`` has ``x [T, D]``, and ``head_size`` is the number of its taps.
"""

WEIGHTS: Mapping[RecurrenceRule, tuple[str, ...]] = MappingProxyType(
    {
        "mamba1": ("A", "dt_bias"),
        "mamba2": ("A", "dt_bias"),
        "gdn": ("A_log", "dt_bias"),
        "kda": (),
        "linear": ("slopes",),
        "short_conv": ("weight", "bias"),
    }
)
"""The names of the weights of each rule. ``dt_bias`` is added to ``dt`` of Mamba, or ``a``, before softplus.

``weight``: ``[D, taps]``, whose last column multiplies the row's own input. ``bias``: ``[D]``, or None without one. The
layer of a short convolution also has ``activation``: ``"silu"``, or None.
"""


def matrix_shape(
    rule: RecurrenceRule, num_heads: int, head_size: int, head_size_v: int, num_speculative_tokens: int = 0
) -> tuple[int, int, int]:
    """Return the shape ``[H, V, K]`` of a state; for ``short_conv``, ``[D, 1, taps - 1 + num_speculative_tokens]``."""
    columns = head_size - 1 + num_speculative_tokens if rule == "short_conv" else head_size
    return num_heads, head_size_v, columns


def state_shape(
    rule: RecurrenceRule, num_heads: int, head_size: int, head_size_v: int, num_speculative_tokens: int = 0
) -> tuple[int, ...]:
    """Return the shape of a state in the cache, as vLLM's: ``[H, V, K]``, but others for some rules.

    They are ``[D, N]``, ``[H, K, V]``, and ``[taps - 1 + num_speculative_tokens, D]``.

    >>> state_shape("mamba1", 64, 16, 1), state_shape("mamba2", 8, 128, 64), state_shape("linear", 8, 128, 64)
    ((64, 16), (8, 64, 128), (8, 128, 64))
    >>> state_shape("short_conv", 64, 4, 1), state_shape("short_conv", 64, 4, 1, num_speculative_tokens=2)
    ((3, 64), (5, 64))
    """
    heads, values, columns = matrix_shape(rule, num_heads, head_size, head_size_v, num_speculative_tokens)
    if rule == "mamba1":
        return heads, columns
    if rule == "linear":
        return heads, columns, values
    if rule == "short_conv":
        return columns, heads
    return heads, values, columns


def as_stored(rule: RecurrenceRule, states: Tensor) -> Tensor:
    """Return states ``[..., H, V, K]`` as they are in the cache, as a view."""
    if rule == "mamba1":
        return states.squeeze(-2)
    if rule == "short_conv":
        return states.squeeze(-2).transpose(-1, -2)
    return states.transpose(-1, -2) if rule == "linear" else states


def as_matrices(rule: RecurrenceRule, stored: Tensor) -> Tensor:
    """Return states of the cache as ``[..., H, V, K]``, as a view."""
    if rule == "mamba1":
        return stored.unsqueeze(-2)
    if rule == "short_conv":
        return stored.transpose(-1, -2).unsqueeze(-2)
    return stored.transpose(-1, -2) if rule == "linear" else stored


@dataclass(frozen=True, kw_only=True)
class StateSpec:
    """Description of the states that one group of layers shares; fields of vLLM's ``MambaSpec``.

    ``shapes``, ``dtypes``: one each; a convolution is a layer of its own. ``num_speculative_blocks``:
    slots that a request has besides the first one, one for each draft token. ``block_size``: tokens of a block, at
    whose end a state is kept with ``mamba_cache_mode`` ``"all"``.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    mamba_type: RecurrenceRule
    block_size: int
    num_speculative_blocks: int = 0
    mamba_cache_mode: MambaCacheMode = "none"


@dataclass
class StateMetadata:
    """The metadata of one step, with the field names of vLLM's metadata of Mamba and GDN.

    There are ``R`` requests: ``num_decodes`` decodes, then ``num_prefills`` prompts and later chunks of prompts, then
    padding requests. A decode has a state and at most ``1 + num_speculative_blocks`` rows.

    query_start_loc: ``[R + 1]`` int32, the first row of each request, then the end of the last one.

    state_indices_tensor: ``[R, 1 + num_speculative_blocks]`` int32. A prompt reads its state from the slot in column 0,
    and writes the state after its last row there. A decode reads it from column ``num_accepted_tokens - 1``, and writes
    the state after row ``t`` to column ``t``. The slots of padding requests are :data:`NULL_BLOCK_ID`. With
    ``short_conv``, all states of a request are in the slot of column 0. Its rows are inputs, the oldest one first. A
    decode reads ``taps - 1`` of them from row ``num_accepted_tokens - 1`` on. It writes all but the first of these, and
    then its own inputs, to row 0 and those behind it.

    has_initial_states: ``[R]`` bool. Where it is False, the state before the first row is 0, whatever the slot holds.

    num_accepted_tokens: ``[R]`` int32, at least 1.

    With ``mamba_cache_mode`` ``"all"``, a request has a slot for each block of ``mamba_block_size`` tokens, in the
    columns of ``state_indices_tensor``. There are no drafts. The state is read from column
    ``block_idx_last_computed_token``. The states at the ends of the blocks ``block_idx_first_scheduled_token`` to
    ``block_idx_last_scheduled_token - 1`` are written to their columns, and the state after the last row to column
    ``block_idx_last_scheduled_token``. Other slots are cached, and another request may have them, too.
    ``num_computed_tokens``: tokens before the first row. All are ``[R]`` int32, or None with ``"none"``.
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    query_start_loc: Tensor
    state_indices_tensor: Tensor
    has_initial_states: Tensor
    num_accepted_tokens: Tensor
    mamba_block_size: int = 0
    num_computed_tokens: Tensor | None = None
    block_idx_last_computed_token: Tensor | None = None
    block_idx_first_scheduled_token: Tensor | None = None
    block_idx_last_scheduled_token: Tensor | None = None

    def source(self, request: int) -> int:
        """Return the slot from which the state of a request is read; not for decodes of ``short_conv`` with drafts."""
        column = self.num_accepted_tokens[request] - 1
        if self.block_idx_last_computed_token is not None:
            column = self.block_idx_last_computed_token[request]
        return int(self.state_indices_tensor[request, column])

    def destinations(self, request: int) -> dict[int, int]:
        """Return the slot of each state that is written, by the row of the request after which it is the state.

        Not for decodes of ``short_conv`` with drafts, whose states are all in the slot of column 0.
        """
        slots = self.state_indices_tensor[request].tolist()
        first, end = self.query_start_loc[request : request + 2].tolist()
        if self.num_computed_tokens is None:
            is_decode = request < self.num_decodes
            return dict(enumerate(slots[: end - first])) if is_decode else {end - first - 1: slots[0]}
        computed = int(self.num_computed_tokens[request])
        columns = [(computed + row) // self.mamba_block_size for row in range(end - first)]
        last_rows = {column: row for row, column in enumerate(columns)}
        return {row: slots[column] for column, row in last_rows.items()}


class StateMetadataBuilder(AttentionMetadataBuilder[StateMetadata]):
    """Builder of :class:`StateMetadata`, for layers whose requests have a fixed number of slots."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.reorder_batch_threshold = 1 + kv_cache_spec.num_speculative_blocks

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
        num_accepted_tokens: Tensor | None = None,
    ) -> StateMetadata:
        """Return the metadata. ``num_accepted_tokens``: ``[R]`` int32, or None if there are no drafts."""
        common = common_attn_metadata
        columns = 1 + self.kv_cache_spec.num_speculative_blocks
        lengths = common.query_start_loc_cpu.diff()
        has_state = common.num_computed_tokens_cpu > 0
        is_decode = has_state & (lengths <= columns)
        num_decodes = int(is_decode.int().cumprod(0).sum())
        num_real = int((common.seq_lens_cpu > 0).sum())
        num_decode_tokens = int(common.query_start_loc_cpu[num_decodes])
        if num_accepted_tokens is None:
            num_accepted_tokens = torch.ones(common.num_reqs, dtype=torch.int32, device=self.device)
        if self.kv_cache_spec.mamba_cache_mode == "all":
            columns = common.block_table_tensor.shape[1]
        return StateMetadata(
            num_prefills=num_real - num_decodes,
            num_prefill_tokens=int(common.query_start_loc_cpu[num_real]) - num_decode_tokens,
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            query_start_loc=common.query_start_loc,
            state_indices_tensor=common.block_table_tensor[:, :columns],
            has_initial_states=has_state.to(self.device),
            num_accepted_tokens=num_accepted_tokens,
            **self._blocks(common),
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> StateMetadata:
        """Return the metadata of a capture: with drafts, each request has accepted as many tokens as it has rows."""
        accepted = common_attn_metadata.query_start_loc.diff() if self.kv_cache_spec.num_speculative_blocks else None
        return self.build(0, common_attn_metadata, num_accepted_tokens=accepted)

    def _blocks(self, common: CommonAttentionMetadata) -> dict[str, Any]:
        """Return the fields of ``mamba_cache_mode`` ``"all"``."""
        if self.kv_cache_spec.mamba_cache_mode == "none":
            return {}
        size = self.kv_cache_spec.block_size
        computed = common.num_computed_tokens_cpu.to(self.device)
        return {
            "mamba_block_size": size,
            "num_computed_tokens": computed,
            "block_idx_last_computed_token": (computed - 1).clamp(min=0) // size,
            "block_idx_first_scheduled_token": computed // size,
            "block_idx_last_scheduled_token": (common.seq_lens - 1).clamp(min=0) // size,
        }


class StateImpl(ABC):
    """One layer."""

    def __init__(
        self,
        *,
        rule: RecurrenceRule,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        head_size_v: int,
        scale: float,
        qk_l2norm: bool,
    ) -> None:
        """Store the arguments. ``scale``: the factor of the queries, which Mamba does not have."""
        self.rule = rule
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_size, self.head_size_v = head_size, head_size_v
        self.scale, self.qk_l2norm = scale, qk_l2norm

    @abstractmethod
    def forward(
        self, layer: Any, inputs: Mapping[str, Tensor], states: Tensor, attn_metadata: Any, output: Tensor
    ) -> object:
        """Write the output of each row and the new state of each request; the result is ignored.

        states: ``[num_slots, *state_shape]`` in the dtype of the states. A slot is contiguous, and the stride of the
        slots is larger than a slot, since vLLM's pages also hold the state of the convolution.
        output: ``[T, H, V]`` in the layer's dtype; ``[T, D]`` for ``mamba1`` and ``short_conv``. Padding rows may be
            left as they are.
        """


class StateBackend(AttentionBackend):
    """Backend of layers with a state."""

    supported_rules: ClassVar[Sequence[RecurrenceRule]] = get_args(RecurrenceRule)
    supported_state_dtypes: ClassVar[Sequence[StateDType]] = get_args(StateDType)
    max_speculative_tokens: ClassVar[int | None] = None
    """The most draft tokens of a decode; None for any number."""
    supported_mamba_cache_modes: ClassVar[Sequence[MambaCacheMode]] = ("none",)

    accept_output_buffer = True
    supported_dtypes: ClassVar[Sequence[torch.dtype]] = tuple(DTYPES.values())

    @classmethod
    def is_ssm(cls) -> bool:
        """Return True."""
        return True

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[StateImpl]:  # type: ignore[override]  # an impl without queries and a KV cache
        """Return the impl class; one instance is constructed per layer."""

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        """Return :class:`StateMetadataBuilder`; override it for other metadata."""
        return StateMetadataBuilder

    @staticmethod
    def get_metadata_cls() -> type[Any]:
        """Return the class of the objects that the builder returns."""
        return StateMetadata

    @classmethod
    def default_suite(cls, device: str) -> str:
        """Return the suite of layers with a state."""
        return "state"

    @classmethod
    def unsupported_reasons(cls, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """Return every reason why the dtype, an option of the rule, or the drafts are not supported."""
        reasons = super().unsupported_reasons(layer, cache, batch)
        options = batch.path.options
        if not isinstance(options, RecurrenceOptions):
            return reasons
        for name, value, supported in (
            ("rule", options.rule, cls.supported_rules),
            ("state_dtype", options.state_dtype, cls.supported_state_dtypes),
            ("mamba_cache_mode", options.mamba_cache_mode, cls.supported_mamba_cache_modes),
        ):
            has_dtype_of_layer = name == "state_dtype" and options.rule == "short_conv"
            if value not in supported and not has_dtype_of_layer:
                reasons.append(f"{name} {value}: supported are {', '.join(supported) or 'none'}")
        most = cls.max_speculative_tokens
        if most is not None and options.num_speculative_tokens > most:
            reasons.append(f"num_speculative_tokens {options.num_speculative_tokens}: at most {most} are supported")
        return reasons
