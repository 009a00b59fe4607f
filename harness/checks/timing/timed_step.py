"""One batch of one backend, timed again and again: new contents in the same memory, every answer judged.

The order is a model runner's: the cache and the metadata are there, ``build`` is timed by the host, then the rows of
the layer arrive, and the cache write and ``forward`` are timed, with nothing of the harness in between. Must not know:
which batches are timed, how many samples are taken.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

import torch

from attncheck.harness.checks.cudagraph.persistent_inputs import each_of
from attncheck.harness.checks.cudagraph.recorder import Recorder
from attncheck.harness.checks.findings import Broken
from attncheck.harness.checks.timing.cache_written import require_stored
from attncheck.harness.checks.timing.clock import Clock, EventClock, HostClock, nothing
from attncheck.harness.checks.timing.fresh_contents import Contents, FreshContents
from attncheck.harness.checks.timing.hooks import active_modes, added_kernels, replaced, tracers
from attncheck.harness.checks.timing.judgement import (
    AFTERWARDS,
    AnswerJudge,
    TimedAnswer,
    UntrustworthyTimeError,
    copy_answer,
)
from attncheck.harness.checks.timing.lent_buffers import LentBuffers, span
from attncheck.harness.checks.timing.replay import Replay, capture
from attncheck.harness.driver.foreign_code import call_backend
from attncheck.harness.driver.forward import bound_forward, output_buffers, output_scale_of
from attncheck.harness.driver.forward_calls import ForwardCall, changed_inputs, forward_calls_of
from attncheck.harness.driver.output_buffers import GuardedBuffer
from attncheck.harness.driver.session import Session
from attncheck.harness.driver.step import Step, make_step, request_order
from attncheck.harness.problem.problem import Problem
from attncheck.reports.run_file.timings import ClockName

Flusher = Callable[[], object]

_EMPTY_CALLS = 15
"""The latest calls of nothing, of whose times the median is what a clock of the host adds to every sample."""


@dataclass(frozen=True)
class LentMemory:
    """What a backend is lent in every call, and what it writes to."""

    lent: LentBuffers
    out: GuardedBuffer
    lse: GuardedBuffer | None


@dataclass
class Latest:
    """Who judged the latest answer of a session: it has to stay as it is until the next call, of whatever batch."""

    judge: AnswerJudge | None = None

    def give_way(self, judge: AnswerJudge | None) -> None:
        """To a call that ``judge`` will judge. Raises UntrustworthyTimeError where the latest answer has changed."""
        if self.judge is not None:
            self.judge.look_again()
        self.judge = judge


class TimedStep:
    """A batch of a session's layer and cache. ``build_ns``: of every call so far. Raises StageError at set-up."""

    def __init__(
        self,
        name: str,
        session: Session,
        contents: FreshContents,
        clock: Clock,
        flush: Flusher,
        latest: Latest,
        memory: LentMemory | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """``latest``: of all steps of the session. ``memory``: of one of at least the same sizes, to be used as well.

        ``recorder``: makes the graph whose replays are timed in place of ``forward``; None: none is to be made.
        """
        self._session, self._contents, self._clock, self._flush = session, contents, clock, flush
        self._backend, self._device, self._latest = session.backend, session.device, latest
        problem = contents.bases[0].problem
        self._order = call_backend("builder", lambda: request_order(problem, session.threshold))
        self._judge = AnswerJudge(name, contents, self._backend.conventions)
        self._host = HostClock(clock.wait)
        self._modes = active_modes()
        self._must_be_buffer = self._backend.accept_output_buffer  # once: a property could do the work of a call
        self._scale = output_scale_of(problem, self._device)
        self._recorder = recorder
        self._replay: Replay | None = None
        self._notes: tuple[str, ...] = ()
        self.build_ns: list[int] = []
        self._empty_ns: deque[int] = deque(maxlen=_EMPTY_CALLS)
        _, call = self._fresh(problem)
        self.memory = self._new_memory(problem, call) if memory is None else memory

    @property
    def worst(self) -> float:
        """The largest error so far, in budgets."""
        return self._judge.worst

    def take(self, asked: Contents | None = None) -> int:
        """Nanoseconds of one ``forward``, on contents that no call has seen; ``asked``: on these.

        Raises StageError for what the backend raised, FoundOutError where its answer is none.
        """
        self._latest.give_way(self._judge)
        asked = asked or self._contents.next()
        problem = asked.problem()
        step, fresh = self._fresh(problem)
        self._fill(problem, step)
        call = self.memory.lent.with_metadata_of(fresh)
        lent = each_of(call, torch.Tensor.detach)
        pristine = replace(fresh, common=_copied(call).common)
        if self._recorder is not None and self._replay is None:
            self._capture(self._recorder, call, fresh)
        metadata = self._build(lent)
        answer, forward_ns = self._forward(lent, fresh, metadata)
        self._judge.judge(asked, step.row_order[fresh.rows].to(self._device), answer)
        changed = ", ".join(changed_inputs(pristine, lent))
        if changed:
            raise UntrustworthyTimeError(
                Broken(f"{self._judge.name}: the call changed what it was lent to read: {changed}")
            )
        if self._session.impl.brings_writer and step.key is not None and self._session.pool is not None:
            require_stored(self._judge.name, self._session.pool, problem, self._contents)
        return forward_ns

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the times should know."""
        return (*self._notes, *self._judge.notes, *self._clock_notes())

    @property
    def clock_name(self) -> ClockName:
        """How ``forward`` is timed."""
        return self._clock.name if self._replay is None else "graph"

    def bare(self) -> Callable[[], object]:
        """One more ``forward`` on new contents, to be looked at by other means than a clock; nobody judges it."""
        self._latest.give_way(None)
        problem = self._contents.next().problem()
        step, fresh = self._fresh(problem)
        self._fill(problem, step)
        lent = each_of(self.memory.lent.with_metadata_of(fresh), torch.Tensor.detach)
        forward = self._bound(lent, self._build(lent))
        self.memory.lent.load_rows(fresh)

        def call() -> object:
            with torch.no_grad():
                return call_backend("forward", forward)

        return call

    def finish(self) -> None:
        """The last answer, once more: raises FoundOutError."""
        if self._latest.judge is self._judge:
            self._judge.look_again()
        self._judge.finish()

    def _clock_notes(self) -> Iterator[str]:
        clock = self._clock
        if not isinstance(clock, EventClock):
            return
        if clock.num_behind:
            yield (
                f"{self._judge.name}: in {clock.num_behind} of {clock.num_taken} calls the host fell behind the "
                "device, and gaps between launches count"
            )
        if clock.num_late:
            yield (
                f"{self._judge.name}: in {clock.num_late} of {clock.num_taken} calls work went on elsewhere on the "
                "device when the stream was done; it counts"
            )

    def _new_memory(self, problem: Problem, call: ForwardCall) -> LentMemory:
        out, lse = output_buffers(self._backend, problem, len(call.query), call.num_rows, self._device)
        return LentMemory(LentBuffers(call), out, lse)

    def _fresh(self, problem: Problem) -> tuple[Step, ForwardCall]:
        step = make_step(problem, self._device, self._order, pad_seq_len=self._backend.conventions.pad_seq_len)
        (call,) = forward_calls_of(step, self._backend.features, self._session.threshold)
        return step, call

    def _fill(self, problem: Problem, step: Step) -> None:
        """The context to the cache, and new rows that no writer brings."""
        pool = self._session.pool
        if pool is None:
            return
        old = problem.old_keys
        pool.write(problem.key_slots[old], problem.keys[old], problem.values[old])
        if not self._session.impl.brings_writer and step.key is not None and step.value is not None:
            pool.write(step.slot_mapping, step.key, step.value)

    def _capture(self, recorder: Recorder, call: ForwardCall, fresh: ForwardCall) -> None:
        common = call.common
        recorder.mark_host(common.query_start_loc_cpu, common.seq_lens_cpu, common.num_computed_tokens_cpu)
        self.memory.lent.load_rows(fresh)
        captured = capture(recorder, self._session.builder, call, self._bound)
        if isinstance(captured, Replay):
            self._replay = captured
        else:
            self._recorder = None
            self._notes = (f"{self._judge.name} is not replayed from a graph, though one is declared: {captured}",)

    def _build(self, call: ForwardCall) -> object:
        made: list[object] = []

        def build() -> None:
            made.append(
                self._session.builder.build(common_prefix_len=call.common_prefix_len, common_attn_metadata=call.common)
            )

        self.build_ns.append(call_backend("build", lambda: self._host.time(build)))
        return made[0]

    def _forward(self, call: ForwardCall, fresh: ForwardCall, metadata: object) -> tuple[TimedAnswer, int]:
        memory, session, num_rows = self.memory, self._session, call.num_rows
        spans = memory.lent.spans()
        if session.pool is not None:
            spans["the cache"] = span(session.pool.kv_cache)
        forward = self._bound(call, metadata) if self._replay is None else self._replay.forward
        due: list[Callable[[], object]] = [forward]
        returned: list[object] = []
        answers: list[TimedAnswer] = []
        found: list[tuple[object, object]] = []
        was_traced_by = tracers()
        _require_untouched("build")
        if active_modes() != self._modes:
            raise _left("build left a mode of torch active behind it")

        def before() -> None:
            self._flush()
            memory.out.refill(num_rows)
            if memory.lse is not None:
                memory.lse.refill(num_rows)
            memory.lent.load_rows(fresh)
            if isinstance(self._clock, HostClock):  # of events, which lie on the device, an empty call takes nothing
                due.append(nothing)
                self._empty_ns.append(self._clock.time(timed))
                for each in (due, returned, found):
                    each.pop()

        def timed() -> None:
            returned.append(due[-1]())
            found.append(tracers())  # under the clock: one that comes to act later could be gone again by then

        def after() -> None:
            answers.append(
                copy_answer(
                    returned[0],
                    memory.out,
                    memory.lse,
                    num_rows,
                    spans,
                    must_be_buffer=self._must_be_buffer,
                    modes=self._modes,
                )
            )

        with torch.no_grad():
            taken = call_backend(
                "forward",
                lambda: self._clock.time(timed, before=before, after=after),
            )
        if found[0] != was_traced_by:
            raise _left("forward left a function behind it that Python calls at every event")
        _require_untouched("forward")
        empty = median(self._empty_ns) if self._empty_ns else 0
        return answers[0], max(1, taken - int(empty))  # a time of nothing is less than a clock can tell

    def _bound(self, call: ForwardCall, metadata: object) -> Callable[[], object]:
        memory, session = self.memory, self._session
        kv_cache = torch.empty(0, dtype=call.query.dtype, device=self._device)
        if session.pool is not None:
            kv_cache = session.pool.kv_cache
        return bound_forward(
            self._backend,
            session.impl,
            session.attn_layer,
            call,
            kv_cache,
            metadata,
            memory.out,
            memory.lse,
            self._scale,
        )


def _require_untouched(stage_name: str) -> None:
    if names := (*replaced(), *added_kernels()):
        raise _left(f"after {stage_name} these are not torch's own: {', '.join(names[:5])}")


def _left(what: str) -> UntrustworthyTimeError:
    return UntrustworthyTimeError(Broken(what, meaning=AFTERWARDS))


def _copied(call: ForwardCall) -> ForwardCall:
    """Copies of the metadata; without the rows, which are not there yet."""
    return each_of(replace(call, query=call.query[:0], key=None, value=None), torch.Tensor.clone)
