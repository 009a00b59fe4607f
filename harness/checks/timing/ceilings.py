"""What a device can do at most: how fast it copies, and how fast it multiplies. Must not know: cases, backends.

Measured in the process that times the backend, on random numbers (zeros can be faster), and the best of a few: on a
shared machine that is nearest to what it can do. Big on a GPU, and small enough on a CPU to take under 0.3 s.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attncheck.backends.dtypes import DTYPES
from attncheck.harness.checks.timing.clock import Clock, host_ns
from attncheck.reports.run_file.timings import Ceilings


@dataclass(frozen=True)
class Sizes:
    """copied: bytes that are copied. side: rows of the square matrices, at most. limit_ns: for each of the two."""

    copied: int
    side: int
    repeats: int
    limit_ns: int


GPU = Sizes(copied=2**30, side=8192, repeats=10, limit_ns=500_000_000)
CPU = Sizes(copied=2**25, side=1024, repeats=5, limit_ns=80_000_000)

FIRST_SIDE = 128


def measure_ceilings(device: torch.device | str, dtype: str, clock: Clock) -> Ceilings:
    """The ceilings of ``device``; ``dtype`` is a layer's, ``clock`` one that is used for nothing else.

    Copied bytes count twice: they are read and written.
    """
    device, element = torch.device(device), DTYPES[dtype]
    sizes, free = (GPU, torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else (CPU, CPU.copied * 64)
    generator = torch.Generator(device).manual_seed(0)
    copied = min(sizes.copied, free // 8) // element.itemsize
    source = torch.randn(copied, generator=generator, device=device, dtype=element)
    target = torch.empty_like(source)
    copy_ns = _best(lambda: target.copy_(source), clock, sizes)
    copy_bytes, source, target = 2 * source.nbytes, torch.empty(0), torch.empty(0)  # the memory is free first

    side, rate = FIRST_SIDE, 0.0
    end = host_ns() + sizes.limit_ns
    while True:
        a, b = (torch.randn(side, side, generator=generator, device=device, dtype=element) for _ in range(2))
        best_ns = _best(lambda a=a, b=b: a @ b, clock, sizes)  # type: ignore[misc]
        rate = max(rate, 2 * side**3 / best_ns * 1e9)
        # The next is eight times as much work.
        if side == sizes.side or 12 * (side * side * element.itemsize) > free or host_ns() + 16 * best_ns > end:
            break
        side *= 2
    return Ceilings(copy_bytes_per_s=copy_bytes / copy_ns * 1e9, matmul_flops_per_s=rate, dtype=dtype)


def _best(call: Callable[[], object], clock: Clock, sizes: Sizes) -> int:
    """The shortest of some repeats after the first, within the limit."""
    end = host_ns() + sizes.limit_ns
    times = [clock.time(call)]
    for _ in range(sizes.repeats):
        if host_ns() + times[-1] > end:
            break
        times.append(clock.time(call))
    return max(1, min(times[1:] or times))
