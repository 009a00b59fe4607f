"""Rules for what a captured graph cannot contain, applied to one operator call, and a report of violations.

The rules state what torch does on a GPU. Operators for which torch's tags do not show this are listed by name.
"""

from types import CodeType
from typing import NamedTuple

import torch
from torch import Tensor

from attncheck.harness.checks.cudagraph.call_sites import find_call_site
from attncheck.harness.checks.cudagraph.emulation.host_memory import HostMemory
from attncheck.harness.checks.cudagraph.emulation.operators import Operator, tensors_among
from attncheck.harness.checks.cudagraph.recorder import Violation, ViolationKind

_INDEX_PUTS = frozenset({"aten.index_put", "aten.index_put_", "aten._index_put_impl_", "aten._unsafe_index_put"})
_MASK_DTYPES = (torch.bool, torch.uint8)
_READ_VALUES = {"aten.masked_fill": 2, "aten.masked_fill_": 2, "aten.index_fill": 3, "aten.index_fill_": 3}
"""Operators that read a value given as a tensor, and the value's position. On a GPU this is an ``.item()``."""


class OperatorCall(NamedTuple):
    """One call of an operator. ``given``: its tensor arguments, in order. ``on_host``: those of them on the host."""

    operator: Operator
    args: tuple[object, ...]
    kwargs: dict[str, object]
    given: tuple[Tensor, ...]
    on_host: tuple[Tensor, ...]

    @property
    def is_host_work(self) -> bool:
        """Whether all tensor arguments are on the host, so that on a GPU no work would reach the device."""
        return len(self.on_host) == len(self.given)


class CaptureReport:
    """Violations and host reads of one recording, in order, without duplicates.

    ``boundary``: a code object. Frames outside the one that runs it do not belong to the backend.
    """

    def __init__(self, boundary: CodeType) -> None:
        self._boundary = boundary
        self.violations: dict[Violation, None] = {}
        self.host_reads: dict[str, None] = {}

    def add(self, kind: ViolationKind, call: str) -> None:
        """Add a violation, unless it comes from Triton's interpreter, which emulates a kernel."""
        place = find_call_site(self._boundary)
        if not place.interpreted:
            self.violations[Violation(kind, call, str(place))] = None

    def add_host_read(self, call: str) -> None:
        """Add a read of host memory, with its line."""
        self.host_reads[f"{call} at {find_call_site(self._boundary)}"] = None


def is_held_on_device(operator: Operator) -> bool:
    """Return whether a graph can contain every call of ``operator`` whose tensor arguments are all on the device."""
    return (
        operator.work == "computation"
        and not operator.is_dynamic
        and operator.name not in _INDEX_PUTS
        and operator.name not in _READ_VALUES
    )


def forbidden(call: OperatorCall, host: HostMemory) -> ViolationKind | None:
    """Return why a graph cannot contain ``call``, or None if it can."""
    operator = call.operator
    if call.is_host_work:
        return None
    if operator.work == "read" or _reads_value(call, host):
        return "host read"
    if _has_data_dependent_shape(call, host):
        return "data-dependent shape"
    if not call.on_host or operator.work == "custom":
        return None
    if any(host.holds(tensor) for tensor in operator.written_tensors(call.args, call.kwargs)):
        return "host read"
    return "host copy" if _copies_from_host(call, host) else None


def _reads_value(call: OperatorCall, host: HostMemory) -> bool:
    position = _READ_VALUES.get(call.operator.name)
    if position is None or len(call.args) <= position:
        return False
    value = call.args[position]
    return isinstance(value, Tensor) and not host.holds(value)


def _has_data_dependent_shape(call: OperatorCall, host: HostMemory) -> bool:
    """Return whether the shape depends on data. An index does only if it is a mask; ``x[mask] = number`` is a fill."""
    name = call.operator.name
    if name in _INDEX_PUTS:
        return _has_mask(call, host) and not _is_masked_fill(call, host)
    if not call.operator.is_dynamic:
        return False
    if name == "aten.index":
        return _has_mask(call, host)
    return name != "aten.repeat_interleave" or call.kwargs.get("output_size") is None


def _copies_from_host(call: OperatorCall, host: HostMemory) -> bool:
    """Return whether torch copies a host tensor to the device. Host scalars usually become kernel arguments instead."""
    name = call.operator.name
    if name == "aten.copy_":
        return True
    if name in _INDEX_PUTS:
        return not _is_masked_fill(call, host)
    return any(tensor.dim() > 0 for tensor in call.on_host)


def _has_mask(call: OperatorCall, host: HostMemory) -> bool:
    return any(index.dtype in _MASK_DTYPES and not host.holds(index) for index in tensors_among(call.args[1]))


def _is_masked_fill(call: OperatorCall, host: HostMemory) -> bool:
    """Return whether the call sets one mask on the device to one number on the host, without accumulation."""
    value = call.args[2]
    accumulates = call.args[3] if len(call.args) > 3 else call.kwargs.get("accumulate", False)
    indices = tuple(tensors_among(call.args[1]))
    return (
        not accumulates
        and isinstance(value, Tensor)
        and value.numel() == 1
        and host.holds(value)
        and len(indices) == 1
        and indices[0].dtype in _MASK_DTYPES
        and not host.holds(indices[0])
    )
