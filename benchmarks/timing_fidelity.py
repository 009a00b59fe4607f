"""Whether times are true: a backend that spins a known time, and kernels that a profiler times as well.

    python benchmarks/timing_fidelity.py [--rounds 3]
    python benchmarks/timing_fidelity.py --device cuda [--backend triton_unified]

Without a GPU, the check ``timing`` runs on a backend whose ``forward`` computes the right answer and then spins until a
known time has passed since its entry. Exits with 1 if a median in the record differs from that time by more than 2 %.
On a GPU, 20 steps of a backend are timed by CUDA events and by torch's profiler, which measures each kernel. Both use
the same contents and no cache flush, as the profiler's calls have none. Exits with 1 if the two differ by more than
3 %.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from attncheck import examine
from attncheck.backends.kernel import kernel_backend
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.model import Case
from attncheck.harness.checks.timing.check import LatestAnswer, TimedStep, measure_overhead
from attncheck.harness.checks.timing.clock import clock_for, kernels_of
from attncheck.harness.checks.timing.contents import FreshContents
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.run.backend_loading import load_backend
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, RequestSpec
from attncheck.reports.run_file.records import Passed
from attncheck.reports.run_file.timings import Timing

SPUN_US = (100, 300, 1_000, 3_000, 10_000)
SPIN_ERROR, PROFILER_ERROR = 0.02, 0.03

SPIN_SUITE = """
suite: spin
description: one decode, small enough to be answered in less than it takes
defaults:
  layer: {num_heads: 1, num_kv_heads: 1, head_size: 64, dtype: float32}
cases:
  - {id: decode, batch: q1s24, checks: [timing]}
"""

STEPS = [
    *((1, context, count) for context in (1024, 2048, 4096, 8192) for count in (16, 64)),
    *((rows, rows, 1) for rows in (2048, 4096, 8192)),
    *((rows, rows, 4) for rows in (1024, 2048, 4096)),
    *((256, context, 8) for context in (1024, 2048, 4096)),
    *((4, context, 32) for context in (1024, 2048, 4096)),
]
"""(query_len, seq_len, requests): 20 steps."""

LAYER = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16")
TINY = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32")
REPEATS = 30


def attend(query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: Any, _: object, out: Tensor) -> None:
    """Attend one query row to the keys of one request, in as few operators as possible, for the sizes of the suite."""
    pages, end = metadata.block_table_tensor[0], metadata.max_seq_len
    scores = (key_cache[pages].flatten(0, 1)[:end, 0] @ query[0, 0]).mul_(0.125)
    torch.mv(value_cache[pages].flatten(0, 1)[:end, 0].T, scores.softmax(0), out=out[0, 0])


def spinning(target_us: int) -> type:
    """Return a backend whose ``forward`` takes ``target_us`` microseconds by ``perf_counter_ns``."""
    kernel = kernel_backend(attend, name=f"spins_{target_us}us", supported_devices=("cpu",))
    entered: Any = kernel.get_impl_cls()
    now, target_ns = time.perf_counter_ns, target_us * 1000

    class Impl(entered):  # type: ignore[misc]  # a class known at run time only
        def forward(
            self, layer: Any, query: Tensor, key: Any, value: Any, kv_cache: Tensor, metadata: Any, output: Tensor
        ) -> Tensor:
            began = now()
            if metadata is None:  # vLLM's profiling run has no batch
                return output.zero_()
            attend(query, *self._cache_views(kv_cache), metadata.common, None, output)
            while now() - began < target_ns:
                pass
            return output

    class Spinning(kernel):  # type: ignore[misc, valid-type]
        @staticmethod
        def get_impl_cls() -> type:
            return Impl

    return Spinning


def spin(rounds: int) -> list[list[object]]:
    """Return rows of target and median in microseconds, number of samples, relative error."""
    rows: list[list[object]] = []
    torch.set_num_threads(1)  # the spin uses one thread
    with tempfile.TemporaryDirectory() as folder:
        suite = Path(folder) / "spin.yaml"
        suite.write_text(SPIN_SUITE, encoding="utf-8")
        for target_us in SPUN_US:
            for _ in range(rounds):
                timing = timing_of(spinning(target_us), str(suite))
                latency = timing.latency("forward")
                assert latency is not None
                median_us = latency.median_ns / 1000
                rows.append([target_us, median_us, len(latency.samples_ns), median_us / target_us - 1])
    return rows


def timing_of(backend: type, suite: str) -> Timing:
    """Return the timing of the only case of ``suite``; exit if the check did not pass."""
    (record,) = examine(backend, suite, checks="timing", device="cpu").records
    if not isinstance(record, Passed) or record.timing is None:
        sys.exit(f"the check ended otherwise: {record}")
    return record.timing


def against_the_profiler(backend: LoadedBackend, device: torch.device) -> list[list[object]]:
    """Return a row for each step: name, kernels a call, profiler and clock time in microseconds, relative error."""
    rows: list[list[object]] = []
    overhead = measure_overhead(device)
    empty_ns = 0 if overhead is None else overhead.empty_ns
    for query_len, seq_len, count in STEPS if device.type == "cuda" else [(1, 40, 2)]:
        request = RequestSpec(query_len=query_len, seq_len=seq_len, count=count)
        case = Case(
            suite="fidelity",
            id=f"{count}q{query_len}s{seq_len}",
            layer=LAYER if device.type == "cuda" else TINY,
            cache=CacheSpec(),
            batch=BatchSpec(requests=(request,)),
        )
        problem = build_problem(case, 0)
        session, clock = Session(backend.backend, problem, device), clock_for(device)
        step = TimedStep("forward", session, FreshContents(problem, None, device), clock, lambda: None, LatestAnswer())
        call = step.unjudged_call()
        clocked = [clock.time(call) for _ in range(2 * REPEATS)][REPEATS:]
        kernels = kernels_of(lambda call=call: [call() for _ in range(REPEATS)], device)  # type: ignore[misc]
        profiled_us = sum(kernel.duration_ns for kernel in kernels) / REPEATS / 1000
        clocked_us = (statistics.median(clocked) - empty_ns) / 1000
        launches = sum(kernel.count for kernel in kernels) / REPEATS
        rows.append([case.id, launches, profiled_us, clocked_us, clocked_us / profiled_us - 1])
    return rows


def main() -> None:
    """Print a table, and exit with 1 if an error is too large."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="triton_unified", help="whose kernels are timed on a GPU")
    parser.add_argument("--rounds", type=int, default=3, help="of every spin")
    parser.add_argument("--profiler", action="store_true", help="on a CPU as well, where its figures mean nothing")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda" or given.profiler:
        backend = load_backend(given.backend)
        if not isinstance(backend, LoadedBackend):
            sys.exit(f"{given.backend}: {'; '.join(backend.reasons)}")
        rows, allowed = against_the_profiler(backend, device), PROFILER_ERROR
        headers = ["step", "launches", "profiler, us", "clock, us", "error"]
    else:
        rows, allowed = spin(given.rounds), SPIN_ERROR
        headers = ["spins, us", "median, us", "samples", "error"]
    print(tabulate(rows, headers, floatfmt=[".6g"] * (len(headers) - 1) + [".2%"]))
    worst = max(abs(float(str(row[-1]))) for row in rows)
    print(f"\nlargest error {worst:.2%} of {len(rows)}; allowed {allowed:.0%}")
    if worst > allowed and not (given.profiler and device.type == "cpu"):
        sys.exit(1)


if __name__ == "__main__":
    main()
