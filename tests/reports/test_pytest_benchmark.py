"""A run as pytest-benchmark's JSON: its own command line reads it, and its figures are those of the samples."""

import json
import re
import statistics
import subprocess
import sys

import pytest

from attncheck.errors import QuestionError
from attncheck.reports.pytest_benchmark import benchmark_names, render_run
from attncheck.reports.run_file.records import RunFooter
from attncheck.reports.run_file.store import Run

CEILINGS = {"copy_bytes_per_s": 1e12, "matmul_flops_per_s": 1e14, "dtype": "bfloat16"}


def converted(header, *records):
    footer = RunFooter(finished="2026-01-01T00:01:00+00:00", counts={})
    return json.loads(render_run(Run("run.jsonl", header, records, footer)))


def test_each_part_of_each_case_of_each_backend_is_a_benchmark(timed, timing_header):
    work = {"moved_bytes": 200_000_000, "flops": 10_000_000_000}
    records = [
        timed({"forward": 1e6, "build": 5e4}, work=work, timing={"ceilings": CEILINGS, "cache": "cold"}),
        timed({"forward": 3e6}, backend="Wrong"),
    ]
    found = converted(timing_header, *records)["benchmarks"]
    assert [(each["name"], each["group"]) for each in found] == [
        ("edge[reference-forward]", "smoke/edge forward"),
        ("edge[reference-build]", "smoke/edge build"),
        ("edge[Wrong-forward]", "smoke/edge forward"),
    ]
    assert found[0]["fullname"] == "attncheck::smoke::edge::reference::timing[forward]"
    assert found[2]["params"] == {"suite": "smoke", "case": "edge", "backend": "Wrong", "part": "forward"}
    info = found[0]["extra_info"]
    assert (info["backend_version"], info["case_hash"]) == ("0.1.0", "0123456789ab")
    assert (info["clock"], info["cache"], info["is_settled"]) == ("events", "cold", True)
    assert info["interval_s"] == pytest.approx([0.98e-3, 1.02e-3])
    assert info["bytes_per_s"] == pytest.approx(2e11)
    assert info["roofline_share"] == pytest.approx(0.2)
    names = benchmark_names("smoke", "edge", "evil\x1b[2J\nname", "forward")
    assert all(text.isprintable() for text in (names.name, names.fullname, names.group, names.param))


def test_statistics_are_of_all_samples_in_seconds(timed, timing_header):
    records = [timed({"forward": 2e6}, round=0), timed({"forward": 4e6}, round=1)]
    (found,) = converted(timing_header, *records)["benchmarks"]
    # Each round holds 0.98, 1, 1.02, 1 and 5 times its median.
    samples = [median * share for median in (2e-3, 4e-3) for share in (0.98, 1.0, 1.02, 1.0, 5.0)]
    assert found["stats"]["data"] == pytest.approx(samples)
    assert found["stats"]["rounds"] == 10
    assert found["stats"]["iterations"] == 1
    assert found["stats"]["median"] == pytest.approx(statistics.median(samples))
    assert found["stats"]["mean"] == pytest.approx(sum(samples) / 10)
    assert found["stats"]["ops"] == pytest.approx(10 / sum(samples))
    # Sorted: 1.96 2 2 2.04 3.92 | 4 4 4.08 10 20 ms; the quartiles are the medians of the halves.
    assert found["stats"]["iqr"] == pytest.approx(4.08e-3 - 2e-3)
    assert found["stats"]["iqr_outliers"] == 2
    # What counts of a process is its median.
    assert found["extra_info"]["round_medians_s"] == pytest.approx([2e-3, 4e-3])
    assert found["extra_info"]["median_s"] == pytest.approx((2e-3 * 4e-3) ** 0.5)


def test_a_wrong_answer_has_no_benchmark_and_none_at_all_is_an_error(timed, make, timing_header):
    with pytest.raises(QuestionError, match=r"run\.jsonl: .*: its times are of wrong outputs"):
        converted(timing_header, make("failed", check="timing"), make("passed"))
    with pytest.raises(QuestionError, match=r"run\.jsonl: .*: it has no times; run with --check timing"):
        converted(timing_header, make("passed"))


def test_pytest_benchmark_itself_compares_two_of_them(timed, timing_header, tmp_path):
    for name, factor in (("base", 1.0), ("new", 1.5)):
        records = (timed({"forward": 2e6 * factor, "build": 5e4}), timed({"forward": 3e6 * factor}, backend="Wrong"))
        (tmp_path / f"{name}.json").write_text(render_run(Run("run.jsonl", timing_header, records)), encoding="utf-8")
    words = "compare base.json new.json --group-by=group --columns=median,iqr,outliers,ops,rounds --sort=name"
    command = [sys.executable, "-m", "pytest_benchmark", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"benchmark 'smoke/edge forward': (\d+) tests", done.stdout) == ["4"]
    rows = dict(re.findall(r"^(edge\[\S+\] \(\S+\)) +([\d.,]+)", done.stdout, re.MULTILINE))
    assert rows["edge[Wrong-forward] (base)"].startswith("3.0000")
    assert rows["edge[Wrong-forward] (new)"].startswith("4.5000")
