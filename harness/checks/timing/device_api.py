"""References to functions of Python and torch that clocks use, taken on import, before any backend is imported.

A backend may later replace ``time.perf_counter_ns``, ``torch.cuda.synchronize`` or a method of ``torch.cuda.Event``.
Clocks keep using these references, and :func:`replaced_clocks` returns what was replaced.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

host_ns = time.perf_counter_ns
"""The host's monotonic clock, in nanoseconds."""

# ``set_stream`` is not watched, because vLLM replaces it to look up the current stream faster.
_WATCHED: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("time", time, ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns")),
    ("torch.cuda", torch.cuda, ("synchronize", "current_stream", "Event")),
    ("torch.cuda.Event", torch.cuda.Event, ("record", "query", "elapsed_time")),
)
_TAKEN = [(f"{path}.{name}", owner, name, getattr(owner, name)) for path, owner, names in _WATCHED for name in names]

_synchronize, _current_stream, _set_stream = torch.cuda.synchronize, torch.cuda.current_stream, torch.cuda.set_stream
_on_device = torch.cuda.device
_sleep: Any = torch.cuda._sleep
_new_event: Any = torch.cuda.Event
_record: Any = torch.cuda.Event.record
_query: Any = torch.cuda.Event.query
_elapsed_time: Any = torch.cuda.Event.elapsed_time
_amax: Any = torch.amax


def replaced_clocks() -> tuple[str, ...]:
    """Return the names of clocks, events and synchronisation functions that were replaced since import."""
    return tuple(label for label, owner, name, value in _TAKEN if getattr(owner, name, None) is not value)


@dataclass(frozen=True)
class DeviceApi:
    """The functions of a device with streams that a clock needs. Streams and events are opaque, so it can be simulated.

    current: returns the current stream. make_current: makes a stream current. record: returns a new event after all
    work issued to a stream so far. is_done: whether the device has reached an event. elapsed_ms: float32 milliseconds
    between two reached events. synchronize: waits for all streams. hold: keeps the current stream idle for at least
    this many nanoseconds while more work is issued to it; 0 launches a kernel that does nothing.
    """

    current: Callable[[], Any]
    make_current: Callable[[Any], None]
    record: Callable[[Any], Any]
    is_done: Callable[[Any], bool]
    elapsed_ms: Callable[[Any, Any], float]
    synchronize: Callable[[], None]
    hold: Callable[[int], None]
    now_ns: Callable[[], int] = host_ns


def cuda_api(device: torch.device | str) -> DeviceApi:
    """Return the API of a CUDA device, using the references taken on import."""
    _, _, number = str(torch.device(device)).partition(":")
    index = int(number) if number else torch.cuda.current_device()
    cycles = cycles_per_ns(index)

    def record(stream: Any) -> Any:
        event = _new_event(enable_timing=True)
        _record(event, stream)
        return event

    def hold(ns: int) -> None:
        with _on_device(index):
            _sleep(round(ns * cycles))

    return DeviceApi(
        current=lambda: _current_stream(index),
        make_current=_set_stream,
        record=record,
        is_done=lambda event: bool(_query(event)),
        elapsed_ms=lambda start, end: float(_elapsed_time(start, end)),
        synchronize=lambda: _synchronize(index),
        hold=hold,
    )


def cycles_per_ns(device: torch.device | int) -> float:
    """Return an upper bound on the rate of the counter that ``torch.cuda._sleep`` reads, so that no hold is too short.

    The counter counts GPU cycles, whose clock may exceed its nominal rate by a quarter. On gfx11 it runs at 100 MHz.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    if getattr(properties, "gcnArchName", "").startswith("gfx11"):
        return 0.1
    return 1.25 * getattr(properties, "clock_rate", 2_400_000) / 1e6  # kHz


class CacheFlush:
    """Flushes the L2 cache of a CUDA device on the current stream when called. Does nothing on other devices.

    Each sample then reads its inputs from memory. The buffer is read, not written, because written lines would be
    written back to memory during the sample. ``num_bytes``: size of the buffer, twice that of the cache; 0 if none is
    flushed. CPU caches are not flushed, since copying the inputs of a sample would fill them again.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.num_bytes = 0
        if torch.device(device).type == "cuda":
            self.num_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.zeros(self.num_bytes // 4, dtype=torch.int32, device=device)
        self._largest = torch.zeros((), dtype=torch.int32, device=device)

    def __call__(self) -> None:
        """Flush the cache."""
        if self.num_bytes:
            _amax(self._buffer, dim=0, out=self._largest)
