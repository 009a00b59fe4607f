"""``attncheck report --needs``: its words, its exit codes, and JSON."""

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


def report(*words: str) -> int:
    return cli.main(["report", "run.jsonl", *words])


def test_right_backends_come_first_with_their_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert report("--needs", "sinks,block_size=16") == 0
    wrong, right = capsys.readouterr().out.split("\n\n")[1:]
    assert right.splitlines() == snapshot(
        [
            "right in every case that needs all of this",
            "  Good: 1 case; 2.00 ms (geometric mean over 1 case)",
        ]
    )
    assert wrong.splitlines() == [
        "accepts it and returns wrong output",
        snapshot("  Liar: wrong in 1 of 1"),
        snapshot("    finding: the sinks are ignored (1 case)"),
    ]


def test_the_exit_code_states_whether_a_backend_is_right() -> None:
    assert report("--needs", "lse") == 1  # declared by one, measured of none
    assert report("--needs", "sinks", "--needs", "block_size=16") == 0


def test_right_for_each_alone_is_not_right_together(
    header: RunHeader, make_record: Callable[..., Record], write_run: Callable[..., Path]
) -> None:
    records = [make_record("passed", case_id=need, needs=(need,)) for need in ("sinks", "lse")]
    write_run(Path("each.jsonl"), header, *records)
    assert cli.main(["report", "each.jsonl", "--needs", "sinks,lse"]) == 1


def test_all_files_of_a_device_have_one_answer(
    header: RunHeader,
    make_record: Callable[..., Record],
    write_run: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for folder, name in (("a", "reference"), ("b", "Wrong"), ("faults", "reference")):
        Path(folder).mkdir()
        outcome = "failed" if folder == "faults" else "passed"
        later = header.model_copy(update={"started": f"2026-01-02T00:00:0{len(folder)}+00:00"})
        write_run(Path(folder, "run.jsonl"), later, make_record(outcome, backend=name, needs=("sinks",)))
    words = ["--runs", ".", "--needs", "sinks", "--skip", "faults", "--device", "cpu"]
    assert cli.main(["report", *words]) == 0
    text = capsys.readouterr().out
    assert text.count("which backend is right") == 1
    assert {"reference: 1 case", "Wrong: 1 case"} <= {line.strip() for line in text.splitlines()}
    assert cli.main(["report", *words[:-1], "A100"]) == 2
    assert "--device A100: nothing was measured on it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--needs", "sinks", "--format", "html"], ["--needs", "sinks", "--section", "table"], ["--device", "cpu"]],
)
def test_options_that_exclude_each_other_are_refused(words: list[str]) -> None:
    assert report(*words) == 2


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
    assert report("--needs", needs) == 2
    assert plain(capsys.readouterr().err) == words


def test_json_has_the_same_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert report("--needs", "sinks", "--format", "json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["needs"] == ["sinks"]
    ((liar, good),) = (device["backends"] for device in answer["devices"])
    assert (good["backend"], good["standing"], good["right"]) == ("Good", "right", 1)
    assert good["median_ns"] == pytest.approx(2e6)
    assert (liar["backend"], liar["standing"], liar["wrong"]) == ("Liar", "wrong", 1)
    assert liar["findings"] == snapshot(["the sinks are ignored (1 case)"])
