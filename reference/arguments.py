"""Argument checks shared by the functions of the reference.

Each helper raises :class:`~attncheck.errors.ReferenceArgumentError` with the argument, its value and what is required,
so that the user gets this message instead of an index error from deep inside.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError

FLOAT8_DTYPES = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
)
"""The dtypes that have a scale; values of every other float dtype are used as they are."""

_INDEX_DTYPES = (torch.int32, torch.int64)


def is_float8(tensor: Tensor) -> bool:
    """Return whether the tensor holds float8 codes, whose value is ``code * scale``."""
    return tensor.dtype in FLOAT8_DTYPES


def require_shape(name: str, tensor: Tensor, *sizes: int | None, legend: str = "") -> None:
    """Raise if the number of axes or the size of an axis differs; a size of ``None`` matches any size."""
    shape = tuple(tensor.shape)
    fits = len(shape) == len(sizes) and all(want in (None, have) for want, have in zip(sizes, shape, strict=True))
    if not fits:
        want = "[" + ", ".join("any" if size is None else str(size) for size in sizes) + "]"
        raise ReferenceArgumentError(f"{name}.shape", shape, want + (f" ({legend})" if legend else ""))


def require_float(name: str, tensor: Tensor, *, float8: bool = False) -> None:
    """Raise if the tensor is not floating point, or is float8 and ``float8`` is False (no scale is available)."""
    require_float_dtype(f"{name}.dtype", tensor.dtype, float8=float8)


def require_float_dtype(name: str, dtype: torch.dtype, *, float8: bool = False) -> None:
    """Raise if the dtype is not floating point, or is float8 and ``float8`` is False."""
    if not dtype.is_floating_point or (dtype in FLOAT8_DTYPES and not float8):
        raise ReferenceArgumentError(name, dtype, "floating point" + ("" if float8 else ", not float8"))


def require_same_device(first: str, tensor: Tensor, **others: Tensor) -> None:
    """Raise if one of the ``others`` is not on the device of ``tensor``, which is called ``first`` in the message."""
    for name, other in others.items():
        if other.device != tensor.device:
            raise ReferenceArgumentError(f"{name}.device", str(other.device), f"{tensor.device}, where {first} is")


def require_positive_int(name: str, value: object) -> int:
    """Return a count as a Python integer; raise if it is not an integer of at least 1."""
    return require_int(name, value, 1)


def require_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return the value as a Python integer; raise if it is not an integer with ``low <= value <= high``."""
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        number = int(value)
        if low <= number and (high is None or number <= high):
            return number
    raise ReferenceArgumentError(
        name, value, f"an integer of at least {low}" + ("" if high is None else f", at most {high}")
    )


def require_shard(block_size: int, dcp_size: int, dcp_rank: int, interleave: int) -> None:
    """Raise if the numbers do not describe a rank of decode context parallelism over pages of ``block_size`` tokens."""
    ranks = require_positive_int("dcp_size", dcp_size)
    require_int("dcp_rank", dcp_rank, 0, ranks - 1)
    require_positive_int("cp_kv_cache_interleave_size", interleave)
    if block_size % interleave:
        raise ReferenceArgumentError("cp_kv_cache_interleave_size", interleave, f"a divisor of block_size {block_size}")


def require_index(name: str, tensor: Tensor) -> None:
    """Raise if the tensor is neither int32 nor int64."""
    if tensor.dtype not in _INDEX_DTYPES:
        raise ReferenceArgumentError(f"{name}.dtype", tensor.dtype, "int32 or int64")


def host_ints(name: str, tensor: Tensor, size: int | None = None) -> list[int]:
    """Return a one-dimensional index tensor as Python integers, whose arithmetic cannot overflow."""
    require_index(name, tensor)
    require_shape(name, tensor, size)
    return [int(value) for value in tensor.tolist()]


def host_offsets(name: str, tensor: Tensor, rows_name: str, rows: int) -> list[int]:
    """Return start offsets ``[R + 1]`` of packed sequences as Python integers.

    Raise if they do not start at 0, decrease, or exceed ``rows``.
    """
    offsets = host_ints(name, tensor)
    if not offsets or offsets[0] != 0:
        raise ReferenceArgumentError(name, offsets[:1], "offsets that start at 0, one more than there are requests")
    for before, after in pairwise(offsets):
        if after < before:
            raise ReferenceArgumentError(name, [before, after], "non-decreasing")
    if offsets[-1] > rows:
        raise ReferenceArgumentError(f"{name}[-1]", offsets[-1], f"at most {rows}, the rows of {rows_name}")
    return offsets


def require_scale(name: str, scale: object, *shapes: Sequence[int]) -> None:
    """Raise unless the scale is a positive number, a tensor of one element, or a tensor of one of the given shapes."""
    if isinstance(scale, Tensor):
        if not scale.dtype.is_floating_point:
            raise ReferenceArgumentError(f"{name}.dtype", scale.dtype, "floating point")
        if scale.numel() != 1 and tuple(scale.shape) not in [tuple(shape) for shape in shapes]:
            others = ", ".join(str(list(shape)) for shape in shapes)
            allowed = "one element" + (f", or {others}" if others else "")
            raise ReferenceArgumentError(f"{name}.shape", tuple(scale.shape), allowed)
    elif not (isinstance(scale, (int, float, np.integer, np.floating)) and math.isfinite(scale) and scale > 0):
        raise ReferenceArgumentError(name, scale, "a positive number")


def require_broadcast(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    """Raise if the tensor does not broadcast to ``shape``."""
    axes = zip(reversed(tensor.shape), reversed(shape), strict=False)
    if tensor.dim() > len(shape) or any(have not in (1, want) for have, want in axes):
        raise ReferenceArgumentError(f"{name}.shape", tuple(tensor.shape), f"broadcastable to {list(shape)}")
