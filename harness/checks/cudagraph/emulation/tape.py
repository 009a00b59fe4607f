"""Recorded operators, and their replay in the memory they were recorded with.

The tape freezes what a captured graph freezes: addresses, shapes and strides (by aliases made at the call), Python
numbers, and host memory.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from attncheck.harness.checks.cudagraph.call_sites import CallSite
from attncheck.harness.checks.cudagraph.emulation.host_memory import HostMemory, storage_key
from attncheck.harness.checks.cudagraph.emulation.operators import WITHOUT_TENSORS, AnyOperator, tensors_among
from attncheck.harness.checks.cudagraph.recorder import Released, count_uses

Fresh = tuple[Tensor | None, ...]
"""Tensors that an operator returned, with None for those that share memory with an argument."""


class TapedOperator(NamedTuple):
    """One operator with its arguments. A replay copies its results to those ``outputs`` that are not None."""

    func: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    outputs: Fresh


@dataclass(frozen=True)
class ExternalMemory:
    """Memory that existed before the recording. ``alias``: one of the tape's references to it."""

    alias: Tensor
    user: str
    place: CallSite

    def released(self) -> Released:
        """Return the memory as a ``Released`` value."""
        memory = self.alias.untyped_storage()
        first_used = self.user + (f" at {self.place}" if str(self.place) else "")
        return Released(memory.data_ptr(), memory.data_ptr() + memory.nbytes(), first_used)


@dataclass(frozen=True)
class TapeMark:
    """The state of a tape, for :meth:`Tape.go_back_to`."""

    num_steps: int
    made: dict[int, Tensor]
    outside: dict[int, ExternalMemory]
    references: dict[int, int]


class Tape:
    """Operators in order, and the memory they use.

    ``find_place``: returns the line of the backend that is running. ``tapes``: all tapes that may hold the same memory,
    including this one.
    """

    def __init__(self, find_place: Callable[[], CallSite], tapes: "WeakSet[Tape]") -> None:
        self._find_place = find_place
        self._tapes = tapes
        tapes.add(self)
        self._steps: list[TapedOperator] = []
        self._made: dict[int, Tensor] = {}
        self._outside: dict[int, ExternalMemory] = {}
        self._references: dict[int, int] = {}
        self._addresses: dict[int, int] = {}

    def freeze(
        self, user: str, args: tuple[object, ...], kwargs: dict[str, object], host: HostMemory
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return the arguments that operator ``user`` gets at each replay.

        They contain aliases of device tensors, and copies of host tensors, which freeze their contents.
        """

        def frozen(value: object) -> object:
            if isinstance(value, Tensor):
                key = storage_key(value)
                return value.clone() if host.holds_key(key) else self._alias(value, key, user)
            if isinstance(value, list | tuple):
                parts = [frozen(part) for part in value]
                return parts if isinstance(value, list) else tuple(parts)
            return value

        return tuple(map(frozen, args)), {name: frozen(value) for name, value in kwargs.items()} if kwargs else {}

    def freeze_on_device(
        self, user: str, args: tuple[object, ...], host: HostMemory
    ) -> tuple[tuple[object, ...], list[int]] | None:
        """Return the frozen arguments, as :meth:`freeze` does, and the keys of their tensors.

        Return None if there is no tensor, or if a tensor is on the host or inside a container.
        """
        keys: list[int] = []
        for value in args:
            if type(value) is Tensor:
                keys.append(storage_key(value))
                if host.holds_key(keys[-1]):
                    return None
            elif type(value) not in WITHOUT_TENSORS:
                return None
        left = iter(keys)
        frozen = [self._alias(value, next(left), user) if type(value) is Tensor else value for value in args]
        return (tuple(frozen), keys) if keys else None

    def _alias(self, tensor: Tensor, key: int, user: str) -> Tensor:
        alias = tensor.detach()
        if key not in self._made:
            self._references[key] = self._references.get(key, 0) + 1
            if key not in self._outside:
                self._outside[key] = ExternalMemory(alias, user, self._find_place())
        return alias

    def add(self, func: AnyOperator, args: tuple[object, ...], kwargs: dict[str, object], fresh: Fresh) -> None:
        """Append a call of ``func`` on frozen arguments, which each replay repeats."""
        outputs = [None if tensor is None else self.keep(tensor) for tensor in fresh]
        is_new = any(output is not None for output in outputs)
        self._steps.append(TapedOperator(func, args, kwargs, tuple(outputs) if is_new else ()))

    def add_new(self, fresh: Fresh, *, is_constant: bool) -> None:
        """Add memory that the recording allocated. Each replay writes a constant again, with its present value."""
        for tensor in fresh:
            if tensor is not None:
                kept = self.keep(tensor)
                if is_constant:
                    self._steps.append(TapedOperator(Tensor.copy_, (kept, kept.clone()), {}, ()))

    def keep(self, tensor: Tensor) -> Tensor:
        """Return an alias of memory that the recording allocated, and keep it alive as long as the tape."""
        alias = tensor.detach()
        self._made.setdefault(storage_key(alias), alias)
        return alias

    def close(self) -> None:
        """End the recording. A later change of an address counts as a release; earlier resizes do not."""
        self._addresses = {key: _address(outside.alias) for key, outside in self._outside.items()}

    def mark(self) -> TapeMark:
        """Return the present state, for :meth:`go_back_to`."""
        return TapeMark(len(self._steps), dict(self._made), dict(self._outside), dict(self._references))

    def has_grown_since(self, mark: TapeMark) -> bool:
        """Return whether a step was added after ``mark``."""
        return len(self._steps) > mark.num_steps

    def go_back_to(self, mark: TapeMark) -> None:
        """Discard everything added after ``mark``."""
        del self._steps[mark.num_steps :]
        self._made, self._outside, self._references = dict(mark.made), dict(mark.outside), dict(mark.references)

    def replay(self) -> None:
        """Repeat each step."""
        inference = any(alias.is_inference() for alias in self._made.values())
        with torch.no_grad(), torch.inference_mode(inference):
            for func, args, kwargs, outputs in self._steps:
                result = func(*args, **kwargs)
                if outputs:
                    for output, new in zip(outputs, tensors_among(result), strict=True):
                        if output is not None:
                            output.copy_(new)

    def uses_outside(self, tensor: Tensor) -> bool:
        """Return whether the memory of ``tensor`` existed before the recording and is used by the tape."""
        return storage_key(tensor) in self._outside

    def released(self) -> Iterator[Released]:
        """Yield memory from before the recording that only tapes keep alive or that a resize has moved."""
        extra = count_uses(torch.empty(1)) - 1
        for key, outside in self._outside.items():
            moved = _address(outside.alias) != self._addresses[key]
            if moved or count_uses(outside.alias) - extra <= sum(tape._references.get(key, 0) for tape in self._tapes):
                yield outside.released()


def fresh_among(result: object, known: Iterable[int]) -> Fresh:
    """Return an operator's result tensors, with None for those whose storage key is among ``known``."""
    known = set(known)
    return tuple([None if storage_key(tensor) in known else tensor for tensor in tensors_among(result)])


def _address(tensor: Tensor) -> int:
    """Return the address of the storage, not of the first element."""
    return tensor.untyped_storage().data_ptr()
