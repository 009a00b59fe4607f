"""Time one batch of one backend repeatedly, with new inputs in the same memory, and judge every output.

The order is that of a model runner. Cache and metadata are ready, and ``build`` is timed on the host. Then the layer's
rows arrive, and the cache write and ``forward`` are timed together, with no code of the harness in between.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

import torch

from attncheck.harness.checks.cudagraph.capture import CapturedForward, capture_forward
from attncheck.harness.checks.cudagraph.recorder import Recorder
from attncheck.harness.checks.findings import Broken
from attncheck.harness.checks.timing.clock import Clock, EventClock, HostClock, do_nothing
from attncheck.harness.checks.timing.fresh_contents import FreshContents
from attncheck.harness.checks.timing.judgement import (
    AnswerJudge,
    TimedAnswer,
    UntrustworthyTimeError,
    copy_answer,
    require_stored,
)
from attncheck.harness.driver.foreign_code import call_backend
from attncheck.harness.driver.forward import OutputBuffers
from attncheck.harness.driver.forward_calls import ForwardCall, changed_inputs, forward_calls_of
from attncheck.harness.driver.persistent_inputs import PersistentInputs, map_tensors, span
from attncheck.harness.driver.session import Session
from attncheck.harness.driver.step import Step, make_step, request_order
from attncheck.harness.problem.problem import Problem
from attncheck.reports.run_file.timings import ClockName, ClockOverhead

Flusher = Callable[[], object]

_EMPTY_CALLS = 15
"""Number of latest empty calls whose median time is subtracted from each sample of a host clock."""

_FEW = 0.1
"""Share of calls in which the host may fall behind without a note, since so few hardly move a median."""


@dataclass(frozen=True)
class LentMemory:
    """The memory that a backend is given in every call: inputs to read, and buffers to write."""

    inputs: PersistentInputs
    buffers: OutputBuffers


@dataclass
class LatestAnswer:
    """The judge of a session's latest output, which must not change until the next call of any batch."""

    judge: AnswerJudge | None = None

    def start_next(self, judge: AnswerJudge | None) -> None:
        """Check that the latest output has not changed, and make ``judge`` responsible for the next call.

        Raise UntrustworthyTimeError if it has changed.
        """
        if self.judge is not None:
            self.judge.require_unchanged()
        self.judge = judge


class TimedStep:
    """A batch on a session's layer and cache. ``build_ns``: ``build`` times of all calls. May raise StageError."""

    def __init__(
        self,
        name: str,
        session: Session,
        contents: FreshContents,
        clock: Clock,
        flush: Flusher,
        latest: LatestAnswer,
        memory: LentMemory | None = None,
        recorder: Recorder | None = None,
        overhead: ClockOverhead | None = None,
    ) -> None:
        """``latest``: shared by all steps of the session. ``memory``: that of a step of at least this size, to reuse.

        ``recorder``: captures the graph whose replays are timed instead of ``forward``; None for no graph.
        ``overhead``: what ``clock`` adds to each sample; None if nothing, or if the clock is the host's.
        """
        self._session, self._contents, self._clock, self._flush = session, contents, clock, flush
        self._backend, self._device, self._latest = session.backend, session.device, latest
        problem = contents.bases[0].problem
        self._order = call_backend("builder", lambda: request_order(problem, session.threshold))
        self._judge = AnswerJudge(name, contents, self._backend.conventions)
        self._host = HostClock(clock.wait)
        self._recorder, self._overhead = recorder, overhead
        self._replay: CapturedForward | None = None
        self._notes: tuple[str, ...] = ()
        self.build_ns: list[int] = []
        self._empty_ns: deque[int] = deque(maxlen=_EMPTY_CALLS)
        _, call = self._fresh(problem)
        if memory is None:
            memory = LentMemory(PersistentInputs(call), session.layer.output_buffers(problem, call))
        self.memory = memory

    @property
    def worst(self) -> float:
        """The largest error so far, in budgets."""
        return self._judge.worst

    def take(self) -> int:
        """Return the nanoseconds of one ``forward`` on inputs that no call has seen.

        Raise StageError if the backend raised, and UntrustworthyTimeError if its output is not valid.
        """
        self._latest.start_next(self._judge)
        contents = self._contents.next()
        problem = contents.problem()
        step, fresh = self._fresh(problem)
        self._fill(problem, step)
        call = self.memory.inputs.load_metadata(fresh)
        lent = map_tensors(call, torch.Tensor.detach)
        pristine = replace(fresh, common=_copied(call).common)
        if self._recorder is not None and self._replay is None:
            self._capture(self._recorder, call, fresh)
        metadata = self._build(lent)
        answer, forward_ns = self._forward(lent, fresh, metadata)
        self._judge.judge(contents, step.row_order[fresh.rows].to(self._device), answer)
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
        """Notes that a reader of the times needs."""
        return (*self._notes, *self._judge.notes, *self._clock_notes())

    @property
    def clock_name(self) -> ClockName:
        """The name of the clock that times ``forward``, or "graph" if replays of a graph are timed."""
        return self._clock.name if self._replay is None else "graph"

    def unjudged_call(self) -> Callable[[], object]:
        """Return a function that runs one more ``forward`` on new inputs, for the profiler. It is not judged."""
        self._latest.start_next(None)
        problem = self._contents.next().problem()
        step, fresh = self._fresh(problem)
        self._fill(problem, step)
        lent = map_tensors(self.memory.inputs.load_metadata(fresh), torch.Tensor.detach)
        forward = self._session.layer.bind(lent, self._kv_cache, self._build(lent), self.memory.buffers)
        self.memory.inputs.load_rows(fresh)

        def call() -> object:
            with torch.no_grad():
                return call_backend("forward", forward)

        return call

    def finish(self) -> None:
        """Judge the last output in full. Raise UntrustworthyTimeError if it has changed or is wrong."""
        if self._latest.judge is self._judge:
            self._judge.require_unchanged()
        self._judge.finish()

    def _clock_notes(self) -> Iterator[str]:
        clock = self._clock
        if not isinstance(clock, EventClock):
            return
        if clock.is_overlapped:
            yield (
                f"{self._judge.name}: the device was not held back, because work seemed to go on elsewhere on it after "
                "the warm-up's calls; gaps between launches count"
            )
        if clock.num_behind > clock.num_taken * _FEW:
            yield (
                f"{self._judge.name}: in {clock.num_behind} of {clock.num_taken} calls the host fell behind the "
                "device, and gaps between launches count"
            )
        if clock.num_late:
            yield (
                f"{self._judge.name}: in {clock.num_late} of {clock.num_taken} calls work went on elsewhere on the "
                "device when the stream was done; it counts"
            )

    def _fresh(self, problem: Problem) -> tuple[Step, ForwardCall]:
        step = make_step(problem, self._device, self._order, pad_seq_len=self._backend.conventions.pad_seq_len)
        (call,) = forward_calls_of(step, self._backend.features, self._session.threshold)
        return step, call

    def _fill(self, problem: Problem, step: Step) -> None:
        """Write the context to the cache, and the new rows if no writer stores them."""
        pool = self._session.pool
        if pool is None:
            return
        old = problem.old_keys
        pool.write(problem.key_slots[old], problem.keys[old], problem.values[old])
        self._session.layer.store_new_rows(pool, step)

    def _capture(self, recorder: Recorder, call: ForwardCall, fresh: ForwardCall) -> None:
        inputs, buffers, layer = self.memory.inputs, self.memory.buffers, self._session.layer
        recorder.mark_host(*inputs.host_twins)
        inputs.load_rows(fresh)
        captured = capture_forward(
            recorder,
            lambda: map_tensors(call, torch.Tensor.detach),
            lambda lent: self._session.builder.build_for_cudagraph_capture(lent.common),
            lambda lent, metadata: layer.enter(lent, self._kv_cache, metadata, buffers),
        )
        if isinstance(captured, CapturedForward):
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
        inputs, buffers, num_rows, kv_cache = self.memory.inputs, self.memory.buffers, call.num_rows, self._kv_cache
        spans = inputs.spans()
        if kv_cache is not None:
            spans["the cache"] = span(kv_cache)
        if self._replay is not None:
            forward = self._replay.launch
        else:
            forward = self._session.layer.bind(call, kv_cache, metadata, buffers)
        returned: list[object] = []
        answers: list[TimedAnswer] = []

        def kept(run: Callable[[], object]) -> Callable[[], None]:
            return lambda: returned.append(run())

        def before() -> None:
            self._flush()
            buffers.refill(num_rows)
            inputs.load_rows(fresh)
            if isinstance(self._clock, HostClock):  # the overhead of an event clock is measured beforehand
                self._empty_ns.append(self._clock.time(kept(do_nothing)))
                returned.clear()

        def after() -> None:
            answers.append(
                copy_answer(
                    returned[0],
                    buffers.out,
                    buffers.lse,
                    num_rows,
                    spans,
                    must_be_buffer=self._backend.accept_output_buffer,
                )
            )

        with torch.no_grad():
            taken = call_backend(
                "forward",
                lambda: self._clock.time(kept(forward), before=before, after=after),
            )
        return answers[0], max(1, taken - self._overhead_ns())  # the difference may be 0 or negative for an empty call

    def _overhead_ns(self) -> int:
        if self._overhead is None:
            return int(median(self._empty_ns)) if self._empty_ns else 0
        return self._overhead.empty_ns + (0 if self._replay is None else self._overhead.replay_ns or 0)

    @property
    def _kv_cache(self) -> torch.Tensor | None:
        return None if self._session.pool is None else self._session.pool.kv_cache


def _copied(call: ForwardCall) -> ForwardCall:
    """Return copies of the metadata, without the rows, which are loaded later."""
    return map_tensors(replace(call, query=call.query[:0], key=None, value=None), torch.Tensor.clone)
