"""The group of the ranks that share the keys of a layer (decode context parallelism), under vLLM's names."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor


class DCPGroup(Protocol):
    """The members of vLLM's ``GroupCoordinator`` that a backend may use. Every rank must make the same calls."""

    world_size: int
    rank_in_group: int

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Return the tensors of all ranks, concatenated along ``dim`` in the order of the ranks."""

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Return this rank's piece of the sum over all ranks; ``dim`` is cut into equal pieces."""

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Return the sum over all ranks."""


_GROUP: ContextVar[DCPGroup | None] = ContextVar("dcp_group", default=None)


def get_dcp_group() -> DCPGroup:
    """Return the group of this process.

    Raises:
        RuntimeError: this process is no rank; only the path ``ranks`` has a group.
    """
    group = _GROUP.get()
    if group is None:
        raise RuntimeError("this process has no group of decode context parallelism: only the path ranks has one")
    return group


def get_dcp_world_size_and_rank(enabled: bool = True) -> tuple[int, int]:
    """Return the number of ranks and the rank of this process; (1, 0) if it has no group, or if not ``enabled``."""
    group = _GROUP.get() if enabled else None
    return (1, 0) if group is None else (group.world_size, group.rank_in_group)


@contextmanager
def set_dcp_group(group: DCPGroup) -> Iterator[None]:
    """Make ``group`` that of this process inside the context."""
    token = _GROUP.set(group)
    try:
        yield
    finally:
        _GROUP.reset(token)
