"""Checks of the function ``causal_conv1d`` that a backend offers."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend
from attncheck.backends.dtypes import DTYPES
from attncheck.cases.model import Case
from attncheck.harness.checks.again import Repeats
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.checks.interface import Function, as_tensor, call, is_answer
from attncheck.harness.checks.numerics import rows_in_words
from attncheck.harness.driver.pool import flat_bytes
from attncheck.harness.problem.pages import RandomStream
from attncheck.harness.problem.problem import planted_inputs
from attncheck.harness.problem.recurrent import draw_taps
from attncheck.harness.truth.short_conv import ConvolutionRuns, convolution_budget
from attncheck.harness.truth.unpaged import Budget, share_of_budget
from attncheck.reference import Precision, causal_conv1d
from attncheck.reference.step_spec import CausalConv1dOptions

# A short convolution over packed sequences with a rolling state: its tensors, and the right result.
#
# The sequences are the requests of the batch. Each has its own line of the state buffer, which has more lines and
# columns than needed; only a request with context has a state. Padding requests have the index `PAD_ID`. Each padding
# request gets one padding token while there are any, and further padding tokens belong to no sequence.

PAD_ID = -1
"""The index of padding sequences, as in vLLM."""

_SPARE_STATE = 3
"""Columns of the state buffer that no state uses, and columns of the packed rows that a view omits."""

_RUBBISH = 512.0

SPARE, FOREIGN, ABSENT = "spare columns of the state", "lines of no sequence", "lines of sequences without a state"


@dataclass(frozen=True)
class ConvProblem:
    """The arguments on the CPU. The ``T`` real rows of ``R`` sequences come first, then those of padding."""

    case: Case
    positions: tuple[tuple[int, int], ...]
    """(request, position) of each real row."""
    x: Tensor
    """``[T + padding, C]``, in the layer's dtype, as are weight, bias and states."""
    weight: Tensor
    bias: Tensor | None
    states: Tensor
    """``[lines, C, K - 1 + spare]``"""
    query_start_loc: Tensor
    cache_indices: Tensor
    has_initial_state: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The layer's dtype."""
        return DTYPES[self.case.layer.dtype]

    @property
    def options(self) -> CausalConv1dOptions:
        """The options of the path."""
        return conv_options(self.case)

    @property
    def past(self) -> int:
        """``K - 1``: the number of inputs that a state holds."""
        return self.options.width - 1

    @property
    def lines(self) -> list[int]:
        """The state line of each request."""
        return [int(line) for line in self.cache_indices[: self.case.batch.num_requests]]

    def row_name(self, row: int) -> str:
        """Return a readable name for a row."""
        request, position = self.positions[row]
        return f"request {request}, position {position}"

    def line_name(self, line: int) -> str:
        """Return a readable name for a line of the state."""
        owner = f"request {self.lines.index(line)}" if line in self.lines else "no sequence"
        return f"line {line} of {len(self.states)} ({owner})"

    def regions(self) -> dict[str, Tensor]:
        """Return bool masks ``[lines, 1, columns]`` by name, of the regions that must not influence the result."""
        lines, _, width = self.states.shape
        spare = (torch.arange(width) >= self.past).expand(lines, 1, width)
        named = torch.zeros(lines, 1, 1, dtype=torch.bool)
        absent = torch.zeros(lines, 1, 1, dtype=torch.bool)
        named[self.lines] = True
        absent[self.lines] = ~self.has_initial_state[: len(self.lines), None, None]
        masks = {SPARE: spare, FOREIGN: ~named & ~spare, ABSENT: absent & ~spare}
        return {name: mask for name, mask in masks.items() if bool(mask.any())}

    def arguments(
        self, device: torch.device, poison: float | None = None, regions: tuple[str, ...] | None = None
    ) -> dict[str, Tensor | None]:
        """Return the positional arguments in order, as new tensors, with ``poison`` in ``regions`` of the states.

        ``regions``: names of :meth:`regions`, or None for all. With the input ``views``, rows are slices of wider rows,
        and states have channels last in memory.
        """
        x = self.x.to(device, copy=True)
        states = self.states.to(device, copy=True)
        if poison is not None:
            for name, mask in self.regions().items():
                if regions is None or name in regions:
                    states.masked_fill_(mask.to(device), poison)
        if "views" in planted_inputs(self.case):
            wide = x.new_full((len(x), x.shape[1] + _SPARE_STATE), _RUBBISH)
            wide[:, : x.shape[1]] = x
            x = wide[:, : x.shape[1]]
            states = states.transpose(1, 2).contiguous().transpose(1, 2)
        return {
            "x": x,
            "weight": self.weight.to(device, copy=True),
            "bias": None if self.bias is None else self.bias.to(device, copy=True),
            "conv_states": states,
            "query_start_loc": self.query_start_loc.to(device, copy=True),
            "cache_indices": self.cache_indices.to(device, copy=True),
            "has_initial_state": self.has_initial_state.to(device, copy=True),
        }


@dataclass(frozen=True)
class ConvTruth:
    """The right result: ``y`` float64 ``[T, 1, C]`` of the real rows, the states after the call, and the budget."""

    y: Tensor
    states: Tensor
    budget: Budget


def conv_options(case: Case) -> CausalConv1dOptions:
    """Return the options of the path, or the defaults."""
    options = case.batch.path.options
    return options if isinstance(options, CausalConv1dOptions) else CausalConv1dOptions()


def build_conv(case: Case, seed: int) -> ConvProblem:
    """Return the tensors of ``case`` under ``seed``, with the same bits on every machine."""
    stream = RandomStream(seed, case.hash, "causal_conv1d")
    options = conv_options(case)
    dtype = DTYPES[case.layer.dtype]
    specs = list(case.batch)
    padding = case.batch.padding
    positions = tuple((r, max(spec.context_len, 0) + i) for r, spec in enumerate(specs) for i in range(spec.query_len))
    one_each = [1 if i < padding.tokens else 0 for i in range(padding.requests)]
    lengths = [*(spec.query_len for spec in specs), *one_each]
    # Leave the first line unused, because some kernels take it for padding, and the last, which index -1 would select.
    num_lines = len(specs) + len(specs) // 2 + 4
    lines = stream.permutation(num_lines - 2)[: len(specs)] + 1
    remembers = torch.tensor([spec.context_len > 0 for spec in specs])
    size, past = options.channels, options.width - 1
    states = stream.uniform(num_lines, size, past + _SPARE_STATE) * _RUBBISH
    states[lines[remembers], :, :past] = stream.uniform(int(remembers.sum()), size, past)
    weight, bias = draw_taps(stream, size, options.width)
    return ConvProblem(
        case=case,
        positions=positions,
        x=stream.uniform(len(positions) + padding.tokens, size).to(dtype),
        weight=weight.to(dtype),
        bias=bias.to(dtype) if options.bias else None,
        states=states.to(dtype),
        query_start_loc=torch.tensor([0, *lengths]).cumsum(0).int(),
        cache_indices=torch.cat([lines, torch.full((padding.requests,), PAD_ID)]).int(),
        has_initial_state=torch.cat([remembers, torch.arange(padding.requests) % 2 == 1]),
    )


def conv_truth(problem: ConvProblem, device: torch.device) -> ConvTruth:
    """Return the right result, and the error that a correct kernel may have."""
    activation, real = problem.options.activation, len(problem.positions)
    y, states = convolve(problem, device)
    low, _ = convolve(problem, device, precision=Precision(torch.float32, None, problem.dtype))
    sums, _ = convolve(problem, device, activation=None)
    weighted, squares = (_convolve_sizes(problem, device, power)[:real] for power in (1, 2))
    runs = ConvolutionRuns(y, low, sums, weighted, squares)
    budget = convolution_budget(runs, activation, problem.options.width, problem.dtype)
    if problem.case.tolerance is not None:
        budget = budget.scaled(problem.case.tolerance.factor)
    return ConvTruth(y[:, None], states, budget)


def convolve(problem: ConvProblem, device: torch.device, **changes: object) -> tuple[Tensor, Tensor]:
    """Return the reference's ``y``, float64 ``[T, C]`` of the real rows, and the states.

    ``changes``: arguments to replace.
    """
    options: dict[str, object] = {"activation": problem.options.activation, "pad_id": PAD_ID}
    arguments = {**problem.arguments(device), **options, **changes}
    y: Tensor = causal_conv1d(**arguments)  # type: ignore[arg-type]
    states = arguments["conv_states"]
    if not isinstance(states, Tensor):
        raise TypeError(f"conv_states is {states!r}")
    return y[: len(problem.positions)].double(), states


def _convolve_sizes(problem: ConvProblem, device: torch.device, power: int) -> Tensor:
    arguments = problem.arguments(device)
    sizes = {
        name: None if (tensor := arguments[name]) is None else tensor.double().abs() ** power
        for name in ("x", "weight", "bias", "conv_states")
    }
    return convolve(problem, device, activation=None, **sizes)[0]


# The path `causal_conv1d`: short convolutions with the function of that name of a backend.
#
# `numerics`: the rows of all sequences are within the budget, and no argument but the states changes. `cache_write`:
# exactly the state lines of the sequences contain exactly their last inputs, and all other bytes are unchanged.
# `containment`: lines of no sequence, columns that no state uses, and states of sequences that have none influence
# neither rows nor states. Cannot see: how a kernel cuts sequences into pieces, or rows of padding, which a function
# that returns a new tensor may leave uninitialized.

CONVOLUTION = "causal_conv1d"

_Fill = tuple[float, tuple[str, ...]]
"""The poison value, and the regions of the states that contain it."""


@dataclass(frozen=True)
class _Convolved:
    """The result of a call: ``y`` float64 ``[T + padding, C]``, the bytes of the states, and changed arguments."""

    y: Tensor
    states: Tensor
    changed: tuple[str, ...]


class Convolution:
    """One backend's ``causal_conv1d`` on the sequences of one case."""

    def __init__(
        self, backend: type[AttentionBackend], function: Function, case: Case, seed: int, device: torch.device
    ) -> None:
        self._function, self._device = function, device
        self._problem = build_conv(case, seed)
        self._truth = conv_truth(self._problem, device)

    def run(self) -> None:
        """Run the first call, whose result the checks share. Raise StageError if it raises."""
        _ = self._first

    def tensors(self) -> dict[str, Tensor | None]:
        """Return the arguments, truth and budget, for a dump."""
        truth = {"truth": self._truth.y[:, 0], "truth_conv_states": self._truth.states}
        allowed = {"budget_norm": self._truth.budget.norm, "budget_peak": self._truth.budget.peak}
        return {**self._problem.arguments(self._device), **truth, **allowed}

    def numerics(self) -> Finding:
        """Judge the rows of all sequences."""
        seen = self._first
        shares = self._shares(seen)
        figures = {"rows": len(shares), "budget_share": float(shares.max()) if shares.numel() else 0.0}
        if bool((shares > 1).any()):
            worst = float(shares.max())
            amount = "NaN or infinite" if math.isinf(worst) else f"{worst:.3g} times the allowed error"
            where = self._name_of((shares > 1).flatten())
            return Broken(
                f"wrong in {where}; the largest error is {amount}", figures, self._meaning(seen), seen.changed
            )
        if seen.changed:
            return Broken(f"arguments were changed: {', '.join(seen.changed)}", figures)
        return Holds(figures)

    def lse(self) -> Finding:
        """Return NotExamined, because a convolution has no LSE."""
        return NotExamined(("a convolution has no log-sum-exp",), "attncheck")

    def cache_write(self) -> Finding:
        """Judge the whole memory of the states after the call."""
        seen = self._first
        figures = {"lines_written": len(self._problem.lines), "state_bytes": seen.states.numel()}
        if torch.equal(flat_bytes(self._truth.states), seen.states):
            return Holds(figures)
        wrong = self._bits_of(seen.states) != self._bits_of(flat_bytes(self._truth.states))
        lines = wrong.flatten(1).any(dim=1).nonzero().flatten().tolist()
        figures["lines_wrong"] = len(lines)
        line = lines[0]
        column = int(wrong[line].any(dim=0).nonzero()[0])
        where = f"{self._problem.line_name(line)}, column {column}"
        return Broken(
            f"{len(lines)} lines of the state are wrong, the first is {where}",
            figures,
            self._meaning_of_states(seen, wrong),
        )

    def containment(self) -> Finding:
        """Judge calls with poison in the regions that must not influence the result."""

        def convolve(fill: _Fill | None) -> _Convolved:
            return self._convolve() if fill is None else self._convolve(*fill)

        def in_words(shares: Tensor) -> str:
            return self._name_of((shares > 1).flatten())

        repeats: Repeats[_Convolved, _Fill] = Repeats(
            self._first, convolve, self._moved, self._shares_with_states, in_words
        )
        regions = self._problem.regions()
        poisons = {"NaN": math.nan, "Inf": math.inf, "0": 0.0}
        for name, value in poisons.items():
            moved = repeats.reached((value, tuple(regions)))
            if bool(moved.any()):
                sources = [region for region in regions if repeats.moves((value, (region,)))]
                where = ", ".join(sources) or "several places together"
                return Broken(f"{name} in {where} reaches {self._name_of(moved)}")
        figures = {"rows": len(self._truth.y), "poisonings": len(poisons), "bitwise": int(repeats.bitwise)}
        return Holds(figures, repeats.notes)

    @cached_property
    def _first(self) -> _Convolved:
        return self._convolve()

    def _convolve(self, poison: float | None = None, regions: tuple[str, ...] | None = None) -> _Convolved:
        """Run one call. Raise FindingError if it does not return a tensor like ``x``."""
        arguments = self._problem.arguments(self._device, poison, regions)
        options = {"activation": self._problem.options.activation, "pad_id": PAD_ID}
        returned, changed = call(CONVOLUTION, self._function, arguments, options, "conv_states")
        x, states = arguments["x"], arguments["conv_states"]
        if x is None or states is None:
            raise TypeError("rows and states are tensors")
        y = as_tensor("the answer", returned, x, self._problem.dtype)
        return _Convolved(y, flat_bytes(states).clone(), changed)

    def _shares(self, seen: _Convolved) -> Tensor:
        """Return errors in budgets, ``[T, 1]``."""
        return share_of_budget(seen.y[: len(self._truth.y), None] - self._truth.y, self._truth.budget)

    def _moved(self, one: _Convolved, other: _Convolved) -> Tensor:
        """Return bool ``[T + R]``: True for real rows and request states that differ in any bit."""
        a, b = (seen.y[: len(self._truth.y)] for seen in (one, other))
        rows = ((a != b) & ~(torch.isnan(a) & torch.isnan(b))).any(dim=1)
        before, after = (self._remembered(seen.states) for seen in (one, other))
        return torch.cat([rows, (before != after).flatten(1).any(dim=1)])

    def _shares_with_states(self, seen: _Convolved) -> Tensor:
        """Return errors in budgets, ``[T + R, 1]``: of the real rows, and infinite for wrong request states."""
        right = self._remembered(flat_bytes(self._truth.states))
        is_wrong = (self._remembered(seen.states) != right).flatten(1).any(dim=1)
        states = torch.zeros(len(is_wrong), 1, dtype=torch.float64, device=is_wrong.device)
        return torch.cat([self._shares(seen), states.masked_fill(is_wrong[:, None], torch.inf)])

    def _name_of(self, moved: Tensor) -> str:
        rows = moved[: len(self._truth.y)]
        if not bool(rows.any()):
            return f"the state of request {int(moved.nonzero()[0]) - len(self._truth.y)}"
        return rows_in_words(self._problem, rows)

    def _bits_of(self, memory: Tensor) -> Tensor:
        """Return the bytes of the states as integers ``[lines, C, columns]``."""
        like = self._truth.states
        states = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        flat_bytes(states).copy_(memory)
        return states.contiguous().view(torch.int16 if states.element_size() == 2 else torch.int32)

    def _remembered(self, memory: Tensor) -> Tensor:
        """Return the bits of the requests' states, ``[R, C, K - 1]``."""
        return self._bits_of(memory)[self._problem.lines, :, : self._problem.past]

    def _meaning(self, seen: _Convolved) -> str | None:
        for meaning, changes in self._mistakes():
            y, _ = convolve(self._problem, self._device, **changes)
            if self._has_rows(seen, y):
                return meaning
        return None

    def _has_rows(self, seen: _Convolved, y: Tensor) -> bool:
        return is_answer(seen.y[: len(y), None], y[:, None], self._truth.budget, self._problem.dtype)

    def _mistakes(self) -> Iterator[tuple[str, dict[str, object]]]:
        problem, given = self._problem, self._problem.arguments(self._device)
        weight, remembers = given["weight"], given["has_initial_state"]
        if weight is not None and remembers is not None:
            yield "the taps are in reverse order: the last one belongs to the newest row", {"weight": weight.flip(1)}
            yield "states are used where has_initial_state is False", {"has_initial_state": remembers | True}
            yield "states are not used", {"has_initial_state": remembers & False}
            lengths = problem.query_start_loc.diff().to(remembers.device)
            meaning = "the state is not used where a sequence has several rows"
            yield meaning, {"has_initial_state": remembers & (lengths <= 1)}
        if problem.options.activation is not None:
            yield "the activation is missing", {"activation": None}
        else:
            yield "an activation is applied, and the case has none", {"activation": "silu"}
        if problem.bias is not None:
            yield "the bias is missing", {"bias": None}

    def _state_mistakes(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (meaning, states after the call) of faults that leave the rows right."""
        problem, right = self._problem, self._truth.states
        starts = problem.query_start_loc.to(self._device)
        lengths, real = starts.diff(), len(problem.lines)
        is_short = lengths < problem.past
        remembers = problem.has_initial_state.to(self._device)
        meaning = "where a sequence is shorter than the state, what it remembers must move up, not be dropped"
        yield meaning, convolve(problem, self._device, has_initial_state=remembers & ~is_short)[1]
        kept = [line for line, short in zip(problem.lines, is_short.tolist(), strict=False) if short]
        unstored = right.clone()
        unstored[kept] = problem.states.to(self._device)[kept]
        yield "the state is not stored where a sequence is shorter than it", unstored
        longer = starts.clone()
        longer[real:] = len(problem.x)
        meaning = "rows of padding behind the last sequence enter its state"
        yield meaning, convolve(problem, self._device, query_start_loc=longer)[1]

    def _meaning_of_states(self, seen: _Convolved, wrong: Tensor) -> str | None:
        """Return the likely cause of wrong states. ``wrong``: bool ``[lines, C, columns]``."""
        problem = self._problem
        if self._has_rows(seen, self._truth.y[:, 0]):
            for meaning, states in self._state_mistakes():
                if torch.equal(flat_bytes(states), seen.states):
                    return meaning
        for meaning, changes in self._mistakes():
            y, states = convolve(problem, self._device, **changes)
            if self._has_rows(seen, y) and torch.equal(flat_bytes(states), seen.states):
                return meaning
        lines = wrong.flatten(1).any(dim=1).nonzero().flatten().tolist()
        if lines == [len(problem.states) - 1] and PAD_ID in problem.cache_indices.tolist():
            return f"the index of padding, {PAD_ID}, was taken for the last line"
        if bool(wrong[:, :, problem.past :].any()):
            return "columns that no state uses were written"
        if not set(lines) <= set(problem.lines):
            return "lines of no sequence were written"
        return None
