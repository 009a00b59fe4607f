"""Simulated time of the host, of streams and of events. Nothing waits, and times are equal in every run."""

import threading
from typing import Any, ClassVar

import numpy as np

from pretend_cuda.order import Past

READ_NS = 100
"""Host time of one read of its clock; above 0, so that a loop until a certain time ends."""

LAUNCH_NS = 4_000
"""Host time to issue one operator or event."""

KERNEL_NS = 2_000
"""Device time of one operator, in addition to that of its bytes."""

EVENT_NS = 1_000
"""Device time of one event."""

WAKE_NS = 6_000
"""Time from the end of the awaited work until the host continues."""

BYTES_PER_NS = 2_000
"""Memory bandwidth of the device."""

ENDLESS_NS = 3600 * 10**9
"""Device time of a kernel that does not end; a real wait for it never returns, either."""

CYCLES_PER_NS = 2
"""Cycles of ``torch.cuda._sleep`` in a nanosecond."""


class SimulatedClock:
    """The host's time in nanoseconds, and the streams, which may be ahead of it."""

    def __init__(self) -> None:
        self.host_ns = 10**15
        self.streams: list[Stream] = []

    def read(self) -> int:
        """Return the host's time, in place of ``time.perf_counter_ns``."""
        self.host_ns += READ_NS
        return self.host_ns

    def work(self, stream: "Stream", device_ns: int) -> int:
        """Issue ``device_ns`` of work to ``stream``; return the time at which it is done."""
        self.host_ns += LAUNCH_NS
        stream.free_ns = max(self.host_ns, stream.free_ns) + device_ns
        return stream.free_ns

    def wait_until(self, ns: int) -> None:
        """Advance the host to the end of a wait for device time ``ns``; never return if that is an hour away."""
        if ns - self.host_ns > ENDLESS_NS:
            threading.Event().wait()
        self.host_ns = max(self.host_ns, ns) + WAKE_NS

    def synchronize(self) -> None:
        """Advance the host to the end of all streams."""
        self.wait_until(max((stream.free_ns for stream in self.streams), default=0))


class Stream:
    """Replaces ``torch.cuda.Stream``; a subclass sets the device."""

    pretend: ClassVar[Any]

    def __init__(self, device: object = None, priority: int = 0, **_: object) -> None:
        self.free_ns = 0
        self.device_index, self.device_type = 0, 1
        self.pretend.clock.streams.append(self)
        self.stream_id = self.cuda_stream = len(self.pretend.clock.streams) - 1
        self.past = Past()

    def wait_stream(self, other: "Stream") -> None:
        self.free_ns = max(self.free_ns, other.free_ns)
        self.past.join(other.past)

    def wait_event(self, event: "Event") -> None:
        self.free_ns = max(self.free_ns, event.at_ns or 0)
        self.past.join(event.past)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or self.pretend.event_class()
        event.record(self)
        return event

    def query(self) -> bool:
        self.pretend.answer()
        return self.free_ns <= self.pretend.clock.read()

    def synchronize(self) -> None:
        self.pretend.refuse_in_capture()
        self.pretend.note("wait", "Stream.synchronize")
        self.pretend.clock.wait_until(self.free_ns)
        self.pretend.order.finish(self.past)


class Event:
    """Replaces ``torch.cuda.Event``; a subclass sets the device."""

    pretend: ClassVar[Any]

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.at_ns: int | None = None
        self.past = Past()

    def record(self, stream: Stream | None = None) -> None:
        self.pretend.note("event", "Event.record")
        stream = stream or self.pretend.current
        self.at_ns = self.pretend.clock.work(stream, EVENT_NS)
        self.past = Past()
        self.past.join(stream.past)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.pretend.current).wait_event(self)

    def query(self) -> bool:
        self.pretend.answer()
        return self.at_ns is None or self.at_ns <= self.pretend.clock.read()

    def elapsed_time(self, end: "Event") -> float:
        self.pretend.answer()
        if self.at_ns is None or end.at_ns is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return float(np.float32((end.at_ns - self.at_ns) / 1e6))

    def synchronize(self) -> None:
        self.pretend.refuse_in_capture()
        self.pretend.note("wait", "Event.synchronize")
        self.pretend.clock.wait_until(self.at_ns or 0)
        self.pretend.order.finish(self.past)
