"""Persistent input buffers of a model runner: every step uses the same addresses with new contents.

Metadata are copied first; each layer's rows are copied when the layer runs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from attncheck.harness.driver.forward_calls import ForwardCall

_ROWS = ("query", "key", "value")


class PersistentInputs:
    """Buffers of the size of ``largest``; a smaller call gets the front of each.

    A tensor that does not fit keeps its own memory.
    """

    def __init__(self, largest: ForwardCall) -> None:
        self._own = largest

    @property
    def host_twins(self) -> tuple[Tensor, ...]:
        """The metadata tensors that the contract puts on the host."""
        common = self._own.common
        return common.query_start_loc_cpu, common.seq_lens_cpu, common.num_computed_tokens_cpu

    def load(self, call: ForwardCall) -> ForwardCall:
        """Copy the contents of ``call`` into these buffers; return the call over them."""
        held = self.load_metadata(call)
        self.load_rows(call)
        return held

    def load_metadata(self, call: ForwardCall) -> ForwardCall:
        """Copy the metadata of ``call``; return the call over these buffers, whose rows keep their old contents."""
        common: dict[str, Any] = {}
        for name, new in _tensors_of(call.common):
            own = getattr(self._own.common, name)
            if isinstance(own, Tensor):
                common[name] = _filled(own, new)
        rows: dict[str, Any] = {name: _front_of(getattr(self._own, name), getattr(call, name)) for name in _ROWS}
        return replace(call, common=replace(call.common, **common), **rows)

    def load_rows(self, call: ForwardCall) -> None:
        """Copy query, key and value of ``call`` into the buffers that :meth:`load_metadata` returned."""
        for name in _ROWS:
            own, new = getattr(self._own, name), getattr(call, name)
            if own is not None and new is not None and _fits(own, new):
                own[: len(new)].copy_(new)

    def copy(self) -> ForwardCall:
        """Return copies of the whole buffers."""
        return map_tensors(self._own, Tensor.clone)

    def changed_behind(self, earlier: ForwardCall, call: ForwardCall) -> Iterator[str]:
        """Yield the names of buffers that differ from ``earlier``, a :meth:`copy`, behind the front that ``call`` uses.

        A call of fewer requests or rows must not write there.
        """
        for name in _ROWS:
            if not _same_behind(getattr(earlier, name), getattr(self._own, name), getattr(call, name)):
                yield name
        for name, now in _tensors_of(self._own.common):
            if not _same_behind(getattr(earlier.common, name), now, getattr(call.common, name)):
                yield f"metadata.{name}"

    def spans(self) -> dict[str, tuple[int, int]]:
        """Return the :func:`span` of query, key, value and each metadata tensor, by name."""
        named = {name: rows for name in _ROWS if (rows := getattr(self._own, name)) is not None}
        named |= {f"metadata.{name}": tensor for name, tensor in _tensors_of(self._own.common)}
        return {name: span(tensor) for name, tensor in named.items()}


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
        if place not in memory and tensor.is_contiguous() and tensor.nbytes == storage.nbytes():
            whole = tensor.clone()
            memory[place] = whole.untyped_storage()
            return whole
        if place not in memory:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).clone()
            memory[place] = whole.untyped_storage()
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return copy.set_(memory[place], tensor.storage_offset(), tensor.shape, tensor.stride())

    return tuple(_with_own_lengths(map_tensors(call, twin)) for call in calls)


def _with_own_lengths(call: ForwardCall) -> ForwardCall:
    """Return the call with a copy of ``encoder_seq_lens``, the only metadata field that is a NumPy array."""
    lens = call.common.encoder_seq_lens
    return call if lens is None else replace(call, common=replace(call.common, encoder_seq_lens=lens.copy()))


def _tensors_of(common: Any) -> Iterator[tuple[str, Tensor]]:
    for field in fields(common):
        if isinstance(value := getattr(common, field.name), Tensor):
            yield field.name, value


def _fits(own: Tensor, new: Tensor) -> bool:
    return len(new) <= len(own) and own.shape[1:] == new.shape[1:]


def _front_of(own: Tensor | None, new: Tensor | None) -> Tensor | None:
    return new if own is None or new is None or not _fits(own, new) else own[: len(new)]


def _same_behind(was: Tensor | None, now: Tensor | None, lent: Tensor | None) -> bool:
    """Return whether two buffers hold equal bytes behind the front that ``lent`` covers."""
    if was is None or now is None or lent is None or len(lent) == len(now) or not _fits(now, lent):
        return True
    behind = slice(len(lent), None)
    return torch.equal(*(part[behind].contiguous().view(torch.uint8) for part in (was, now)))


def _filled(own: Tensor, new: Tensor) -> Tensor:
    """Return the front of ``own`` with the contents of ``new``, or ``new`` itself if it does not fit.

    A narrower block table is widened by repeating its last column, whose pages no request of this step owns.
    """
    if new.ndim != own.ndim or any(n > o for n, o in zip(new.shape, own.shape, strict=True)):
        return new
    front = own[: len(new)]
    if new.ndim == 2:
        front[:, : new.shape[1]] = new
        front[:, new.shape[1] :] = new[:, -1:]
    else:
        front.copy_(new)
    return front
