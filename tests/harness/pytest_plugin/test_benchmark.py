"""The check timing as pytest items: pytest-benchmark has the times of honest calls, and of no others."""

import json
import re
import warnings
from types import SimpleNamespace

import pytest

import attncheck.backends.candidates.reference
import attncheck.backends.candidates.torch_sdpa  # noqa: F401 (pytester forgets what is imported while it runs)
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.pytest_plugin.benchmark import WARM_UPS, Benchmarks, refusal_of
from attncheck.reports.run_file.records import parse_line

pytest_plugins = ["pytester"]

QUICK = "--benchmark-max-time=0.05 --benchmark-min-rounds=4"
TIMED = "@case decode @check timing"


@pytest.fixture
def run(inside):
    return lambda words, *backends: inside(f"{QUICK} {words}", *backends)


def saved(folder, name="out.json"):
    return json.loads((folder.path / name).read_text())


def test_right_calls_are_benchmarks_and_those_of_a_cheat_fail_and_are_not_saved(run, folder, monkeypatch, preloaded):
    monkeypatch.setenv("COLUMNS", "200")
    result = run(f"{TIMED} --benchmark-json out.json -rf", "torch_sdpa", "reference", "./wrong.py:Keeping")
    result.assert_outcomes(passed=2, failed=1)
    text = result.stdout.str()
    name = "attncheck::small::decode::Keeping::timing"
    assert re.search(rf"FAILED {name} - forward: the output of call \d+ is wrong", text)
    assert "it is the right answer to the contents of" in text
    assert "repeat: attncheck run --backend ./wrong.py:Keeping --suite small.yaml --case decode --check timing" in text

    found = saved(folder)
    names = [(each["group"], each["fullname"]) for each in found["benchmarks"]]
    assert names == [
        (f"small/decode {part}", f"attncheck::small::decode::{backend}::timing[{part}]")
        for backend in ("torch_sdpa", "reference")
        for part in ("forward", "build")
    ]
    # Backends of one case and part are in one table.
    assert re.search(r"benchmark 'small/decode build': 2 tests", text)
    for benchmark in found["benchmarks"]:
        extra_info, stats = benchmark["extra_info"], benchmark["stats"]
        assert stats["rounds"] >= 4
        assert stats["iterations"] == 1
        assert extra_info["median_s"] == pytest.approx(stats["median"])
        assert extra_info["interval_s"][0] <= extra_info["median_s"] <= extra_info["interval_s"][1]
        assert len(extra_info["case_hash"]) == 12
        if benchmark["params"]["part"] == "forward":
            assert extra_info["moved_bytes"] > 0
            assert 0 < extra_info["roofline_share"] < 2
    assert found["machine_info"]["attncheck"]["device"] == "cpu"
    assert found["machine_info"]["attncheck"]["device_name"]


def test_timing_comes_beside_the_other_checks_where_it_is_requested(run, preloaded):
    def items(words=""):
        listed = run(f"@case decode --collect-only -q {words}", "torch_sdpa").outlines
        return [line.rpartition("::")[2] for line in listed if line.startswith("attncheck::")]

    usual = items()
    assert "timing" not in usual
    assert items("@timing") == [*usual, "timing"]
    assert items("@timing @check lse") == ["lse", "timing"]
    assert items("@check timing") == ["timing"]


def test_parts_of_a_mixed_batch_are_benchmarks_and_other_checks_and_refused_cases_are_none(run, folder, preloaded):
    words = "@timing @check numerics @case mixed,capped.x-1"
    result = run(f"{words} --benchmark-json out.json -rs", "torch_sdpa")
    result.assert_outcomes(passed=2, skipped=2)
    assert "unsupported: " in result.stdout.str()
    names = [(each["group"], each["name"]) for each in saved(folder)["benchmarks"]]
    parts = ("forward", "decode", "prefill", "build")
    assert names == [(f"small/mixed {part}", f"mixed[torch_sdpa-{part}]") for part in parts]


def test_options_of_pytest_benchmark_choose_among_the_checks(run, preloaded):
    words = "@case decode @timing @check numerics,lse"
    result = run(f"{words} --benchmark-only -rs -v", "reference")
    result.assert_outcomes(passed=1, skipped=2)
    assert "attncheck::small::decode::reference::timing PASSED" in result.stdout.str()
    result = run(f"{words} --benchmark-skip -rs", "reference")
    result.assert_outcomes(passed=2, skipped=1)
    assert "--benchmark-skip active" in result.stdout.str()
    result = run(f"{TIMED} --benchmark-disable", "reference", "./wrong.py:Keeping")
    result.assert_outcomes(passed=1, failed=1)
    assert "benchmark 'small" not in result.stdout.str()


def test_runs_of_different_devices_are_not_compared(run, folder, preloaded):
    run(f"{TIMED} --benchmark-json out.json", "torch_sdpa").assert_outcomes(passed=1)

    def compared_with(**facts):
        found = saved(folder)
        found["machine_info"]["attncheck"] |= facts
        (folder.path / "saved.json").write_text(json.dumps(found))
        return run(f"{TIMED} --benchmark-compare={folder.path / 'saved.json'}", "torch_sdpa")

    result = compared_with(device="cuda", device_name="NVIDIA H200")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    printed = result.stderr.str() + result.stdout.str()
    assert "the saved times are of NVIDIA H200 (cuda), and these are of" in printed
    assert "INTERNALERROR" not in printed

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = compared_with(torch="2.0.0")
    result.assert_outcomes(passed=1)
    (ours,) = (str(each.message) for each in warned if "other circumstances" in str(each.message))
    assert ours.startswith("attncheck: compared with a run of other circumstances: torch 2.0.0 then, ")
    assert re.search(r"decode\[torch_sdpa-forward\] \(NOW\)", result.stdout.str())


@pytest.mark.parametrize(
    ("theirs", "refused"),
    [
        ({"device": "cuda", "device_name": "NVIDIA H200", "driver": "1"}, False),
        ({"device": "cuda", "device_name": "NVIDIA A100", "driver": "2"}, True),
        ({"device": "cpu", "device_name": "NVIDIA H200", "driver": "2"}, True),
        ({}, True),
    ],
)
def test_another_device_is_refused_and_another_driver_is_not(theirs, refused):
    ours = {"device": "cuda", "device_name": "NVIDIA H200", "driver": "2"}
    assert bool(refusal_of(ours, theirs)) is refused


def test_under_xdist_nothing_is_timed(run, monkeypatch, preloaded):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    result = run(f"{TIMED} -rs", "torch_sdpa")
    result.assert_outcomes(skipped=1)
    assert "times taken beside other tests are none: leave out -n of pytest-xdist" in result.stdout.str()


@pytest.fixture
def session(pytestconfig):
    """As pytest-benchmark's, with its options, but for what is collected."""
    real = pytestconfig._benchmarksession
    options = real.options | {"min_rounds": 3, "max_time": 0.0}
    return SimpleNamespace(options=options, benchmarks=[], logger=real.logger, disabled=False)


@pytest.fixture
def benchmarks(session, request):
    found = Benchmarks(session)
    item = SimpleNamespace(
        case=SimpleNamespace(suite="small", id="decode"),
        backend=SimpleNamespace(name="mine"),
        name="timing",
        nodeid="attncheck::small::decode::mine::timing",
        warn=request.node.warn,
    )
    found.begin(item)
    return found


def record(outcome):
    fields = {"failed": {"summary": "x"}, "errored": {"stage": "forward", "error_type": "E", "message": "x"}}[outcome]
    who = {"suite": "small", "case_id": "decode", "case_hash": "0", "check": "timing", "seed": 0, "environment": "e"}
    who |= {"backend": "mine", "backend_ref": "mine", "backend_version": "", "attncheck_version": "0", "kind": "record"}
    return parse_line(json.dumps(who | fields | {"outcome": outcome}))


def test_what_is_saved_is_what_the_clock_of_the_check_measured(benchmarks, session):
    calls = iter([*[900] * WARM_UPS, 100, 300, 200])
    found = benchmarks.sample("forward", lambda: next(calls), TimingSettings(min_samples=3, relative_width=5.0))
    assert found.samples_ns == (100, 300, 200)
    assert (found.median_ns, found.is_settled) == (200, True)
    (kept,) = session.benchmarks
    assert kept.stats.data == pytest.approx([1e-7, 3e-7, 2e-7])
    assert (kept.group, kept.name) == ("small/decode forward", "decode[mine-forward]")


def test_as_many_are_taken_as_fit_into_the_time_and_few_are_not_settled(benchmarks, session):
    assert not benchmarks.sample("forward", lambda: 100, TimingSettings(min_samples=4)).is_settled
    assert benchmarks.sample("decode", lambda: 100, TimingSettings(min_samples=3)).is_settled
    session.options["max_time"] = 3600.0
    found = benchmarks.sample("prefill", lambda: 100, TimingSettings(max_samples=17))
    assert len(found.samples_ns) == 17


def test_times_of_a_wrong_answer_or_an_error_are_taken_back_and_those_of_others_stay(benchmarks, session):
    session.benchmarks.append(other := SimpleNamespace())
    benchmarks.sample("forward", lambda: 100, TimingSettings())
    assert len(session.benchmarks) == 2
    benchmarks.end(record("failed"))
    assert session.benchmarks == [other]
    calls = iter([1] * (WARM_UPS + 1))
    with pytest.raises(StopIteration):
        benchmarks.sample("forward", lambda: next(calls), TimingSettings())
    benchmarks.end(record("errored"))
    assert session.benchmarks == [other]
