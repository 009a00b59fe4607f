"""Memory that a captured graph may use: held for it, and spoilt once nobody else holds it.

A graph goes on using memory that has been let go of since its capture, whatever the allocator has put there meanwhile.
Merely held it would be right by luck, and merely freed it might not even be mapped. So it is overwritten: a graph that
reads it answers wrongly every time, one that writes it is found out, and none reads wildly, for zero is an index that
every table has. Must not know: graphs, backends.
"""

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from types import CellType, FunctionType, ModuleType
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_NAN = 0xFF
"""A byte that makes NaN of every floating type, when it fills all bytes of a number."""


@dataclass(eq=False)
class MemoryBlock:
    """All memory that a tensor is part of, as bytes; ``value`` is the byte that it is spoilt with."""

    memory: Tensor
    value: int
    is_spoilt: bool = False

    def spoil(self) -> None:
        """Overwrite it, if nobody else holds it any more: NaN where floating-point numbers were, zeros elsewhere."""
        if not self.is_spoilt and _uses(self.memory) == _uses(torch.empty(1)):
            self.memory.fill_(self.value)
            self.is_spoilt = True

    def was_written(self) -> bool:
        """Whether anybody has written to it since it was spoilt."""
        return self.is_spoilt and bool(self.memory.ne(self.value).any())


class HeldMemory:
    """Blocks by their address. Graphs that use the same memory share its block, and it lives as long as one of them."""

    def __init__(self) -> None:
        self._blocks: WeakValueDictionary[int, MemoryBlock] = WeakValueDictionary()

    def of(self, tensors: Iterable[Tensor]) -> tuple[MemoryBlock, ...]:
        """The memory of ``tensors``, each block once; the tensors themselves are not held."""
        found: dict[int, MemoryBlock] = {}
        for tensor in tensors:
            if tensor.layout == torch.strided and tensor.data_ptr():
                memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                block = MemoryBlock(memory, _NAN if tensor.is_floating_point() else 0)
                found.setdefault(memory.data_ptr(), self._blocks.setdefault(memory.data_ptr(), block))
        return tuple(found.values())


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
