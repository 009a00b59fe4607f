"""The order of streams: what a held stream writes is seen by other streams only after they have waited for it.

A stream is held by ``torch.cuda._sleep``, as is a stream that waits for it, until the host waits for either. An
operation of a held stream runs at once, over memory as the stream sees it. What it changes in existing memory is kept
as a :class:`Write`. New tensors are not kept back, so a stream that reads another's new tensor too early is not found.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

T = TypeVar("T")


@dataclass(frozen=True)
class Write:
    """Bytes that an operation changed. ``memory``: the whole storage, uint8. ``places``: indices of the bytes."""

    stream: int
    number: int
    memory: Tensor
    places: Tensor
    values: Tensor


@dataclass
class Past:
    """What a stream or an event comes after: holds, and the number of the last write of each stream."""

    holds: set[int] = field(default_factory=set)
    writes: dict[int, int] = field(default_factory=dict)

    def join(self, other: "Past") -> None:
        """Come after everything that ``other`` comes after, too."""
        self.holds |= other.holds
        for stream, number in other.writes.items():
            self.writes[stream] = max(number, self.writes.get(stream, 0))

    def includes(self, write: Write) -> bool:
        return write.number <= self.writes.get(write.stream, 0)


class Order:
    """The holds that have not ended, and the writes behind them, in the order of issue."""

    def __init__(self) -> None:
        self._num_holds = self._num_writes = 0
        self._holds: set[int] = set()
        self._writes: list[Write] = []

    def hold(self, past: Past) -> None:
        """Hold the stream of ``past``."""
        self._num_holds += 1
        self._holds.add(self._num_holds)
        past.holds.add(self._num_holds)

    def finish(self, past: Past | None = None) -> None:
        """Carry out the writes that ``past`` comes after, or all: the host has waited for them."""
        self._holds = set() if past is None else self._holds - past.holds
        done = [write for write in self._writes if past is None or past.includes(write)]
        with _on_the_host():
            for write in done:
                write.memory[write.places] = write.values
        self._writes = [write for write in self._writes if all(write is not each for each in done)]

    def run(
        self, stream: int, past: Past, given: Iterable[Tensor], changed: Iterable[Tensor], call: Callable[[], T]
    ) -> T:
        """Return the result of an operation of ``stream`` on the tensors ``given``, which changes ``changed``."""
        if not self._holds & past.holds:
            if self._writes:
                self.finish(past)
            return call()
        with _on_the_host():
            written = {_key(tensor) for tensor in changed}
            pending = {_key(write.memory) for write in self._writes if past.includes(write)}
            memories = {_key(tensor): _bytes_of(tensor) for tensor in given if _key(tensor) in written | pending}
            as_others_see = {key: memory.clone() for key, memory in memories.items()}
            for write in self._writes:
                if past.includes(write) and _key(write.memory) in memories:
                    write.memory[write.places] = write.values
            before = {key: memory.clone() for key, memory in memories.items() if key in written}
        try:
            return call()
        finally:
            with _on_the_host():
                for key, memory in memories.items():
                    if key in before:
                        self._keep(stream, past, memory, before[key])
                    memory.copy_(as_others_see[key])

    def _keep(self, stream: int, past: Past, memory: Tensor, before: Tensor) -> None:
        places = memory.ne(before).nonzero().flatten()
        if len(places):
            self._num_writes += 1
            past.writes[stream] = self._num_writes
            self._writes.append(Write(stream, self._num_writes, memory, places, memory[places]))


@contextmanager
def _on_the_host() -> Iterator[None]:
    """Turn off the modes of the pretend device."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes_of(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
