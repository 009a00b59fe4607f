"""``streams``: ``forward`` works in the order of the current stream, also if that is not the default stream.

A step runs on a stream of its own. A delay keeps this stream busy while the host issues ``forward``. Until the delay
ends, query, key and value are NaN. The result and the cache are copied on the stream directly after ``forward``, and
judged like any step. So work on another stream is found if it does not wait for the current stream, or if the current
stream does not wait for it. Cannot see: work on another stream that ends early enough by chance. Needs further runs of
the backend.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attncheck.harness.checks.cudagraph.replay import step_fault
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.checks.interface import Check, CheckedCase
from attncheck.harness.checks.numerics import output_shares
from attncheck.harness.device import Accelerator, accelerator_of
from attncheck.harness.driver.foreign_code import call_backend
from attncheck.harness.driver.lending import PersistentInputs
from attncheck.harness.driver.observation import Observation
from attncheck.harness.driver.outputs import read_result
from attncheck.harness.driver.pool import same_bytes
from attncheck.harness.driver.session import BegunStep, Session
from attncheck.harness.driver.step import ForwardCall
from attncheck.harness.truth.truth import Truth

FIRST_DELAY_NS, LONGEST_DELAY_NS = 2_000_000, 1_000_000_000
"""Nanoseconds of the first delay, and the most of any. A delay must outlast the host's part of ``forward``."""

ATTEMPTS = 3
"""Most runs of a step. A run follows if the delay of the one before ended before ``forward`` returned."""

_FACTOR = 3
"""Length of the next delay, as a multiple of the time in which the host got through the last run."""


@dataclass(frozen=True)
class DelayedCall:
    """A call of ``forward`` behind a delay.

    image: the cache's bytes directly after ``forward``; None without a pool. took_ns: time of the host from the start
    of the delay until ``forward`` returned. is_ahead: whether ``forward`` returned before the delay ended.
    changed_later: whether the result or the cache changed after the stream had ended its work.
    """

    image: Tensor | None
    took_ns: int
    is_ahead: bool
    changed_later: bool


class DelayedSteps:
    """Runs steps of sessions on one stream of a device, behind delays."""

    def __init__(self, device: torch.device, accelerator: Accelerator) -> None:
        self._device, self._api, self._torch = device, accelerator, accelerator.module()
        # torch hands out 32 streams of a priority, again and again. Backends use the default one, so they get others.
        self._stream: Any = self._torch.Stream(device, priority=-1)

    def run(self, session: Session, delay_ns: int) -> tuple[Observation, list[DelayedCall]]:
        """Run one step of ``session``; return its observation, and its calls. Raise StageError.

        The observation has the result and the cache as they were on the stream directly after ``forward``.
        """
        self._api.synchronize()
        with self._torch.stream(self._stream):
            begun = session.begin()
            calls = [
                self._call(session, begun, call, fresh, metadata, delay_ns)
                for (call, metadata), fresh in zip(session.built(begun.calls), begun.lent.pristine, strict=True)
            ]
            seen = replace(session.finish(begun), pool_after=calls[-1].image)
            self._api.synchronize()
        return seen, calls

    def _call(
        self, session: Session, begun: BegunStep, call: ForwardCall, fresh: ForwardCall, metadata: object, delay_ns: int
    ) -> DelayedCall:
        """Make one call of the step. ``fresh``: the call with the rows that are written behind the delay."""
        api, layer, pool = self._api, session.layer_of(call), session.pool
        buffers = layer.output_buffers(session.problem, call)
        forward = layer.bind(call, begun.kv_cache, metadata, buffers)
        for rows in (call.query, call.key, call.value):
            if rows is not None:
                rows.fill_(math.nan)
        api.synchronize()
        began_ns = api.now_ns()
        api.hold(delay_ns)
        PersistentInputs(call).load_rows(fresh)
        written = api.record(self._stream)
        with torch.no_grad():
            returned = call_backend("forward", forward)
        is_ahead = not api.is_done(written)
        took_ns = api.now_ns() - began_ns
        buffers.require_memory()
        with self._torch.stream(self._stream):  # the backend may have made another one current
            result, _ = read_result(returned, buffers.out, must_be_buffer=session.backend.accept_output_buffer)
            results = [result] if buffers.lse is None else [result, buffers.lse.rows]
            copies = [rows.clone() for rows in results]
            image = None if pool is None else pool.bytes().clone()
            call_backend("forward", lambda: None, self._device)
            changed_later = not all(map(same_bytes, copies, results))
            if changed_later:  # judge the result as it was
                for rows, copy in zip(results, copies, strict=True):
                    rows.copy_(copy)
            if pool is not None and image is not None:
                changed_later |= not same_bytes(image, pool.bytes())
            begun.results.append(layer.result_of(call, returned, buffers))
        return DelayedCall(image, took_ns, is_ahead, changed_later)


def check_streams(case: CheckedCase) -> Finding:
    """Judge a step behind delays, unless the first step is wrong without them."""
    accelerator = accelerator_of(case.device)
    if accelerator is None:
        return NotExamined(("it needs a CUDA device",), "attncheck")
    steps = case.shared.get(DelayedSteps, lambda: DelayedSteps(case.device, accelerator))
    problem, truth, (session, first) = case.problem, case.truth, case.first_step()

    def judge(seen: Observation) -> str | None:
        return step_fault(problem, truth, session.backend.conventions, seen, session.pool)

    plain = judge(first)
    if plain is not None:
        return NotExamined((f"the step is wrong on the default stream without a delay: {plain}",))
    delay_ns = FIRST_DELAY_NS
    for attempt in range(1, ATTEMPTS + 1):
        seen, calls = steps.run(session, delay_ns)
        figures = {"rows": len(truth.out), "delay_us": delay_ns / 1e3}
        fault = judge(seen)
        if fault is not None:
            summary = f"on a stream of its own, as of the end of forward's work there: {fault}"
            return Broken(summary, figures, _likely_cause(truth, seen, calls))
        if all(call.is_ahead for call in calls):
            return Holds(figures)
        took_ns = max(call.took_ns for call in calls)
        if attempt < ATTEMPTS:
            delay_ns = min(LONGEST_DELAY_NS, _FACTOR * took_ns)
    if delay_ns == LONGEST_DELAY_NS:
        longest, took = LONGEST_DELAY_NS / 1e9, took_ns / 1e9
        return NotExamined(
            (f"forward returned after {took:.2g} s; its inputs are held back {longest:g} s",), "attncheck"
        )
    return Holds(figures, (f"forward waits for the device: it returned after a delay of {delay_ns / 1e6:.3g} ms",))


def _likely_cause(truth: Truth, seen: Observation, calls: list[DelayedCall]) -> str:
    if any(call.changed_later for call in calls):
        return "result or cache changed later: probably the current stream does not wait for work on another stream"
    if bool(output_shares(truth, seen).isinf().any()):
        return (
            "query, key and value are NaN until the current stream has written them: probably work on another stream, "
            "such as the default stream, does not wait for the current stream"
        )
    return "probably one of two streams does not wait for the other"


CHECKS = {"streams": Check(check_streams)}
