"""``attncheck report`` in every format: where it writes, what it refuses, and what it loads."""

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
from attncheck.reports.formats import FORMATS
from attncheck.reports.run_file.header import RunHeader, SuiteInfo
from attncheck.reports.run_file.records import Record


@pytest.fixture
def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    header: RunHeader,
    make_record: Callable[..., Record],
    write_run: Callable[..., Path],
) -> Path:
    """A run of one right and timed answer and one wrong one, in the folder to type in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(STEP_SUMMARY, raising=False)
    suite = SuiteInfo(name="mine", ref="suites/mine.yaml", cases=2)
    header_fields = {"suites": (suite,), "checks": ("timing",), "backends": header.backends[:1]}
    latency = {"part": "forward", "clock": "host", "median_ns": 2e6, "low_ns": 1.9e6, "high_ns": 2.1e6}
    timing = {"latencies": [latency | {"samples_ns": [2_000_000, 2_000_000], "is_settled": True}]}
    return write_run(
        tmp_path / "run.jsonl",
        header.model_copy(update=header_fields),
        make_record("passed", suite="mine", case_id="good", check="timing", timing=timing),
        make_record("failed", suite="mine", case_id="bad", check="timing"),
    )


def report(*words: str) -> int:
    return cli.main(["report", "run.jsonl", *words])


@pytest.mark.parametrize("form", ["terminal", "markdown", "github"])
def test_named_sections_alone_are_printed(run: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    assert report("--section", "verdict", "--section", "failures", "--format", form) == 0
    printed = capsys.readouterr().out
    assert printed.index("1 finding in 1 of 2 cases") < printed.index("Repeat:")
    assert "timing" in printed
    assert "median" not in printed
    assert report("--section", "graph-levels", "--format", form) == 0
    assert capsys.readouterr().out == "The run has no graph-levels.\n"


def test_sections_are_of_text_formats(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report("--section", "verdict", "--format", "json") == 2
    assert "formats with sections are terminal, markdown, github" in capsys.readouterr().err


def test_verbose_leaves_nothing_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report() == 0
    assert "Circumstances" not in capsys.readouterr().out
    assert report("--verbose") == 0
    assert "\nCircumstances\n" in capsys.readouterr().out


def test_each_format_is_the_named_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(form: str) -> str:
        assert report("--format", form) == 0
        return capsys.readouterr().out

    assert ET.fromstring(printed("junit")).get("failures") == "1"
    assert [each["group"] for each in json.loads(printed("pytest-benchmark"))["benchmarks"]] == ["mine/good forward"]
    assert printed("terminal").splitlines()[-1] == "failed: 1 backend, 2 cases: 1 failed, 1 right"
    assert printed("markdown").startswith("# attncheck report\n")
    summary = printed("github")
    assert summary.startswith("## attncheck: failed: 1 backend, 2 cases: 1 failed, 1 right\n")
    annotation = summary.splitlines()[-1]
    assert annotation.startswith(
        "::error file=suites/mine.yaml,title=reference%3A 7 of 40 rows::1 case, check timing%0A"
    )
    assert "%0Amine/bad: 7 of 40 rows%0Arepeat: attncheck run " in annotation


def test_the_page_is_written_where_its_extra_is_installed(run: Path) -> None:
    pytest.importorskip("matplotlib")
    assert report("--format", "html", "--output", "page.html") == 0
    page = (run.parent / "page.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>")
    assert "7 of 40 rows" in page


def test_without_its_extra_a_message_states_what_to_install(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report("--format", "html") == 2
    printed = capsys.readouterr().err
    assert "matplotlib" in printed
    assert "pip install 'attncheck[report]'" in printed


def test_a_step_summary_is_added_to_what_is_there(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = run.parent / "summary.md"
    summary.write_text("of a step before\n", encoding="utf-8")
    monkeypatch.setenv(STEP_SUMMARY, str(summary))
    assert report("--format", "github") == 0
    assert summary.read_text(encoding="utf-8").startswith("of a step before\n## attncheck: failed")
    printed = capsys.readouterr().out
    assert printed.startswith("::error ")
    assert "## attncheck" not in printed


def test_output_goes_before_the_step_summary_and_is_written_anew(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(STEP_SUMMARY, str(run.parent / "summary.md"))
    (run.parent / "own.md").write_text("old", encoding="utf-8")
    assert report("--format", "github", "--output", "own.md") == 0
    assert (run.parent / "own.md").read_text(encoding="utf-8").startswith("## attncheck: failed")
    assert not (run.parent / "summary.md").exists()
    assert capsys.readouterr().out.startswith("::error ")


def test_a_step_summary_that_cannot_be_written_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(STEP_SUMMARY, str(run.parent / "nowhere" / "summary.md"))
    assert report("--format", "github") == 2
    assert f"${STEP_SUMMARY} {run.parent}/nowhere/summary.md cannot be written" in capsys.readouterr().err


def test_a_format_of_one_run_refuses_several(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report("run.jsonl", "--format", "pytest-benchmark") == 2
    printed = capsys.readouterr().err
    assert "--format" in printed
    assert printed == snapshot(
        "error: --format pytest-benchmark takes one run, and 2 are given; convert each by itself, and let `pytest-benchmark compare` read the files together\n"
    )
    assert report("run.jsonl", "--format", "junit") == 0


@pytest.mark.parametrize("form", FORMATS)
def test_no_run_is_overwritten(run: Path, form: str) -> None:
    before = run.read_bytes()
    assert report("--format", form, "--output", "./run.jsonl") == 2
    assert run.read_bytes() == before


def test_a_page_is_not_printed_on_a_terminal(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert report("--format", "html") == 2
    assert capsys.readouterr().err == snapshot("error: --format html is not for a terminal; give --output FILE\n")


@pytest.mark.parametrize("form", ["junit", "github", "pytest-benchmark", "markdown", "terminal"])
def test_no_format_loads_torch_and_none_of_text_what_the_page_takes(run: Path, form: str) -> None:
    program = (
        "import sys\n"
        "from attncheck.harness.cli.app import main\n"
        f"assert main(['report', 'run.jsonl', '--format', '{form}', '--output', 'out']) == 0\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'torch', 'numpy', 'scipy', 'jinja2', 'matplotlib'}, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=run.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("form", [name for name in FORMATS if name != "pytest-benchmark"])
def test_a_file_whose_name_is_no_text_is_reported(run: Path, form: str, tmp_path: Path) -> None:
    strange = run.rename(run.with_name(os.fsdecode(b"\xff.jsonl")))
    assert cli.main(["report", str(strange), "--format", form, "--output", "report"]) == 0
    assert (tmp_path / "report").read_text(encoding="utf-8")
