"""Checks of layers with a state: Mamba, gated delta networks, linear attention, and short convolutions."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend
from attncheck.backends.state import NULL_BLOCK_ID
from attncheck.cases.model import Case
from attncheck.harness.checks.again import Repeats, Variation, later_fault
from attncheck.harness.checks.cudagraph.recorder import CaptureError, Recording, UnseenError, recorder_for
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.checks.interface import dump_tensors, is_answer
from attncheck.harness.checks.numerics import differing_rows, rows_in_words, summarize, wrong_figures
from attncheck.harness.checks.refusals import check_declared
from attncheck.harness.driver.foreign_code import call_backend
from attncheck.harness.driver.recurrent import StateObservation, StateSession, StateStep, without_padding
from attncheck.harness.problem.recurrent import PADDING, UNREAD_INPUTS, RecurrentProblem, StateRequest, build_recurrent
from attncheck.harness.truth.recurrent import (
    Computed,
    RecurrentTruth,
    computed,
    mistakes,
    recurrent_truth,
    wrong_orders,
)
from attncheck.reference.spec import AttentionCGSupport
from attncheck.reference.step_spec import CHANNEL_RULES
from attncheck.reports.analysis.phrases import plural
from attncheck.reports.run_file.causes import UNKNOWN

# `numerics`: the rows of all requests are within the budget, and no argument but output and states changes.
# `cache_write`: the states that the step stores are within the budget, and all other bytes of the pool are unchanged.
# `containment`: slots of no request, slots of requests without a state, slots of rejected drafts and padding rows
# influence neither outputs nor states, and no memory beside the output changes. `determinism`: equal bits.
# `cudagraph`: a graph of decodes, captured with the null block alone, is right with other slots and fewer requests.
# `invariance`: right requests are right again in other orders, slots, steps and pieces.
#
# Each step is judged by a truth of its own. Where a step continues another one, that truth begins with the states which
# the backend itself stored. So the budget of a later step is that of one step.

_NOT_EXAMINED = "this version of attncheck does not examine {} of layers with a state"

_ORDER = "the result of a request depends on what is beside it in the batch"
_SLOTS = "the result of a request depends on the number of its slot"
_STATE_KEPT = "something is kept from an earlier call, or the backend is not deterministic"
_WRONG_AT_FIRST = f"{UNKNOWN}the first step has wrong rows or states, too"

_Fill = tuple[float, tuple[str, ...]]
"""The poison value, and the regions that contain it."""


@dataclass(frozen=True)
class _Judged:
    """A step of a problem, its truth, and what the backend returned."""

    problem: RecurrentProblem
    truth: RecurrentTruth
    seen: StateObservation

    @cached_property
    def computed(self) -> Computed:
        return Computed(self.seen.out, self.seen.states)

    @cached_property
    def shares(self) -> Tensor:
        """Errors of the outputs in budgets, ``[T, heads]``; infinite in rows that were not written."""
        return self.truth.shares(self.computed).masked_fill(self.seen.unwritten[:, None], torch.inf)

    @cached_property
    def state_shares(self) -> Tensor:
        """Errors of the stored states in budgets, ``[S]``."""
        return self.truth.state_shares(self.computed).amax(dim=1)

    @cached_property
    def wrong_requests(self) -> set[int]:
        """The numbers of the requests with a wrong row or state."""
        of_rows = [number for number, _ in self.problem.positions]
        of_states = [request.number for request, _ in self.problem.places]
        wrong_rows = (self.shares > 1).any(dim=1).nonzero().flatten().tolist()
        wrong_states = (self.state_shares > 1).nonzero().flatten().tolist()
        return {of_rows[row] for row in wrong_rows} | {of_states[state] for state in wrong_states}

    @property
    def writes_elsewhere(self) -> bool:
        """Whether anything changed in the pool that the step must leave alone."""
        return bool(self.seen.strays) or self.seen.has_filled_gaps

    def wrong_output(self) -> Broken | None:
        """Return what is wrong with the rows, or None."""
        if not bool((self.shares > 1).any()):
            return None
        figures = wrong_figures(self.shares, self.seen.out, self.seen.unwritten)
        summary = summarize(self.problem, self.shares, has_heads=self.problem.options.rule not in CHANNEL_RULES)
        return Broken(summary, figures, self._meaning(), self.seen.changed)

    def wrong_pool(self) -> Broken | None:
        """Return what is wrong with the states in the pool, or None."""
        figures: dict[str, float | int] = {"states_written": len(self.problem.places)}
        if self.seen.strays:
            first = self.seen.strays[0]
            slots = plural(len(self.seen.strays), "slot")
            is_part = set(self.seen.strays) <= {slot for _, slot in self.problem.places}
            alone = "that the step must leave alone"
            what = f"changed in inputs {alone}" if is_part else f"{alone} changed"
            summary = f"{slots} {what}, the first is {self.problem.slot_name(first)}"
            figures["slots_wrong"] = len(self.seen.strays)
            return Broken(summary, figures, _meaning_of_strays(self.problem, self.seen.strays))
        if self.seen.has_filled_gaps:
            return Broken("memory between the slots changed", figures)
        wrong = (self.state_shares > 1).nonzero().flatten().tolist()
        if not wrong:
            return None
        worst = float(self.state_shares.max())
        where = self.problem.slot_name(self.problem.places[wrong[0]][1])
        figures["states_wrong"] = len(wrong)
        are = "is" if len(wrong) == 1 else "are"
        of_stored = f"{len(wrong)} of {len(self.state_shares)} stored states {are}"
        if self.problem.options.rule == "short_conv":
            summary = f"{of_stored} not the last inputs, bit for bit"
            return Broken(f"{summary}; the first is in {where}", figures, self._meaning_of_states(wrong))
        amount = "NaN or infinite" if math.isinf(worst) else f"{worst:.3g} times the allowed error"
        figures["budget_share"] = worst
        summary = f"{of_stored} wrong, the first is in {where}"
        return Broken(f"{summary}; the largest error is {amount}", figures, self._meaning_of_states(wrong))

    def _meaning(self) -> str | None:
        if not bool(torch.isfinite(self.seen.out).all()) or bool(self.seen.unwritten.any()):
            return None
        return self._mistake(of_states=False)

    def _meaning_of_states(self, wrong: list[int]) -> str | None:
        before, after = self.problem.pool(), self.seen.pool
        slots = [self.problem.places[state][1] for state in wrong]
        if all(torch.equal(before[slot], after[slot]) for slot in slots):
            return "the new state is not stored"
        return self._mistake(of_states=True)

    def _mistake(self, *, of_states: bool) -> str | None:
        """Return the fault that explains the outputs, and with ``of_states`` the states, too."""
        seen, truth = self.computed, self.truth
        for mistake in (*mistakes(self.problem), *wrong_orders(self.problem)):
            wrong = computed(self.problem, mistake, self.wrong_requests)
            shares = truth.state_shares(wrong) if of_states else truth.shares(wrong)
            if not bool((shares > 1).any()):
                continue  # this result is right, so it explains nothing
            if not is_answer(seen.judged_out, wrong.judged_out, truth.budget, self.problem.dtype):
                continue
            states = seen.judged_states, wrong.judged_states, truth.state_budget, self.problem.state_dtype
            if not of_states or is_answer(*states):
                return mistake.meaning
        return None


class RecurrenceChecks:
    """One case of one backend of layers with a state. ``reasons``: why the backend excludes the case."""

    def __init__(
        self, backend: type[AttentionBackend], case: Case, seed: int, device: torch.device, reasons: tuple[str, ...]
    ) -> None:
        self._backend, self._case, self._seed, self._device = backend, case, seed, device
        self._reasons = reasons
        if not reasons:
            self._problem = build_recurrent(case, seed)
            self._truth = recurrent_truth(self._problem)

    def find(self, check: str) -> Callable[[], Finding] | NotExamined:
        """Return the function that runs a check, or why it examines nothing."""
        if self._reasons:
            return NotExamined(self._reasons)
        examined: Mapping[str, Callable[[], Finding]] = {
            "numerics": self._numerics,
            "cache_write": self._cache_write,
            "containment": self._containment,
            "determinism": self._determinism,
            "invariance": self._invariance,
            "cudagraph": self._cudagraph,
            "refusals": partial(check_declared, lambda: self._first),
        }
        reason = "a layer with a state has no log-sum-exp" if check == "lse" else _NOT_EXAMINED.format(check)
        return examined.get(check, NotExamined((reason,), "attncheck"))

    def dump(self, folder: Path, backend: str) -> None:
        """Write inputs, states, truth and budget to one file."""
        if self._reasons:
            return
        problem, truth = self._problem, self._truth
        content = {name: problem.packed(name) for name in problem.padding} | dict(problem.weights)
        content |= {"states": problem.pool(), "truth": truth.right.out, "truth_states": truth.right.states}
        content |= {"budget_norm": truth.budget.norm, "budget_peak": truth.budget.peak}
        dump_tensors(folder, self._case, self._seed, backend, content)

    @cached_property
    def _session(self) -> StateSession:
        return StateSession(self._backend, self._problem, self._device)

    @cached_property
    def _first(self) -> _Judged:
        return _Judged(self._problem, self._truth, self._session.run(self._problem))

    def _numerics(self) -> Finding:
        first = self._first
        wrong = first.wrong_output()
        if wrong is not None:
            return wrong
        if first.seen.changed:
            return Broken(f"arguments were changed: {', '.join(first.seen.changed)}")
        return Holds({"rows": len(first.shares), "budget_share": float(first.shares.max())})

    def _cache_write(self) -> Finding:
        first = self._first
        wrong = first.wrong_pool()
        figures = {"states_written": len(first.state_shares), "budget_share": float(first.state_shares.max())}
        return Holds(figures) if wrong is None else wrong

    def _containment(self) -> Finding:
        first, problem = self._first, self._problem
        if first.seen.breached:
            return Broken("memory beside the output was written")

        def run(fill: _Fill | None) -> StateObservation:
            return self._session.run(problem) if fill is None else self._session.run(problem, *fill)

        def shares(seen: StateObservation) -> Tensor:
            judged = _Judged(problem, self._truth, seen)
            return torch.cat([judged.shares.amax(dim=1), judged.state_shares])[:, None]

        def in_words(errors: Tensor) -> str:
            return self._named((errors > 1).flatten())

        exact = self._backend.conventions.deterministic
        repeats: Repeats[StateObservation, _Fill] = Repeats(first.seen, run, _moved, shares, in_words, bitwise=exact)
        parts = {UNREAD_INPUTS: bool(problem.unread_columns().any()), PADDING: problem.num_padding_rows > 0}
        regions = (*problem.regions(), *(name for name, is_there in parts.items() if is_there))
        poisons = {"NaN": math.nan, "Inf": math.inf, "0": 0.0}
        for name, value in poisons.items():
            moved = repeats.reached((value, regions))
            if bool(moved.any()):
                sources = [region for region in regions if repeats.moves((value, (region,)))]
                where = ", ".join(sources) or "several places together"
                return Broken(f"{name} in {where} reaches {self._named(moved)}")
        figures = {"rows": len(first.shares), "poisonings": len(poisons), "bitwise": int(repeats.bitwise)}
        return Holds(figures, repeats.notes)

    def _named(self, moved: Tensor) -> str:
        """Return in words which are the first of the rows and states, bool ``[T + S]``."""
        rows = moved[: len(self._problem.positions)]
        if bool(rows.any()):
            return rows_in_words(self._problem, rows)
        _, slot = self._problem.places[int(moved.nonzero()[0]) - len(rows)]
        return f"the state in {self._problem.slot_name(slot)}"

    def _determinism(self) -> Finding:
        exact, first = self._backend.conventions.deterministic, self._first
        is_right = not first.wrong_requests and not first.writes_elsewhere
        again: dict[str, Callable[[], StateSession]] = {
            "when the step is repeated on the same impl": lambda: self._session,
            "when the step is repeated on a new impl and builder": partial(
                StateSession, self._backend, self._problem, self._device
            ),
        }
        for how, session in again.items():
            judged = _Judged(self._problem, self._truth, session().run(self._problem))
            moved = _moved(first.seen, judged.seen)
            if exact and bool(moved.any()):
                meaning = _STATE_KEPT if is_right else _WRONG_AT_FIRST
                return Broken(f"other bits {how}: {self._named(moved)}", {"rows_moved": int(moved.sum())}, meaning)
            wrong = judged.wrong_output() or judged.wrong_pool()
            if wrong is not None and is_right:
                return later_fault(wrong, how, _STATE_KEPT)
        notes = () if exact else ("compared within the allowed error: the backend declares deterministic=False",)
        return Holds({"rows": len(first.shares), "repeats": len(again), "bitwise": int(exact)}, notes)

    def _invariance(self) -> Finding:
        if not self._right.requests:
            return NotExamined(("no request is right in the first step",), "attncheck")
        done = []
        for variation in self._variations():
            wrong = variation.wrong()
            if wrong is not None and (self._first.wrong_requests or self._first.writes_elsewhere):
                return replace(wrong, meaning=_WRONG_AT_FIRST)
            if wrong is not None:
                return wrong
            done.append(variation.what)
        return Holds({"rows": len(self._right.positions), "variations": len(done)}, tuple(done))

    def _cudagraph(self) -> Finding:
        if self._backend.builder_only:  # the classes of vLLM, which get steps without the padding of graphs
            return NotExamined(("its layers run without graphs; cases of attention examine its builder",), "attncheck")
        level = self._session.graph_support
        if level is AttentionCGSupport.NEVER:
            return NotExamined(("its builder declares no CUDA graphs",))
        decodes = _decodes_of_a_graph(self._right, level)
        if len(decodes) < 2:
            return NotExamined(("a graph needs two right decodes of equal length",), "attncheck")
        steps = _steps_of_a_graph(self._right, decodes)
        for how, problem in steps.items():
            wrong = self._wrong_in(problem, f"in a step {how}, without a graph", None)
            if wrong is not None:
                return wrong
        step = StateStep(without_padding(self._right.ordered(decodes)), self._device)
        recording = self._recording(step)
        if not isinstance(recording, Recording):
            return recording
        for how, problem in steps.items():
            step.fill(problem)
            self._session.build(step)
            for memory in recording.released():
                return Broken(f"the graph uses memory that was released after its capture: {memory}")
            seen = self._session.observed(problem, step, lambda: call_backend("replay", recording.replay))
            judged = _Judged(problem, recurrent_truth(problem, self._truth), seen)
            wrong = judged.wrong_output() or judged.wrong_pool()
            if wrong is not None:
                details = tuple(f"the graph repeats what it read on the host: {each}" for each in recording.host_reads)
                summary = f"right without a graph, wrong in a replay {how}: {wrong.summary}"
                return replace(wrong, summary=summary, meaning=None, details=(*wrong.details, *details))
        notes = (f"{level.name} is declared; graphs of decodes alone are examined",)
        return Holds({"replays": len(steps), "requests": len(decodes)}, notes)

    def _recording(self, step: StateStep) -> Recording | Finding:
        """Return the graph of a step whose slots are all the null block, and whose inputs are NaN."""
        step.common.block_table_tensor.fill_(NULL_BLOCK_ID)
        for tensor in step.inputs.values():
            tensor.fill_(math.nan)
        recorder = recorder_for(self._device)
        common = step.common
        recorder.mark_host(common.query_start_loc_cpu, common.seq_lens_cpu, common.num_computed_tokens_cpu)

        def prepare() -> Callable[[], object]:
            return partial(self._session.forward, step, self._session.build(step, for_capture=True))

        def record() -> Recording | Finding:
            try:
                return recorder.record(prepare)
            except CaptureError as refusal:
                return Broken(f"the builder declares graphs, and forward cannot be captured: {refusal}")
            except UnseenError as refusal:
                return NotExamined((str(refusal),), "attncheck")

        with torch.no_grad():
            return call_backend("warm-up for capture", record)

    @cached_property
    def _right(self) -> RecurrentProblem:
        """The step with the requests alone that are right in the first step."""
        wrong = self._first.wrong_requests
        return replace(
            self._problem, requests=tuple(each for each in self._problem.requests if each.number not in wrong)
        )

    def _variations(self) -> Iterator[Variation]:
        problem = self._right
        requests, count = problem.requests, len(problem.stale)
        yield self._variation("in another order of requests", problem.ordered(requests[::-1]), _ORDER)
        for request in _different(requests):
            alone = without_padding(problem.ordered([request]))
            yield self._variation(f"with request {request.number} alone", alone, _ORDER)
        mirrored = [replace(each, slots=tuple(count - slot for slot in each.slots)) for each in requests]
        yield self._variation("in other slots", problem.ordered(mirrored), _SLOTS)
        cuts = {request.number: cut for request in requests if (cut := _cut_of(request))}
        if cuts:
            yield Variation("with prompts in two pieces", partial(self._wrong_in_pieces, cuts))
        drafted = [request for request in requests if request.is_decode and request.num_rows > 1]
        if drafted:
            after = [_after_roll_back(request, place) for place, request in enumerate(drafted)]
            step = partial(self._later, self._first.seen, after)
            yield Variation(
                "after a roll-back of drafts", lambda: self._wrong_in(step(), "after a roll-back of drafts", None)
            )
        step_of_reused = replace(problem.ordered(_in_slots_of_others(requests)), stale=self._first.seen.pool)
        yield self._variation("in slots that other requests have left", step_of_reused, None)

    def _variation(self, how: str, problem: RecurrentProblem, meaning: str | None) -> Variation:
        return Variation(how, partial(self._wrong_in, problem, how, meaning))

    def _wrong_in(self, problem: RecurrentProblem, how: str, meaning: str | None) -> Broken | None:
        """Return what is wrong in another step; None if nothing is. ``meaning``: the cause if no mistake is one."""
        truth = recurrent_truth(problem, self._truth)
        judged = _Judged(problem, truth, self._session.run(problem))
        wrong = judged.wrong_output() or judged.wrong_pool()
        if wrong is None:
            return None
        if self._first.writes_elsewhere:
            return replace(wrong, summary=f"wrong {how}: {wrong.summary}")
        if meaning in (_ORDER, _SLOTS):
            again = _moved(self._first.seen, self._session.run(self._problem))
            if bool(again.any()):
                meaning = _STATE_KEPT
            elif not self._has_other_bits(judged):
                meaning = None  # only the allowed error differs
        return later_fault(wrong, how, meaning)

    def _has_other_bits(self, judged: _Judged) -> bool:
        """Return whether rows or stored states differ from those of the same requests in the first step."""
        first = self._first
        row_of = {position: row for row, position in enumerate(first.problem.positions)}
        rows = [row_of[position] for position in judged.problem.positions]
        state_of = {place: state for state, place in enumerate(_columns(first.problem))}
        states = [state_of[place] for place in _columns(judged.problem)]
        moved = (
            differing_rows(first.seen.out[rows], judged.seen.out),
            differing_rows(first.seen.states[states], judged.seen.states),
        )
        return bool(torch.cat(moved).any())

    def _wrong_in_pieces(self, cuts: Mapping[int, int]) -> Broken | None:
        """Return what is wrong if requests, by number, are cut in two before a row."""
        longer = [request for request in self._right.requests if request.number in cuts]
        pieces = self._right.ordered([request.rows(0, cuts[request.number]) for request in longer])
        how = "with prompts in two pieces"
        wrong = self._wrong_in(pieces, how, None)
        if wrong is not None:
            return wrong
        seen = self._session.run(pieces)
        rests = [request.rows(cuts[request.number], request.num_rows) for request in longer]
        return self._wrong_in(self._later(seen, rests), how, None)

    def _later(self, seen: StateObservation, requests: list[StateRequest]) -> RecurrentProblem:
        """Return a step on the pool of an earlier one; each request has the state that it finds there."""
        filled = [replace(each, initial=seen.pool[each.source]) for each in requests]
        return replace(self._right.ordered(filled), stale=seen.pool)


def _decodes_of_a_graph(problem: RecurrentProblem, level: AttentionCGSupport) -> list[StateRequest]:
    """Return decodes of equal length that a graph of ``level`` can have, the longest ones."""
    is_single = level is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    decodes = [each for each in problem.requests if each.is_decode and (each.num_rows == 1 or not is_single)]
    longest = max((each.num_rows for each in decodes), default=0)
    return [each for each in decodes if each.num_rows == longest]


def _steps_of_a_graph(problem: RecurrentProblem, decodes: list[StateRequest]) -> dict[str, RecurrentProblem]:
    """Return the steps that one graph serves, by a description. They have equally many rows, with padding."""
    num_rows, count = decodes[0].num_rows, len(problem.stale)

    def padded(requests: list[StateRequest]) -> RecurrentProblem:
        missing = len(decodes) - len(requests)
        padding = {
            name: torch.full((missing * num_rows, *rows.shape[1:]), math.nan, dtype=rows.dtype)
            for name, rows in problem.padding.items()
        }
        return replace(problem.ordered(requests), padding=padding, padding_requests=missing)

    mirrored = [replace(each, slots=tuple(count - slot for slot in each.slots)) for each in decodes[::-1]]
    return {
        "of decodes": padded(decodes),
        "of decodes in other slots": padded(mirrored),
        "of one decode and padding": padded(decodes[-1:]),
    }


def _columns(problem: RecurrentProblem) -> list[tuple[int, int]]:
    """Return (request of the case, column of its slots) of each state that the step stores."""
    return [(request.number, request.slots.index(slot)) for request, slot in problem.places]


def _different(requests: tuple[StateRequest, ...]) -> list[StateRequest]:
    """Return the longest request of each kind: decodes, chunks with a state, and prompts."""
    kinds: dict[tuple[bool, bool], StateRequest] = {}
    for request in sorted(requests, key=lambda each: each.num_rows):
        kinds[request.is_decode, request.initial is None] = request
    return list(kinds.values())


def _in_slots_of_others(requests: tuple[StateRequest, ...]) -> list[StateRequest]:
    """Return new requests with the rows of these, without a state, in the slots of these."""
    left = iter(dict.fromkeys(slot for each in requests[1:] + requests[:1] for slot in each.slots))
    new = []
    for each in requests:
        count = -(-each.num_rows // each.block_size) if each.block_size else len(each.slots)
        new.append(replace(each, initial=None, position=0, accepted=1, slots=tuple(islice(left, count))))
    return new


def _cut_of(request: StateRequest) -> int:
    """Return the row before which a prompt is cut in two; 0 if it is none, or if its first piece would be a decode."""
    least = 1 if request.initial is None else request.most_decoded + 1
    cut = max(request.num_rows // 2, least)
    return 0 if request.is_decode or cut >= request.num_rows else cut


def _after_roll_back(request: StateRequest, place: int) -> StateRequest:
    """Return the next step of a decode, with other rows, after its first ``place`` drafts at most were accepted."""
    accepted = 1 + place % request.num_rows
    inputs = {name: tensor.flip(0) for name, tensor in request.inputs.items()}
    return replace(request, inputs=inputs, position=request.position + accepted, accepted=accepted)


def _moved(one: StateObservation, other: StateObservation) -> Tensor:
    """Return bool ``[T + S]``: True for rows and stored states that differ in any bit."""
    rows = differing_rows(one.out, other.out)
    return torch.cat([rows, differing_rows(one.states, other.states)])


def _meaning_of_strays(problem: RecurrentProblem, strays: tuple[int, ...]) -> str | None:
    owned = {slot for request in problem.requests for slot in request.slots}
    last = len(problem.stale) - 1
    is_cached = problem.options.mamba_cache_mode == "all"
    if is_cached and set(strays) <= problem.sources:
        return "the slot from which a state was read was written, although the new state belongs to another block"
    if set(range(len(problem.stale))) - owned <= set(strays):
        return "all slots of no request were written, as by an operation on the whole cache"
    if NULL_BLOCK_ID in strays:
        return "the null block was written, which is the slot of padding requests"
    if last in strays and last not in owned:
        return "the last slot was written, which an index of -1 or a column behind those of a request selects"
    if not set(strays) <= owned:
        return None
    if set(strays) <= {slot for _, slot in problem.places}:
        return "inputs of a slot that belong to no state after this step were written"
    if problem.options.rule == "short_conv" and not is_cached:
        return "a column behind the first was written, and all states of a request are in the slot of column 0"
    words = "blocks that are cached" if is_cached else "columns of draft tokens that the step does not have"
    return f"{words} were written"
