"""Lay out query, key, value and output in memory: the same values with other strides and gaps.

A model's layer passes slices of one fused tensor, so a kernel that assumes a stride reads the wrong rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attncheck.reference.spec import StrideForm, StridesSpec

_ROOM = 16
"""Elements of each gap. Kernels that load several elements at once stay aligned."""

_ODD = 7
"""Stride of a dimension of size 1, which no correct kernel uses."""


def operand_views(rows: Sequence[Tensor], strides: StridesSpec) -> tuple[Tensor, ...]:
    """Return query, key and value (``[T, H, D]`` each) with the same values, in the memory layout of ``strides``.

    Fused operands with equal row counts are slices of one tensor. Gaps hold NaN, except those of fused operands, which
    hold the other operands or zeros.
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
    """Return an uninitialised tensor of ``shape`` (rows first) in the layout ``form``, and all its memory, flat."""
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
    """Return slices of one tensor, with a gap of zeros after the last, so that a single operand is strided, too."""
    widths = [rows.shape[1] * rows.shape[2] for rows in group]
    whole = torch.cat([*(rows.flatten(1) for rows in group), group[0].new_zeros(len(group[0]), _ROOM)], dim=1)
    parts = whole.split([*widths, _ROOM], dim=1)
    return [part.unflatten(1, rows.shape[1:]) for part, rows in zip(parts, group, strict=False)]
