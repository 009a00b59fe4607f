"""Differences between the environments of two runs, and warnings about changes all their times share."""

from typing import Any

import pytest

from attncheck.reports.comparison.changes import another_device
from attncheck.reports.comparison.compare import compare_runs
from attncheck.reports.run_file.header import BackendInfo, Environment
from attncheck.reports.run_file.store import Run


def test_every_field_that_differs_is_listed(run_of, rounds_of, around):
    before = BackendInfo(
        name="reference", ref="reference", version="0.1.0", features=("sinks", "lse"), conventions={"lse_base": "e"}
    )
    changed = {"version": "2", "features": ("lse",), "conventions": {"lse_base": "2"}}
    after = before.model_copy(update=changed | {"required_environment": {"A": "1"}})
    base = run_of(rounds_of(around(1e6, rounds=6)), backends=(before,))
    environment = base.header.environment.model_copy(update={"torch": "2.14.0", "git_commit": "abc", "tf32": True})
    new = run_of(rounds_of(around(1e6, rounds=7)), backends=(after,), environment=environment, seed=3)
    changes = {each.field: (each.base, each.new) for each in compare_runs(base, new).environments}
    assert changes == {
        "torch": ("2.13.0+cpu", "2.14.0"),
        "git_commit": ("none", "abc"),
        "tf32": ("no", "yes"),
        "seed": ("0", "3"),
        "rounds": ("6", "7"),
        "reference: version": ("0.1.0", "2"),
        "reference: lse_base": ("e", "2"),
        "reference: started with": ("none", "A=1"),
        "reference: features declared on one side only": ("sinks", "none"),
    }
    assert compare_runs(base, Run("elsewhere", base.header, base.records)).environments == ()


def test_a_gpu_is_its_name_whatever_the_machine_around_it(run_of, rounds_of, around):
    one = run_of(rounds_of(around(1e6))).header.environment.model_copy(update={"device": "cuda", "device_name": "H200"})
    assert another_device(one, one.model_copy(update={"cpu": "another", "cores": 64, "driver": "2"})) == ""
    assert another_device(one, one.model_copy(update={"device_name": "A100"})) == "another device: H200 and A100"
    cpu = Environment(**(one.model_dump() | {"device": "cpu", "device_name": one.cpu}))
    assert another_device(cpu, cpu.model_copy(update={"cores": 64})) == "another device: 2 and 64"


def state(**fields: Any) -> dict[str, Any]:
    return {"device": fields}


def ceilings(rate: float) -> dict[str, Any]:
    return {"ceilings": {"copy_bytes_per_s": rate, "matmul_flops_per_s": 1e12, "dtype": "bfloat16"}}


@pytest.mark.parametrize(
    ("base", "new", "message"),
    [
        (state(), state(throttle_reasons=("sw_power_cap",)), "held back in 10 of 10 timings of NEW: sw_power_cap"),
        (state(sm_clock_mhz=1980), state(sm_clock_mhz=1900), "the SM clock is 4.0% lower in NEW"),
        (state(sm_clock_mhz=1980), state(sm_clock_mhz=1975), ""),
        (ceilings(1e12), ceilings(0.9e12), "the rate of a large copy is 10.0% lower in NEW"),
        (ceilings(1e12), ceilings(0.98e12), ""),
        (ceilings(1e12), {}, ""),
    ],
)
def test_a_machine_that_became_slower_is_warned_of(run_of, rounds_of, around, base, new, message):
    runs = [run_of(rounds_of(around(1e6), build=around(1e4), timing=timing)) for timing in (base, new)]
    warnings = compare_runs(*runs).warnings
    assert len(warnings) == bool(message)
    assert all(message in warning for warning in warnings)


def test_times_that_all_moved_one_way_are_laid_at_the_machines_door(run_of, rounds_of, around):
    def of(factors, seed):
        records = []
        for backend, factor in factors.items():
            for case in range(4):
                times = around(factor * 1e6, spread=0.002, seed=seed + case)
                records += rounds_of(times, case_id=f"c{case}", backend=backend)
        return run_of(records)

    base = of({"reference": 1, "fast": 0.5}, 0)
    (warning,) = compare_runs(base, of({"reference": 1.06, "fast": 0.53}, 10)).warnings
    assert warning.startswith("8 of 8 times are longer in NEW, whatever the backend, by 6.")
    assert compare_runs(base, of({"reference": 1, "fast": 0.53}, 10)).warnings == ()
    assert compare_runs(of({"fast": 1}, 0), of({"fast": 1.06}, 10)).warnings == ()
    # Backends of one run may all be slower than others.
    one = of({"reference": 1, "fast": 1.06, "Wrong": 1.13}, 0)
    found = compare_runs(one, one, backends={"reference": "fast", "fast": "Wrong"})
    assert [change.ratio > 1 for change in found.speeds] == [True] * 8
    assert found.warnings == ()


def test_other_kernels_of_a_library_are_listed_where_both_runs_have_them(make, run_of):
    for base, new, expected in (
        (("flash",), ("cudnn", "flash"), {"reference: kernels": ("flash", "cudnn, flash")}),
        ((), ("flash",), {}),
        (("flash",), (), {}),
    ):
        runs = [run_of([make("passed", chosen_kernels=kernels)]) for kernels in (base, new)]
        assert {each.field: (each.base, each.new) for each in compare_runs(*runs).environments} == expected
