"""The memory a backend is lent again and again: the same addresses at every call, new contents.

So a model runner does: metadata are built first, the rows of a layer come when it is its turn. Must not know: backends,
clocks, what is judged.
"""

from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from attncheck.harness.driver.forward_calls import ForwardCall
from attncheck.reference import CommonAttentionMetadata

_ROWS = ("query", "key", "value")


class LentBuffers:
    """The tensors of ``call``, for calls that are no larger: a smaller one gets the front of each."""

    def __init__(self, call: ForwardCall) -> None:
        self._own = call

    def with_metadata_of(self, fresh: ForwardCall) -> ForwardCall:
        """``fresh`` over these buffers, its metadata in them; query, key and value hold what they held."""
        common: dict[str, Any] = {}
        for field in fields(CommonAttentionMetadata):
            own, new = getattr(self._own.common, field.name), getattr(fresh.common, field.name)
            if isinstance(own, Tensor) and isinstance(new, Tensor):
                common[field.name] = _filled(own, new)
        rows: dict[str, Any] = {name: _front_of(getattr(self._own, name), getattr(fresh, name)) for name in _ROWS}
        return replace(fresh, common=replace(fresh.common, **common), **rows)

    def load_rows(self, fresh: ForwardCall) -> None:
        """Query, key and value of ``fresh``, put where :meth:`with_metadata_of` said they lie."""
        for name in _ROWS:
            own, new = getattr(self._own, name), getattr(fresh, name)
            if own is not None and new is not None and _fits(own, new):
                own[: len(new)].copy_(new)

    def spans(self) -> dict[str, tuple[int, int]]:
        """Name -> first address and the one behind the last, of the memory behind query, key, value and metadata."""
        found = {}
        lent = {name: getattr(self._own, name) for name in _ROWS}
        lent |= {f"metadata.{field.name}": getattr(self._own.common, field.name) for field in fields(self._own.common)}
        for name, tensor in lent.items():
            if isinstance(tensor, Tensor):
                found[name] = span(tensor)
        return found


def span(tensor: Tensor) -> tuple[int, int]:
    """First address, and the one behind the last, of the memory behind a tensor."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _fits(own: Tensor, new: Tensor) -> bool:
    return len(new) <= len(own) and (own.shape[1:] == new.shape[1:])


def _front_of(own: Tensor | None, new: Tensor | None) -> Tensor | None:
    return new if own is None or new is None or not _fits(own, new) else own[: len(new)]


def _filled(own: Tensor, new: Tensor) -> Tensor:
    """The front of ``own`` with the contents of ``new``; a narrower table is widened by the page nobody owns."""
    if new.ndim != own.ndim or any(n > o for n, o in zip(new.shape, own.shape, strict=True)):
        return new
    front = own[: len(new)]
    if new.ndim == 2:
        front[:, new.shape[1] :] = 0
        front[:, : new.shape[1]] = new
    else:
        front.copy_(new)
    return front
