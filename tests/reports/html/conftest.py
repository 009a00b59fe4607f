"""Runs written by hand, with the times of an imagined device."""

import math
import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from attncheck.reports.run_file.header import Environment

ENVIRONMENT = Environment(
    attncheck="0.1.0",
    python="3.12.3",
    torch="2.13.0",
    numpy="2.3.5",
    platform="Linux x86_64",
    cpu="a cpu",
    cores=16,
    device="cuda",
    device_name="a gpu",
    capability="9.0",
    driver="580.1",
)
CEILINGS = {"copy_bytes_per_s": 4e12, "matmul_flops_per_s": 6e14, "dtype": "bfloat16"}
NEEDS = ("attn_type=decoder", "dtype=bfloat16", "head_size=128", "block_size=16", "layout=NHD", "kv_cache_dtype=auto")

DEVICE = {"sm_clock_mhz": 1980, "max_sm_clock_mhz": 1980, "temperature_c": 45}
FAILURE = {"summary": "3 of 8 rows are wrong, the first is row 2", "meaning": "the window is one key too long"}


def latency(part: str, samples_ns: Sequence[int], **work: int) -> dict[str, Any]:
    ordered = sorted(samples_ns)
    return {
        "part": part,
        "clock": "host" if part == "build" else "events",
        "median_ns": ordered[len(ordered) // 2],
        "low_ns": ordered[len(ordered) // 4],
        "high_ns": ordered[-len(ordered) // 4],
        "samples_ns": samples_ns,
        "is_settled": True,
        **work,
    }


@pytest.fixture(scope="session")
def record_of(make):
    """``record_of("failed", case_id="a", ...)``: a record with defaults for all other fields."""

    def record(outcome="passed", **fields):
        defaults = {"suite": "decode", "backend_ref": fields.get("backend", "reference"), "needs": NEEDS}
        defaults |= {"environment": ENVIRONMENT.digest} | ({"figures": {}} if outcome == "passed" else {})
        return make(outcome, **(defaults | fields))

    return record


@pytest.fixture(scope="session")
def run_with(run_of):
    return partial(run_of, environment=ENVIRONMENT, device="cuda")


@pytest.fixture(scope="session")
def timed(record_of):
    """``timed(["one", "two"], (512, 1024), rounds=5, slower=1.3)``: records of times and outputs.

    Decodes of 8 requests of each length, and prefills of a quarter of it; each backend takes longer than the last.

    A time is what the device takes at least, times a factor of the backend, and what it takes to start; processes
    differ by 2 %. ``slower``: a factor for the first backend.
    """

    def records(backends, lengths, *, rounds=1, slower=1.0, seed=0):
        luck = random.Random(seed)
        found = []
        for index, backend in enumerate(backends):
            factor = (1.3 + 0.35 * index) * (slower if index == 0 else 1.0)
            for length in lengths:
                for name, queries, keys in (("decode", 1, length), ("prefill", length // 4, length // 4)):
                    moved, flops = 8 * keys * 8 * 128 * 2 * 2, 8 * queries * keys * 32 * 128 * 4
                    least = max(moved / CEILINGS["copy_bytes_per_s"], flops / CEILINGS["matmul_flops_per_s"]) * 1e9
                    common = {"case_id": f"{name}.{length}", "backend": backend, "suite": "lengths"}
                    share = math.exp(luck.gauss(-1.2, 0.5)) if index < 11 else 1.8
                    for round_ in range(rounds):
                        process = luck.gauss(1, 0.02)
                        times = [int((4000 + least * factor) * process * luck.uniform(0.99, 1.05)) for _ in range(40)]
                        builds = [int((15000 + 900 * index) * process * luck.uniform(0.95, 1.2)) for _ in range(40)]
                        latencies = [latency("forward", times, moved_bytes=moved, flops=flops)]
                        latencies.append(latency("build", builds))
                        timing = {"latencies": latencies, "cache": "cold", "ceilings": CEILINGS, "device": DEVICE}
                        found.append(record_of(check="timing", timing=timing, round=round_, duration_s=0.2, **common))
                    figures = {"rows": 8, "budget_share": share}
                    if share > 1:
                        found.append(record_of("failed", figures=figures, **FAILURE, **common))
                    else:
                        found.append(record_of(figures=figures, duration_s=0.01, **common))
                    found.append(
                        record_of("unsupported", check="lse", reasons=("feature 'lse' is not declared",), **common)
                    )
        return found

    return records
