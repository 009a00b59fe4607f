"""Clocks that keep their own references to Python and torch, so a backend imported later cannot replace them.

:class:`HostClock` times what is done when a call returns: everything on a CPU, and the host's part of a step.
:class:`EventClock` times the work of a device.
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
"""Longest time for which a device is held back while the host issues a call, in nanoseconds."""

GUARDS = 5
"""Number of first samples for which the device is not held back. If most of them are late, it is never held."""

MARGIN_NS = 20_000
"""Nanoseconds added to the length of a hold, and to the threshold above which a sample is late."""

_SLOW_SHARE = 0.01
"""Share of the duration of a sample that is added to the threshold above which it is late."""


def do_nothing() -> None:
    """Do nothing."""


class Clock(Protocol):
    """Times one call. ``name``: the clock's name in records."""

    name: ClockName

    def time(
        self,
        call: Callable[[], object],
        *,
        before: Callable[[], object] = do_nothing,
        after: Callable[[], object] = do_nothing,
    ) -> int:
        """Return the nanoseconds that ``call`` takes, including all work that it starts.

        ``before`` and ``after`` are not counted. Work that they issue to the current stream runs directly before and
        after the work of ``call``: first new inputs and poison for the output, then a copy of the output.
        """
        ...

    def wait(self) -> None:
        """Wait until all issued work is done."""
        ...


class HostClock:
    """The host's monotonic clock around a call, which ends when ``wait`` (for a device) returns.

    Cannot see: work left to another thread of the process. The CPU time of other threads does not show it, because
    OpenMP's threads spin for a while after their work. Judging the output after the call does.
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
    """Events on the current stream, around the work that a call issues to it. Use one clock for each thing timed.

    ::

        host     sync | hold | before | start | call | end | after | settled | sync | last
        stream          ####   ######   !       ####   !     #####   !
        others                                    ########################### ~            late: until here

    - The device is held back until the host has issued everything, so that gaps between launches do not count. They
      count if the host does not get ahead, because it waits for the device inside the call or takes longer than the
      longest hold. This affects ``num_behind`` of ``num_taken`` samples.
    - Work on other streams that continues after this stream has settled counts until its end: ``num_late`` samples.
      The event ``last`` is recorded when the whole device is idle. A sample is late if the time from ``settled`` to
      ``last`` exceeds that of a call without work by more than 1 % of the sample. After a long wait a host is slow to
      record ``last``: on an H200 by about 25 us after 6 ms.
    - Work on other streams that does not wait for the current stream could finish while this stream is held. So the
      first :data:`GUARDS` samples, part of the warm-up, are taken without a hold. If most of them are late, all later
      samples are taken without a hold too, and gaps between launches count: ``is_overlapped``. Two late samples of
      five, caused by a slow host, change nothing.
    - A call that leaves another stream current does not move the end, which is recorded on the stream of the start.

    An empty call takes a few microseconds by these events. Callers subtract them (``measure_overhead``).

    Cannot see: work on other streams that ends within :data:`MARGIN_NS` and 1 % of the sample after the end, or that
    starts early from the sixth sample on. Both show in the output because of the stream's order: such work reads inputs
    before ``before`` has written them, or writes an output that is poisoned afterwards or is incomplete when ``after``
    copies it.

    Times between events are float32 milliseconds. Each sample has its own start event, so that no digits are lost.
    """

    name: ClockName = "events"

    def __init__(self, device: torch.device | str, api: DeviceApi | None = None) -> None:
        self._api = cuda_api(device) if api is None else api
        self._hold_ns = 0
        self._guards: list[bool] = []
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

        taken_ns, went_on_ns = self._between(start, end), self._between(settled, last)
        is_late = went_on_ns > 2 * idle_ns + MARGIN_NS + taken_ns * _SLOW_SHARE
        if is_guard:
            self._guards.append(is_late)
            self.is_overlapped = sum(self._guards) > GUARDS // 2
            self._is_holding = not self.is_overlapped
        else:
            self.num_taken += 1
            self.num_behind += not is_ahead and not self.is_overlapped
            self.num_late += is_late
        self._set_hold(issued_ns, is_behind=is_held and not is_ahead)
        return self._between(start, last) - idle_ns if is_late else taken_ns

    def wait(self) -> None:
        """See :class:`Clock`."""
        self._api.synchronize()

    def _between(self, start: Any, end: Any) -> int:
        return round(self._api.elapsed_ms(start, end) * 1e6)

    def _set_hold(self, issued_ns: int, *, is_behind: bool) -> None:
        if is_behind and self._hold_ns == LONGEST_HOLD_NS:
            self._is_holding = False
        wanted = issued_ns + issued_ns // 2 + MARGIN_NS
        self._hold_ns = min(LONGEST_HOLD_NS, max(wanted, 2 * self._hold_ns) if is_behind else wanted)

    def _idle(self) -> int:
        """Return the nanoseconds from a settled stream to the next event if no other work runs on the device."""
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
    """Return a clock for work on ``device``: events on CUDA, the host's clock elsewhere."""
    return EventClock(device) if torch.device(device).type == "cuda" else HostClock()
