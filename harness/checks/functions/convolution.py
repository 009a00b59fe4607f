"""The path ``causal_conv1d``: short convolutions with the function of that name of a backend.

``numerics``: the rows of all sequences are within the budget, and no argument but the states changes. ``cache_write``:
exactly the state lines of the sequences contain exactly their last inputs, and all other bytes are unchanged.
``containment``: lines of no sequence, columns that no state uses, and states of sequences that have none influence
neither rows nor states. Cannot see: how a kernel cuts sequences into pieces, or rows of padding, which a function that
returns a new tensor may leave uninitialized.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend
from attncheck.cases.model import Case
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.checks.function_calls import Function, Poisoning, as_tensor, call, is_answer
from attncheck.harness.checks.functions.conv_problem import PAD_ID, build_conv, conv_truth, convolve
from attncheck.harness.driver.pool_memory import flat_bytes
from attncheck.harness.truth.tolerance import share_of_budget

NAME = "causal_conv1d"

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

        poisoning = Poisoning(convolve, self._first, self._moved, self._wrong)
        regions = self._problem.regions()
        poisons = {"NaN": math.nan, "Inf": math.inf, "0": 0.0}
        for name, value in poisons.items():
            moved = poisoning.reached((value, tuple(regions)))
            if bool(moved.any()):
                sources = [region for region in regions if bool(poisoning.reached((value, (region,))).any())]
                where = ", ".join(sources) or "several places together"
                return Broken(f"{name} in {where} reaches {self._name_of(moved)}")
        figures = {"rows": len(self._truth.y), "poisonings": len(poisons), "bitwise": int(poisoning.bitwise)}
        return Holds(figures, poisoning.notes)

    @cached_property
    def _first(self) -> _Convolved:
        return self._convolve()

    def _convolve(self, poison: float | None = None, regions: tuple[str, ...] | None = None) -> _Convolved:
        """Run one call. Raise FormError if it does not return a tensor like ``x``."""
        arguments = self._problem.arguments(self._device, poison, regions)
        options = {"activation": self._problem.options.activation, "pad_id": PAD_ID}
        returned, changed = call(NAME, self._function, arguments, options, "conv_states")
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

    def _wrong(self, seen: _Convolved) -> Tensor:
        """Return bool ``[T + R]``: True for real rows outside the budget and for wrong request states."""
        right = self._remembered(flat_bytes(self._truth.states))
        states = (self._remembered(seen.states) != right).flatten(1).any(dim=1)
        return torch.cat([(self._shares(seen) > 1).any(dim=1), states])

    def _name_of(self, moved: Tensor) -> str:
        rows = moved[: len(self._truth.y)].nonzero().flatten()
        if not len(rows):
            return f"the state of request {int(moved.nonzero()[0]) - len(self._truth.y)}"
        first = int(rows[0])
        return f"{len(rows)} of {len(self._truth.y)} rows, the first is row {first} ({self._problem.row_name(first)})"

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
