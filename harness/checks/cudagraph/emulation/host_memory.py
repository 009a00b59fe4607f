"""Track which storages would be on the host, on a machine where all tensors are.

Without a GPU a tensor's device is no evidence, so how the tensor was created decides. Untracked memory counts as device
memory.
"""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Memory = Literal["host", "device"]

_FIRST_SWEEP = 1024
"""Number of entries at which those of freed memory are first removed."""


def storage_key(tensor: Tensor) -> int:
    """Return a number that identifies the storage of ``tensor``, or 0 if it has no storage.

    The number is unique while a tensor of the storage, or a weak reference to it, is alive. Wrappers of torch.func and
    sparse tensors have no storage.
    """
    try:
        address: int = torch._C._storage_address(tensor)  # type: ignore[attr-defined]
    except (NotImplementedError, RuntimeError):
        return 0
    return address


class HostMemory:
    """The storages on the host. Weak references to them prevent the reuse of their keys after a free."""

    def __init__(self) -> None:
        self._marked: dict[int, StorageWeakRef] = {}
        self._sweep_at = _FIRST_SWEEP

    def mark(self, tensor: Tensor) -> None:
        """Record that the memory of ``tensor`` is on the host."""
        key = storage_key(tensor)
        if key == 0 or key in self._marked:
            return
        self._marked[key] = StorageWeakRef(tensor.untyped_storage())
        if len(self._marked) >= self._sweep_at:
            self._marked = {key: held for key, held in self._marked.items() if not held.expired()}
            self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._marked))

    def unmark(self, tensor: Tensor) -> None:
        """Record that the memory of ``tensor`` is on the device."""
        self._marked.pop(storage_key(tensor), None)

    def place(self, memory: Memory, tensors: Iterable[Tensor | None]) -> None:
        """Record that the memory of those ``tensors`` that are not None is in ``memory``."""
        for tensor in tensors:
            if tensor is not None:
                (self.mark if memory == "host" else self.unmark)(tensor)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the memory of ``tensor`` is on the host."""
        return storage_key(tensor) in self._marked

    def holds_key(self, key: int) -> bool:
        """Return whether the storage with this :func:`storage_key` is on the host."""
        return key in self._marked

    def memory_of(self, tensors: Iterable[Tensor]) -> Memory:
        """Return "device" if at least one of ``tensors`` is on the device, else "host"."""
        return "host" if all(map(self.holds, tensors)) else "device"

    def held(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Return those tensors whose memory is on the host."""
        return tuple([tensor for tensor in tensors if storage_key(tensor) in self._marked])

    def snapshot(self, value: object) -> object:
        """Return an operator's arguments in their current state: aliases of device memory, copies of host memory."""
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
