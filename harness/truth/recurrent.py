"""The float64 truth of a layer with a state, the error budget around it, and layers with one fault each.

The truth is the loop of :mod:`attncheck.reference.attention.recurrence`, request by request. The budget has the formula
of ``unpaged``. Its honest low-precision runs are:

- the loop in float32;
- where states have fewer bits, the same loop with the state rounded after each row of a decode. Its output comes from
  the rounded state. With ``mamba1``, this holds for the rows of prompts, too: each may be a call of the decode kernel;
- the form in chunks of :func:`rounded_chunks`, of 1, 16 and 64 rows. Its operands, beta and intermediate results are
  rounded to the layer's dtype, as kernels for matrix units round them. Beta of ``gdn`` is ``1 / (1 + exp(-b))``, with
  each result rounded to the dtype of ``b``. Queries and keys are normalised in the same way in their dtype, as layers
  in torch do. The state is rounded to its dtype after each chunk. For decodes, chunks have one row, because a kernel
  may read again the state that it stored after each row.

An error enters the state and decays with it, in these runs as in a kernel. So no bound of its own is needed for decay.
``mamba1`` has no form in chunks: its kernels are loops in float32.

A stored state has the same budget in the dtype of states: each row of its matrix counts as one head of an output.

A short convolution is no recurrence: :mod:`short_conv` has its rows and its budget, and its states are exact.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from attncheck.errors import BlindCaseError
from attncheck.harness.problem.recurrent import RecurrentProblem, StateRequest
from attncheck.harness.truth.short_conv import convolution_budget, convolved, only_state, runs_of, stored_inputs
from attncheck.harness.truth.truth import NOTICEABLE
from attncheck.harness.truth.unpaged import (
    ROUNDINGS,
    Budget,
    allowed_errors,
    float32_bracket,
    share_of_budget,
    usual_errors,
    usual_losses,
)
from attncheck.reference.attention.recurrence import RecurrentRows, recurrence, recurrent_rows

_CHUNKS = (1, 16, 64)
_ROUNDINGS = 4
"""Roundings of an output that kernels for matrix units make: of the score, the value, its correction, and itself."""
_NARROW = 8
_LONGEST_CHUNK = 256
"""Rows over which kernels sum the logarithms of decays in float32."""


@dataclass(frozen=True)
class Computed:
    """Outputs ``[T, H, V]`` of a step, and the states that it stores, ``[S, H, V, K]``, in the order of ``places``."""

    out: Tensor
    states: Tensor

    @property
    def judged_out(self) -> Tensor:
        """The outputs ``[T, heads, columns]`` as they are judged. Channels of ``mamba1`` are columns of one head."""
        return self.out.transpose(1, 2) if self.out.shape[2] < _NARROW else self.out

    @property
    def judged_states(self) -> Tensor:
        """The states ``[S * V, H, K]``: each row of a matrix is judged by itself."""
        return self.states.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class RecurrentTruth:
    """The right result in float64, and the budgets of outputs and states in their judged shapes.

    usual, usual_of_states: the usual losses in a head, as of :func:`usual_losses`.
    """

    right: Computed
    budget: Budget
    state_budget: Budget
    usual: tuple[Tensor, Tensor]
    usual_of_states: tuple[Tensor, Tensor]

    def shares(self, seen: Computed) -> Tensor:
        """Return the errors of the outputs in budgets, ``[T, heads]``."""
        return share_of_budget(seen.judged_out - self.right.judged_out, self.budget)

    def state_shares(self, seen: Computed) -> Tensor:
        """Return the errors of the stored states in budgets, ``[S, V * H]``."""
        shares = share_of_budget(seen.judged_states - self.right.judged_states, self.state_budget)
        return shares.reshape(len(self.right.states), -1)


def recurrent_truth(problem: RecurrentProblem, first: RecurrentTruth | None = None) -> RecurrentTruth:
    """Return the truth of a step.

    ``first``: the truth of the first step of the same case, if this is a later one. What is usual in a head is then at
    least as large as there. Otherwise a request alone would have a smaller budget than the same rows in a batch.

    Raises:
        BlindCaseError: a fault of :func:`mistakes` changes the outputs, but by less than a kernel may err.
    """
    truth = _truth_of_convolution(problem) if problem.options.rule == "short_conv" else _truth_of_loop(problem, first)
    if problem.case.tolerance is not None:
        budget, state_budget = (
            each.scaled(problem.case.tolerance.factor) for each in (truth.budget, truth.state_budget)
        )
        truth = replace(truth, budget=budget, state_budget=state_budget)
    if first is None:
        _refuse_blindness(problem, truth)
    return truth


def _truth_of_convolution(problem: RecurrentProblem) -> RecurrentTruth:
    right = computed(problem)
    runs = runs_of(problem, [state_of(problem, request) for request in problem.requests])
    budget = convolution_budget(runs, problem.options.activation, problem.layer.head_size, problem.dtype)
    none = torch.zeros_like(right.judged_states[:, :, 0])
    exact = Budget(none, none, none)
    unused = none[:1], none[:1]
    return RecurrentTruth(right, budget, exact, unused, unused)


def _truth_of_loop(problem: RecurrentProblem, first: RecurrentTruth | None) -> RecurrentTruth:
    right = computed(problem)
    steps = [(request, rows_of(problem, request)) for request in problem.requests]
    runs = list(_honest_runs(problem, steps))
    weighted = _joined([_sizes(request, rows, 1) for request, rows in steps])
    spread = _joined([_sizes(request, rows, 2) for request, rows in steps])
    reach = torch.cat([_reach(rows) for _, rows in steps])
    bracket = float32_bracket(reach, problem.layer.head_size)
    of_state = bracket[_stored_rows(problem)]
    losses = [run.judged_out - right.judged_out for run in runs]
    usual = usual_losses(losses, spread.judged_out.sqrt())
    losses_of_states = [run.judged_states - right.judged_states for run in runs]
    usual_of_states = usual_losses(losses_of_states, spread.judged_states.sqrt())
    if first is not None:
        usual = _larger(usual, first.usual)
        usual_of_states = _larger(usual_of_states, first.usual_of_states)
    budget = _budget(
        allowed_errors(
            losses,
            right.judged_out,
            bracket if right.judged_out is right.out else bracket.amax(dim=1, keepdim=True),
            weighted.judged_out,
            problem.dtype,
            ROUNDINGS if problem.options.rule == "mamba1" else _ROUNDINGS,
        ),
        usual_errors(usual, spread.judged_out.sqrt()),
    )
    state_budget = _budget(
        allowed_errors(
            losses_of_states,
            right.judged_states,
            of_state.repeat_interleave(right.states.shape[2], dim=0),
            weighted.judged_states,
            problem.state_dtype,
        ),
        usual_errors(usual_of_states, spread.judged_states.sqrt()),
    )
    return RecurrentTruth(right, budget, state_budget, usual, usual_of_states)


def rows_of(problem: RecurrentProblem, request: StateRequest, **changes: object) -> RecurrentRows:
    """Return the rows of a request in float64. ``changes``: arguments of :func:`recurrent_rows` to replace."""
    arguments: dict[str, object] = {
        "rule": problem.options.rule,
        "inputs": {name: tensor.double() for name, tensor in request.inputs.items()},
        "weights": {name: tensor.double() for name, tensor in problem.weights.items()},
        "scale": problem.layer.scale,
        "qk_l2norm": problem.options.qk_l2norm,
    }
    rows: RecurrentRows = recurrent_rows(**{**arguments, **changes})  # type: ignore[arg-type]
    return rows


def state_of(_problem: RecurrentProblem, request: StateRequest) -> Tensor | None:
    """Return the state before the first row, float64 ``[H, V, K]``; None if there is none."""
    return None if request.initial is None else request.initial.double()


def stored_after(request: StateRequest) -> list[int]:
    """Return the rows of a request after which its states are stored, in the order of its places."""
    return list(request.written.values())


@dataclass(frozen=True)
class Mistake:
    """A fault of a layer. ``meaning``: in words.

    ``rows``, ``state``: what it takes for those of a request. ``stored``: the rows whose states it stores. ``loop``:
    its form of :func:`recurrence`. ``arguments``: those of a short convolution, which has no ``rows`` and ``loop``.
    ``only_state``: the row after which decodes of a short convolution store their only state; None if they store all.
    """

    meaning: str
    rows: Callable[[RecurrentProblem, StateRequest], RecurrentRows] = rows_of
    state: Callable[[RecurrentProblem, StateRequest], Tensor | None] = state_of
    stored: Callable[[StateRequest], list[int]] = stored_after
    loop: Callable[[RecurrentRows, Tensor | None, list[int]], tuple[Tensor, dict[int, Tensor]]] = recurrence
    arguments: Mapping[str, object] = field(default_factory=dict)
    only_state: Callable[[StateRequest], int] | None = None


_NONE = Mistake("")


def computed(problem: RecurrentProblem, mistake: Mistake = _NONE, requests: Collection[int] | None = None) -> Computed:
    """Return the exact result of a layer with a fault, or without.

    ``requests``: the numbers of those on which the fault acts; None for all.
    """
    faulty = {request.number for request in problem.requests} if requests is None else requests
    made = [(request, mistake if request.number in faulty else _NONE) for request in problem.requests]
    if problem.options.rule == "short_conv":
        contents = [each.state(problem, request) for request, each in made]
        columns = problem.stale.shape[-1]
        states = [
            stored_inputs(request, content, row, columns)
            if each.only_state is None or not request.is_decode
            else only_state(problem, request, content, each.only_state(request))
            for (request, each), content in zip(made, contents, strict=True)
            for row in each.stored(request)
        ]
        is_faulty = torch.tensor([number in faulty for number, _ in problem.positions])
        changed = convolved(problem, contents, **mistake.arguments)
        out = torch.where(is_faulty[:, None], changed, convolved(problem, contents))
        return Computed(out[:, :, None], torch.stack(states))
    parts = []
    for request, each in made:
        stored = each.stored(request)
        parts.append(_looped(each.loop(each.rows(problem, request), each.state(problem, request), stored), stored))
    return _joined(parts)


def _loop(stored: list[int], rows: RecurrentRows, state: Tensor | None) -> Computed:
    return _looped(recurrence(rows, state, keep=stored), stored)


def _looped(found: tuple[Tensor, dict[int, Tensor]], stored: list[int]) -> Computed:
    out, after = found
    return Computed(out.double(), torch.stack([after[row] for row in stored]).double())


def _joined(parts: list[Computed]) -> Computed:
    return Computed(torch.cat([part.out for part in parts]), torch.cat([part.states for part in parts]))


def _stored_rows(problem: RecurrentProblem) -> list[int]:
    """Return the row of the step after which each state is stored."""
    rows, first = [], 0
    for request in problem.requests:
        rows += [first + row for row in stored_after(request)]
        first += request.num_rows
    return rows


def _larger(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.maximum(one[0], other[0]), torch.maximum(one[1], other[1])


def _budget(allowed: tuple[Tensor, Tensor], usual: tuple[Tensor, Tensor]) -> Budget:
    norm, peak = _larger(allowed, usual)
    return Budget(norm, peak, torch.zeros_like(norm))


# Honest runs in low precision, and the sizes of what is summed.


def _honest_runs(problem: RecurrentProblem, steps: list[tuple[StateRequest, RecurrentRows]]) -> Iterator[Computed]:
    in_float32 = [(request, rows.to(torch.float32), request.initial) for request, rows in steps]
    yield _joined([_loop(stored_after(request), rows, state) for request, rows, state in in_float32])
    if problem.state_dtype != torch.float32:
        yield _joined([_out_of_stored(problem, *each) for each in in_float32])
    for size in _CHUNKS:
        yield _joined([_rounded(problem, size, *each) for each in in_float32])


def _out_of_stored(
    problem: RecurrentProblem, request: StateRequest, rows: RecurrentRows, state: Tensor | None
) -> Computed:
    """Return the loop whose outputs come from the rounded state; the plain loop for prompts but those of ``mamba1``."""
    if not request.is_decode and problem.options.rule != "mamba1":
        return _loop(stored_after(request), rows, state)
    stored = problem.state_dtype
    outputs, states = [], []
    for t in range(request.num_rows):
        _, after = recurrence(_row(rows, t), state, keep=[0])
        state = after[0].to(stored).float()
        outputs.append(torch.einsum("hvk,hk->hv", state, rows.query[t]))
        states.append(state)
    kept = [states[t] for t in stored_after(request)]
    return Computed(torch.stack(outputs).double(), torch.stack(kept).double())


def _row(rows: RecurrentRows, t: int) -> RecurrentRows:
    at = slice(t, t + 1)
    beta = None if rows.beta is None else rows.beta[at]
    return RecurrentRows(rows.query[at], rows.key[at], rows.value[at], rows.log_decay[at], beta)


def _rounded(
    problem: RecurrentProblem, size: int, request: StateRequest, rows: RecurrentRows, state: Tensor | None
) -> Computed:
    stored = problem.state_dtype
    kept = stored_after(request)
    if problem.options.rule == "mamba1":
        after_row = stored if request.is_decode else torch.float32
        out, after = rounded_chunks(rows, state, 1, torch.float32, after_row, kept)
    else:
        if problem.options.rule in ("gdn", "kda") and problem.options.qk_l2norm:
            rows = _with_rounded_norm(problem, request)
        rows = _with_rounded_beta(request, rows) if problem.options.rule == "gdn" else rows
        out, after = rounded_chunks(rows, state, 1 if request.is_decode else size, problem.dtype, stored, kept)
    return Computed(out.double(), torch.stack([after[row] for row in kept]).to(stored).double())


def _with_rounded_norm(problem: RecurrentProblem, request: StateRequest) -> RecurrentRows:
    """Return float32 rows whose queries and keys are normalised in their dtype, as by functions of torch."""
    inputs = dict(request.inputs)
    for name in ("query", "key"):
        given = inputs[name]
        inputs[name] = given * torch.rsqrt((given * given).sum(-1, keepdim=True) + 1e-6)  # torch rounds each result
    exact = {name: tensor.double() for name, tensor in inputs.items()}
    return rows_of(problem, request, inputs=exact, qk_l2norm=False).to(torch.float32)


def _with_rounded_beta(request: StateRequest, rows: RecurrentRows) -> RecurrentRows:
    """Return rows whose beta is computed in the dtype of ``b``: three roundings, as kernels for few heads have."""
    b = request.inputs["b"]
    beta = 1 / (1 + (-b).exp())  # torch rounds each result
    return replace(rows, beta=beta.float())


def rounded_chunks(
    rows: RecurrentRows,
    state: Tensor | None,
    size: int,
    dtype: torch.dtype,
    stored: torch.dtype,
    stops: Collection[int] = (),
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the outputs ``[T, H, V]``, and the state after each chunk in float32, by the last row of the chunk.

    A chunk has at most ``size`` rows, and ends at each row of ``stops``.

    Beta, operands and results of each matrix product are rounded to ``dtype``, and the state to ``stored`` after each
    chunk. ``rows``: float32. With a delta rule, the corrected values are ``T (beta V) - T (beta K exp(G)) S``. ``T`` is
    the inverse of a unit lower triangular matrix (Gated DeltaNet, arXiv 2412.06464, section 3.3).
    """

    def low(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    now = torch.zeros(rows.state_shape) if state is None else state.float()
    now = now.to(rows.query.device)
    outputs, states = [], {}
    first = 0
    for last in range(len(rows.query)):
        if last - first + 1 < size and last not in stops and last + 1 < len(rows.query):
            continue
        at = slice(first, last + 1)
        query, key, value = low(rows.query[at]), low(rows.key[at]), low(rows.value[at])
        total = rows.log_decay[at].cumsum(0)
        sees = torch.ones(len(total), len(total), dtype=torch.bool, device=total.device).tril()
        between = (total[:, None] - total[None]).masked_fill(~sees[:, :, None, None], -torch.inf).exp()
        if rows.beta is not None:
            beta = low(rows.beta[at])
            overlap = beta.t()[:, :, None] * torch.einsum("thk,tihk,ihk->hti", key, between, key).tril(-1)
            unit = torch.eye(len(total), device=total.device).expand_as(overlap)
            inverse = low(torch.linalg.solve_triangular(overlap + unit, unit, upper=False, unitriangular=True))
            from_state = low(torch.einsum("hti,ihk->thk", inverse, low(beta[:, :, None] * key * total.exp())))
            from_values = low(torch.einsum("hti,ihv->thv", inverse, low(beta[:, :, None] * value)))
            value = low(from_values - torch.einsum("thk,hvk->thv", from_state, low(now)))
        scores = low(torch.einsum("thk,tihk,ihk->hti", query, between, key))
        out = torch.einsum("hti,ihv->thv", scores, value)
        outputs.append(out + torch.einsum("thk,hvk->thv", low(query * total.exp()), low(now)))
        kept = now * total[-1].exp()[:, None]
        now = kept + torch.einsum("thk,thv->hvk", low(key * (total[-1] - total).exp()), value)
        now = now.to(stored).float()
        states[last] = now
        first = last + 1
    return torch.cat(outputs), states


def _sizes(request: StateRequest, rows: RecurrentRows, power: int) -> Computed:
    """Return the sums of the magnitudes of all summands, to a power. A delta rule has those that it takes, too."""
    values = rows.value.abs()
    if rows.beta is not None:
        known = _loop(stored_after(request), replace(rows, query=rows.key), _double(request.initial)).out
        values = rows.beta[:, :, None] * (values + known.abs())
    initial = None if request.initial is None else request.initial.double().abs() ** power
    query, key, values = (each.abs() ** power for each in (rows.query, rows.key, values))
    return _loop(stored_after(request), RecurrentRows(query, key, values, power * rows.log_decay), initial)


def _double(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.double()


def _reach(rows: RecurrentRows) -> Tensor:
    """Return ``[T, H]``: the largest sum of logarithms of decays within a chunk that ends at the row."""
    total = -rows.log_decay.cumsum(0)
    before = torch.cat([torch.zeros_like(total[:_LONGEST_CHUNK]), total[:-_LONGEST_CHUNK]])[: len(total)]
    return (total - before).amax(dim=2)


# Faults of layers. A wrong output is compared with each. A case must show each that can act on its requests.


def mistakes(problem: RecurrentProblem) -> Iterator[Mistake]:
    """Yield the commonest faults that the rule of the problem can have."""
    rule, layer, options = problem.options.rule, problem.layer, problem.options
    is_loop = rule != "short_conv"
    if is_loop:
        yield Mistake("the decay is missing", rows=_without_decay)
    yield Mistake("the initial state is ignored", state=_no_state)
    yield Mistake("states are used where has_initial_states is False", state=_stale_state)
    yield Mistake("the state of another request is read", state=_state_of_next)
    if options.num_speculative_tokens and is_loop:
        yield Mistake("the state is read from column 0, not num_accepted_tokens - 1", state=_state_of_first_column)
    if options.mamba_cache_mode == "all":
        words = "the state is read from the block of the last new token, not of the last computed one"
        yield Mistake(words, state=_state_of_last_block)
        yield Mistake("all blocks of a request get the state after its last row", stored=_after_last_row)
    if rule in ("mamba1", "mamba2"):
        yield Mistake("dt_bias is missing", rows=_without_dt_bias)
    elif rule == "short_conv":
        yield from _mistakes_of_convolution(problem)
    else:
        yield Mistake("the scale is missing", rows=partial(rows_of, scale=1.0))
    if rule in ("gdn", "kda"):
        yield Mistake("the delta rule is missing: nothing is taken from the state", rows=_without_delta)
        yield Mistake("beta is missing", rows=_without_beta)
        other = not options.qk_l2norm
        words = "queries and keys are normalised, and the case has qk_l2norm false" if other else ""
        yield Mistake(words or "queries and keys are not normalised", rows=partial(rows_of, qk_l2norm=other))
    if 1 < layer.num_kv_heads < layer.num_heads:
        yield Mistake("head h reads the keys of head h % num_kv_heads", rows=_keys_in_turn)


def _mistakes_of_convolution(problem: RecurrentProblem) -> Iterator[Mistake]:
    options, weight = problem.options, problem.weights["weight"].double()
    words = "the taps are in reverse order: the last one belongs to the newest row"
    yield Mistake(words, arguments={"weight": weight.flip(1)})
    if options.activation is None:
        yield Mistake("an activation is applied, and the case has none", arguments={"activation": "silu"})
    else:
        yield Mistake("the activation is missing", arguments={"activation": None})
    if options.bias:
        yield Mistake("the bias is missing", arguments={"bias": None})
    if options.num_speculative_tokens:
        words = "the state is read from input 0 of the slot, not from input num_accepted_tokens - 1"
        yield Mistake(words, state=_state_at_start)
        words = "the state is read from the slot in column num_accepted_tokens - 1, not from that in column 0"
        yield Mistake(words, state=_state_of_accepted_column)
        words = "the last inputs of decodes are stored alone, as if all drafts were accepted"
        yield Mistake(words, only_state=lambda request: request.num_rows - 1)
        yield Mistake("the states after the drafts of decodes are not stored", only_state=lambda _request: 0)
    yield Mistake("the new state ends before the last row", stored=_after_row_before)


_Order = Literal["output first", "decay last", "undecayed", "correction first"]


def wrong_orders(problem: RecurrentProblem) -> Iterator[Mistake]:
    """Yield layers that do the parts of a row in a wrong order, or lose the decay of a first row.

    Some change little; no case has to show them.
    """
    if problem.options.rule == "short_conv":
        return
    yield Mistake("the state before a prompt's first row has not decayed", state=_undecayed_state)
    yield Mistake("the output comes from the state before the row", loop=partial(_in_order, "output first"))
    words = "the decay follows the row's key and value instead of preceding them"
    yield Mistake(words, loop=partial(_in_order, "decay last"))
    if problem.options.rule in ("gdn", "kda"):
        words = "the delta rule takes from the new state what the undecayed one returns"
        yield Mistake(words, loop=partial(_in_order, "undecayed"))
    if problem.options.rule == "kda":
        words = "the state is corrected before its decay, instead of after it"
        yield Mistake(words, loop=partial(_in_order, "correction first"))


def _in_order(
    order: _Order, rows: RecurrentRows, state: Tensor | None, keep: list[int]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return what :func:`recurrence` does, for another order."""
    now = torch.zeros(rows.state_shape, dtype=torch.float64) if state is None else state
    decay = rows.log_decay.exp()
    outputs, states = torch.empty_like(rows.value), {}
    for t, (query, key, value) in enumerate(zip(rows.query, rows.key, rows.value, strict=True)):
        before, decayed = now, now * decay[t, :, None, :]
        added, taken = value, torch.zeros_like(value)
        if rows.beta is not None:
            beta = rows.beta[t, :, None]
            added = beta * value
            taken = beta * torch.einsum("hvk,hk->hv", decayed if order == "output first" else before, key)
        change = torch.einsum("hv,hk->hvk", added - taken, key)
        match order:
            case "decay last":
                now = (before + change) * decay[t, :, None, :]
            case "correction first":
                corrected = before - torch.einsum("hv,hk->hvk", taken, key)
                now = corrected * decay[t, :, None, :] + torch.einsum("hv,hk->hvk", added, key)
            case _:
                now = decayed + change
        outputs[t] = torch.einsum("hvk,hk->hv", before if order == "output first" else now, query)
        if t in keep:
            states[t] = now
    return outputs, states


def _without_decay(problem: RecurrentProblem, request: StateRequest) -> RecurrentRows:
    rows = rows_of(problem, request)
    return replace(rows, log_decay=torch.zeros_like(rows.log_decay))


def _without_dt_bias(problem: RecurrentProblem, request: StateRequest) -> RecurrentRows:
    weights = {name: tensor.double() for name, tensor in problem.weights.items()}
    weights["dt_bias"] = torch.zeros_like(weights["dt_bias"])
    return rows_of(problem, request, weights=weights)


def _without_delta(problem: RecurrentProblem, request: StateRequest) -> RecurrentRows:
    rows = rows_of(problem, request)
    factor = 1.0 if rows.beta is None else rows.beta[:, :, None]
    return replace(rows, value=rows.value * factor, beta=None)


def _without_beta(problem: RecurrentProblem, request: StateRequest) -> RecurrentRows:
    rows = rows_of(problem, request)
    return replace(rows, beta=None if rows.beta is None else torch.ones_like(rows.beta))


def _keys_in_turn(problem: RecurrentProblem, request: StateRequest) -> RecurrentRows:
    rows, layer = rows_of(problem, request), problem.layer
    group_size = layer.num_heads // layer.num_kv_heads
    in_turn = torch.arange(layer.num_heads) % layer.num_kv_heads * group_size
    return replace(rows, query=rows.query[:, in_turn], key=rows.key[:, in_turn])


def _no_state(_problem: RecurrentProblem, _request: StateRequest) -> Tensor | None:
    return None


def _undecayed_state(problem: RecurrentProblem, request: StateRequest) -> Tensor | None:
    state = state_of(problem, request)
    if state is None or request.is_decode:
        return state
    return state * (-rows_of(problem, request).log_decay[0, :, None]).exp()


def _stale_state(problem: RecurrentProblem, request: StateRequest) -> Tensor | None:
    return problem.pool()[request.source].double()


def _state_of_next(problem: RecurrentProblem, request: StateRequest) -> Tensor | None:
    if request.initial is None:
        return None
    having = [each for each in problem.requests if each.initial is not None]
    place = [each.number for each in having].index(request.number)
    return state_of(problem, having[(place + 1) % len(having)])


def _state_of_first_column(problem: RecurrentProblem, request: StateRequest) -> Tensor | None:
    return None if request.initial is None else problem.pool()[request.slots[0]].double()


def _state_at_start(problem: RecurrentProblem, request: StateRequest) -> Tensor | None:
    state = state_of(problem, request)
    return None if state is None else state.roll(request.accepted - 1, dims=-1)


def _state_of_accepted_column(problem: RecurrentProblem, request: StateRequest) -> Tensor | None:
    first = request.accepted - 1
    return None if request.initial is None else problem.pool()[request.slots[first]].double().roll(first, dims=-1)


def _state_of_last_block(problem: RecurrentProblem, request: StateRequest) -> Tensor | None:
    return None if request.initial is None else problem.pool()[list(request.written)[-1]].double()


def _after_last_row(request: StateRequest) -> list[int]:
    return [request.num_rows - 1] * len(request.written)


def _after_row_before(request: StateRequest) -> list[int]:
    return [row - 1 for row in stored_after(request)]


def _refuse_blindness(problem: RecurrentProblem, truth: RecurrentTruth) -> None:
    for mistake in mistakes(problem):
        wrong = computed(problem, mistake)
        if torch.equal(wrong.out, truth.right.out):
            continue  # it cannot act on these requests
        most = float(truth.shares(wrong).max())
        if most < NOTICEABLE:
            raise BlindCaseError(
                problem.case.key,
                mistake.meaning,
                f"no row moves by {NOTICEABLE:g} times the allowed error (largest: {most:.3g}); use longer requests",
            )
