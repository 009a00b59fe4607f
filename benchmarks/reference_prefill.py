"""How fast and how lean the float64 reference is on one causal prefill, beside the dense formulation.

    python benchmarks/reference_prefill.py [--tokens 4096] [--rounds 5]

Prints the time and the peak memory of ``attncheck.reference.paged_attention`` and of a dense float64 einsum + softmax
in the same process, the largest difference of their outputs, and the share of this machine's float64 matmul rate that
either reaches. Operations are counted for the visible keys only, so the dense form cannot exceed one half. Rounds are
interleaved, since the speed of a shared machine drifts, and medians are shown. Peaks are read from the kernel's VmHWM
of this process, which only Linux can reset.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor

from attncheck.reference import AttentionParams, paged_attention

HEADS, HEAD_SIZE, BLOCK_SIZE = 8, 64, 16


def make_problem(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return query ``[n, H, D]``, key and value cache ``[NB, BS, H, D]``, shuffled block table ``[1, NB]`` (int32)."""
    generator = torch.Generator().manual_seed(0)
    blocks = -(-tokens // BLOCK_SIZE)
    query = torch.randn(tokens, HEADS, HEAD_SIZE, generator=generator, dtype=torch.float64)
    cache = torch.randn(2, blocks, BLOCK_SIZE, HEADS, HEAD_SIZE, generator=generator, dtype=torch.float64)
    table = torch.randperm(blocks, generator=generator)[None].to(torch.int32)
    return query, cache[0], cache[1], table


def dense(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor) -> Tensor:
    """Compute causal attention in the textbook form, which holds every score of every head at once."""
    tokens = query.shape[0]
    key, value = (cache[table[0].long()].reshape(-1, HEADS, HEAD_SIZE)[:tokens] for cache in (key_cache, value_cache))
    scores = torch.einsum("qhd,khd->hqk", query, key) * HEAD_SIZE**-0.5
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)


def reference(query: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor) -> Tensor:
    """Compute the same with attncheck's reference, tile by tile."""
    params = AttentionParams(num_heads=HEADS, num_kv_heads=HEADS, head_size=HEAD_SIZE)
    lengths, starts = torch.tensor([query.shape[0]]), torch.tensor([0, query.shape[0]])
    return paged_attention(query, key_cache, value_cache, table, lengths, starts, params)[0]


def peak_memory_of(run: Callable[[], Tensor]) -> int:
    """Return the bytes of resident memory that ``run`` adds at its peak, its result included."""
    # Writing 5 resets VmHWM to the current resident size (Linux, proc(5)).
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status("VmRSS")
    result = run()
    added = _status("VmHWM") - before
    del result
    return added


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def seconds(run: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def matmul_rate(size: int = 2048) -> float:
    """Return float64 operations a second of one square matmul, the best of five."""
    a, b = torch.ones(2, size, size, dtype=torch.float64)
    return 2 * size**3 / min(seconds(lambda: a @ b) for _ in range(5))


def main() -> None:
    """Measure both forms and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    problem = make_problem(options.tokens)
    runs = {"reference": lambda: reference(*problem), "dense": lambda: dense(*problem)}
    reference(*make_problem(BLOCK_SIZE))  # so that torch's first-call buffers count for neither
    # The leaner one runs first. Memory that an earlier run returned to the allocator would not count for a later one.
    peaks = {name: peak_memory_of(run) for name, run in runs.items()}
    difference = (runs["reference"]() - runs["dense"]()).abs().max().item()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds):
        for name, run in runs.items():
            times[name].append(seconds(run))

    pairs = options.tokens * (options.tokens + 1) // 2
    operations = 4 * HEADS * HEAD_SIZE * pairs
    rate = matmul_rate()
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(
        f"one causal prefill of {options.tokens} tokens, {HEADS} heads, head size {HEAD_SIZE}, float64; "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads of {os.cpu_count()} cores"
    )
    print(
        tabulate(
            [
                (
                    name,
                    medians[name],
                    min(times[name]),
                    max(times[name]),
                    peaks[name] / 2**20,
                    operations / medians[name] / rate,
                )
                for name in runs
            ],
            headers=("", "median s", "min s", "max s", "peak MiB", "share of matmul rate"),
            floatfmt=("", ".3f", ".3f", ".3f", ".0f", ".1%"),
        )
    )
    print(
        f"reference: {medians['dense'] / medians['reference']:.1f} times as fast, "
        f"{peaks['reference'] / peaks['dense']:.1%} of the memory; largest difference {difference:.1e}; "
        f"float64 matmul {rate / 1e9:.0f} GFLOP/s"
    )


if __name__ == "__main__":
    main()
