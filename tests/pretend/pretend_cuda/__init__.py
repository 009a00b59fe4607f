"""A pretend CUDA device for tests of code that needs one; values are computed on the CPU.

Each storage belongs to the device or to the host, and operations that torch refuses between them raise. The device
counts operations, has a simulated clock, and can be small or in use.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from pretend_cuda.device import Act, PretendDevice, Settings
from pretend_cuda.functions import Functions
from pretend_cuda.operators import Operators
from pretend_cuda.stand_ins import Generator, cuda_names, profiler_of

__all__ = ["Act", "PretendDevice", "Settings", "present"]


@contextmanager
def present(settings: Settings = Settings()) -> Iterator[PretendDevice]:  # noqa: B008 (frozen)
    """Patch torch so that it has the device, in this thread."""
    device = PretendDevice(settings)
    with ExitStack() as entered:
        entered.callback(device.close)
        entered.enter_context(patch.multiple(getattr(torch, settings.type), create=True, **cuda_names(device)))
        entered.enter_context(patch.multiple(torch, Generator=Generator, compile=_uncompiled))
        entered.enter_context(patch.object(torch.profiler, "profile", profiler_of(device)))
        entered.enter_context(patch.object(time, "perf_counter_ns", device.clock.read))
        if os.environ.get("TRITON_INTERPRET") == "1":
            from triton.runtime.interpreter import GridExecutor

            from pretend_cuda.kernels import launcher

            launch = launcher(device, GridExecutor.__call__)
            entered.enter_context(patch.object(GridExecutor, "__call__", launch))
        entered.enter_context(Functions(device))
        entered.enter_context(Operators(device))
        yield device


def _uncompiled(function: Callable[..., Any] | None = None, **_: object) -> Any:
    """Replace ``torch.compile``, since Inductor generates no code for the pretend device."""
    return function if function is not None else _uncompiled
