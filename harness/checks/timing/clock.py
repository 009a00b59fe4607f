"""Clocks that go on with their own references when a backend, imported later, replaces what they were taken from.

:class:`HostClock` for what is done when a call returns: everything on a CPU, and the host's part of a step.
:class:`EventClock` for the work of a device.
"""

from collections.abc import Callable
from statistics import median
from typing import Any, Protocol

import torch

from attncheck.harness.checks.timing.device_api import DeviceApi, cuda_api, host_ns
from attncheck.harness.driver.foreign_code import collection_paused
from attncheck.reports.run_file.timings import ClockName

__all__ = ["Clock", "EventClock", "HostClock", "clock_for", "host_ns"]

LONGEST_HOLD_NS = 10_000_000
"""For how long a device is held back at most, while a call is issued."""

GUARDS = 5
"""Samples at first for which the device is not held back; the median of them decides whether it is later."""

MARGIN_NS = 20_000
"""By how much a hold is longer than was needed before, and a device may be idle later than it used to be."""


def do_nothing() -> None:
    """Do nothing."""


class Clock(Protocol):
    """Times one call. ``name``: what records call it."""

    name: ClockName

    def time(
        self,
        call: Callable[[], object],
        *,
        before: Callable[[], object] = do_nothing,
        after: Callable[[], object] = do_nothing,
    ) -> int:
        """Nanoseconds that ``call`` takes, with all it has begun.

        ``before`` and ``after`` are not counted. What they issue to the current stream is done right before and right
        behind what ``call`` issues to it: new contents for the inputs and poison for the output before, a copy of the
        output behind.
        """
        ...

    def wait(self) -> None:
        """Until everything that was issued is done."""
        ...


class HostClock:
    """The host's monotonic clock around a call, which is over once ``wait`` (of a device) returns.

    Cannot see: work left to a thread of the process. The CPU time of other threads does not tell it from OpenMP's
    threads, which spin for a while after their work; who judges the contents behind the call does.
    """

    name: ClockName = "host"

    def __init__(self, wait: Callable[[], object] | None = None) -> None:
        self._wait = wait

    def time(
        self,
        call: Callable[[], object],
        *,
        before: Callable[[], object] = do_nothing,
        after: Callable[[], object] = do_nothing,
    ) -> int:
        """See :class:`Clock`."""
        before()
        self.wait()
        with collection_paused():
            began = host_ns()
            call()
            if self._wait is not None:
                self._wait()
            ended = host_ns()
            after()
        return ended - began

    def wait(self) -> None:
        """See :class:`Clock`."""
        if self._wait is not None:
            self._wait()


class EventClock:
    """Events on the current stream, around what a call issues to it; one clock for each thing timed.

    ::

        host     sync | hold | before | start | call | end | after | settled | sync | last
        stream          ####   ######   !       ####   !     #####   !
        others                                    ########################### ~            late: until here

    - The device is held back until the host has issued everything, so that gaps between launches do not count. Where
      the host does not get ahead (it waits for the device inside the call, or takes longer than the longest hold),
      they do: ``num_behind`` of ``num_taken`` samples.
    - Work that goes on elsewhere when the stream has settled is counted to its end: ``num_late`` samples. The time from
      ``settled`` to ``last``, which is recorded once the whole device is idle, is then longer than after a call that
      issues nothing.
    - Work elsewhere that does not wait for the current stream would be done while this is held. So the first
      :data:`GUARDS` samples, which belong to the warm-up, are taken on an idle device instead; where their median is
      late, all further ones are, gaps between launches included: ``is_overlapped``. A host that is late itself, twice
      of five times, changes nothing.
    - A call that leaves another stream current does not move the end: it is recorded where the start was.

    An empty call takes a few microseconds by these events; who takes samples subtracts them (``measure_overhead``).

    Cannot see: work elsewhere that is over within :data:`MARGIN_NS` of the end, or that begins early from the sixth
    sample on. Both show in contents, in the order of the stream: inputs made by ``before`` are not there yet when they
    are read, an output is poisoned after it was written, or is not complete when ``after`` copies it.

    Events have float32 milliseconds between them; every sample has a start of its own, so that no digit is lost.
    """

    name: ClockName = "events"

    def __init__(self, device: torch.device | str, api: DeviceApi | None = None) -> None:
        self._api = cuda_api(device) if api is None else api
        self._hold_ns = 0
        self._guards: list[int] = []
        self._is_holding = True
        self.is_overlapped = False
        self._idle_ns: int | None = None
        self.num_taken = self.num_behind = self.num_late = 0

    def time(
        self,
        call: Callable[[], object],
        *,
        before: Callable[[], object] = do_nothing,
        after: Callable[[], object] = do_nothing,
    ) -> int:
        """See :class:`Clock`."""
        api = self._api
        idle_ns = self._idle()
        is_guard = len(self._guards) < GUARDS
        is_held = self._is_holding and not is_guard
        api.synchronize()
        stream = api.current()
        with collection_paused():
            began = api.now_ns()
            if is_held:
                api.hold(self._hold_ns)
            before()
            if not is_held:
                api.synchronize()
                began = api.now_ns()
            start = api.record(stream)
            call()
            end = api.record(stream)
            is_ahead = not api.is_done(start)
            issued_ns = api.now_ns() - began
            if api.current() != stream:
                api.make_current(stream)
            after()
        settled = api.record(stream)
        api.synchronize()
        last = api.record(stream)
        api.synchronize()

        went_on_ns, late_ns = self._between(settled, last), 2 * idle_ns + MARGIN_NS
        is_late = went_on_ns > late_ns
        if is_guard:
            self._guards.append(went_on_ns)
            self.is_overlapped = len(self._guards) == GUARDS and median(self._guards) > late_ns
            self._is_holding = not self.is_overlapped
        else:
            self.num_taken += 1
            self.num_behind += not is_ahead and not self.is_overlapped
            self.num_late += is_late
        self._set_hold(issued_ns, is_behind=is_held and not is_ahead)
        return self._between(start, last) - idle_ns if is_late else self._between(start, end)

    def wait(self) -> None:
        """See :class:`Clock`."""
        self._api.synchronize()

    def _between(self, start: Any, end: Any) -> int:
        return round(self._api.elapsed_ms(start, end) * 1e6)

    def _set_hold(self, issued_ns: int, *, is_behind: bool) -> None:
        """How long to hold the device next time, if at all."""
        if is_behind and self._hold_ns == LONGEST_HOLD_NS:
            self._is_holding = False
        wanted = issued_ns + issued_ns // 2 + MARGIN_NS
        self._hold_ns = min(LONGEST_HOLD_NS, max(wanted, 2 * self._hold_ns) if is_behind else wanted)

    def _idle(self) -> int:
        """How long after a stream has settled the next event is recorded, where nothing goes on elsewhere."""
        if self._idle_ns is None:
            found = []
            for _ in range(5):
                self._api.synchronize()
                stream = self._api.current()
                settled = self._api.record(stream)
                self._api.synchronize()
                last = self._api.record(stream)
                self._api.synchronize()
                found.append(self._between(settled, last))
            self._idle_ns = round(median(found))
        return self._idle_ns


def clock_for(device: torch.device | str) -> Clock:
    """The clock for work on ``device``: events on CUDA, the host's elsewhere."""
    return EventClock(device) if torch.device(device).type == "cuda" else HostClock()
