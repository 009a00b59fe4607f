"""Inputs lent to a backend: copies or persistent buffers of them, and what a call changed in them."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from attncheck.harness.driver.foreign_code import has_its_memory, is_like
from attncheck.harness.driver.pool import same_bytes
from attncheck.harness.driver.step import HOST_TENSORS, ON_HOST, ForwardCall
from attncheck.reference import (
    CommonAttentionMetadata,
)


def changed_inputs(pristine: ForwardCall, call: ForwardCall) -> list[str]:
    """Return the names of inputs and metadata fields that differ from ``pristine``.

    Of query, key and value, only real rows are compared.
    """
    return _differing(_inputs(pristine, call))


def _inputs(pristine: ForwardCall, call: ForwardCall) -> Iterator[tuple[str, object, object]]:
    """Yield the name of each input and metadata field, what it was, and what it is."""
    real = {"query": pristine.num_rows, "key": pristine.num_key_rows, "value": pristine.num_key_rows}
    for name, count in real.items():
        was, now = getattr(pristine, name), getattr(call, name)
        if was is not None:
            yield (name, was[:count], now[:count]) if is_like(now, was) else (name, was, now)
    for field in fields(pristine.common):
        yield f"metadata.{field.name}", getattr(pristine.common, field.name), getattr(call.common, field.name)


def _differing(values: Iterable[tuple[str, object, object]]) -> list[str]:
    """Return the names of values that differ from what they were. If none does, wait once for each device."""
    values = [each for each in values if each[1] is not each[2]]
    pairs = [(was, cast(Tensor, now)) for _, was, now in values if isinstance(was, Tensor)]
    if all(is_like(now, was) for was, now in pairs) and _hold_same_bytes(pairs):
        values = [each for each in values if not isinstance(each[1], Tensor)]
    return [name for name, was, now in values if not same(was, now)]


def _hold_same_bytes(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Return whether both tensors of each pair hold the same bytes; they have equal sizes and devices."""
    by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    for was, now in pairs:
        by_device.setdefault(was.device, []).append((_bytes_of(was), _bytes_of(now)))
    sides = (map(torch.cat, zip(*group, strict=True)) for group in by_device.values())
    return all(same_bytes(*both) for both in sides)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def same(was: object, now: object) -> bool:
    """Return whether two values of a field are equal, of the same type and, for tensors, on the same device.

    NaN, which a step may contain, equals NaN.
    """
    if was is now:
        return True
    if isinstance(was, Tensor):
        if not is_like(now, was):
            return False
        now = cast(Tensor, now)
        if was.is_floating_point() and was.itemsize == 1:  # float8 has no comparison
            was, now = was.float(), now.float()
        return torch.equal(was, now) or bool(((was == now) | (torch.isnan(was) & torch.isnan(now))).all())
    if type(was) is not type(now):
        return False
    if isinstance(was, np.ndarray) and isinstance(now, np.ndarray):
        return was.dtype == now.dtype and np.array_equal(was, now)
    if isinstance(was, list | tuple) and isinstance(now, list | tuple):
        return len(was) == len(now) and all(map(same, was, now))
    return bool(was == now)


# Persistent input buffers of a model runner: every step uses the same addresses with new contents.
#
# Metadata are copied first; each layer's rows are copied when the layer runs.

_ROWS = ("query", "key", "value")


class PersistentInputs:
    """Buffers of the size of ``largest``; a smaller call gets the front of each.

    A tensor that does not fit keeps its own memory.
    """

    def __init__(self, largest: ForwardCall) -> None:
        self.largest = largest

    @property
    def host_twins(self) -> tuple[Tensor, ...]:
        """The buffers of the metadata on the host."""
        return tuple(getattr(self.largest.common, name) for name in HOST_TENSORS)

    def load(self, call: ForwardCall) -> ForwardCall:
        """Copy the contents of ``call`` into these buffers; return the call over them."""
        held = self.load_metadata(call)
        self.load_rows(call)
        return held

    def load_metadata(self, call: ForwardCall) -> ForwardCall:
        """Copy the metadata of ``call``; return the call over these buffers, whose rows keep their old contents."""
        common: dict[str, Any] = {}
        for name, new in _tensors_of(call.common):
            own = getattr(self.largest.common, name)
            if isinstance(own, Tensor):
                common[name] = _filled(own, new)
        rows: dict[str, Any] = {name: _front_of(getattr(self.largest, name), getattr(call, name)) for name in _ROWS}
        return replace(call, common=replace(call.common, **common), **rows)

    def load_rows(self, call: ForwardCall) -> None:
        """Copy query, key and value of ``call`` into the buffers that :meth:`load_metadata` returned."""
        for name in _ROWS:
            own, new = getattr(self.largest, name), getattr(call, name)
            if own is not None and new is not None and _fits(own, new):
                own[: len(new)].copy_(new, non_blocking=True)

    def behind(self, earlier: ForwardCall, call: ForwardCall) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the bytes of each buffer behind the front that ``call`` uses: its name, what it was, and what it is.

        ``earlier``: a copy of the buffers. A call of fewer requests or rows must not write there.
        """
        was, lent = _named_tensors(earlier), _named_tensors(call)
        for name, now in _named_tensors(self.largest).items():
            if name in lent and _fits(now, lent[name]):
                front = len(lent[name])
                yield name, _bytes_of(was[name][front:]), _bytes_of(now[front:])

    def spans(self) -> dict[str, tuple[int, int]]:
        """Return the :func:`span` of query, key, value and each metadata tensor, by name."""
        return {name: span(tensor) for name, tensor in _named_tensors(self.largest).items()}


def _named_tensors(call: ForwardCall) -> dict[str, Tensor]:
    rows = {name: tensor for name in _ROWS if (tensor := getattr(call, name)) is not None}
    return rows | {f"metadata.{name}": tensor for name, tensor in _tensors_of(call.common)}


@dataclass(frozen=True)
class LentCalls:
    """The calls of a step as a backend gets them.

    ``pristine``: copies of the calls that no backend gets. ``buffers``: the persistent inputs behind each call, and
    copies of the whole of them; empty for calls in memory of their own.
    """

    pristine: tuple[ForwardCall, ...]
    calls: tuple[ForwardCall, ...]
    buffers: tuple[tuple[PersistentInputs, ForwardCall], ...] = ()

    def changed(self) -> list[str]:
        """Return the names of inputs and metadata fields that a backend has changed."""
        inputs = [_inputs(was, now) for was, now in zip(self.pristine, self.calls, strict=True)]
        behind = [held.behind(whole, was) for (held, whole), was in zip(self.buffers, self.pristine, strict=False)]
        return _differing(itertools.chain(*inputs, *behind))


def lend_copies(calls: tuple[ForwardCall, ...]) -> LentCalls:
    """Return the calls in new memory."""
    return LentCalls(calls, copied_calls(calls))


def lend_in_place(buffers: Sequence[PersistentInputs], calls: Sequence[ForwardCall]) -> LentCalls:
    """Return the calls in persistent memory, one of ``buffers`` for each."""
    loaded = tuple(inputs.load(call) for inputs, call in zip(buffers, calls, strict=True))
    copies = copied_calls([*(inputs.largest for inputs in buffers), *loaded])
    wholes, pristine = copies[: len(loaded)], copies[len(loaded) :]
    return LentCalls(pristine, loaded, tuple(zip(buffers, wholes, strict=True)))


def zeroed(common: CommonAttentionMetadata, device: torch.device) -> CommonAttentionMetadata:
    """Return metadata of zeros with the same sizes on ``device``, but for those that the contract puts on the host.

    No two tensors share memory.
    """
    zeros: dict[str, Any] = {
        name: torch.zeros_like(tensor, device="cpu" if name in ON_HOST else device)
        for name, tensor in _tensors_of(common)
    }
    return replace(common, **zeros)


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the address range ``[first, end)`` of the storage behind a tensor."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def map_tensors(call: ForwardCall, change: Callable[[Tensor], Tensor]) -> ForwardCall:
    """Return the call with ``change`` applied to every tensor, for instance to copy or to alias it."""
    common: dict[str, Any] = {name: change(tensor) for name, tensor in _tensors_of(call.common)}
    rows: dict[str, Any] = {name: None if (x := getattr(call, name)) is None else change(x) for name in _ROWS}
    return replace(call, common=replace(call.common, **common), **rows)


def copied_calls(calls: Sequence[ForwardCall]) -> tuple[ForwardCall, ...]:
    """Return copies of the calls of one step; tensors that share memory in ``calls`` share memory in the copies."""
    memory: dict[tuple[torch.device, int], torch.UntypedStorage] = {}

    def twin(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        place = tensor.device, storage.data_ptr()
        if place not in memory:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).clone()
            memory[place] = whole.untyped_storage()
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return copy.set_(memory[place], tensor.storage_offset(), tensor.shape, tensor.stride())

    return tuple(_with_own_objects(map_tensors(call, twin)) for call in calls)


def _with_own_objects(call: ForwardCall) -> ForwardCall:
    """Return the call with copies of the metadata fields that are neither tensors nor numbers."""
    common = call.common
    if common.encoder_seq_lens is None and common.mm_req_doc_ranges is None:
        return call
    own = {name: deepcopy(getattr(common, name)) for name in ("encoder_seq_lens", "mm_req_doc_ranges")}
    return replace(call, common=replace(common, **own))


def _tensors_of(common: Any) -> Iterator[tuple[str, Tensor]]:
    for field in fields(common):
        if isinstance(value := getattr(common, field.name), Tensor):
            yield field.name, value


def _fits(own: Tensor, new: Tensor) -> bool:
    return has_its_memory(own) and len(new) <= len(own) and own.shape[1:] == new.shape[1:]


def _front_of(own: Tensor | None, new: Tensor | None) -> Tensor | None:
    return new if own is None or new is None or not _fits(own, new) else own[: len(new)]


def _filled(own: Tensor, new: Tensor) -> Tensor:
    """Return the front of ``own`` with the contents of ``new``, or ``new`` itself if it does not fit.

    A narrower block table is widened by repeating its last column, whose pages no request of this step owns.
    """
    if not has_its_memory(own):
        return new
    if new.ndim != own.ndim or any(n > o for n, o in zip(new.shape, own.shape, strict=True)):
        return new
    front = own[: len(new)]
    if new.ndim == 2:
        front[:, : new.shape[1]].copy_(new, non_blocking=True)
        front[:, new.shape[1] :].copy_(new[:, -1:], non_blocking=True)
    else:
        front.copy_(new, non_blocking=True)
    return front
