"""Memory that a captured graph may use: held for it, and spoilt once nobody else holds it.

A graph goes on using memory that has been let go of since its capture, whatever the allocator has put there meanwhile.
Merely held it would be right by luck, and merely freed it might not even be mapped. So it is overwritten: a graph that
reads it answers wrongly every time, one that writes it is found out, and none reads wildly, for zero is an index that
every table has. Must not know: graphs, backends.
"""

import gc
from collections.abc import Iterable
from types import CellType, FunctionType, ModuleType

import torch
from torch import Tensor

_NAN = 0xFF
"""A byte that makes NaN of every floating type, when it fills all bytes of a number."""


class HeldMemory:
    """Holds the memory of ``tensors``, and not the tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._held: dict[int, tuple[Tensor, int]] = {}
        for tensor in tensors:
            if tensor.layout == torch.strided and tensor.data_ptr():
                memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                self._held.setdefault(memory.data_ptr(), (memory, _NAN if tensor.is_floating_point() else 0))
        self._spoilt: dict[int, tuple[Tensor, int]] = {}

    def spoil(self) -> None:
        """Overwrite what nobody else holds any more: NaN where floating-point numbers were, zeros elsewhere."""
        alone = _uses(torch.empty(1))
        for address, (memory, value) in self._held.items():
            if address not in self._spoilt and _uses(memory) == alone:
                self._spoilt[address] = memory.fill_(value), value

    def was_written(self) -> bool:
        """Whether anybody has written to what was spoilt."""
        return any(bool(memory.ne(value).any()) for memory, value in self._spoilt.values())


def tensors_within(root: object) -> list[Tensor]:
    """Every tensor that ``root`` holds: through closures, arguments bound, attributes, containers.

    Of a function only its closure is followed, and classes and modules not at all: what is global is not held by it.
    """
    found: list[Tensor] = []
    seen = {id(root)}
    pending = [root]
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            found.append(item)
        if isinstance(item, type | ModuleType):
            continue
        held: list[object] | tuple[CellType, ...] = (
            item.__closure__ or () if isinstance(item, FunctionType) else gc.get_referents(item)
        )
        for each in held:
            if id(each) not in seen:
                seen.add(id(each))
                pending.append(each)
    return found


def _uses(tensor: Tensor) -> int:
    """How many tensors share the memory of ``tensor``, and how often asking counts."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
