"""A case of a layer with a state as tensors: inputs, weights, states, and their slots, bitwise equal on every machine.

The requests are those of the batch, decodes first. A request with context has a state. It has one slot of the pool, and
one more for each draft token. With ``mamba_cache_mode: all``, it has one for each block of its tokens, and requests
with a common prefix share the slots of that prefix. All other slots hold stale states, as do those of requests without
a state. A short convolution has its states of drafts in one slot, so that the others of a request are not used.

The numbers are such that each part of a rule decides: heads forget within a row, or hardly in the whole prompt; betas
reach 0 and 1, and keys recur, so that the delta rule has something to correct; some gates are 0 exactly; states are as
large as what rows add.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import torch
from torch import Tensor

from attncheck.backends.dtypes import DTYPES
from attncheck.backends.state import INPUTS, NULL_BLOCK_ID, as_stored, matrix_shape
from attncheck.cases.model import Case
from attncheck.errors import InternalError
from attncheck.harness.problem.pages import RandomStream
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import RecurrenceOptions

FOREIGN, ABSENT, UNREAD = "slots of no request", "slots of requests without a state", "slots of rejected drafts"
CACHED = "slots of blocks that the step does not read"
UNUSED, UNREAD_INPUTS = "slots of drafts that the layer does not use", "inputs that the step does not read"
PADDING = "padding rows"

_FLOAT32_INPUTS = ("g", "beta")

_DECAYS = (0.02, 6.0, 0.25, 1.0)
"""``-A`` of Mamba's heads in turn; ``dt`` is about 1."""

_LOG_DECAYS = (0.004, 4.0, 0.05, 0.5)
"""The mean of ``-g`` of the heads of a delta rule, in turn, and the slopes of linear attention."""

_DT_BIASES = (-1.0, 0.5, -3.0)

_A_LOGS, _GATE_BIASES = (0.0, 0.5, -1.0), (0.5, -1.0)
"""``A_log`` and ``dt_bias`` of the heads of a gated delta network, in turn. Each dtype has these numbers."""

_LEAST_SOFTPLUS = 2**-20
_NO_GATE = -200.0
"""A value of ``a`` for which ``g`` is 0 in float32."""

_LARGE_DT, _LARGE_DT_EVERY = 4.0, 7
_LENGTHS = (1.0, 0.5, 0.75)
"""Lengths of queries and keys that a layer does not normalise. Longer keys would let the state grow."""

_RECURS_EVERY, _RECURS_AFTER = 3, 2
"""Every third row has the key of the row two before it."""

_OWN_KEY_EVERY = 2
"""Every second row of a step of decodes has its own key as a query."""

_WITHOUT_DECAY = slice(1, None, 6)
"""Rows of a delta rule whose ``g`` is 0 in all heads."""


@dataclass(frozen=True)
class StateRequest:
    """One request of a step.

    number, position: its number in the case, and the position of its first row in it. inputs: ``[rows, ...]`` each.
    initial: its state ``[H, V, K]`` before the first row, in the dtype of states; None if it has none.
    slots: its slots in the pool. accepted: the state is in ``slots[accepted - 1]``, unless there is a ``past``.
    block_size: with ``mamba_cache_mode: all``, the tokens of each slot, and the state is in that of the last token
    before the first row. 0 without.
    past: with ``short_conv``, the number of inputs that a state has. All states are in ``slots[0]``, each one column
    behind that before it; the state read begins in column ``accepted - 1``. 0 with other rules.
    """

    number: int
    position: int
    inputs: Mapping[str, Tensor]
    initial: Tensor | None
    slots: tuple[int, ...]
    accepted: int = 1
    block_size: int = 0
    past: int = 0

    @property
    def num_rows(self) -> int:
        """Number of new tokens."""
        return len(next(iter(self.inputs.values())))

    @property
    def most_decoded(self) -> int:
        """The most rows of a decode."""
        return 1 if self.block_size else len(self.slots)

    @property
    def is_decode(self) -> bool:
        """Whether each row has a slot for the state after it."""
        return self.initial is not None and self.num_rows <= self.most_decoded

    @property
    def source(self) -> int:
        """The slot of the state before the first row, whether the request has a state or not."""
        if self.block_size:
            return self.slots[max(self.position - 1, 0) // self.block_size]
        return self.slots[0 if self.past else self.accepted - 1]

    @property
    def written(self) -> dict[int, int]:
        """The row after which the state is stored, by slot."""
        if self.block_size:
            # Of several rows in a block, the last one counts: that at its end, or the last row of the request.
            return {self.slots[(self.position + row) // self.block_size]: row for row in range(self.num_rows)}
        if self.is_decode and not self.past:
            return dict(zip(self.slots, range(self.num_rows), strict=False))
        return {self.slots[0]: self.num_rows - 1}

    @property
    def columns_read(self) -> slice:
        """The columns of the matrices in the slot that are the state before the first row."""
        return slice(self.accepted - 1, self.accepted - 1 + self.past) if self.past else slice(None)

    @property
    def columns_written(self) -> slice:
        """The columns of the matrices that each state has which the step stores."""
        if not self.past:
            return slice(None)
        return slice(0, self.past + (self.num_rows - 1 if self.is_decode else 0))

    def rows(self, first: int, end: int) -> "StateRequest":
        """Return the request with some of its rows alone; its state is the one before ``first``."""
        inputs = {name: tensor[first:end] for name, tensor in self.inputs.items()}
        return replace(self, position=self.position + first, inputs=inputs)


@dataclass(frozen=True)
class RecurrentProblem:
    """The tensors of one step on the CPU. ``requests``: in the order of the step.

    weights: float32, by name; those of ``short_conv`` have the layer's dtype.
    padding: inputs of the padding rows. padding_requests: their number; each has one of these rows, while there
    are any.
    stale: ``[num_slots, H, V, K]`` in the dtype of states: what slots hold that have no state of a request.
    """

    case: Case
    weights: Mapping[str, Tensor]
    requests: tuple[StateRequest, ...]
    padding: Mapping[str, Tensor]
    padding_requests: int
    stale: Tensor

    @property
    def layer(self) -> LayerSpec:
        """The layer."""
        return self.case.layer

    @property
    def options(self) -> RecurrenceOptions:
        """The options of the path."""
        return recurrence_options(self.case)

    @property
    def dtype(self) -> torch.dtype:
        """The layer's dtype."""
        return DTYPES[self.layer.dtype]

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of states."""
        return self.stale.dtype

    @property
    def num_padding_rows(self) -> int:
        """Number of rows behind those of the requests."""
        return len(next(iter(self.padding.values())))

    @property
    def positions(self) -> list[tuple[int, int]]:
        """(request of the case, position) of each row."""
        return [(each.number, each.position + row) for each in self.requests for row in range(each.num_rows)]

    @property
    def places(self) -> list[tuple[StateRequest, int]]:
        """The request and the slot of each state that the step stores."""
        return [(request, slot) for request in self.requests for slot in request.written]

    def row_name(self, row: int) -> str:
        """Return a readable name for a row."""
        request, position = self.positions[row]
        return f"request {request}, position {position}"

    def slot_name(self, slot: int) -> str:
        """Return a readable name for a slot of the pool."""
        owner = "the null block" if slot == NULL_BLOCK_ID else "no request"
        for request in self.requests:
            if slot in request.slots:
                column = f", column {request.slots.index(slot)}" if len(request.slots) > 1 else ""
                owner = f"request {request.number}{column}"
        return f"slot {slot} of {len(self.stale)} ({owner})"

    def ordered(self, requests: Sequence[StateRequest]) -> "RecurrentProblem":
        """Return a step of other requests, decodes first."""
        return replace(self, requests=tuple(sorted(requests, key=lambda each: not each.is_decode)))

    @property
    def sources(self) -> set[int]:
        """The slots of the states that the step reads."""
        return {request.source for request in self.requests if request.initial is not None}

    def regions(self) -> dict[str, Tensor]:
        """Return int64 slots by name, of the regions whose content must not influence the result."""
        owned = {slot for request in self.requests for slot in request.slots}
        foreign = set(range(len(self.stale))) - owned
        absent = {slot for request in self.requests if request.initial is None for slot in request.slots}
        unread = UNUSED if self.options.rule == "short_conv" else UNREAD
        if self.options.mamba_cache_mode == "all":
            unread = CACHED
        found = {FOREIGN: foreign, ABSENT: absent, unread: owned - absent - self.sources}
        return {name: torch.tensor(sorted(slots)) for name, slots in found.items() if slots}

    def columns_written(self) -> Tensor:
        """Return bool ``[num_slots, K]``: the columns of the matrices that the step stores."""
        mask = torch.zeros(len(self.stale), self.stale.shape[-1], dtype=torch.bool)
        for request in self.requests:
            mask[list(request.written), request.columns_written] = True
        return mask

    def unread_columns(self) -> Tensor:
        """Return bool ``[num_slots, K]``: the columns of a slot with a state of ``short_conv`` that are not read."""
        mask = torch.zeros(len(self.stale), self.stale.shape[-1], dtype=torch.bool)
        for request in self.requests:
            if request.initial is not None:
                mask[request.source] = True
                mask[request.source, request.columns_read] = False
        return mask

    def pool(self) -> Tensor:
        """Return the states before the step, ``[num_slots, H, V, K]``."""
        pool = self.stale.clone()
        for request in self.requests:
            if request.initial is not None:
                pool[request.source] = request.initial
        return pool

    def packed(self, name: str) -> Tensor:
        """Return an input of all rows: those of the requests, then padding."""
        return torch.cat([*(request.inputs[name] for request in self.requests), self.padding[name]])


def recurrence_options(case: Case) -> RecurrenceOptions:
    """Return the options of the path ``recurrence``."""
    options = case.batch.path.options
    if not isinstance(options, RecurrenceOptions):
        raise InternalError(f"case {case.key} has the path {case.batch.path.name}")
    return options


def build_recurrent(case: Case, seed: int) -> RecurrentProblem:
    """Return the tensors of ``case`` under ``seed``."""
    stream = RandomStream(seed, case.hash, "recurrence")
    layer, options = case.layer, recurrence_options(case)
    specs = list(case.batch)
    ends = torch.tensor([spec.query_len for spec in specs]).cumsum(0).tolist()
    total = ends[-1] + case.batch.padding.tokens
    inputs = _draw_inputs(stream, layer, options, total)
    block_size = case.cache.block_size if options.mamba_cache_mode == "all" else 0
    columns = 1 + options.num_speculative_tokens
    if options.rule in ("gdn", "kda") and all(spec.context_len and spec.query_len <= columns for spec in specs):
        # In steps without prompts, a row that looks for its own key shows what the delta rule takes from the state.
        inputs["query"][::_OWN_KEY_EVERY] = inputs["key"][::_OWN_KEY_EVERY]
    counts = [-(-spec.total_len // block_size) if block_size else columns for spec in specs]
    # The null block is the first slot, and the last one is what an index of -1 would select.
    num_slots = sum(counts) + max(counts) * (len(specs) // 2) + 4
    drawn = iter((stream.permutation(num_slots - 2) + 1).tolist())
    slots = [tuple(islice(drawn, count)) for count in counts]
    sizes = layer.num_heads, layer.head_size, layer.value_head_size
    shape = matrix_shape(options.rule, *sizes, options.num_speculative_tokens)
    dtype = DTYPES[options.dtype_of_states(layer.dtype)]
    stale = _states(stream, dtype, num_slots, shape)
    initial = _states(stream, dtype, len(specs), shape)
    accepted = _accepted(columns)
    sharer = max(range(len(specs)), key=lambda number: specs[number].shared_prefix)
    requests = []
    for number, (spec, end) in enumerate(zip(specs, ends, strict=True)):
        shared = spec.shared_prefix // block_size if block_size else 0
        request = StateRequest(
            number=number,
            position=spec.context_len,
            inputs={name: tensor[end - spec.query_len : end] for name, tensor in inputs.items()},
            # A request whose whole context is shared has the state of the others that share it.
            initial=initial[sharer if spec.context_len == spec.shared_prefix else number] if spec.context_len else None,
            slots=slots[sharer][:shared] + slots[number][shared:],
            block_size=block_size,
            past=layer.head_size - 1 if options.rule == "short_conv" else 0,
        )
        requests.append(replace(request, accepted=next(accepted)) if request.is_decode else request)
    problem = RecurrentProblem(
        case=case,
        weights=_draw_weights(stream, layer, options),
        requests=(),
        padding={name: tensor[ends[-1] :] for name, tensor in inputs.items()},
        padding_requests=case.batch.padding.requests,
        stale=stale,
    )
    return problem.ordered(requests)


def stored_pool(problem: RecurrentProblem) -> Tensor:
    """Return the states before the step in the shape of the cache, ``[num_slots, *state_shape]``."""
    return as_stored(problem.options.rule, problem.pool())


def _accepted(columns: int) -> Iterator[int]:
    """Yield ``num_accepted_tokens`` of decodes in turn, for example 4, 1, 3, 2 if there are 4 columns of slots."""
    order = [each for pair in zip(range(columns, 0, -1), range(1, columns + 1), strict=True) for each in pair]
    return cycle(order[:columns])


def _states(stream: RandomStream, dtype: torch.dtype, count: int, shape: tuple[int, ...]) -> Tensor:
    return (stream.uniform(count, *shape) / 2).to(dtype)


def _draw_inputs(stream: RandomStream, layer: LayerSpec, options: RecurrenceOptions, total: int) -> dict[str, Tensor]:
    dtype = DTYPES[layer.dtype]
    drawn = dict(zip(INPUTS[options.rule], _inputs_of(stream, layer, options, total), strict=True))
    return {name: tensor.to(torch.float32 if name in _FLOAT32_INPUTS else dtype) for name, tensor in drawn.items()}


def _inputs_of(stream: RandomStream, layer: LayerSpec, options: RecurrenceOptions, total: int) -> Iterator[Tensor]:
    """Yield the inputs of the rule in float64, in the order of :data:`INPUTS`."""
    heads, groups, size = layer.num_heads, layer.num_kv_heads, layer.head_size
    rule = options.rule
    if rule == "short_conv":
        yield stream.uniform(total, heads)
        return
    if rule in ("mamba1", "mamba2"):
        values = () if rule == "mamba1" else (layer.value_head_size,)
        keys = (size,) if rule == "mamba1" else (groups, size)
        yield stream.uniform(total, heads, *values) / 2
        dt = stream.uniform(total, heads)
        dt[::_LARGE_DT_EVERY] += _LARGE_DT
        yield dt
        yield stream.uniform(total, *keys) / 2
        yield stream.uniform(total, *keys) / 2
        return
    query, key = (stream.uniform(total, groups, size) / 2 for _ in range(2))
    if rule == "linear":
        yield from (query, key, stream.uniform(total, heads, layer.value_head_size) / 2)
        return
    key[_RECURS_AFTER::_RECURS_EVERY] = key[:-_RECURS_AFTER:_RECURS_EVERY]
    yield query if options.qk_l2norm else _short(query)
    yield key if options.qk_l2norm else _short(key)
    yield stream.uniform(total, heads, layer.value_head_size) / 2
    mean = _in_turn(_LOG_DECAYS, heads)
    noise = stream.uniform(total, heads).abs()
    if rule == "kda":
        channels = _in_turn(_LOG_DECAYS, heads * size).view(heads, size)
        g = -channels * stream.uniform(total, heads, size).abs()
        g[_WITHOUT_DECAY] = 0
        yield g
    beta = (stream.uniform(total, heads) + 2) / 4
    beta[::5], beta[1::5] = 1 - beta[::5] / 64, beta[1::5] / 64
    if rule == "kda":
        yield beta
        return
    amount, bias = _in_turn(_A_LOGS, heads).exp(), _in_turn(_GATE_BIASES, heads)
    softplus = (mean * noise / amount).clamp(min=_LEAST_SOFTPLUS)
    a, b = softplus + torch.log(-torch.expm1(-softplus)) - bias, torch.logit(beta)
    a[_WITHOUT_DECAY] = _NO_GATE
    a, b = (gate.to(DTYPES[layer.dtype]).double() for gate in (a, b))
    yield from (-amount * torch.nn.functional.softplus(a + bias), torch.sigmoid(b), a, b)


def _draw_weights(stream: RandomStream, layer: LayerSpec, options: RecurrenceOptions) -> dict[str, Tensor]:
    heads = layer.num_heads
    weights: dict[str, Tensor] = {}
    if options.rule == "short_conv":
        weight, bias = draw_taps(stream, heads, layer.head_size)
        taps = {"weight": weight, "bias": bias} if options.bias else {"weight": weight}
        return {name: tensor.to(DTYPES[layer.dtype]) for name, tensor in taps.items()}
    if options.rule in ("mamba1", "mamba2"):
        count = heads * (layer.head_size if options.rule == "mamba1" else 1)
        decay = _in_turn(_DECAYS, count) * (1 + stream.uniform(count) / 8)
        weights["A"] = -decay.view(heads, -1) if options.rule == "mamba1" else -decay
        # Layers may have it in the model's dtype. Each dtype has the numbers of bfloat16 in this range.
        weights["dt_bias"] = (_in_turn(_DT_BIASES, heads) + stream.uniform(heads) / 8).to(torch.bfloat16)
    elif options.rule == "gdn":
        weights["A_log"], weights["dt_bias"] = _in_turn(_A_LOGS, heads), _in_turn(_GATE_BIASES, heads)
    elif options.rule == "linear":
        weights["slopes"] = _in_turn(_LOG_DECAYS, heads) * (1 + stream.uniform(heads) / 8)
    return {name: tensor.float() for name, tensor in weights.items()}


def draw_taps(stream: RandomStream, channels: int, taps: int) -> tuple[Tensor, Tensor]:
    """Return the weight ``[C, taps]`` and the bias ``[C]`` of a short convolution, float64."""
    return stream.uniform(channels, taps) / 2, stream.uniform(channels)


def _in_turn(values: Sequence[float], count: int) -> Tensor:
    """Return float64 ``[count]``: the values in turn."""
    return torch.tensor(values, dtype=torch.float64).repeat(-(-count // len(values)))[:count]


def _short(rows: Tensor) -> Tensor:
    """Return rows of lengths up to 1. They are rounded first, so that the sum of their squares is exact."""
    rounded = rows.to(torch.bfloat16).double()
    lengths = _in_turn(_LENGTHS, len(rows))[:, None, None]
    return rounded / rounded.square().sum(-1, keepdim=True).sqrt() * lengths
