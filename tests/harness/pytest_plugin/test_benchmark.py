"""The check timing as pytest items: pytest-benchmark has the times of honest calls, and of no others."""

import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import attncheck.backends.candidates.reference
import attncheck.backends.candidates.torch_sdpa  # noqa: F401 (pytester forgets what is imported while it runs)
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.pytest_plugin.benchmark import WARM_UPS, Benchmarks, refusal_of
from attncheck.reports.run_file.records import Errored, Failed, Record, parse_line

pytest_plugins = ["pytester"]

SUITE = """\
suite: small
description: a small question
defaults:
  layer: {num_heads: 2, num_kv_heads: 1, head_size: 16, dtype: float32}
cases:
  - {id: decode, batch: q1s20_q1s7}
  - {id: mixed, batch: q1s20_q5s9}
  - {id: soft, batch: q1s20, layer: {logits_soft_cap: 5.0}}
"""
WRONG = """\
import torch
from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl

class Keeping(ReferenceBackend):
    class Impl(ReferenceImpl):
        kept = None
        def forward(self, *args, **kwargs):
            result = super().forward(*args, **kwargs)
            if self.kept is None:
                self.kept = result.clone()
            result.copy_(self.kept)
            return result
    @classmethod
    def get_name(cls): return "KEEPING"
    @classmethod
    def get_impl_cls(cls): return cls.Impl
"""
OURS = ("--attncheck-suite", "small.yaml", "--attncheck-device", "cpu", "--attncheck-case", "decode")
QUICK = ("--benchmark-max-time=0.05", "--benchmark-min-rounds=4")
TIMING = ("--attncheck-check", "timing")


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, preloaded: None) -> pytest.Pytester:
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):  # of the run around it
        monkeypatch.delenv(name, raising=False)
    (pytester.path / "small.yaml").write_text(SUITE)
    (pytester.path / "wrong.py").write_text(WRONG)
    return pytester


def run(folder: pytest.Pytester, *words: str, backends: tuple[str, ...] = ("torch_sdpa",)) -> pytest.RunResult:
    chosen = [word for name in backends for word in ("--attncheck-backend", name)]
    return folder.runpytest_inprocess("-p", "no:cacheprovider", *OURS, *QUICK, *chosen, *words)


def saved(folder: pytest.Pytester, name: str = "out.json") -> dict[str, Any]:
    return json.loads((folder.path / name).read_text())


def test_right_calls_are_benchmarks_and_those_of_a_cheat_fail_and_are_not_saved(
    folder: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends = ("torch_sdpa", "reference", "./wrong.py:Keeping")
    monkeypatch.setenv("COLUMNS", "200")
    result = run(folder, *TIMING, "--benchmark-json", "out.json", "-rf", backends=backends)
    result.assert_outcomes(passed=2, failed=1)
    text = result.stdout.str()
    assert re.search(
        r"FAILED attncheck::small::decode::Keeping::timing - forward: the output of call \d+ is wrong", text
    )
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
            assert extra_info["roofline_share"] == pytest.approx(extra_info["roofline_share"], abs=1)
    assert found["machine_info"]["attncheck"]["device"] == "cpu"
    assert found["machine_info"]["attncheck"]["device_name"]


def test_timing_comes_beside_the_other_checks_where_it_is_requested(folder: pytest.Pytester) -> None:
    def items(*words: str) -> list[str]:
        listed = run(folder, "--collect-only", "-q", *words).outlines
        return [line.rpartition("::")[2] for line in listed if line.startswith("attncheck::")]

    usual = items()
    assert "timing" not in usual
    assert items("--attncheck-timing") == [*usual, "timing"]
    assert items("--attncheck-timing", "--attncheck-check", "lse") == ["lse", "timing"]
    assert items(*TIMING) == ["timing"]


def test_parts_of_a_mixed_batch_are_benchmarks_and_other_checks_and_refused_cases_are_none(
    folder: pytest.Pytester,
) -> None:
    cases = ("--attncheck-case", "mixed", "--attncheck-case", "soft", "-k", "not decode")
    words = ("--attncheck-timing", "--attncheck-check", "numerics", "--benchmark-json", "out.json", "-rs", *cases)
    result = run(folder, *words)
    result.assert_outcomes(passed=2, skipped=2, deselected=2)
    assert "unsupported: " in result.stdout.str()
    names = [(each["group"], each["name"]) for each in saved(folder)["benchmarks"]]
    parts = ("forward", "decode", "prefill", "build")
    assert names == [(f"small/mixed {part}", f"mixed[torch_sdpa-{part}]") for part in parts]


def test_the_other_checks_are_made_as_ever(folder: pytest.Pytester) -> None:
    words = ("--attncheck-timing", "--attncheck-check", "numerics", "--attncheck-check", "lse")
    result = run(folder, *words, "--benchmark-only", "-rs", "-v", backends=("reference",))
    result.assert_outcomes(passed=1, skipped=2)
    assert "attncheck::small::decode::reference::timing PASSED" in result.stdout.str()
    result = run(folder, *words, "--benchmark-skip", "-rs", backends=("reference",))
    result.assert_outcomes(passed=2, skipped=1)
    assert "--benchmark-skip active" in result.stdout.str()


def test_disabled_benchmarks_are_examined_and_not_printed(folder: pytest.Pytester) -> None:
    result = run(folder, *TIMING, "--benchmark-disable", backends=("reference", "./wrong.py:Keeping"))
    result.assert_outcomes(passed=1, failed=1)
    assert "benchmark 'small" not in result.stdout.str()


@pytest.fixture
def saved_run(folder: pytest.Pytester) -> Callable[..., Path]:
    """A file of a run with these facts of its machine instead of its own."""
    run(folder, *TIMING, "--benchmark-json", "out.json").assert_outcomes(passed=1)

    def write(**facts: object) -> Path:
        found = saved(folder)
        found["machine_info"]["attncheck"] |= facts
        (folder.path / "saved.json").write_text(json.dumps(found))
        return folder.path / "saved.json"

    return write


def test_runs_of_different_devices_are_not_compared(folder: pytest.Pytester, saved_run: Callable[..., Path]) -> None:
    other = saved_run(device="cuda", device_name="NVIDIA H200")
    result = run(folder, *TIMING, f"--benchmark-compare={other}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    printed = result.stderr.str() + result.stdout.str()
    assert "the saved times are of NVIDIA H200 (cuda), and these are of" in printed
    assert "INTERNALERROR" not in printed

    other = saved_run(torch="2.0.0")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = run(folder, *TIMING, f"--benchmark-compare={other}")
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
def test_another_device_is_refused_and_another_driver_is_not(theirs: dict[str, str], refused: bool) -> None:
    ours = {"device": "cuda", "device_name": "NVIDIA H200", "driver": "2"}
    assert bool(refusal_of(ours, theirs)) is refused


def test_under_xdist_nothing_is_timed(folder: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    words = ("--attncheck-backend", "torch_sdpa", *TIMING, "-n", "1", "-rs")
    result = folder.runpytest_subprocess("-p", "no:cacheprovider", *OURS, *words, timeout=300)
    result.assert_outcomes(skipped=1)
    assert "times taken beside other tests are none: leave out -n of pytest-xdist" in result.stdout.str()


def test_without_pytest_benchmark_the_question_is_wrong(folder: pytest.Pytester) -> None:
    # Its options are gone with it.
    result = folder.runpytest_subprocess(
        "-p", "no:benchmark", *OURS, "--attncheck-backend", "torch_sdpa", "--attncheck-timing"
    )
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert any("made through pytest-benchmark, which is switched off" in line for line in result.errlines)


@pytest.fixture
def session(pytestconfig: pytest.Config) -> Any:
    """As pytest-benchmark's, with its options, but for what is collected."""
    real = pytestconfig._benchmarksession  # type: ignore[attr-defined]
    options = real.options | {"min_rounds": 3, "max_time": 0.0}
    return SimpleNamespace(options=options, benchmarks=[], logger=real.logger, disabled=False)


@pytest.fixture
def benchmarks(session: Any, request: pytest.FixtureRequest) -> Benchmarks:
    found = Benchmarks(session)
    item = SimpleNamespace(
        case=SimpleNamespace(suite="small", id="decode"),
        backend=SimpleNamespace(name="mine"),
        name="timing",
        nodeid="attncheck::small::decode::mine::timing",
        warn=request.node.warn,
    )
    found.begin(item)  # type: ignore[arg-type]
    return found


def record(outcome: str) -> Record:
    fields = {"failed": {"summary": "x"}, "errored": {"stage": "forward", "error_type": "E", "message": "x"}}[outcome]
    who = {"suite": "small", "case_id": "decode", "case_hash": "0", "check": "timing", "seed": 0, "environment": "e"}
    who |= {"backend": "mine", "backend_ref": "mine", "backend_version": "", "attncheck_version": "0", "kind": "record"}
    found = parse_line(json.dumps(who | fields | {"outcome": outcome}))
    assert isinstance(found, Failed | Errored)
    return found


def ticking(*nanoseconds: int) -> Iterator[int]:
    yield from nanoseconds
    raise AssertionError("a call too many")


def test_what_is_saved_is_what_the_clock_of_the_check_measured(benchmarks: Benchmarks, session: Any) -> None:
    calls = ticking(*[900] * WARM_UPS, 100, 300, 200)
    found = benchmarks.sample("forward", lambda: next(calls), TimingSettings(min_samples=3, relative_width=5.0))
    assert found.samples_ns == (100, 300, 200)
    assert (found.median_ns, found.is_settled) == (200, True)
    (saved_,) = session.benchmarks
    assert saved_.stats.data == pytest.approx([1e-7, 3e-7, 2e-7])
    assert (saved_.group, saved_.name) == ("small/decode forward", "decode[mine-forward]")


def test_as_many_are_taken_as_fit_into_the_time_and_few_are_not_settled(benchmarks: Benchmarks, session: Any) -> None:
    assert not benchmarks.sample("forward", lambda: 100, TimingSettings(min_samples=4)).is_settled
    assert benchmarks.sample("decode", lambda: 100, TimingSettings(min_samples=3)).is_settled
    session.options["max_time"] = 3600.0
    found = benchmarks.sample("prefill", lambda: 100, TimingSettings(max_samples=17))
    assert len(found.samples_ns) == 17


def test_times_of_a_wrong_answer_are_taken_back_and_those_of_others_stay(benchmarks: Benchmarks, session: Any) -> None:
    session.benchmarks.append(other := SimpleNamespace())
    benchmarks.sample("forward", lambda: 100, TimingSettings())
    assert len(session.benchmarks) == 2
    benchmarks.end(record("failed"))
    assert session.benchmarks == [other]


def test_what_a_call_raises_ends_its_item(benchmarks: Benchmarks, session: Any) -> None:
    calls = iter([1] * (WARM_UPS + 1))
    with pytest.raises(StopIteration):
        benchmarks.sample("forward", lambda: next(calls), TimingSettings())
    benchmarks.end(record("errored"))
    assert session.benchmarks == []
