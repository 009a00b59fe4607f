"""The memory of query, key, value and output: the same values in another order, with room between them.

A model's layer hands over slices of one fused tensor. A kernel that takes a stride for granted reads other rows there.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attncheck.reference.spec import StrideForm, StridesSpec

_ROOM = 16
"""Elements of room; kernels that load several elements at once stay aligned."""

_ODD = 7
"""The stride of a dimension of size 1, over which nothing ever steps."""


def operand_views(rows: Sequence[Tensor], strides: StridesSpec) -> tuple[Tensor, ...]:
    """Return query, key and value (``[T, H, D]`` each) with the same values in memory as ``strides`` has it.

    Fused operands of equal row counts are slices of one tensor. What lies between rows is NaN.
    """
    forms: list[StrideForm] = [strides.query, strides.key, strides.value]
    views = [x if form == "fused" else _copied(x, form) for x, form in zip(rows, forms, strict=True)]
    fused = [i for i, form in enumerate(forms) if form == "fused"]
    for count in {len(rows[i]) for i in fused}:
        group = [i for i in fused if len(rows[i]) == count]
        for i, view in zip(group, _fused([rows[i] for i in group]), strict=True):
            views[i] = view
    return tuple(views)


def empty_rows(
    shape: Sequence[int], form: StrideForm, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return an uninitialised tensor of ``shape`` (rows first) in memory of this form, and all of that memory, flat."""
    count, *sizes = shape
    width = 1
    for size in sizes:
        width *= size
    offset, room = (0, 0) if form == "contiguous" else (_ROOM, _ROOM)
    if form in ("padded", "fused"):
        memory = torch.empty(count * (width + _ROOM), dtype=dtype, device=device)
        return memory.view(count, width + _ROOM)[:, :width].unflatten(1, sizes), memory
    memory = torch.empty(offset + count * width + room, dtype=dtype, device=device)
    rows = memory[offset : offset + count * width]
    if form == "transposed" and sizes:
        heads, *inner = sizes
        return rows.view(heads, count, *inner).transpose(0, 1), memory
    rows = rows.view(count, *sizes)
    if form == "odd":
        steps = [_ODD if size == 1 else step for size, step in zip(rows.shape, rows.stride(), strict=True)]
        rows = rows.as_strided(rows.shape, steps)
    return rows, memory


def _copied(rows: Tensor, form: StrideForm) -> Tensor:
    copy, memory = empty_rows(rows.shape, form, rows.dtype, rows.device)
    memory.fill_(torch.nan)
    return copy.copy_(rows)


def _fused(group: Sequence[Tensor]) -> list[Tensor]:
    """Slices of one tensor, and room that nobody owns behind the last, so that rows of a group of one are strided."""
    widths = [rows.shape[1] * rows.shape[2] for rows in group]
    whole = torch.cat([*(rows.flatten(1) for rows in group), group[0].new_zeros(len(group[0]), _ROOM)], dim=1)
    parts = whole.split([*widths, _ROOM], dim=1)
    return [part.unflatten(1, rows.shape[1:]) for part, rows in zip(parts, group, strict=False)]
