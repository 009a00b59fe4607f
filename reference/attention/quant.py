"""Float8 quantisation and dequantisation: ``value = code * scale``."""

import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import (
    FLOAT8_DTYPES,
    is_float8,
    require_broadcast,
    require_float,
    require_float_dtype,
    require_positive_int,
    require_scale,
    require_shape,
)


@torch.no_grad()
def quantize_fp8(x: Tensor, scale: float | Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Return the codes ``round_fp8(clamp(float32(x) / float32(scale), -max, max))``: new, of the shape of ``x``.

    Rounding is to nearest, ties to even. Values saturate, infinities too; NaN stays NaN. ``scale`` is the
    dequantisation factor, a number or a tensor that broadcasts to ``x``. ``x`` is divided by it, as in vLLM:
    multiplying by the reciprocal could differ by one code. ``max`` is the largest finite number of ``dtype``: 448 for
    ``float8_e4m3fn``, 57344 for ``float8_e5m2``, 240 for ``float8_e4m3fnuz``.

    >>> quantize_fp8(torch.tensor([1.0, 3.3, 1e9, -1e9]), 2.0).float()
    tensor([   0.5000,    1.6250,  448.0000, -448.0000])
    """
    require_float("x", x)
    _check_scale(scale, x)
    _require_float8_dtype(dtype)
    return fp8_codes(x, scale, dtype)


@torch.no_grad()
def dequantize_fp8(codes: Tensor, scale: float | Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return ``code * scale`` in ``dtype``: new, of the shape of ``codes``.

    ``scale`` is a number (used exactly, not through float32) or a tensor that broadcasts to ``codes``.

    >>> dequantize_fp8(torch.tensor([0.5, 1.625]).to(torch.float8_e4m3fn), 2.0)
    tensor([1.0000, 3.2500], dtype=torch.float64)
    """
    if not is_float8(codes):
        raise ReferenceArgumentError("codes.dtype", codes.dtype, "a float8 dtype")
    _check_scale(scale, codes)
    require_float_dtype("dtype", dtype)
    return fp8_values(codes, scale, dtype)


@torch.no_grad()
def quantize_fp8_group(x: Tensor, group: int, *, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Return ``(codes [T, N], scales [T, N // group])``, with one scale per ``group`` consecutive numbers of a row.

    Per group, in float32: ``scale = amax / max`` and ``codes = quantize_fp8(x, scale)``. The scale is 1 if
    ``amax / max`` is 0, because the group is all zeros or underflows. The largest number of a group gets the largest
    code. Groups are independent. If a group holds a NaN or an infinity, that becomes its scale.

    x: ``[T, N]``, any float dtype but float8; ``group`` divides ``N``. dtype: a float8 dtype.

    >>> codes, scales = quantize_fp8_group(torch.tensor([[448.0, -224.0, 0.0, 0.0], [1.0, 2.0, 896.0, 3.0]]), 2)
    >>> codes.float().tolist()
    [[448.0, -224.0, 0.0, 0.0], [224.0, 448.0, 448.0, 1.5]]
    >>> [round(scale, 6) for scale in scales.flatten().tolist()]
    [1.0, 1.0, 0.004464, 2.0]
    """
    require_float("x", x)
    require_shape("x", x, None, None, legend="rows, numbers")
    require_positive_int("group", group)
    if x.shape[1] % group:
        raise ReferenceArgumentError("group", group, f"a divisor of {x.shape[1]}, the width of x")
    _require_float8_dtype(dtype)
    groups = x.float().reshape(len(x), x.shape[1] // group, group)
    scales = groups.abs().amax(-1) / torch.finfo(dtype).max
    scales.masked_fill_(scales == 0, 1.0)
    return fp8_codes(groups, scales.unsqueeze(-1), dtype).reshape(x.shape), scales


def fp8_codes(x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Return :func:`quantize_fp8` of checked arguments."""
    divisor = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    limit = torch.finfo(dtype).max
    return x.float().div(divisor).clamp_(-limit, limit).to(dtype)


def fp8_values(codes: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Return :func:`dequantize_fp8` of checked arguments."""
    return codes.to(dtype).mul_(scale.to(codes.device, dtype) if isinstance(scale, Tensor) else scale)


def _require_float8_dtype(dtype: torch.dtype) -> None:
    if dtype not in FLOAT8_DTYPES:
        raise ReferenceArgumentError("dtype", dtype, "a float8 dtype")


def _check_scale(scale: float | Tensor, x: Tensor) -> None:
    if not isinstance(scale, Tensor):
        require_scale("scale", scale)
    else:
        require_float("scale", scale)
        require_broadcast("scale", scale, x.shape)
        if not (scale > 0).all():
            raise ReferenceArgumentError("scale", scale.min().item(), "positive everywhere")
