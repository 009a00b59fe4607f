"""``attncheck report`` of one run file: in every format, in sections, by needs; where it writes and what it loads."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from attncheck.harness.cli import app as cli
from attncheck.harness.cli.common import STEP_SUMMARY
from attncheck.harness.cli.reports import RUN_FORMATS
from attncheck.harness.run.expectations import load_expectations
from attncheck.reports.formats import FORMATS
from attncheck.reports.run_file.header import BackendInfo, RunHeader, SuiteInfo
from attncheck.reports.run_file.records import Record

Attncheck = Callable[..., int]
MakeRecord = Callable[..., Record]
WriteRun = Callable[..., Path]


@pytest.fixture
def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    header: RunHeader,
    make_record: MakeRecord,
    write_run: WriteRun,
) -> Path:
    """``run.jsonl``: a backend that is right with sinks, and timed; and one that ignores them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(STEP_SUMMARY, raising=False)
    header_fields = {
        "suites": (SuiteInfo(name="mine", ref="suites/mine.yaml", cases=1),),
        "checks": ("numerics", "timing"),
        "backends": (BackendInfo(name="Good", ref="Good"), BackendInfo(name="Liar", ref="Liar", features=("lse",))),
    }
    good, liar = (
        {"suite": "mine", "backend": name, "backend_ref": name, "needs": ("sinks", "block_size=16")}
        for name in ("Good", "Liar")
    )
    latency = {"part": "forward", "clock": "host", "median_ns": 2e6, "low_ns": 1.9e6, "high_ns": 2.1e6}
    timing = {"latencies": [latency | {"samples_ns": [2_000_000, 2_000_000], "is_settled": True}]}
    return write_run(
        tmp_path / "run.jsonl",
        header.model_copy(update=header_fields),
        make_record("passed", **good),
        make_record("passed", check="timing", timing=timing, **good),
        make_record("failed", finding="the sinks are ignored", concerns=("sinks",), **liar),
    )


def report(*words: str) -> int:
    return cli.main(["report", "run.jsonl", *words])


def test_each_format_is_the_named_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(form: str) -> str:
        assert report("--format", form) == 0
        return capsys.readouterr().out

    assert ET.fromstring(printed("junit")).get("failures") == "1"
    assert [each["group"] for each in json.loads(printed("pytest-benchmark"))["benchmarks"]] == ["mine/edge forward"]
    closing = printed("terminal").splitlines()[-1]
    assert closing == snapshot("failed: 2 backends (1 failed, 1 passed), 1 case")
    assert printed("markdown").startswith("# attncheck report\n")
    summary = printed("github")
    assert summary.startswith(f"## attncheck: {closing}\n")
    assert summary.splitlines()[-1].partition("%0Arepeat: attncheck run ")[0] == snapshot(
        "::error file=suites/mine.yaml,title=Liar%3A the sinks are ignored::1 case, check numerics%0Amine/edge: 7 of 40 rows"
    )


@pytest.mark.parametrize("form", ["terminal", "markdown", "github"])
def test_named_sections_alone_are_printed(run: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    assert report("--section", "verdict", "--section", "failures", "--format", form) == 0
    printed = capsys.readouterr().out
    assert printed.index("1 finding in 1 of 1 case") < printed.index("Repeat:")
    assert "median" not in printed
    assert report("--section", "graph-levels", "--format", form) == 0
    assert capsys.readouterr().out == "The run has no graph-levels.\n"


def test_verbose_leaves_nothing_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report() == 0
    assert "Circumstances" not in capsys.readouterr().out
    assert report("--verbose") == 0
    assert "\nCircumstances\n" in capsys.readouterr().out


def test_the_page_needs_its_extra(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert report("--format", "html", "--output", "page.html") == 0
    page = Path("page.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>")
    assert "the sinks are ignored" in page
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report("--format", "html") == 2
    assert "pip install 'attncheck[report]'" in capsys.readouterr().err


def test_output_goes_before_the_summary_of_a_step_and_that_before_stdout(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, own = Path("summary.md").absolute(), Path("own.md")
    for path in (summary, own):
        path.write_text("of before\n", encoding="utf-8")
    monkeypatch.setenv(STEP_SUMMARY, str(summary))
    assert report("--format", "github", "--output", "own.md") == 0
    assert own.read_text(encoding="utf-8").startswith("## attncheck: failed")
    assert summary.read_text(encoding="utf-8") == "of before\n"
    assert report("--format", "github") == 0
    assert summary.read_text(encoding="utf-8").startswith("of before\n## attncheck: failed")
    assert [line[:8] for line in capsys.readouterr().out.splitlines()] == ["::error "] * 2
    monkeypatch.setenv(STEP_SUMMARY, str(run.parent / "nowhere" / "summary.md"))
    assert report("--format", "github") == 2
    assert f"${STEP_SUMMARY} {run.parent}/nowhere/summary.md cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--section", "verdict", "--format", "json"], "formats with sections are terminal, markdown, github"),
        (["run.jsonl", "--format", "pytest-benchmark"], "--format pytest-benchmark takes one run, and 2 are given"),
        (["--format", "html"], "--format html is not for a terminal; give --output FILE"),
        (["--needs", "sinks", "--format", "html", "--output", "x"], "--needs cannot be combined with --format html"),
        (["--needs", "sinks", "--section", "table"], "leave out --section"),
        (["--needs", "sinsk"], "no case of these runs needs 'sinsk'; did you mean 'sinks'?"),
        (["--needs", " ,"], "--needs names nothing; give features and forms, such as sinks,block_size=16"),
        (["--needs", "sinks", "--device", "A100"], "--device A100: nothing was measured on it"),
        (["--device", "cpu"], "give --needs, or leave it out"),
        *((["--format", form, "--output", "./run.jsonl"], "is one of the runs that are read") for form in FORMATS),
    ],
)
def test_what_is_no_report_is_refused(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = run.read_bytes()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert report(*words) == 2
    assert message in capsys.readouterr().err
    assert run.read_bytes() == before


def test_no_format_loads_torch_and_none_of_text_what_the_page_takes(run: Path) -> None:
    program = (
        "import sys\n"
        "from attncheck.harness.cli.app import main\n"
        "for words in sys.argv[1:]:\n"
        "    assert main(words.split()) == 0\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'torch', 'jinja2', 'matplotlib'}, loaded\n"
        "assert 'scipy.stats' not in sys.modules\n"
    )
    forms = set(RUN_FORMATS) - {"html"}
    words = [f"report run.jsonl --format {form} --output out" for form in forms]
    commands = [*words, "report run.jsonl --needs sinks", "compare run.jsonl other.jsonl"]
    Path("other.jsonl").write_bytes(run.read_bytes())
    done = subprocess.run([sys.executable, "-c", program, *commands], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("form", [name for name in FORMATS if name != "pytest-benchmark"])
def test_a_file_whose_name_is_no_text_is_reported(run: Path, form: str) -> None:
    strange = run.rename(run.with_name(os.fsdecode(b"\xff.jsonl")))
    assert cli.main(["report", str(strange), "--format", form, "--output", "report"]) == 0
    assert Path("report").read_text(encoding="utf-8")


def test_needs_name_right_backends_with_their_time(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report("--needs", "sinks", "--needs", "block_size=16") == 0
    assert capsys.readouterr().out.partition("\n\n")[2] == snapshot("""\
accepts it and returns wrong output
  Liar: wrong in 1 of 1
    finding: the sinks are ignored (1 case)

right in every case that needs all of this
  Good: 1 case; 2.00 ms (geometric mean over 1 case)
""")
    assert report("--needs", "sinks", "--format", "json") == 0
    ((liar, good),) = (device["backends"] for device in json.loads(capsys.readouterr().out)["devices"])
    assert (good["backend"], good["standing"], good["right"]) == ("Good", "right", 1)
    assert good["median_ns"] == pytest.approx(2e6)
    assert (liar["backend"], liar["standing"], liar["wrong"]) == ("Liar", "wrong", 1)
    assert liar["findings"] == ["the sinks are ignored (1 case)"]
    assert report("--needs", "lse") == 1  # declared by one, measured of none


def test_right_for_each_need_alone_is_not_right_together(
    run: Path, header: RunHeader, make_record: MakeRecord, write_run: WriteRun
) -> None:
    records = [make_record("passed", case_id=need, needs=(need,)) for need in ("sinks", "lse")]
    write_run(Path("each.jsonl"), header, *records)
    assert cli.main(["report", "each.jsonl", "--needs", "sinks,lse"]) == 1


def test_all_files_of_a_device_have_one_answer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    header: RunHeader,
    make_record: MakeRecord,
    write_run: WriteRun,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
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


def test_a_wrong_backend_is_green_with_the_expectations_written_from_its_run(
    here: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--backend", "./wrong.py:Wrong", "--check", "numerics", "--check", "lse")
    assert here(*options, "--output", "run.jsonl") == 1
    printed = capsys.readouterr().out
    assert report("--format", "expect", "--output", "known.yaml") == 0
    assert here(*options, "--expect", "known.yaml") == 0
    assert {entry.expectation.check for entry in load_expectations(folder / "known.yaml")} == {"numerics"}
    capsys.readouterr()
    assert report() == 0
    assert set(printed.splitlines()[1:-1]) <= set(capsys.readouterr().out.splitlines())
