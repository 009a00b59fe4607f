"""Whether clocks and what they rest on are still what they were. Must not know: how they work."""

import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch

HOST = (
    "perf_counter",
    "perf_counter_ns",
    "monotonic",
    "monotonic_ns",
    "time",
    "time_ns",
    "process_time",
    "process_time_ns",
    "thread_time",
    "thread_time_ns",
)
CUDA = ("synchronize", "Event", "Stream", "current_stream", "default_stream", "CUDAGraph")
"""``set_stream`` and ``stream`` are left out: vLLM replaces the former, to know the current stream sooner."""

EVENT = ("__new__", "record", "wait", "query", "elapsed_time", "synchronize")
STREAM = ("__new__", "record_event", "wait_event", "wait_stream", "query", "synchronize")
BELOW = ("_cuda_synchronize", "_cuda_exchangeDevice", "_cuda_getCurrentStream", "_cuda_setStream", "_cuda_sleep")

_ABSENT = object()


def watch(*modules: ModuleType) -> Callable[[], tuple[str, ...]]:
    """A function that names what is no longer what it is at present.

    Watched are Python's clocks, torch's events, streams, graphs and synchronisation, and all that stands in ``modules``
    and in their classes: which object each name leads to, and which code a function of Python runs.
    """
    static = inspect.getattr_static
    taken = [
        (f"{path}.{name}", owner, name, value := static(owner, name, _ABSENT), _code(value))
        for path, owner, names in [*_of_others(), *_of_modules(modules)]
        for name in names
    ]

    def tampered() -> tuple[str, ...]:
        """Names of what has been replaced. Cannot see: what native code changes below Python."""
        return tuple(
            label
            for label, owner, name, value, code in taken
            if (now := static(owner, name, _ABSENT)) is not value or _code(now) is not code
        )

    return tampered


def _of_others() -> Iterator[tuple[str, Any, Iterable[str]]]:
    yield "time", time, HOST
    yield "torch.cuda", torch.cuda, CUDA
    yield "torch.cuda.Event", torch.cuda.Event, EVENT
    yield "torch.cuda.Stream", torch.cuda.Stream, STREAM
    yield "torch.cuda.CUDAGraph", torch.cuda.CUDAGraph, ("replay",)
    yield "torch._C", torch._C, BELOW


def _of_modules(modules: Iterable[ModuleType]) -> Iterator[tuple[str, Any, Iterable[str]]]:
    for module in modules:
        held = {name: value for name, value in vars(module).items() if not name.startswith("__")}
        yield module.__name__, module, tuple(held)
        for name, value in held.items():
            if isinstance(value, type) and value.__module__ == module.__name__:
                methods = tuple(key for key, each in vars(value).items() if isinstance(each, FunctionType))
                yield f"{module.__name__}.{name}", value, methods


def _code(value: object) -> object:
    """What a function of Python runs, which can be exchanged within it."""
    return value.__code__ if isinstance(value, FunctionType) else None
