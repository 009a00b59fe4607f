"""``attncheck compare`` as typed: its exit codes, and where it writes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attncheck.harness.cli import app as cli
from attncheck.harness.cli.common import STEP_SUMMARY
from attncheck.reports.run_file.header import BackendInfo, RunHeader, SuiteInfo
from attncheck.reports.run_file.records import Record

WANDER = (0.99, 1.01, 1.0, 0.995, 1.005, 1.002, 0.998, 1.007, 0.993, 1.0)

Write = Callable[..., Path]


@pytest.fixture
def write(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    header: RunHeader,
    make_record: Callable[..., Record],
    write_run: Callable[..., Path],
) -> Write:
    """``write("new.jsonl", factor=1.1, rounds=10, has_sinks=False)``: a run of ``one``, and as slow ``two``."""
    monkeypatch.delenv(STEP_SUMMARY, raising=False)

    def records(factor: float, rounds: int, *, has_sinks: bool) -> Iterator[Record]:
        for backend in ("one", "two"):
            who = {"suite": "decode", "backend": backend, "backend_ref": backend}
            is_lost = backend == "two" and not has_sinks
            lost = {"outcome": "unsupported", "reasons": ["no sinks"]}
            yield make_record(**(lost if is_lost else {"outcome": "passed"}), case_id="sinks", **who)
            for index in range(rounds):
                median = 1e6 * WANDER[index] * (factor if backend == "two" else 1)
                latency = {"part": "forward", "clock": "host", "median_ns": median, "low_ns": median, "high_ns": median}
                samples = {"samples_ns": [round(median), round(median) + 1], "is_settled": True}
                timing = {"latencies": [latency | samples]}
                yield make_record("passed", check="timing", round=index, timing=timing, **who)

    def write(name: str, *, factor: float = 1.0, rounds: int = 10, has_sinks: bool = True) -> Path:
        header_fields = {
            "suites": (SuiteInfo(name="decode", ref="decode", cases=2),),
            "checks": ("numerics", "timing"),
            "rounds": rounds,
            "backends": tuple(BackendInfo(name=each, ref=each) for each in ("one", "two")),
        }
        whole = header.model_copy(update=header_fields)
        return write_run(folder / name, whole, *records(factor, rounds, has_sinks=has_sinks))

    return write


def compare(*words: str) -> int:
    return cli.main(["compare", *words])


def test_a_slowdown_and_a_lost_feature_are_named_and_fail(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write("base.jsonl")
    write("new.jsonl", factor=1.1, has_sinks=False)
    assert compare("base.jsonl", "new.jsonl") == 1
    out = capsys.readouterr().out
    assert "worse  two      decode/sinks  numerics  passed -> unsupported  no sinks" in out
    assert "+10.0%" in out
    assert out.rstrip().splitlines()[-1].startswith("regression: 1 outcome worse; of 2 times 1 slower")


def test_equal_runs_and_too_noisy_ones_pass(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write("base.jsonl")
    write("new.jsonl")
    write("few.jsonl", factor=2, rounds=3)
    assert compare("base.jsonl", "new.jsonl") == 0
    assert "no regression" in capsys.readouterr().out
    assert compare("base.jsonl", "few.jsonl") == 0
    assert "ALL TOO NOISY TO COMPARE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--fail-on", "decode: 5%"], 1),
        (["--fail-on", "decode: 15%"], 0),
        (["--fail-on", "5%", "--fail-on", "decode@forward: 15%"], 0),
        (["--fail-on", "@build: 5%"], 0),
        (["--min-effect", "20"], 0),
        (["--fail-on", "prefill: 5%"], 2),
        (["--fail-on", "decode: five"], 2),
        (["--fail-on", "decode: 5%", "--min-effect", "10"], 2),
        (["--match", "one"], 2),
        (["--match", "one=three"], 2),
        (["--match", "one=two", "--match", "two=two"], 2),
        (["--match", "two=one"], 0),
    ],
)
def test_options_decide_what_fails(write: Write, words: list[str], code: int) -> None:
    write("base.jsonl")
    write("new.jsonl", factor=1.1)
    assert compare("base.jsonl", "new.jsonl", *words) == code


def test_two_backends_of_one_run(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    write("run.jsonl", factor=1.1)
    assert compare("run.jsonl", "run.jsonl", "--match", "one=two") == 1
    assert "one -> two" in capsys.readouterr().out
    assert compare("run.jsonl", "run.jsonl") == 2
    assert "--match OLD=NEW" in capsys.readouterr().err


def test_what_new_lacks_fails_unless_it_is_allowed(
    write: Write, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write("base.jsonl")
    lines = base.read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "cut.jsonl").write_text("".join(lines[:-2]), encoding="utf-8")
    assert compare("base.jsonl", "cut.jsonl") == 1
    assert capsys.readouterr().out.split("\n\n")[-1].startswith("incomplete: ")
    assert compare("base.jsonl", "cut.jsonl", "--allow-missing") == 0
    assert "accepted by --allow-missing: the end of NEW" in " ".join(capsys.readouterr().out.split())
    (folder / "header.jsonl").write_text(lines[0], encoding="utf-8")
    assert compare("base.jsonl", "header.jsonl") == 2  # nothing is left to compare


def test_where_it_writes(
    write: Write, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write("base.jsonl")
    write("new.jsonl", factor=1.1)
    assert compare("base.jsonl", "new.jsonl", "--format", "markdown", "--output", "comparison.md") == 1
    assert (folder / "comparison.md").read_text().startswith("# attncheck comparison")
    assert capsys.readouterr().out == ""
    before = (folder / "new.jsonl").read_bytes()
    assert compare("base.jsonl", "new.jsonl", "--output", "new.jsonl") == 2
    assert compare("base.jsonl", "new.jsonl", "--output", "nowhere/comparison.md") == 2
    assert (folder / "new.jsonl").read_bytes() == before


def test_github_gets_a_summary_where_it_looks_for_it_and_annotations_in_the_log(
    write: Write, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write("base.jsonl")
    write("new.jsonl", factor=1.1)
    words = ("base.jsonl", "new.jsonl", "--format", "github")
    assert compare(*words) == 1
    out = capsys.readouterr().out
    assert out.startswith("# attncheck comparison")
    assert out.splitlines()[-1].startswith("::error title=two%3A decode/edge%2C forward%3A +10.0%25 time::")
    (folder / "summary.md").write_text("of another step\n")
    monkeypatch.setenv(STEP_SUMMARY, str(folder / "summary.md"))
    assert compare(*words) == 1
    assert (folder / "summary.md").read_text().startswith("of another step\n# attncheck comparison")
    assert capsys.readouterr().out.startswith("::error ")


def test_a_run_file_that_is_none_is_a_wrong_question(write: Write, folder: Path) -> None:
    write("base.jsonl")
    (folder / "none.jsonl").write_text("{}\n")
    assert compare("base.jsonl", "none.jsonl") == 2
    assert compare("base.jsonl", "missing.jsonl") == 2
