"""What correct and faulty writers store in an FP8 cache for numbers that no code represents exactly.

The rows lie between codes, at and near ties, beyond the range and below the smallest code; NaN and, in formats without
infinities, those are included. A correct kernel divides by the scale or multiplies by its reciprocal, in float32 or
wider. The results may differ by one code if the scale is not a power of two; each such code is accepted, no others.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from attncheck.harness.problem.float8 import magnitudes, nearest_code, numbers_of, truncated_code
from attncheck.harness.problem.storage import Storage

_AT = (0, 1, 2, 7, 8, 9, 24, 37, 51, 60, 77, 90, 101, 110)
"""Indices of codes; the rows lie between each and the next. Smallest, subnormal, even, odd, small and large ones."""

_ASIDE = 2.0**-7
"""Relative distance of a near tie from the tie. Larger than the rounding of any activation dtype."""

Rows = tuple[Tensor, Tensor]
"""Keys and values."""


def extreme_rows(rows: Tensor, storage: Storage) -> Tensor:
    """Return rows of the shape of ``rows`` that expose how a writer rounds.

    Elements for which the cache cannot hold one of the honest codes are 0.
    """
    quotients = torch.tensor(list(_quotients(storage.held)), dtype=torch.float64)
    chosen = quotients.repeat(-(-rows.numel() // len(quotients)))[: rows.numel()].reshape(rows.shape)
    made = (chosen * storage.scale.double()).to(storage.dtype)
    is_held = torch.stack([storage.holds(codes) for codes in honest_codes(made, storage)]).all(0)
    if storage.held != torch.float8_e4m3fn:
        is_held &= ~torch.isinf(made)  # a number beyond the activation dtype's range became infinite
    return made.masked_fill(~is_held, 0.0)


def _quotients(held: torch.dtype) -> Iterator[float]:
    """Yield numbers in the scale of the codes, with alternating signs."""
    numbers = magnitudes(held).tolist()
    sign = 1.0
    for low, high in ((numbers[i], numbers[i + 1]) for i in _AT):
        tie, most = (low + high) / 2, low + 0.8 * (high - low)
        for number in (tie, tie * (1 + _ASIDE), tie * (1 - _ASIDE), most):
            yield sign * number
            sign = -sign
    limit = numbers[-1]
    for factor in (1.0, 1.01, 1.04, 1.3, 16.0, 1000.0):
        yield sign * limit * factor
        yield -sign * limit * factor
        sign = -sign
    yield from (numbers[1] / 64, -numbers[1] / 64)
    yield torch.nan
    if held == torch.float8_e4m3fn:
        yield from (torch.inf, -torch.inf)


def honest_codes(rows: Tensor, storage: Storage) -> tuple[Tensor, ...]:
    """Return the codes (uint8) that correct arithmetic may produce for ``rows``; first the reference's."""
    scale = storage.scale.to(rows.device)
    quotients = (rows.float() / scale, rows.float() * (1 / scale), rows.double() / scale.double())
    return tuple(nearest_code(quotient.double(), storage.held) for quotient in quotients)


def honest_rows(rows: Rows, storages: tuple[Storage, Storage]) -> list[Rows]:
    """Return, for each of the honest codes, rows that the codec stores as those codes."""
    keys, values = ([s.rows_of(codes) for codes in honest_codes(x, s)] for x, s in zip(rows, storages, strict=True))
    return list(zip(keys, values, strict=True))


def faulty_rows(rows: Rows, storages: tuple[Storage, Storage]) -> Iterator[tuple[str, Rows]]:
    """Yield (fault of a writer, rows that the codec stores as the faulty writer would store ``rows``)."""
    key, value = storages
    both = list(zip(rows, storages, strict=True))

    def scaled(factors: tuple[Tensor, Tensor]) -> Rows:
        numbers = (x.double() * factor.to(x.device) for x, factor in zip(rows, factors, strict=True))
        made = [s.rows_of(nearest_code(x, s.held)) for x, s in zip(numbers, storages, strict=True)]
        return made[0], made[1]

    scales = key.scale.double(), value.scale.double()
    yield "the scale multiplies what is stored, instead of dividing it", scaled(scales)
    yield "the scale is left out", scaled((torch.ones(1, 1), torch.ones(1, 1)))
    yield "k_scale and v_scale are exchanged", scaled((1 / scales[1], 1 / scales[0]))
    yield "the scale of KV head 0 is used for all heads", scaled((1 / scales[0][:1], 1 / scales[1][:1]))
    cut = [s.rows_of(truncated_code(x.double() / s.scale.to(x.device).double(), s.held)) for x, s in both]
    yield "codes are truncated, not rounded to the nearest", (cut[0], cut[1])


def is_unsaturated(expected: Tensor, got: Tensor, held: torch.dtype) -> bool:
    """Return whether every differing code (uint8) should be the largest number and is NaN or infinite."""
    differs, limit = expected != got, len(magnitudes(held)) - 1
    is_limit, is_finite = (expected[differs] & 0x7F) == limit, torch.isfinite(numbers_of(got[differs], held))
    return bool(is_limit.all()) and not bool(is_finite.any())
