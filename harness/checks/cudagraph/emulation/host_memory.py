"""Which memory lies on the host, on a machine where every tensor does: an account by storage.

On a machine without a GPU the device of a tensor says nothing; what a GPU would hold, and what the host, follows from
how each tensor was made. Memory the account does not know counts as the device's.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Memory = Literal["host", "device"]

_FIRST_SWEEP = 1024
"""Entries after which those of freed memory are dropped for the first time."""


def storage_key(tensor: Tensor) -> int:
    """What tensors of one memory share, as long as one of them, or a weak reference, lives; 0 for those without.

    Wrappers that torch.func puts around tensors, and sparse tensors, have no storage of their own.
    """
    try:
        address: int = torch._C._storage_address(tensor)  # type: ignore[attr-defined]
    except (NotImplementedError, RuntimeError):
        return 0
    return address


class HostMemory:
    """The storages that lie on the host. Weak references are held, so that no address is confused after a free."""

    def __init__(self) -> None:
        self._marked: dict[int, StorageWeakRef] = {}
        self._sweep_at = _FIRST_SWEEP

    def mark(self, tensor: Tensor) -> None:
        """The memory of ``tensor`` lies on the host."""
        key = storage_key(tensor)
        if key == 0 or key in self._marked:
            return
        self._marked[key] = StorageWeakRef(tensor.untyped_storage())
        if len(self._marked) >= self._sweep_at:
            self._marked = {key: held for key, held in self._marked.items() if not held.expired()}
            self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._marked))

    def unmark(self, tensor: Tensor) -> None:
        """The memory of ``tensor`` lies on the device after all."""
        self._marked.pop(storage_key(tensor), None)

    def place(self, memory: Memory, tensors: Iterable[Tensor | None]) -> None:
        """The memory of ``tensors``, where they are not None, lies there."""
        for tensor in tensors:
            if tensor is not None:
                (self.mark if memory == "host" else self.unmark)(tensor)

    def holds(self, tensor: Tensor) -> bool:
        """Whether the memory of ``tensor`` lies on the host."""
        return storage_key(tensor) in self._marked

    def holds_key(self, key: int) -> bool:
        """Whether the memory with this :func:`storage_key` lies on the host."""
        return key in self._marked

    def memory_of(self, tensors: Iterable[Tensor]) -> Memory:
        """Where ``tensors`` lie: on the device as soon as one of them does."""
        return "host" if all(map(self.holds, tensors)) else "device"

    def held(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Those whose memory lies on the host."""
        return tuple([tensor for tensor in tensors if storage_key(tensor) in self._marked])

    def snapshot(self, value: object) -> object:
        """Arguments of an operator as they are now: memory of the device by aliases, memory of the host copied."""
        if isinstance(value, Tensor):
            if not self.holds(value):
                return value.detach()
            copied = value.clone()
            self.mark(copied)
            return copied
        if isinstance(value, list | tuple):
            parts = [self.snapshot(part) for part in value]
            return parts if isinstance(value, list) else tuple(parts)
        if isinstance(value, dict):
            return {name: self.snapshot(part) for name, part in value.items()}
        return value
