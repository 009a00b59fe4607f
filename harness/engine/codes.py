"""Finds by which rule a layer rounds keys and values to the FP8 codes of its cache."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attncheck.harness.engine.events import WritePages
from attncheck.harness.problem.storage import nearest_code, numbers_of, truncated_code

# A layer is judged by the codes that its own writer stores: whether they are the nearest ones is examined by the cases
# of `attncheck run`. The writer of vLLM's CPU backend cuts mantissas off.

_RULES: tuple[Callable[[Tensor, torch.dtype], Tensor], ...] = (nearest_code, truncated_code)

_PROBES = 64
"""Values whose codes are compared."""


class Fp8Codes:
    """Keys and values as the FP8 codes of a cache represent them; ``scales``: of keys and of values."""

    def __init__(
        self, rule: Callable[[Tensor, torch.dtype], Tensor], dtype: torch.dtype, scales: tuple[float, float]
    ) -> None:
        self._rule, self._dtype, self._scales = rule, dtype, scales

    def __call__(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the float32 values of the codes."""
        key_scale, value_scale = self._scales
        return self._through(key, key_scale), self._through(value, value_scale)

    def _through(self, x: Tensor, scale: float) -> Tensor:
        codes = self._rule(x.double() / scale, self._dtype)
        return (numbers_of(codes, self._dtype) * scale).float()


def fp8_codes(
    write: WritePages, kv_cache: Tensor, like: tuple[Tensor, Tensor], dtype: torch.dtype, scales: tuple[float, float]
) -> Fp8Codes | None:
    """Return the codes of a layer, or None if its writer follows no rule that is known.

    Scales must be powers of two: others are divided by, or multiplied by their inverse, and a code may differ.
    ``like``: a key and a value, ``[1, ...]``. Writes to pages that are made here, of the layout of ``kv_cache``.
    """
    if any(math.frexp(scale)[0] != 0.5 for scale in scales):
        return None
    numbers = torch.randn(_PROBES, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.linspace(-9, 5, _PROBES)
    numbers = numbers.to(like[0].dtype).to(kv_cache.device)
    # Each page gets one key and value, all of whose elements are equal. So no layout has to be known.
    stored = []
    for fill in (0, 255):
        pages = torch.empty_like(kv_cache[:1]).repeat_interleave(_PROBES, dim=0)
        pages.view(torch.uint8).fill_(fill)
        slots = torch.arange(_PROBES, device=kv_cache.device) * _page_size(kv_cache, like)
        key, value = (
            (numbers * scale).to(each.dtype).view(-1, *[1] * (each.dim() - 1)).expand(-1, *each.shape[1:]).contiguous()
            for each, scale in zip(like, scales, strict=True)
        )
        write(key, value, pages, slots)
        stored.append(pages.view(torch.uint8).flatten(1))
    is_written = stored[0] == stored[1]
    for rule in _RULES:
        expected = rule(numbers.double(), dtype)[:, None]
        if bool(((stored[0] == expected) | ~is_written).all()) and bool(is_written.any(dim=1).all()):
            return Fp8Codes(rule, dtype, scales)
    return None


def _page_size(kv_cache: Tensor, like: tuple[Tensor, Tensor]) -> int:
    """Return the tokens of a page, from its bytes and those of a key and value."""
    return kv_cache[0].numel() * kv_cache.element_size() // sum(each[0].numel() for each in like)
