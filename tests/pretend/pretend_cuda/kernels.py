"""Triton kernels on the pretend device, with Triton's interpreter."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pretend_cuda.device import PretendDevice


def launcher(device: PretendDevice, run: Callable[..., None]) -> Callable[..., None]:
    """Return a replacement of ``GridExecutor.__call__`` that requires tensors of the device and counts launches."""

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        named = {**dict(zip(executor.arg_names, args, strict=False)), **kwargs}
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        for name, tensor in tensors.items():
            if not device.holds(tensor):
                device.note("mixed", f"{executor.fn.__name__}, {name}")
                raise ValueError(f"Pointer argument {name} cannot be accessed from Triton (cpu tensor?)")
        device.launch(executor.fn.__name__, sum(tensor.nbytes for tensor in tensors.values()))
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            held = list(tensors.values())
            device.run(held, held, lambda: run(executor, *args, **kwargs))

    return launch
