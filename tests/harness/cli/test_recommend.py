"""``attncheck recommend``: its words, its exit codes, and JSON."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from attncheck.harness.cli import app as cli
from attncheck.reports.run_file.header import BackendInfo, RunHeader, SuiteInfo
from attncheck.reports.run_file.records import Record


@pytest.fixture(autouse=True)
def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    header: RunHeader,
    make_record: Callable[..., Record],
    write_run: Callable[..., Path],
) -> None:
    """``run.jsonl``: a backend that is right with sinks, and timed; and one that ignores them."""
    monkeypatch.chdir(tmp_path)
    header_fields = {
        "suites": (SuiteInfo(name="mine", ref="mine", cases=2),),
        "checks": ("numerics", "timing"),
        "backends": (BackendInfo(name="Good", ref="Good"), BackendInfo(name="Liar", ref="Liar", features=("lse",))),
    }
    good, liar = (
        {"suite": "mine", "backend": name, "backend_ref": name, "needs": ("sinks", "block_size=16")}
        for name in ("Good", "Liar")
    )
    latency = {"part": "forward", "clock": "host", "median_ns": 2e6, "low_ns": 2e6, "high_ns": 2e6}
    timing = {"latencies": [latency | {"samples_ns": [2_000_000], "is_settled": True}]}
    write_run(
        tmp_path / "run.jsonl",
        header.model_copy(update=header_fields),
        make_record("passed", **good),
        make_record("passed", check="timing", timing=timing, **good),
        make_record("failed", finding="the sinks are ignored", concerns=("sinks",), **liar),
    )


def recommend(*words: str) -> int:
    return cli.main(["recommend", "run.jsonl", *words])


def test_right_backends_come_first_with_their_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert recommend("--needs", "sinks,block_size=16") == 0
    right, wrong = capsys.readouterr().out.split("\n\n")[1:]
    assert right.splitlines() == snapshot(
        [
            "right in every case that needs all of this",
            "  Good: 1 case; 2.00 ms (geometric mean over 1 case)",
        ]
    )
    assert wrong.splitlines() == [
        "wrong",
        snapshot("  Liar: wrong in 1 of 1"),
        snapshot("    finding: the sinks are ignored (1 case, check numerics)"),
    ]


def test_the_exit_code_states_whether_a_backend_is_right() -> None:
    assert recommend("--needs", "lse") == 1  # declared by one, measured of none
    assert recommend("--needs", "sinks", "--needs", "block_size=16") == 0


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        (
            "sinsk",
            snapshot("error: no case of these runs needs 'sinsk'; did you mean 'sinks'? (known: ...)\n"),
        ),
        (" ,", snapshot("error: --needs names nothing; give features and forms, such as sinks,block_size=16\n")),
    ],
)
def test_a_need_that_no_case_has_is_a_wrong_question(
    plain: Callable[[str], str], capsys: pytest.CaptureFixture[str], needs: str, words: str
) -> None:
    assert recommend("--needs", needs) == 2
    assert plain(capsys.readouterr().err) == words


def test_json_has_the_same_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert recommend("--needs", "sinks", "--format", "json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["needs"] == ["sinks"]
    ((good, liar),) = (run["backends"] for run in report["runs"])
    assert (good["backend"], good["standing"], good["right"]) == ("Good", "right", 1)
    assert good["median_ns"] == pytest.approx(2e6)
    assert (liar["backend"], liar["standing"], liar["wrong"]) == ("Liar", "wrong", 1)
    assert liar["findings"] == snapshot(["the sinks are ignored (1 case, check numerics)"])
