"""What clocks call of Python and torch: references taken on import, which is before any backend is imported.

A backend may later replace ``time.perf_counter_ns``, ``torch.cuda.synchronize`` or a method of ``torch.cuda.Event``.
The clocks go on with these references, and :func:`replaced_clocks` names what was replaced.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

host_ns = time.perf_counter_ns
"""The host's monotonic clock, in nanoseconds."""

# ``set_stream`` is not watched: vLLM replaces it, to know the current stream sooner.
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
    """Return the names of clocks, events and synchronisation that are not what they were on import."""
    return tuple(label for label, owner, name, value in _TAKEN if getattr(owner, name, None) is not value)


@dataclass(frozen=True)
class DeviceApi:
    """One device with streams, as a clock needs it. Streams and events are opaque; a simulated device has its own.

    current: the stream that is current. make_current: makes it so again. record: a new event at the end of what has
    been issued to a stream. is_done: whether the device has got to an event. elapsed_ms: between two events that it
    has got to, as float32 milliseconds. synchronize: the host waits for all streams. hold: the current stream does
    nothing for at least so many nanoseconds, while more is issued to it; 0 is a kernel that does nothing.
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
    """Return the API of a CUDA device, over the references taken on import."""
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
    """Return how fast the counter at most is that ``torch.cuda._sleep`` looks at, so that no hold is too short.

    It counts cycles of the GPU, whose clock may rise by a quarter above the rate it names. On gfx11 it is a clock of
    100 MHz.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    if getattr(properties, "gcnArchName", "").startswith("gfx11"):
        return 0.1
    return 1.25 * getattr(properties, "clock_rate", 2_400_000) / 1e6  # kHz


class CacheFlush:
    """Fills the whole L2 cache of a CUDA device when called, on the current stream. Elsewhere it does nothing.

    Every sample then reads its inputs from memory. The buffer is read, not written: lines that were written would be
    written back to memory while the sample runs. ``num_bytes``: of the buffer, twice the cache; 0 where the device has
    none that is flushed. A CPU's caches are left alone: a sample follows on the copying of its inputs, which fills them
    again.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.num_bytes = 0
        if torch.device(device).type == "cuda":
            self.num_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.zeros(self.num_bytes // 4, dtype=torch.int32, device=device)
        self._largest = torch.zeros((), dtype=torch.int32, device=device)

    def __call__(self) -> None:
        """Flush."""
        if self.num_bytes:
            _amax(self._buffer, dim=0, out=self._largest)
