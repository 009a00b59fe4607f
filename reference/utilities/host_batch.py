"""The host tensors of a batch as checked numpy arrays, from which the metadata utilities compute.

They use numpy because the arrays have one number per request, and torch's call overhead exceeds the arithmetic.
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
    """Return a one-dimensional index tensor of the host as an array that shares its memory and must not be written."""
    if tensor.dtype is not torch.int32 and tensor.dtype is not torch.int64:
        raise ReferenceArgumentError(f"{name}.dtype", tensor.dtype, "int32 or int64")
    if not tensor.is_cpu:
        raise ReferenceArgumentError(f"{name}.device", str(tensor.device), "cpu: it is read on the host")
    shape = tuple(tensor.shape)
    if len(shape) != 1 or (size is not None and shape[0] != size):
        raise ReferenceArgumentError(f"{name}.shape", shape, "one axis" if size is None else f"[{size}]")
    return tensor.numpy()


def steps_of(name: str, starts: Integers) -> Integers:
    """Return the difference between each start location and the one before; raise if they decrease."""
    steps = starts[1:] - starts[:-1]
    if len(steps) and steps.min() < 0:
        first = int((steps < 0).argmax())
        raise ReferenceArgumentError(name, starts[first : first + 2].tolist(), f"non-decreasing (entry {first + 1})")
    return steps


def query_bounds(metadata: CommonAttentionMetadata) -> tuple[Integers, Integers]:
    """Return ``query_start_loc_cpu`` and the query lengths of the ``num_reqs`` requests; raise if there are none."""
    num_reqs = require_int("num_reqs", metadata.num_reqs, 1)
    starts = host_array("query_start_loc_cpu", metadata.query_start_loc_cpu, num_reqs + 1)
    return starts, steps_of("query_start_loc_cpu", starts)
