"""Small runs of one backend with given outcomes by case."""

import pytest

from attncheck.reports.analysis.measured import measured_run, subjects
from attncheck.reports.run_file.header import BackendInfo, CaseInfo, SuiteInfo
from attncheck.reports.run_file.store import read_run
from attncheck.reports.site.build import names_of, read_runs, write_site
from attncheck.reports.speeds.speed import forward_times

LATENCY = {"part": "forward", "clock": "events", "samples_ns": [1], "is_settled": True}


@pytest.fixture
def run_file(tmp_path, header, make_record, write_run):
    """``run_file(day, {"a": "passed"})`` writes a run of that day in January with these outcomes by case id.

    ``device``, ``backend``, ``version``: of the run. ``finding``, ``concerns``: of its failures. ``times``: nanoseconds by case id,
    in ``processes``. ``machine``: fields of the environment. ``variant``: what the run set in the suite. ``needs``: by case id, or of all cases. ``stopped``: ids of cases that the run did not reach.
    ``late``: the same of a complete run without time for all; of the first of them, only the builder was examined.
    """

    def write(
        day,
        outcomes,
        *,
        device="a gpu",
        backend="Mine",
        version="1",
        features=("sliding_window",),
        finding="the window is ignored",
        concerns=(),
        needs=("sliding_window", "block_size=16"),
        times=None,
        processes=1,
        stopped=(),
        late=(),
        machine=None,
        variant="",
        **fields,
    ):
        environment = header.environment.model_copy(
            update={"device_name": device, "capability": "9.0"} | (machine or {})
        )
        whose = {"backend": backend, "backend_ref": backend, "backend_version": version}
        common = whose | {"environment": environment.digest} | fields
        records = []
        for case, outcome in outcomes.items():
            own = {"needs": needs[case] if isinstance(needs, dict) else needs}
            own |= {"finding": finding, "concerns": concerns} if outcome == "failed" else {}
            own |= {"reason": finding} if outcome == "xfailed" else {}
            records.append(make_record(outcome, case_id=case, **common, **own))
            for round_ in range(processes if case in (times or {}) else 0):
                time = (times or {})[case]
                latency = LATENCY | {"median_ns": time, "low_ns": 0.99 * time, "high_ns": 1.01 * time}
                timed = {"check": "timing", "round": round_, "timing": {"latencies": [latency]}, "needs": own["needs"]}
                records.append(make_record("passed", case_id=case, **(common | timed)))
        for number, case in enumerate(late):
            own = common | {"needs": needs[case] if isinstance(needs, dict) else needs}
            reason = "the case did not run, because earlier cases used up the time of the backend by --within"
            records.append(make_record("unavailable", case_id=case, reasons=[reason], **own))
            records += [make_record("passed", case_id=case, **own | {"check": "builder"})] if number == 0 else []
        selected = (*outcomes, *stopped, *late)
        described = header.model_copy(
            update={
                "started": f"2026-01-{day:02}T00:00:00+00:00",
                "environment": environment,
                "backends": (BackendInfo(name=backend, ref=backend, version=version, features=features),),
                "checks": ("numerics", "timing", "refusals", "poison", "cache_write", "builder"),
                "rounds": processes,
                "suites": (SuiteInfo(name="smoke", ref=f"smoke{variant}", cases=len(selected)),),
                "cases": tuple(CaseInfo(suite="smoke", id=case, shape="head size 64") for case in selected),
            }
        )
        path = tmp_path / "runs" / f"{len(list(tmp_path.rglob('*.jsonl'))):03}.jsonl"
        path.parent.mkdir(exist_ok=True)
        write_run(path, described, *records)
        if stopped:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            path.write_text("".join(lines[:-1]), encoding="utf-8")  # without its footer
        return path

    return write


def measured(path):
    run = read_run(path)
    return measured_run(run, path.name, forward_times(run))


@pytest.fixture
def subjects_of():
    """``subjects_of(file, ...)``: every backend on every device."""
    return lambda *files: subjects(map(measured, files))


@pytest.fixture
def build(tmp_path, monkeypatch):
    """``build(files)`` writes the site of these run files, without the HTML reports of runs, and returns its folder."""
    monkeypatch.setattr("attncheck.reports.site.build.render_runs", lambda _: "<title>a run</title>")

    def write(files):
        write_site(*read_runs(names_of(files), 1), tmp_path / "site")
        return tmp_path / "site"

    return write
