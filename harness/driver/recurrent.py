"""Run a backend of layers with a state: construct it, lay out the arguments of a step, read the results."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend, CommonAttentionMetadata
from attncheck.backends.impl import set_current_vllm_config
from attncheck.backends.state import NULL_BLOCK_ID, WEIGHTS, StateSpec, as_matrices, state_shape
from attncheck.harness.driver.construction import LAYER, ConfigNode, vllm_config
from attncheck.harness.driver.foreign_code import call_backend, require_memory
from attncheck.harness.driver.outputs import GuardedBuffer, mark_unwritten
from attncheck.harness.driver.pool import flat_bytes, same_bytes
from attncheck.harness.problem.problem import planted_inputs
from attncheck.harness.problem.recurrent import PADDING, UNREAD_INPUTS, RecurrentProblem, stored_pool
from attncheck.reference.spec import AttentionCGSupport
from attncheck.reference.step_spec import CHANNEL_RULES

_GAP = 64
"""Least number of elements of a page that belong to no state; half of them lie before it. A state is aligned."""

_SPARE_COLUMNS = 2
_SPARE_INPUT = 8
_RUBBISH = 512.0

_HELD = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
"""The tensors of the common metadata on the device."""


@dataclass(frozen=True)
class StateObservation:
    """What a step returned, on the CPU.

    out: float64 ``[T, H, V]`` of the rows of requests. unwritten: bool ``[T]``, rows that were not written completely.
    states: float64 ``[S, H, V, K]``, those that the step had to store; columns that it had to leave alone are 0.
    pool: all, in the dtype of states. strays: slots with a change where none should be.
    has_filled_gaps: whether memory between the slots changed.
    changed: names of arguments that changed and should not have. breached: whether memory beside the output changed.
    """

    out: Tensor
    unwritten: Tensor
    states: Tensor
    pool: Tensor
    strays: tuple[int, ...]
    has_filled_gaps: bool
    changed: tuple[str, ...]
    breached: bool


class StatePool:
    """The memory of the states: one page a slot, which has a gap before and after the state.

    ``states``: ``[num_slots, *state_shape]``, a view.
    """

    def __init__(self, problem: RecurrentProblem, device: torch.device) -> None:
        filled = stored_pool(problem)
        shape = filled.shape[1:]
        page = -(-math.prod(shape) // _GAP) * _GAP + _GAP
        self.memory = torch.empty(len(filled) * page, dtype=filled.dtype, device=device)
        mark_unwritten(self.memory)
        steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        self._layout = filled.shape, (page, *steps), _GAP // 2
        self.states = self.memory.as_strided(*self._layout)
        self.states.copy_(filled)

    def gaps(self) -> Tensor:
        """Return a copy of the memory whose states are zeros."""
        memory = self.memory.clone()
        memory.as_strided(*self._layout).zero_()
        return memory


class StateStep:
    """The arguments of one step on a device. Captured graphs use their memory again for later steps.

    inputs: by name. accepted: ``num_accepted_tokens``, None without drafts.
    """

    def __init__(self, problem: RecurrentProblem, device: torch.device) -> None:
        self._device = device
        self.inputs = {name: _as_view(problem, problem.packed(name), device) for name in problem.padding}
        self.common = common_metadata(problem, device)
        self.accepted = accepted_tokens(problem, device)
        self.pool = StatePool(problem, device)
        self.output = _output_buffer(problem, device)

    def fill(self, problem: RecurrentProblem) -> None:
        """Write the arguments of another step of as many requests and rows into the same memory."""
        other = StateStep(problem, self._device)
        for name, tensor in self.inputs.items():
            tensor.copy_(other.inputs[name])
        held = {name: getattr(self.common, name) for name in _HELD}
        for name, tensor in held.items():
            tensor.copy_(getattr(other.common, name))
        self.common = replace(other.common, **held)
        if self.accepted is not None and other.accepted is not None:
            self.accepted.copy_(other.accepted)
        self.pool.memory.copy_(other.pool.memory)
        self.output.refill(len(problem.positions))


class StateSession:
    """An impl and a builder of a backend, constructed for the layer of a problem. Raises StageError if that raises."""

    def __init__(self, backend: type[AttentionBackend], problem: RecurrentProblem, device: torch.device) -> None:
        self._device = device
        layer, options, batch = problem.layer, problem.options, problem.case.batch
        sizes = layer.num_heads, layer.head_size, layer.value_head_size
        self._layer = _layer_of(problem, device)
        spec = StateSpec(
            shapes=(state_shape(options.rule, *sizes, options.num_speculative_tokens),),
            dtypes=(problem.state_dtype,),
            mamba_type=options.rule,
            block_size=problem.case.cache.block_size,
            num_speculative_blocks=options.num_speculative_tokens,
            mamba_cache_mode=options.mamba_cache_mode,
        )
        config = vllm_config(
            layer,
            problem.case.cache,
            problem.dtype,
            passed_cache_dtype=problem.case.cache.kv_cache_dtype,
            max_model_len=batch.max_seq_len + batch.max_query_len,
            max_num_seqs=batch.num_requests + batch.padding.requests,
            max_tokens=batch.num_tokens + batch.padding.tokens,
            num_blocks=len(problem.stale),
            path=batch.path,
        )

        def construct() -> Any:
            impl: Any = backend.get_impl_cls()
            with set_current_vllm_config(config):
                return impl(
                    rule=options.rule,
                    num_heads=layer.num_heads,
                    num_kv_heads=layer.num_kv_heads,
                    head_size=layer.head_size,
                    head_size_v=layer.value_head_size,
                    scale=layer.softmax_scale,
                    qk_l2norm=options.qk_l2norm,
                )

        def construct_builder() -> Any:
            with set_current_vllm_config(config):
                return backend.get_builder_cls()(spec, [LAYER], config, device)

        self._spec, self._config = spec, config
        self._impl = call_backend("construct", construct, device)
        self._builder = call_backend("builder", construct_builder, device)

    def run(
        self, problem: RecurrentProblem, poison: float | None = None, regions: tuple[str, ...] = ()
    ) -> StateObservation:
        """Run one step. ``poison``: written to ``regions``, which must not influence the result. Raises StageError."""
        step = StateStep(problem, self._device)
        if poison is not None:
            for name, slots in problem.regions().items():
                if name in regions:
                    step.pool.states[slots.to(self._device)] = poison
            if UNREAD_INPUTS in regions:
                unread = problem.unread_columns().to(self._device)[:, None, None]
                as_matrices(problem.options.rule, step.pool.states).masked_fill_(unread, poison)
            if PADDING in regions:
                for tensor in step.inputs.values():
                    tensor[len(problem.positions) :] = poison

        def call() -> None:
            metadata = self.build(step)
            call_backend("forward", partial(self.forward, step, metadata), self._device)

        return self.observed(problem, step, call)

    def build(self, step: "StateStep", *, for_capture: bool = False) -> Any:
        """Return the metadata of a step. Raises StageError."""
        common, accepted = step.common, step.accepted

        def build() -> Any:
            if for_capture:
                return self._builder.build_for_cudagraph_capture(common)
            return self._builder.build(common_prefix_len=0, common_attn_metadata=common, num_accepted_tokens=accepted)

        return call_backend("build", build, self._device)

    def forward(self, step: "StateStep", metadata: Any) -> None:
        """Call ``forward``; exceptions propagate."""
        given = {name: tensor.detach() for name, tensor in step.inputs.items()}
        self._impl.forward(self._layer, given, step.pool.states.detach(), metadata, step.output.handed_out())

    @property
    def graph_support(self) -> AttentionCGSupport:
        """The level of CUDA graphs that the builder declares. Raises StageError if that raises."""
        level = call_backend("declaration", lambda: self._builder.get_cudagraph_support(self._config, self._spec))
        return AttentionCGSupport[level.name]

    def observed(self, problem: RecurrentProblem, step: "StateStep", call: Callable[[], object]) -> StateObservation:
        """Make the call that runs a step, and return what it changed. Raises StageError if a tensor lost its memory."""
        pool, output = step.pool, step.output
        num_rows = len(problem.positions)
        states_before, gaps_before = pool.states.clone(), pool.gaps()
        watched = {**step.inputs, **_weights(self._layer, problem), "query_start_loc": step.common.query_start_loc}
        watched["block_table_tensor"] = step.common.block_table_tensor
        before = {name: flat_bytes(tensor).clone() for name, tensor in watched.items()}
        with torch.no_grad():
            call()
        for name, tensor in {**watched, "states": pool.memory, "output": output.memory}.items():
            require_memory(tensor, name, "forward")
        output.find_unwritten()
        rule, slots = problem.options.rule, [slot for _, slot in problem.places]
        written = problem.columns_written()[:, None, None]
        moved = as_matrices(rule, _bits(pool.states) != _bits(states_before)).cpu()
        after = as_matrices(rule, pool.states).cpu().contiguous()
        return StateObservation(
            out=_matrices_of(problem, output.rows[:num_rows]).cpu().double(),
            unwritten=output.unwritten[:num_rows].cpu(),
            states=after[slots].double().masked_fill(~written[slots], 0.0),
            pool=after,
            strays=tuple((moved & ~written).flatten(1).any(dim=1).nonzero().flatten().tolist()),
            has_filled_gaps=not same_bytes(pool.gaps(), gaps_before),
            changed=tuple(name for name, each in watched.items() if not same_bytes(flat_bytes(each), before[name])),
            breached=output.breached(),
        )


def common_metadata(problem: RecurrentProblem, device: torch.device) -> CommonAttentionMetadata:
    """Return the common metadata of a step, whose block table has the slots of a request in its first columns."""
    lengths = [request.num_rows for request in problem.requests]
    contexts = [request.position for request in problem.requests]
    padding = [0] * problem.padding_requests
    batch, options = problem.case.batch, problem.options
    columns = 1 + options.num_speculative_tokens
    if options.mamba_cache_mode == "all":
        columns = -(-batch.max_seq_len // problem.case.cache.block_size)
    table = torch.full((len(lengths + padding), columns + _SPARE_COLUMNS), len(problem.stale) - 1, dtype=torch.int32)
    table[len(lengths) :] = NULL_BLOCK_ID
    for number, request in enumerate(problem.requests):
        table[number, : len(request.slots)] = torch.tensor(request.slots)
    starts = torch.tensor([0, *lengths, *padding]).cumsum(0).int()
    computed_tokens = torch.tensor([*contexts, *padding], dtype=torch.int32)
    seq_lens = computed_tokens + starts.diff()
    num_tokens = sum(lengths) + problem.num_padding_rows
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device, copy=True),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(device, copy=True),
        seq_lens_cpu=seq_lens,
        num_computed_tokens_cpu=computed_tokens,
        num_reqs=len(table),
        num_actual_tokens=num_tokens,
        max_query_len=max(lengths),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=table.to(device),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
    )


def accepted_tokens(problem: RecurrentProblem, device: torch.device) -> Tensor | None:
    """Return ``num_accepted_tokens`` of a step, 1 for padding requests; None if there are no drafts."""
    if not problem.options.num_speculative_tokens:
        return None
    accepted = [request.accepted for request in problem.requests] + [1] * problem.padding_requests
    return torch.tensor(accepted, dtype=torch.int32, device=device)


def without_padding(problem: RecurrentProblem) -> RecurrentProblem:
    """Return the step without padding requests and padding rows."""
    padding = {name: tensor[:0] for name, tensor in problem.padding.items()}
    return replace(problem, padding=padding, padding_requests=0)


def _layer_of(problem: RecurrentProblem, device: torch.device) -> ConfigNode:
    """Return the layer with its weights, None for those that it has not, and its activation if the rule has one."""
    options = problem.options
    given: dict[str, object] = dict.fromkeys(WEIGHTS[options.rule])
    given |= {name: tensor.to(device) for name, tensor in problem.weights.items()}
    if options.rule == "short_conv":
        given["activation"] = options.activation
    return ConfigNode("layer", **given)


def _weights(layer: ConfigNode, problem: RecurrentProblem) -> Mapping[str, Tensor]:
    return {name: getattr(layer, name) for name in problem.weights}


def _as_view(problem: RecurrentProblem, rows: Tensor, device: torch.device) -> Tensor:
    """Return rows ``[T, ...]`` on the device; a slice of wider rows if the case has views and they are not float32."""
    if "views" not in planted_inputs(problem.case) or rows.dtype != problem.dtype:
        return rows.to(device, copy=True)
    flat = rows.flatten(1)
    wide = torch.full((len(flat), flat.shape[1] + _SPARE_INPUT), _RUBBISH, dtype=rows.dtype, device=device)
    wide[:, : flat.shape[1]] = flat
    view: Tensor = wide[:, : flat.shape[1]].unflatten(1, rows.shape[1:])
    return view


def _output_buffer(problem: RecurrentProblem, device: torch.device) -> GuardedBuffer:
    layer, num_rows = problem.layer, len(problem.positions)
    sizes = (layer.num_heads,) if problem.options.rule in CHANNEL_RULES else (layer.num_heads, layer.value_head_size)
    return GuardedBuffer((num_rows + problem.num_padding_rows, *sizes), num_rows, problem.dtype, device)


def _matrices_of(problem: RecurrentProblem, output: Tensor) -> Tensor:
    return output[:, :, None] if problem.options.rule in CHANNEL_RULES else output


def _bits(states: Tensor) -> Tensor:
    return states.contiguous().view(torch.int16 if states.element_size() == 2 else torch.int32)
