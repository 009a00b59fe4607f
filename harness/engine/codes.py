"""Finds by which rule a layer rounds keys and values to the FP8 codes of its cache."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from attncheck.harness.engine.events import WritePages
from attncheck.harness.problem.storage import nearest_code, numbers_of, truncated_code

# A layer is judged by the codes that its own writer stores: whether they are the nearest ones is examined by the cases
# of `attncheck run`. The writer of vLLM's CPU backend cuts mantissas off.

Fp8Codes = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Returns a key and value as the FP8 codes of a cache represent them, float32."""

Rule = Callable[[Tensor, torch.dtype], Tensor]
"""Returns the codes of numbers."""

_PROBES = 64
"""Values whose codes are compared."""


def fp8_codes(
    write: WritePages, kv_cache: Tensor, like: tuple[Tensor, Tensor], dtype: torch.dtype, scales: tuple[float, float]
) -> Fp8Codes | None:
    """Return what the codes of a layer make of its rows, or None if its writer follows no rule that is known.

    Scales must be powers of two: others are divided by, or multiplied by their inverse, and a code may differ.
    ``like``: a key and a value, ``[1, ...]``. Writes to pages that are made here, of the layout of ``kv_cache``.
    """
    if any(math.frexp(scale)[0] != 0.5 for scale in scales):
        return None
    numbers = torch.randn(_PROBES, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.linspace(-9, 5, _PROBES)
    numbers = numbers.to(like[0].dtype).to(kv_cache.device)
    # Each page gets one key and value, all of whose elements are equal. So no layout has to be known.
    rows = [(numbers * scale).to(each.dtype) for each, scale in zip(like, scales, strict=True)]
    key, value = (
        row.view(-1, *[1] * (each.dim() - 1)).repeat(1, *each.shape[1:]) for row, each in zip(rows, like, strict=True)
    )
    page_size = kv_cache[0].numel() * kv_cache.element_size() // sum(each[0].numel() for each in like)
    slots = torch.arange(_PROBES, device=kv_cache.device) * page_size
    stored = []
    for fill in (0, 255):
        pages = torch.empty_like(kv_cache[:1]).repeat_interleave(_PROBES, dim=0)
        pages.view(torch.uint8).fill_(fill)
        write(key, value, pages, slots)
        stored.append(pages.view(torch.uint8).flatten(1))
    is_written = stored[0] == stored[1]
    for rule in (nearest_code, truncated_code):
        is_right = stored[0] == rule(numbers.double(), dtype)[:, None]
        if bool((is_right | ~is_written).all()) and bool(is_written.any(dim=1).all()):
            return partial(_values, rule, dtype, scales)
    return None


def _values(rule: Rule, dtype: torch.dtype, scales: tuple[float, float], *rows: Tensor) -> tuple[Tensor, Tensor]:
    codes = [rule(each.double() / scale, dtype) for each, scale in zip(rows, scales, strict=True)]
    key, value = (numbers_of(each, dtype) * scale for each, scale in zip(codes, scales, strict=True))
    return key.float(), value.float()
