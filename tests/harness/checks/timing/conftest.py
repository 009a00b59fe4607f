"""A device that is simulated in virtual time.

Work on a stream takes its number of nanoseconds, once it is issued and earlier work of the stream is done.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck.harness.checks.timing.clock import EventClock

US = 1_000


@dataclass
class Simulated:
    """``host``, ``free``: the time of the host, and when each stream is done. Long after its start, as machines are.

    ``event_ns``: what a stream takes to record an event. ``dirty_ns``: what the lines take to be written back that are
    dirty in the cache; the next work waits for them.
    """

    host: int = 10**15
    launch_ns: int = 4 * US
    wake_ns: int = 6 * US
    event_ns: int = 0
    dirty_ns: int = 0
    stream: str = "main"
    free: dict[str, int] = field(default_factory=lambda: {"main": 0, "side": 0})
    held: list[int] = field(default_factory=list)

    def work(self, ns, on=None, behind=()):
        """Issue work of ``ns``, behind what was issued to other streams too."""
        self.host += self.launch_ns
        on = on or self.stream
        start = max(self.host, self.free[on], *(self.free[other] for other in behind))
        self.free[on] = start + self.dirty_ns + ns
        self.dirty_ns = 0

    def record(self, stream):
        self.host += 500
        self.free[stream] = max(self.host, self.free[stream]) + self.event_ns
        return self.free[stream]

    def hold(self, ns):
        self.held.append(ns)
        self.work(ns)

    def synchronize(self):
        self.host = max(self.host, *self.free.values()) + self.wake_ns

    def wait_for(self, stream):
        self.host = max(self.host, self.free[stream]) + self.wake_ns

    def make_current(self, stream):
        self.stream = stream

    def spend(self, ns):
        self.host += ns

    @property
    def api(self):
        return SimpleNamespace(
            current=lambda: self.stream,
            make_current=self.make_current,
            record=self.record,
            is_done=lambda event: event <= self.host,
            elapsed_ms=lambda start, end: float(np.float32((end - start) / 1e6)),
            synchronize=self.synchronize,
            hold=self.hold,
            now_ns=lambda: self.host,
        )

    @property
    def clock(self):
        return EventClock(self.api)


class Cached(TorchDispatchMode):
    """Operators of torch are work of the device, a byte a nanosecond; what they write stays dirty in its cache."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = list(args) + list((kwargs or {}).values())
        written = [
            tensor
            for tensor, argument in zip(given, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        self.device.work(sum(tensor.nbytes for tensor in given if hasattr(tensor, "nbytes")))
        self.device.dirty_ns = sum(tensor.nbytes for tensor in written)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def device():
    return Simulated()


@pytest.fixture
def cached(device):
    """Around calls of torch: they are the device's."""
    return Cached(device)
