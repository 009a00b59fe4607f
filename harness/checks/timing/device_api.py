"""What clocks call of Python and torch, taken when this module is imported: before any backend is, so none can fool it.

A backend may replace ``time.perf_counter_ns``, ``torch.cuda.synchronize`` or the methods of ``torch.cuda.Event`` for
everybody who looks them up after it. Here are the functions themselves, below torch's Python classes: those of
``torch._C``, whose classes cannot be changed from Python. On a build without CUDA they are missing, and only
:func:`cuda_api` needs them. Must not know: how a time is made of them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

host_ns = time.perf_counter_ns
"""The host's monotonic clock, in nanoseconds."""

CYCLES_PER_NS = 2
"""At least as many as a GPU's clock has, so that a hold is no shorter than asked for."""


def _of_torch(*names: str) -> Any:
    """What ``torch._C`` has under this path; None on a build without CUDA."""
    found: Any = torch._C
    for name in names:
        found = getattr(found, name, None)
    return found


_synchronize = _of_torch("_cuda_synchronize")
_exchange_device = _of_torch("_cuda_exchangeDevice")
_current_stream = _of_torch("_cuda_getCurrentStream")
_set_stream = _of_torch("_cuda_setStream")
_sleep = _of_torch("_cuda_sleep")
_stream_cls = _of_torch("_CudaStreamBase")
_event_cls = _of_torch("_CudaEventBase")
_record = _of_torch("_CudaEventBase", "record")
_query = _of_torch("_CudaEventBase", "query")
_elapsed_time = _of_torch("_CudaEventBase", "elapsed_time")

fill_zero: Callable[[torch.Tensor], object] = torch._C.TensorBase.zero_
"""Sets a tensor to 0 on the current stream."""


@dataclass(frozen=True)
class DeviceApi:
    """One device with streams, as a clock needs it. Streams and events are opaque; a simulated device has its own.

    current: the stream that is current. make_current: makes it so again. record: a new event at the end of what has
    been issued to a stream. is_done: whether the device has got to an event. elapsed_ms: between two events that it
    has got to, as float32 milliseconds. synchronize: the host waits for all streams. hold: the current stream does
    nothing for at least so many nanoseconds, while more is issued to it.
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
    """The API of a CUDA device, of the functions that were taken."""
    _, _, number = str(torch.device(device)).partition(":")
    index = int(number) if number else torch.cuda.current_device()

    def current() -> tuple[int, int, int]:
        stream: tuple[int, int, int] = _current_stream(index)
        return stream

    def make_current(stream: tuple[int, int, int]) -> None:
        stream_id, device_index, device_type = stream
        _set_stream(stream_id=stream_id, device_index=device_index, device_type=device_type)

    def record(stream: tuple[int, int, int]) -> Any:
        stream_id, device_index, device_type = stream
        event = _event_cls(enable_timing=True)
        _record(event, _stream_cls(stream_id=stream_id, device_index=device_index, device_type=device_type))
        return event

    def on_device(function: Callable[..., Any], *args: Any) -> None:
        before = _exchange_device(index)
        try:
            function(*args)
        finally:
            _exchange_device(before)

    return DeviceApi(
        current=current,
        make_current=make_current,
        record=record,
        is_done=lambda event: bool(_query(event)),
        elapsed_ms=lambda start, end: float(_elapsed_time(start, end)),
        synchronize=lambda: on_device(_synchronize),
        hold=lambda ns: on_device(_sleep, ns * CYCLES_PER_NS),
    )
