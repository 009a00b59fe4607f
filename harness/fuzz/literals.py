"""Writes values as Python source that needs only torch: tensors with their strides, and stand-ins for our classes."""

import dataclasses
import inspect
import math
import textwrap
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attncheck.harness.driver.pool_memory import flat_bytes
from attncheck.harness.fuzz.recording import NotExpressibleError

MOST_NUMBERS = 50_000
"""Maximum numbers that a file may contain."""

_FEW = 64
"""Maximum integers of a tensor that is written inline."""

_WIDTH = 118
_GAP = 6
"""Maximum distance, in elements, between neighbours in a run of numbers that differ from the fill."""


class SourceWriter:
    """Turns values into source: expressions, and the definitions they need, in order."""

    def __init__(self) -> None:
        self.definitions: list[str] = []
        self.classes: dict[str, str] = {}
        self._memories: dict[int, tuple[str, torch.dtype]] = {}
        self._named: dict[int, str] = {}
        self._numbers = 0

    def name(self, value: object, name: str) -> None:
        """Write ``name`` for this object (by identity) from now on."""
        self._named[id(value)] = name

    def source(self, value: Any) -> str:
        """Return the expression of a value.

        Raises:
            NotExpressibleError: the value has no plain form, or too many numbers.
        """
        if id(value) in self._named:
            return self._named[id(value)]
        match value:
            case None | bool() | int() | str() if not isinstance(value, Enum):
                return repr(value)
            case Enum():
                return repr(value.value)
            case float():
                return repr(value) if math.isfinite(value) else f"float({str(value)!r})"
            case tuple():
                return f"({', '.join(map(self.source, value))}{',' * (len(value) == 1)})"
            case list():
                return f"[{', '.join(map(self.source, value))}]"
            case torch.dtype():
                return str(value)
            case torch.device():
                return f"torch.device({str(value)!r})"
            case Tensor():
                return self._tensor(value)
            case np.ndarray():
                return f"{self._tensor(torch.from_numpy(value))}.numpy()"
            case Mapping():
                return "{" + ", ".join(f"{key!r}: {self.source(each)}" for key, each in value.items()) + "}"
        if dataclasses.is_dataclass(value) and not hasattr(value, "softmax_scale"):
            return self._dataclass(value)
        if callable(value):
            return f"lambda *_: {self.source(value(*[None] * len(inspect.signature(value).parameters)))}"
        if hasattr(value, "__dict__") or dataclasses.is_dataclass(value):
            return self._namespace(value)
        raise NotExpressibleError(f"a {type(value).__name__} is among the arguments")

    def memory(self, tensor: Tensor) -> str:
        """Return the name of the flat tensor for a tensor's storage; define it at the first call."""
        key = tensor.untyped_storage().data_ptr()
        if key not in self._memories or not key:
            flat = flat_bytes(tensor.cpu() if tensor.device.type == "cpu" else tensor).cpu()
            usable = flat[: len(flat) // tensor.element_size() * tensor.element_size()]
            name = f"memory_{len(self._memories) + 1}"
            self._memories[key or id(tensor)] = name, tensor.dtype
            self.definitions.append(self.flat_literal(name, usable.view(tensor.dtype)))
            return name
        return self._memories[key][0]

    def flat_literal(self, name: str, flat: Tensor) -> str:
        """Return statements that define ``name`` as this flat tensor: a fill with the most frequent number, then runs.

        Raises:
            NotExpressibleError: the file would have more than :data:`MOST_NUMBERS` numbers.
        """
        bits = flat.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.itemsize])
        is_fill = bits == bits.mode().values
        other = (~is_fill).nonzero().flatten()
        self._numbers += len(other)
        if self._numbers > MOST_NUMBERS:
            raise NotExpressibleError(f"it takes more than {MOST_NUMBERS} numbers")
        if len(flat) < 2 * len(other) + 8:
            return f"{name} = {_listed(flat)}"
        first = int(is_fill.nonzero()[0])
        lines = [f"{name} = torch.full(({len(flat)},), {_number(flat[first])}, dtype={flat.dtype})"]
        ends = (other.diff() > _GAP).nonzero().flatten().tolist() if len(other) else []
        for run in other.tensor_split([end + 1 for end in ends]) if len(other) else ():
            low, high = int(run[0]), int(run[-1]) + 1
            lines.append(f"{name}[{low}:{high}] = {_listed(flat[low:high])}")
        return "\n".join(lines)

    def _tensor(self, tensor: Tensor) -> str:
        if not tensor.numel():
            return f"torch.empty({tuple(tensor.shape)}, dtype={tensor.dtype})"
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() and tensor.is_contiguous()
        if whole and not tensor.is_floating_point() and tensor.numel() <= _FEW:
            return f"torch.tensor({tensor.tolist()}, dtype={tensor.dtype})"
        name = self.memory(tensor)
        held = next((dtype for known, dtype in self._memories.values() if known == name), tensor.dtype)
        if held.itemsize != tensor.dtype.itemsize:
            raise NotExpressibleError(f"memory of {held} is read as {tensor.dtype} as well")
        seen = name if held == tensor.dtype else f"{name}.view({tensor.dtype})"
        if whole:
            return seen if tensor.dim() == 1 else f"{seen}.view({tuple(tensor.shape)})"
        return f"{seen}.as_strided({tuple(tensor.shape)}, {tensor.stride()}, {tensor.storage_offset()})"

    def _dataclass(self, value: Any) -> str:
        """Return a call of a stand-in dataclass with the same name and fields; omit fields with default values."""
        name, own = type(value).__name__, dataclasses.fields(value)
        if name not in self.classes:
            lines = [
                f"    {each.name}: object" + ("" if each.default is dataclasses.MISSING else f" = {each.default!r}")
                for each in own
            ]
            self.classes[name] = "\n".join(["@dataclass", f"class {name}:", *lines])
        given = [
            f"{each.name}={self.source(getattr(value, each.name))}"
            for each in own
            if getattr(value, each.name) is not each.default
        ]
        return _wrapped_call(name, given)

    def _namespace(self, value: Any) -> str:
        if dataclasses.is_dataclass(value):
            held = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        else:
            held = {name: each for name, each in vars(value).items() if name not in ("_path", "impl")}
        computed = inspect.getmembers_static(type(value), lambda member: isinstance(member, property))
        held |= {name: getattr(value, name) for name, _ in computed}
        return _wrapped_call("SimpleNamespace", [f"{name}={self.source(each)}" for name, each in held.items()])


def _wrapped_call(name: str, arguments: list[str]) -> str:
    line = f"{name}({', '.join(arguments)})"
    if len(line) <= _WIDTH - 20:
        return line
    return f"{name}(\n" + "".join(f"{textwrap.indent(each, '    ')},\n" for each in arguments) + ")"


def _listed(flat: Tensor) -> str:
    numbers = "[" + ", ".join(_number(each) for each in flat) + "]"
    dtype = f", dtype={flat.dtype})"
    if len(numbers) + len(dtype) < _WIDTH - 40:
        return f"torch.tensor({numbers}{dtype}"
    body = textwrap.fill(numbers, _WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    return f"torch.tensor(\n{body}{dtype}"


def _number(element: Tensor) -> str:
    """Return the shortest decimal that rounds to the same number in the tensor's dtype."""
    value = element.item()
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    return next(
        text
        for digits in range(1, 18)
        if float(torch.tensor(float(text := f"{value:.{digits}g}"), dtype=element.dtype)) == value
    )
