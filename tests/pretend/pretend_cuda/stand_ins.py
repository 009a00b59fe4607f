"""Replacements of names that differ in a CUDA build of torch, for a pretend device."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

import torch

from pretend_cuda.clock import CYCLES_PER_NS, KERNEL_NS, Stream
from pretend_cuda.device import PretendDevice
from pretend_cuda.functions import is_gpu


def cuda_names(device: PretendDevice) -> dict[str, Any]:
    """Return replacements of names in ``torch.cuda``."""
    settings = device.settings
    properties = [
        SimpleNamespace(
            name=settings.names[number],
            major=settings.capability[0],
            minor=settings.capability[1],
            multi_processor_count=settings.num_sms,
            total_memory=settings.total_memory,
            L2_cache_size=settings.l2_cache_size,
            shared_memory_per_block=48 * 1024,
            shared_memory_per_block_optin=227 * 1024,
            max_threads_per_multi_processor=2048,
            warp_size=32,
            uuid=f"11111111-2222-3333-4444-{number:012}",
        )
        for number in device.visible
    ]

    def properties_of(named: object = None) -> SimpleNamespace:
        index = named if isinstance(named, int) else torch.device(named or device.named).index  # type: ignore[call-overload]
        return properties[index or 0]

    def answered(value: Any) -> Any:
        device.answer()
        return value

    def synchronize(_device: object = None) -> None:
        device.refuse_in_capture()
        device.note("wait", "torch.cuda.synchronize")
        device.clock.synchronize()
        device.order.finish()

    def hold(cycles: int) -> None:
        if cycles:  # a sleep of 0 cycles is an empty kernel
            device.note("hold", "torch.cuda._sleep")
            device.order.hold(device.current.past)
        device.clock.work(device.current, cycles // CYCLES_PER_NS)

    def set_stream(stream: Stream) -> None:
        device.current = stream

    @contextmanager
    def stream_context(stream: Stream | None) -> Iterator[None]:
        outer = device.current
        device.current = stream or outer
        try:
            yield
        finally:
            device.current = outer

    @contextmanager
    def device_context(_device: object) -> Iterator[None]:
        device.answer()
        yield

    def set_sync_debug_mode(mode: int | str) -> None:
        device.sync_debug_mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)  # type: ignore[call-overload]

    def set_memory_fraction(fraction: float, _device: object = None) -> None:
        device.memory_fraction = fraction

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: len(properties),
        "current_device": lambda: 0,
        "set_device": lambda _device: device.answer(),
        "get_device_properties": properties_of,
        "get_device_capability": lambda _device=None: tuple(settings.capability),
        "get_device_name": lambda named=None: properties_of(named).name,
        "mem_get_info": lambda _device=None: answered(
            (settings.total_memory - device.allocated(), settings.total_memory)
        ),
        "memory_reserved": lambda _device=None: device.allocated(),
        "memory_allocated": lambda _device=None: device.allocated(),
        "get_per_process_memory_fraction": lambda _device=None: device.memory_fraction,
        "set_per_process_memory_fraction": set_memory_fraction,
        "empty_cache": lambda: None,
        "synchronize": synchronize,
        "device": device_context,
        "device_of": device_context,
        "Stream": device.stream_class,
        "Event": device.event_class,
        "stream": stream_context,
        "set_stream": set_stream,
        "current_stream": lambda _device=None: device.current,
        "default_stream": lambda _device=None: device.default,
        "is_current_stream_capturing": lambda: device.is_capturing,
        "get_sync_debug_mode": lambda: device.sync_debug_mode,
        "set_sync_debug_mode": set_sync_debug_mode,
        "_sleep": hold,
        "_lazy_init": device.answer,
    }


class Generator(torch.Generator):
    """A generator on the CPU that reports the given device."""

    def __new__(cls, device: object = "cpu") -> Self:
        made = super().__new__(cls, "cpu")
        made._named = torch.device(torch.device(device).type, 0) if is_gpu(device) else torch.device("cpu")
        return made

    @property
    def device(self) -> torch.device:
        return self._named


def profiler_of(device: PretendDevice) -> type:
    """Return a replacement of ``torch.profiler.profile``, whose events are the launches on ``device``."""

    class Profile:
        def __init__(self, **_: object) -> None:
            self._before = Counter[str]()
            self._found = Counter[str]()

        def __enter__(self) -> Self:
            self._before = Counter(device.launches)
            return self

        def __exit__(self, *_: object) -> None:
            self._found = device.launches - self._before

        def events(self) -> list[Any]:
            kernel = {
                "device_type": SimpleNamespace(name=device.named.type.upper()),
                "time_range": SimpleNamespace(elapsed_us=lambda: KERNEL_NS / 1000),
            }
            return [SimpleNamespace(name=name, **kernel) for name in self._found.elements()]

    return Profile
