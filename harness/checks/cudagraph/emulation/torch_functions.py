"""What torch's Python functions say of host and device, which no operator can: destinations, constructors, names."""

from collections.abc import Callable
from functools import cache
from types import (
    BuiltinFunctionType,
    EllipsisType,
    MethodDescriptorType,
    MethodWrapperType,
    NoneType,
    WrapperDescriptorType,
)
from typing import cast

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._device import _device_constructors

from attncheck.harness.checks.cudagraph.emulation.host_memory import HostMemory, Memory, storage_key
from attncheck.harness.checks.cudagraph.emulation.operators import tensors_among

TorchFunction = Callable[..., object]
"""As a TorchFunctionMode gets it."""

EXPORTS: frozenset[TorchFunction] = frozenset((Tensor.numpy, Tensor.__array__))
"""What a tensor of a GPU refuses. Inside a custom operator it is how a kernel of the CPU gets at its memory."""

READERS: frozenset[TorchFunction] = EXPORTS | {Tensor.tolist, Tensor.__repr__, Tensor.__str__, Tensor.__format__}
"""Read contents without an operator that says so."""

ADDRESSES: frozenset[TorchFunction] = frozenset({Tensor.data_ptr, Tensor.untyped_storage, Tensor.__dlpack__})
"""What hands memory to code that torch does not see."""

COPIES: frozenset[TorchFunction] = frozenset(
    {Tensor.to, Tensor.type_as, Tensor.cpu, torch.as_tensor, torch.asarray, torch.tensor}
)
"""Bring a tensor to another device; on one device some of them return what they were given."""

MAKERS: frozenset[TorchFunction] = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
"""Make a tensor of what they are given; tensors within lists are read one by one."""

FACTS: frozenset[TorchFunction] = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "layout", "itemsize", "ndim", "is_nested", "is_cuda", "requires_grad")
) | {Tensor.__len__, Tensor.dim, Tensor.size, Tensor.stride, Tensor.numel, Tensor.storage_offset}
"""Tell what is known without a look at the contents or the device, and call no operator."""

_BUILT_IN = frozenset({BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType})
"""Types of functions that run no Python code."""

_VIEWS: frozenset[TorchFunction] = frozenset(
    getattr(owner, name)
    for name in ("detach", "transpose", "permute", "unsqueeze", "squeeze", "select", "narrow", "unbind")
    for owner in (Tensor, torch)
) | {Tensor.view, Tensor.expand, Tensor.t}
"""Return views."""

_NUMBERS = frozenset({int, NoneType, EllipsisType, torch.dtype})
"""Types of what a view is made of, beside slices; a bool or a list makes an index that copies."""

_MOVES: frozenset[TorchFunction] = frozenset({Tensor.to, Tensor.type_as})

_DEVICE_OF = Tensor.device.__get__
_HOST = "cpu"

_WORDS: dict[str, str] = {
    "__bool__": "bool()",
    "__int__": "int()",
    "__float__": "float()",
    "__complex__": "complex()",
    "__index__": "a tensor as an index",
    "__contains__": "in",
    "__repr__": "repr()",
    "__str__": "str()",
    "__format__": "format()",
    "__array__": "numpy.asarray()",
}


@cache
def constructors() -> frozenset[TorchFunction]:
    """Functions that make a tensor from no tensor, on the host unless ``device`` says otherwise."""
    return frozenset(_device_constructors())


def is_plain(function: TorchFunction, kwargs: dict[str, object]) -> bool:
    """Whether the operators of a call say all that it does with memory."""
    return (
        "device" not in kwargs
        and function not in _functions_of_memory()
        and not isinstance(function, OpOverload | OpOverloadPacket)
    )


@cache
def _functions_of_memory() -> frozenset[TorchFunction]:
    """Functions that read, copy, make or export tensors, or look at where they lie."""
    return READERS | ADDRESSES | COPIES | MAKERS | constructors() | {Tensor.new_tensor, _DEVICE_OF}


def is_view(function: TorchFunction, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether the call returns a view, whose memory is known, and has no number to read from a tensor."""
    is_index = function is Tensor.__getitem__
    if kwargs or not (is_index or function in _VIEWS):
        return False
    is_nested = len(args) == 2 and type(args[1]) in ((tuple,) if is_index else (tuple, list, torch.Size))
    return all(map(_is_number, cast(tuple[object, ...], args[1] if is_nested else args[1:])))


def _is_number(part: object) -> bool:
    if type(part) is slice:
        return all(type(bound) in _NUMBERS for bound in (part.start, part.stop, part.step))
    return type(part) in _NUMBERS


def stays_on_device(function: TorchFunction, args: tuple[object, ...], host: HostMemory) -> bool:
    """Whether a plain call makes no memory of the host: a view, or one C++ function of a tensor of the device."""
    if type(function) not in _BUILT_IN or not args or type(args[0]) is not Tensor:
        return False
    key = storage_key(args[0])
    return (key != 0 and not host.holds_key(key)) or is_view(function, args, {})


def asks_device(function: TorchFunction) -> bool:
    """Whether this reads ``tensor.device``."""
    return function == _DEVICE_OF


def words(function: TorchFunction | None, operator_name: str) -> str:
    """The call as its author wrote it, as far as that is known: ``.item()``, ``torch.nonzero()``, ``x[...]``."""
    name = str(getattr(function, "__name__", ""))
    if function is None or not name:
        return operator_name
    if name in _WORDS:
        return _WORDS[name]
    if name in {"__getitem__", "__setitem__"}:
        return f"x[...]{' = y' if name == '__setitem__' else ''} ({operator_name})"
    owner = str(getattr(function, "__qualname__", "")).partition(".")[0]
    method = owner in {"Tensor", "TensorBase", "_TensorBase"} or name.startswith("__")
    return f".{name}()" if method else f"torch.{name}()"


def destination(
    function: TorchFunction, args: tuple[object, ...], kwargs: dict[str, object], host_device: torch.device
) -> Memory | Tensor | None:
    """Where a call puts its result: named (host, device), beside another tensor, or None where it does not say.

    ``host_device`` is the device object that host tensors were seen to have. The literal ``"cpu"`` means the host too:
    literals are interned, which strings that torch makes of a device (``device.type``) are not.
    """
    if function is Tensor.cpu:
        return "host"
    wanted = kwargs.get("device")
    if wanted is None and function in _MOVES:
        first = args[1] if len(args) > 1 else kwargs.get("other")
        if isinstance(first, Tensor):
            return first
        wanted = first if isinstance(first, torch.device | str | int) else None
    if wanted is None:
        return None
    return "host" if wanted is host_device or (type(wanted) is str and wanted is _HOST) else "device"


def place_of_new(
    function: TorchFunction,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    host_device: torch.device,
    host: HostMemory,
) -> Memory | None:
    """Where a new tensor lies, as far as the function says."""
    named = destination(function, args, kwargs, host_device)
    if isinstance(named, str):
        return named
    if function in constructors():
        return "host"
    return host.memory_of(tensors_among(args[:1])) if function is Tensor.new_tensor else None
