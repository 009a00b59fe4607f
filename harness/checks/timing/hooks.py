"""What a backend may leave behind in the interpreter, so that it works or looks on where no clock runs.

A mode of torch, a profile function, a method of ``torch.Tensor`` of its own, a kernel of its own for an operator of
ATen: each is run by what the harness calls between two calls of the backend. It could do there the work of the call
before, or learn of contents that are being laid out. Cannot see: native code, threads, and what is changed in the
modules of attncheck itself. Must not know: backends, clocks.
"""

import sys
from collections.abc import Callable, Iterator

import torch
import torch.library

_num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_profile, _trace = sys.getprofile, sys.gettrace

_ATEN = ("clone", "copy_", "slice.Tensor", "gather", "randperm.generator", "randint.generator")
"""Operators by which answers are copied, and contents made and laid out."""

_TORCH = ("arange", "cat", "empty", "equal", "randint", "randperm", "stack")
_METHODS = {name: vars(torch.Tensor).get(name) for name in dir(torch.Tensor)}
_FUNCTIONS = {name: vars(torch).get(name) for name in _TORCH}
_KERNELS = frozenset(
    f"aten/{operator}/{key}"
    for operator in _ATEN
    for key in ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView", "BackendSelect", "Functionalize")
)
_registered: set[str] = torch.library._impls


def active_modes() -> tuple[int, int]:
    """How many modes of torch see what is called: those for operators, those for functions."""
    return _num_dispatch_modes(), _num_function_modes()


def tracers() -> tuple[object, object]:
    """The functions that Python calls at every event of this thread, to profile and to trace; None: there is none."""
    return _profile(), _trace()


def added_kernels() -> tuple[str, ...]:
    """Kernels that Python code has registered for operators by which the harness moves contents."""
    return tuple(sorted(_KERNELS & _registered))


def replaced() -> tuple[str, ...]:
    """Names of methods of a tensor, and of functions of torch, that are not what they were."""
    return tuple(_replaced())


def _replaced() -> Iterator[str]:
    methods, functions = vars(torch.Tensor), vars(torch)
    for name, was in _METHODS.items():
        if methods.get(name) is not was:
            yield f"torch.Tensor.{name}"
    for name, was in _FUNCTIONS.items():
        if functions.get(name) is not was:
            yield f"torch.{name}"
