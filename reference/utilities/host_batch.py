"""The host side of a batch as checked numpy arrays: what the metadata utilities compute from.

numpy, because there is one number a request and torch's price of a call exceeds that of the arithmetic.
"""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import require_int
from attncheck.reference.utilities.metadata import CommonAttentionMetadata

Integers: TypeAlias = npt.NDArray[np.signedinteger[Any]]


def host_array(name: str, tensor: Tensor, size: int | None = None) -> Integers:
    """A one-dimensional index tensor of the host as an array that shares its memory: to be read, never written."""
    if tensor.dtype is not torch.int32 and tensor.dtype is not torch.int64:
        raise ReferenceArgumentError(f"{name}.dtype", tensor.dtype, "int32 or int64")
    if not tensor.is_cpu:
        raise ReferenceArgumentError(f"{name}.device", str(tensor.device), "cpu: it is read on the host")
    shape = tuple(tensor.shape)
    if len(shape) != 1 or (size is not None and shape[0] != size):
        raise ReferenceArgumentError(f"{name}.shape", shape, "one axis" if size is None else f"[{size}]")
    return tensor.numpy()


def steps_of(name: str, starts: Integers) -> Integers:
    """How far each start location lies behind the one before; refuses those that fall."""
    steps = starts[1:] - starts[:-1]
    if len(steps) and steps.min() < 0:
        first = int((steps < 0).argmax())
        raise ReferenceArgumentError(name, starts[first : first + 2].tolist(), f"non-decreasing (entry {first + 1})")
    return steps


def query_bounds(metadata: CommonAttentionMetadata) -> tuple[Integers, Integers]:
    """``query_start_loc_cpu`` and the query lengths, for ``num_reqs`` requests, of which there must be one."""
    num_reqs = require_int("num_reqs", metadata.num_reqs, 1)
    starts = host_array("query_start_loc_cpu", metadata.query_start_loc_cpu, num_reqs + 1)
    return starts, steps_of("query_start_loc_cpu", starts)
