"""Show that CPU_ATTN cuts the mantissa off where it writes an FP8 cache, and stores NaN as a number.

    python show.py

Exits 0 while the defect is there, 1 when it is gone, and 77 on a CPU without AVX-512. Needs vLLM's CPU build.
"""

import sys

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

PAGE, HEAD, ISA = 32, 64, "vec"
FORMATS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def stored(numbers: torch.Tensor, name: str) -> torch.Tensor:
    """Return the values that the writer puts into a cache of format ``name`` for ``numbers`` (float32), scale 1."""
    row = torch.zeros(1, 1, HEAD)
    row[0, 0, : len(numbers)] = numbers
    key_cache, value_cache = torch.zeros(1, 1, 2 * PAGE, HEAD, dtype=torch.uint8).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        row, row, key_cache, value_cache, torch.zeros(1, dtype=torch.int64), ISA, kv_cache_dtype=name
    )
    return value_cache[0, 0, 0, : len(numbers)].view(FORMATS[name]).float()


def main() -> int:
    """Compare what is stored with the nearest code, for every number of a grid and for NaN."""
    if not torch.cpu._is_avx512_supported():
        print("the kernels that vLLM loads on a CPU without AVX-512 lack this code")
        return 77
    current_platform.import_kernels()
    shown = False
    for name, dtype in FORMATS.items():
        numbers = torch.linspace(1.0, 4.0, 61)
        wrote, nearest = stored(numbers, name), numbers.to(dtype).float()
        wrong, below = int((wrote != nearest).sum()), int(((wrote != nearest) & (wrote < numbers)).sum())
        print(f"{name}: {wrong} of {len(numbers)} numbers are not stored as the nearest code, {below} of them below it")
        print(
            f"  1.24 is stored as {stored(torch.tensor([1.24]), name).item()}, "
            f"the nearest code is {torch.tensor(1.24).to(dtype).item()}"
        )
        not_a_number = stored(torch.tensor([float("nan")]), name).item()
        print(f"  NaN is stored as {not_a_number}")
        shown = shown or wrong > 0
    return 0 if shown else 1


if __name__ == "__main__":
    sys.exit(main())
