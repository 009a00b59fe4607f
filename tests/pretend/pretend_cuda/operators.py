"""Operators on the device: raise the errors of CUDA, and count launches, waits and copies."""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from pretend_cuda.device import PretendDevice, storage_key
from pretend_cuda.functions import Functions, tensors_in

_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_TORCHS_OWN = frozenset({"aten", "prim", "prims"})

_COPIES = frozenset({"aten::copy_", "aten::set_", "aten::is_same_size", "aten::result_type"})
"""Operators that accept tensors of both devices."""

_NO_NUMBERS = frozenset(
    f"aten::{name}"
    for name in ("cat", "stack", "equal", "mm", "bmm", "baddbmm", "gather", "scatter", "scatter_", "scatter_reduce",
                 "index_select", "searchsorted", "bucketize")
)  # fmt: skip
"""Operators that accept no tensor of the host, not even a zero-dimensional one."""

_INDEXED = frozenset(
    {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
)
_WAITING = frozenset(
    f"aten::{name}"
    for name in ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim",
                 "unique_consecutive", "repeat_interleave")
)  # fmt: skip
"""Operators that wait for the device, since the host reads a number or the result's shape depends on data."""

_FLOAT8 = frozenset(
    f"aten::{name}"
    for name in ("index", "index_put_", "_index_put_impl_", "cat", "fill_", "zero_", "clone", "empty_like", "new_empty",
                 "empty_strided", "new_empty_strided", "_to_copy", "copy_", "set_", "lift_fresh")
)  # fmt: skip
"""Operators, in addition to views, that CUDA implements for float8 (torch 2.7 and newer)."""

_FLOAT8_DTYPES = frozenset(
    {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}
)


class Operators(TorchDispatchMode):
    """A mode that checks the devices of each operator's tensors, and puts new tensors on the same device."""

    supports_higher_order_operators = True

    def __init__(self, device: PretendDevice) -> None:
        super().__init__()
        self._device = device
        self._facts: dict[Any, tuple[str, bool]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operator would import the compiler

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name, is_view = self._facts.get(func) or self._facts.setdefault(func, facts_of(func))
        if is_view:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            given = tensors_in((args, kwargs))
            held = [self._device.holds(tensor) for tensor in given]
            if not any(held):
                is_inside = not given and any(map(self._device.holds, tensors_in(self._device.given)))
                result = func(*args, **kwargs)
                if is_inside:  # torch's own code creates a tensor, such as a mask, with the options of its argument
                    for tensor in tensors_in(result):
                        self._device.take(tensor)
                return result
            if isinstance(func, OpOverload) and func.namespace not in _TORCHS_OWN:
                return self._custom(func, args, kwargs)
            if not all(held) and name not in _COPIES:
                self._require_one_device(name, args, given, held)
            self._note(name, args, kwargs, given)
            known = {storage_key(tensor) for tensor in given}
            changed = tensors_in(_changed_arguments(func, args, kwargs))
        result = self._device.run(given, changed, lambda: func(*args, **kwargs))
        with torch._C.DisableTorchFunction():
            if name not in _COPIES and (name not in _INDEXED or held[0]):
                for tensor in tensors_in(result):
                    if storage_key(tensor) not in known:
                        self._device.take(tensor)
        return result

    def _custom(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the Python code of a custom operator under both modes."""
        kernel = torch.library.get_kernel(func, "CPU")
        with torch._C._EnableTorchFunction(), Functions(self._device), self:
            return kernel.call_boxed(_CPU_KEYS, *args, **kwargs)

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> None:
        """Count the launch, wait or copy of an operator; raise for float8 if CUDA has no kernel."""
        device = self._device
        has_float8 = any(tensor.dtype in _FLOAT8_DTYPES and device.holds(tensor) for tensor in given)
        if has_float8 and name not in _FLOAT8 and name not in _WAITING:
            device.note("float8", name)
            raise NotImplementedError(f'"{name.removeprefix("aten::")}_cuda" not implemented for float8')
        if name == "aten::copy_" and device.holds(args[0]) != device.holds(args[1]):
            kind = "to device" if device.holds(args[0]) else "to host"
            if kwargs.get("non_blocking") or (len(args) > 2 and args[2]):
                device.note(kind, f"{name}, not waited for")
            else:
                device.wait(name, kind)
        elif name in _WAITING or (name in _INDEXED and self._counts(args[1])):
            device.launch(name)
            device.wait(name, "to host" if name == "aten::_local_scalar_dense" else "wait")
        elif not name.startswith(("aten::empty", "aten::new_empty")) and name != "aten::set_":
            device.launch(name, sum(tensor.nbytes for tensor in given))

    def _counts(self, indices: Any) -> bool:
        """Return whether an index makes the host wait: a mask, whose true elements are counted, or a host tensor."""
        found = [tensor for tensor in indices if isinstance(tensor, Tensor)]
        return any(tensor.dtype in {torch.bool, torch.uint8} or not self._device.holds(tensor) for tensor in found)

    def _require_one_device(self, name: str, args: tuple[Any, ...], given: list[Tensor], held: list[bool]) -> None:
        if name in _INDEXED:
            target, indices = args[0], tensors_in(args[1])
            values = args[2] if len(args) > 2 and isinstance(args[2], Tensor) and args[2].dim() else target
            is_right = self._device.holds(target) == self._device.holds(values)
            is_right &= self._device.holds(target) or not any(map(self._device.holds, indices))
        else:
            is_right = name not in _NO_NUMBERS and not any(
                tensor.dim() for tensor, is_held in zip(given, held, strict=True) if not is_held
            )
        if not is_right:
            self._device.note("mixed", name)
            found = " and ".join(dict.fromkeys(str(self._device.named) if is_held else "cpu" for is_held in held))
            raise RuntimeError(f"Expected all tensors to be on the same device, but found {found} in {name}")


def _changed_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operator changes; none for a higher-order operator, which has no schema."""
    declared = func._schema.arguments if hasattr(func, "_schema") else []
    named = {**dict(zip([each.name for each in declared], args, strict=False)), **kwargs}
    return [named[each.name] for each in declared if each.is_write and each.name in named]


def facts_of(func: Any) -> tuple[str, bool]:
    """Return the operator's name, and whether it is a view, which needs no device."""
    schema = getattr(func, "_schema", None)
    return (str(func) if schema is None else schema.name), bool(getattr(func, "is_view", False))
