"""Runs written by hand, with the times of an imagined device."""

import random
from functools import partial

import pytest

CEILINGS = {"copy_bytes_per_s": 4e12, "matmul_flops_per_s": 6e14, "dtype": "bfloat16"}
NEEDS = ("attn_type=decoder", "dtype=bfloat16", "head_size=128", "block_size=16", "layout=NHD", "kv_cache_dtype=auto")

DEVICE = {"sm_clock_mhz": 1980, "max_sm_clock_mhz": 1980, "temperature_c": 45}


@pytest.fixture(scope="session")
def gpu(make_header):
    machine = {"device": "cuda", "device_name": "a gpu", "capability": "9.0", "driver": "580.1"}
    return make_header().environment.model_copy(update=machine)


@pytest.fixture(scope="session")
def record_of(make, gpu):
    """``record_of("failed", case_id="a", ...)``: a record with defaults for all other fields."""

    def record(outcome="passed", **fields):
        defaults = {"suite": "decode", "backend_ref": fields.get("backend", "reference"), "needs": NEEDS}
        defaults |= {"environment": gpu.digest} | ({"figures": {}} if outcome == "passed" else {})
        return make(outcome, **(defaults | fields))

    return record


@pytest.fixture(scope="session")
def run_with(run_of, gpu):
    return partial(run_of, environment=gpu, device="cuda")


@pytest.fixture(scope="session")
def timed(timed, record_of, gpu):
    """``timed(["one", "two"], (512, 1024), rounds=5, slower=1.3)``: records of times and outputs.

    Decodes of 8 requests of each length, and prefills of a quarter of it; each backend takes longer than the last.

    A time is what the device takes at least, times a factor of the backend, and what it takes to start; processes
    differ by 2 %. ``slower``: a factor for the first backend.
    """
    one_time = timed

    def records(backends, lengths, *, rounds=1, slower=1.0, seed=0):
        luck = random.Random(seed)
        found = []
        measured = {"cache": "cold", "ceilings": CEILINGS, "device": DEVICE}
        for index, backend in enumerate(backends):
            factor = (1.3 + 0.35 * index) * (slower if index == 0 else 1.0)
            kinds = [("decode", 1, length) for length in lengths]
            kinds += [("prefill", length // 4, length // 4) for length in lengths]
            for (kind, queries, keys), length in zip(kinds, [*lengths, *lengths], strict=True):
                work = {"moved_bytes": 8 * keys * 8 * 128 * 2 * 2, "flops": 8 * queries * keys * 32 * 128 * 4}
                moving = work["moved_bytes"] / CEILINGS["copy_bytes_per_s"]
                least = max(moving, work["flops"] / CEILINGS["matmul_flops_per_s"]) * 1e9
                who = {"case_id": f"{kind}.{length}", "backend": backend, "backend_ref": backend, "suite": "lengths"}
                common = who | {"environment": gpu.digest, "needs": NEEDS}
                for round_ in range(rounds):
                    process = luck.gauss(1, 0.02)
                    medians = {"forward": (4000 + least * factor) * process, "build": (15000 + 900 * index) * process}
                    found.append(one_time(medians, work=work, timing=measured, round=round_, **common))
                figures = {"rows": 8, "budget_share": luck.uniform(0.1, 0.9)}
                found.append(record_of(figures=figures, **who))
                found.append(record_of("unsupported", check="lse", reasons=("feature 'lse' is not declared",), **who))
        return found

    return records
