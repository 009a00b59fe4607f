"""What a call did to what it was only lent: its inputs and the fields of its metadata.

Must not know: backends, how a call is made.
"""

from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from attncheck.harness.driver.forward_calls import ForwardCall
from attncheck.reference import CommonAttentionMetadata


def changed_inputs(pristine: ForwardCall, call: ForwardCall) -> Iterator[str]:
    """Names of inputs and metadata fields that no longer hold what was handed over; of inputs, real rows only."""
    real = {"query": pristine.num_rows, "key": pristine.num_key_rows, "value": pristine.num_key_rows}
    for name, count in real.items():
        was, now = getattr(pristine, name), getattr(call, name)
        if was is not None and not _same_numbers(was[:count], now[:count]):
            yield name
    for field in fields(CommonAttentionMetadata):
        if not _same(getattr(pristine.common, field.name), getattr(call.common, field.name)):
            yield f"metadata.{field.name}"


def _same_numbers(was: Tensor, now: Tensor) -> bool:
    """Whether two tensors are equal; NaN, which a step may bring, equals NaN."""
    return was.shape == now.shape and bool(((was == now) | (torch.isnan(was) & torch.isnan(now))).all())


def _same(was: object, now: object) -> bool:
    """Whether a field still holds what it held: of the same type, and tensors on the same device."""
    if type(was) is not type(now):
        return False
    if isinstance(was, Tensor) and isinstance(now, Tensor):
        alike = (was.device, was.dtype, was.shape) == (now.device, now.dtype, now.shape)
        return alike and torch.equal(was, now)
    if isinstance(was, np.ndarray) and isinstance(now, np.ndarray):
        return was.dtype == now.dtype and np.array_equal(was, now)
    return was == now
