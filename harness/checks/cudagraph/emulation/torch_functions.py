"""What torch's Python functions reveal about host and device beyond their operators: destinations and constructors."""

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
"""A function as passed to a TorchFunctionMode."""

EXPORTS: frozenset[TorchFunction] = frozenset((Tensor.numpy, Tensor.__array__))
"""Functions that a GPU tensor refuses. Inside a custom operator, a CPU kernel accesses memory through them."""

READERS: frozenset[TorchFunction] = EXPORTS | {Tensor.tolist, Tensor.__repr__, Tensor.__str__, Tensor.__format__}
"""Functions that read contents without an operator that shows it."""

ADDRESSES: frozenset[TorchFunction] = frozenset({Tensor.data_ptr, Tensor.untyped_storage, Tensor.__dlpack__})
"""Functions that give memory to code that torch does not see."""

COPIES: frozenset[TorchFunction] = frozenset(
    {Tensor.to, Tensor.type_as, Tensor.cpu, torch.as_tensor, torch.asarray, torch.tensor}
)
"""Functions that copy a tensor to another device. Some return their argument if it is on that device already."""

MAKERS: frozenset[TorchFunction] = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
"""Functions that create a tensor from their argument. Tensors within lists are read one by one."""

FACTS: frozenset[TorchFunction] = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "layout", "itemsize", "ndim", "is_nested", "is_cuda", "requires_grad")
) | {Tensor.__len__, Tensor.dim, Tensor.size, Tensor.stride, Tensor.numel, Tensor.storage_offset}
"""Functions that return metadata, read neither contents nor the device, and call no operator."""

_BUILT_IN = frozenset({BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType})
"""Types of functions that run no Python code."""

_VIEWS: frozenset[TorchFunction] = frozenset(
    getattr(owner, name)
    for name in ("detach", "transpose", "permute", "unsqueeze", "squeeze", "select", "narrow", "unbind")
    for owner in (Tensor, torch)
) | {Tensor.view, Tensor.expand, Tensor.t}
"""Functions that return views."""

_NUMBERS = frozenset({int, NoneType, EllipsisType, torch.dtype})
"""Types of view arguments other than slices. A bool or a list makes an index that copies instead."""

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
    """Return functions that create a tensor from no tensor, on the host unless ``device`` is given."""
    return frozenset(_device_constructors())


def is_plain(function: TorchFunction, kwargs: dict[str, object]) -> bool:
    """Return whether the operators of a call reveal all that it does with memory."""
    return (
        "device" not in kwargs
        and function not in _functions_of_memory()
        and not isinstance(function, OpOverload | OpOverloadPacket)
    )


@cache
def _functions_of_memory() -> frozenset[TorchFunction]:
    return READERS | ADDRESSES | COPIES | MAKERS | constructors() | {Tensor.new_tensor, _DEVICE_OF}


def is_view(function: TorchFunction, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Return whether the call returns a view without reading a number from a tensor."""
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
    """Return whether a plain call creates no host memory: a view, or one C++ function of a tensor on the device."""
    if type(function) not in _BUILT_IN or not args or type(args[0]) is not Tensor:
        return False
    key = storage_key(args[0])
    return (key != 0 and not host.holds_key(key)) or is_view(function, args, {})


def reads_device(function: TorchFunction) -> bool:
    """Return whether the function reads ``tensor.device``."""
    return function == _DEVICE_OF


def words(function: TorchFunction | None, operator_name: str) -> str:
    """Return the call as its author wrote it, if known: ``.item()``, ``torch.nonzero()``, ``x[...]``."""
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
    """Return where a call puts its result: "host", "device", or a tensor beside which it goes. None if not specified.

    ``host_device``: the device object that host tensors report. The literal ``"cpu"`` also means the host. It is
    compared by identity, because literals are interned but the strings that torch makes of a device (``device.type``)
    are not.
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
    """Return where the call puts a new tensor, or None if the function does not determine it."""
    named = destination(function, args, kwargs, host_device)
    if isinstance(named, str):
        return named
    if function in constructors():
        return "host"
    return host.memory_of(tensors_among(args[:1])) if function is Tensor.new_tensor else None
