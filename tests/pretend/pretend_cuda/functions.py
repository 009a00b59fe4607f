"""Devices in torch's Python functions, which operators do not see: getters, destinations, reads by the host."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pretend_cuda.device import PretendDevice, storage_key

CPU = torch.device("cpu")
_WORDS = (torch.device, str, int)


class Functions(TorchFunctionMode):
    """A mode that runs torch functions on the CPU, reports the pretend devices, and assigns results to them."""

    def __init__(self, device: PretendDevice) -> None:
        super().__init__()
        self._device = device
        self._handlers: dict[Any, Callable[..., object]] = {
            Tensor.device.__get__: lambda tensor: device.named if device.holds(tensor) else CPU,
            getattr(Tensor, f"is_{device.named.type}").__get__: device.holds,
            Tensor.is_cpu.__get__: lambda tensor: not device.holds(tensor),
            Tensor.get_device: lambda tensor: 0 if device.holds(tensor) else -1,
            Tensor.cpu: lambda tensor, **_: self._moved(tensor, tensor, is_wanted=False),
            Tensor.cuda: lambda tensor, device=None, **_: self._moved(tensor, tensor, is_wanted=True),
            Tensor.pin_memory: lambda tensor, *_: tensor,
            Tensor.to: self._to,
            Tensor.type_as: self._to,
            Tensor.new_tensor: self._new_tensor,
            torch.tensor: lambda *args, **kwargs: self._create_from(torch.tensor, *args, **kwargs),
            torch.as_tensor: lambda *args, **kwargs: self._create_from(torch.as_tensor, *args, **kwargs),
            torch.asarray: lambda *args, **kwargs: self._create_from(torch.asarray, *args, **kwargs),
            Tensor.numpy: lambda tensor, **kwargs: self._exported(Tensor.numpy, tensor, **kwargs),
            Tensor.__array__: lambda tensor, *args, **kwargs: self._exported(Tensor.__array__, tensor, *args, **kwargs),
            Tensor.tolist: lambda *args: self._read(Tensor.tolist, *args),
            Tensor.__repr__: lambda *args, **kwargs: self._read(Tensor.__repr__, *args, **kwargs),
            Tensor.__format__: lambda *args: self._read(Tensor.__format__, *args),
        }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)  # the host's memory is not pinned; copies from it are as if it were
        outer, self._device.given = self._device.given, ()
        try:
            handler = self._handlers.get(func)
            if handler is not None:
                return handler(*args, **kwargs)
            if kwargs.get("device") is None or getattr(func, "__name__", "") == "set_default_device":
                self._device.given = (args, kwargs)
                return func(*args, **kwargs)
            return self._create(func, args, kwargs)
        finally:
            self._device.given = outer

    def _create(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Create a tensor on the device ``kwargs["device"]``, which must be that of the generator."""
        is_wanted = is_gpu(kwargs["device"])
        generator = kwargs.get("generator")
        if generator is not None and is_gpu(generator.device) != is_wanted:
            own = self._device.named.type
            named, found = (own, "cpu") if is_wanted else ("cpu", own)
            raise RuntimeError(f"Expected a '{named}' device type for generator but found '{found}'")
        if is_wanted:
            self._device.answer()
        out = func(*args, **{**kwargs, "device": CPU})
        for tensor in tensors_in(out):
            if is_wanted:
                self._device.take(tensor)
                if "empty" not in func.__name__:
                    self._device.launch(func.__name__, tensor.nbytes)
            else:
                self._device.release(tensor)
        return out

    def _create_from(self, func: Callable[..., Tensor], data: object, *args: object, **kwargs: Any) -> Tensor:
        """Create a tensor from ``data``, on the given device, or else that of a tensor ``data``, or else the host."""
        named = kwargs.pop("device", None)
        if named is None and len(args) > 1:
            named, args = args[1], args[:1]
        if not isinstance(data, Tensor):
            for held in filter(self._device.holds, tensors_in(data)):
                self._device.wait(func.__name__, "to host")
                del held
        out = func(data, *args, **kwargs)
        if isinstance(data, Tensor):
            is_held = self._device.holds(data)
            if is_held and storage_key(out) != storage_key(data):
                self._device.take(out)
            return self._moved(data, out, is_wanted=is_held if named is None else is_gpu(named))
        if named is None or not is_gpu(named):
            return out
        return self._uploaded(out, f"torch.{func.__name__}", is_alias=not isinstance(data, int | float | list | tuple))

    def _new_tensor(self, like: Tensor, data: object, **kwargs: Any) -> Tensor:
        named = kwargs.pop("device", None)
        return self._create_from(
            torch.tensor, data, dtype=kwargs.pop("dtype", None) or like.dtype, device=self._of(like, named)
        )

    def _of(self, like: Tensor, named: object) -> object:
        return named if named is not None else self._device.named if self._device.holds(like) else CPU

    def _to(self, tensor: Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        rest = list(args)
        is_wanted = self._device.holds(tensor)
        like = rest.pop(0) if rest and isinstance(rest[0], Tensor) else kwargs.pop("other", None)
        named = kwargs.pop("device", None)
        if like is not None:
            is_wanted = self._device.holds(like)
            rest.insert(0, like.dtype)
        elif rest and isinstance(rest[0], _WORDS) and not isinstance(rest[0], bool):
            named = rest.pop(0)
        if named is not None:
            is_wanted = is_gpu(named)
        dtype = kwargs.pop("dtype", None) or (
            rest.pop(0) if rest and isinstance(rest[0], torch.dtype) else tensor.dtype
        )
        non_blocking = non_blocking or (bool(rest.pop(0)) if rest else False)
        out = Tensor.to(tensor, dtype, non_blocking, *rest, **kwargs)
        return self._moved(tensor, out, is_wanted=is_wanted, is_blocking=not non_blocking)

    def _moved(self, source: Tensor, out: Tensor, *, is_wanted: bool, is_blocking: bool = True) -> Tensor:
        """Return ``out`` from ``source``, on the device if ``is_wanted``, else on the host; record a copy."""
        if is_wanted == self._device.holds(source):
            return out
        if is_wanted:
            return self._uploaded(
                out, "copy", is_alias=storage_key(out) == storage_key(source), is_blocking=is_blocking
            )
        self._copied("to host", "copy", is_blocking=is_blocking)
        out = out.clone() if storage_key(out) == storage_key(source) else out
        self._device.release(out)
        return out

    def _uploaded(self, out: Tensor, what: str, *, is_alias: bool, is_blocking: bool = True) -> Tensor:
        self._copied("to device", what, is_blocking=is_blocking)
        out = out.clone() if is_alias else out
        self._device.take(out)
        return out

    def _copied(self, kind: Any, what: str, *, is_blocking: bool) -> None:
        if is_blocking:
            self._device.wait(what, kind)
        else:
            self._device.note(kind, f"{what}, not waited for")

    def _exported(self, func: Callable[..., object], tensor: Tensor, *args: object, **kwargs: object) -> object:
        if self._device.holds(tensor):
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it to host memory first."
            )
        return func(tensor, *args, **kwargs)

    def _read(self, func: Callable[..., object], tensor: Tensor, *args: object, **kwargs: object) -> object:
        if self._device.holds(tensor):
            self._device.wait(func.__name__, "to host")
        return func(tensor, *args, **kwargs)


def is_gpu(named: object) -> bool:
    """Return whether ``named``, in any form that torch accepts, is a GPU."""
    return isinstance(named, int) or torch.device(named).type in {"cuda", "xpu"}


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in ``value`` and in its lists, tuples and dicts."""
    found, pending = [], [value]
    while pending:
        part = pending.pop()
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, list | tuple):
            pending.extend(part[::-1])
        elif isinstance(part, dict):
            pending.extend(part.values())
    return found
