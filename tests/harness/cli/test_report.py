"""``attncheck report`` of run files: in every format, in sections, by needs; where it writes and what it loads."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from attncheck.harness.cli.common import STEP_SUMMARY
from attncheck.harness.cli.reports import RUN_FORMATS
from attncheck.harness.run.expectations import load_expectations
from attncheck.reports.formats import FORMATS
from attncheck.reports.run_file.header import BackendInfo, SuiteInfo


@pytest.fixture
def run_file(folder, monkeypatch, header, make_record, write_run):
    """``run.jsonl``: a backend that is right with sinks, and timed; and one that ignores them."""
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
        folder / "run.jsonl",
        header.model_copy(update=header_fields),
        make_record("passed", **good),
        make_record("passed", check="timing", timing=timing, **good),
        make_record("failed", finding="the sinks are ignored", concerns=("sinks",), **liar),
    )


@pytest.fixture
def report(run_file, typed):
    return lambda words="": typed(f"report run.jsonl {words}")


def test_each_format_is_the_named_one(report):
    def printed(form):
        done = report(f"--format {form}")
        assert done.code == 0
        return done.out

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
def test_named_sections_alone_are_printed_and_by_default_those_of_the_terminal(report, form):
    printed = report(f"--section verdict --section failures --format {form}").out
    assert printed.index("1 finding in 1 of 1 case") < printed.index("Repeat:")
    assert "median" not in printed
    assert report(f"--section graph-levels --format {form}").out == "The run has no graph-levels.\n"
    assert "Circumstances" not in report().out
    assert "\nCircumstances\n" in report("--verbose").out


def test_the_page_needs_its_extra(report, folder, monkeypatch):
    pytest.importorskip("matplotlib")
    assert report("--format html --output page.html").code == 0
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>")
    assert "the sinks are ignored" in page
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = report("--format html")
    assert (done.code, "pip install 'attncheck[report]'" in done.err) == (2, True)


def test_output_goes_before_the_summary_of_a_step_and_that_before_stdout(report, folder, monkeypatch):
    summary, own = folder / "summary.md", folder / "own.md"
    for path in (summary, own):
        path.write_text("of before\n", encoding="utf-8")
    monkeypatch.setenv(STEP_SUMMARY, str(summary))
    first = report("--format github --output own.md")
    assert own.read_text(encoding="utf-8").startswith("## attncheck: failed")
    assert summary.read_text(encoding="utf-8") == "of before\n"
    second = report("--format github")
    assert summary.read_text(encoding="utf-8").startswith("of before\n## attncheck: failed")
    assert [line[:8] for line in (first.out + second.out).splitlines()] == ["::error "] * 2
    monkeypatch.setenv(STEP_SUMMARY, str(folder / "nowhere" / "summary.md"))
    done = report("--format github")
    assert done.code == 2
    assert f"${STEP_SUMMARY} {folder}/nowhere/summary.md cannot be written" in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--section verdict --format json", "formats with sections are terminal, markdown, github"),
        ("run.jsonl --format pytest-benchmark", "--format pytest-benchmark takes one run, and 2 are given"),
        ("--format html", "--format html is not for a terminal; give --output FILE"),
        ("--needs sinks --format html --output x", "--needs cannot be combined with --format html"),
        ("--needs sinks --section table", "leave out --section"),
        ("--needs sinsk", "no case of these runs needs 'sinsk'; did you mean 'sinks'?"),
        ("--needs ' ,'", "--needs names nothing; give features and forms, such as sinks,block_size=16"),
        ("--needs sinks --device A100", "--device A100: nothing was measured on it"),
        ("--device cpu", "give --needs, or leave it out"),
        *((f"--format {form} --output ./run.jsonl", "is one of the runs that are read") for form in FORMATS),
    ],
)
def test_what_is_no_report_is_refused(report, run_file, monkeypatch, words, message):
    before = run_file.read_bytes()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    done = report(words)
    assert done.code == 2
    assert message in done.err
    assert run_file.read_bytes() == before


ALL = """\
import sys
from attncheck.harness.cli.app import main
for words in sys.argv[1:]:
    assert main(words.split()) == 0
loaded = {name.partition('.')[0] for name in sys.modules}
assert not loaded & {'torch', 'jinja2', 'matplotlib'}, loaded
assert 'scipy.stats' not in sys.modules
"""


def test_no_format_loads_torch_and_none_of_text_what_the_page_takes(run_file):
    forms = set(RUN_FORMATS) - {"html"}
    words = [f"report run.jsonl --format {form} --output out" for form in forms]
    commands = [*words, "report run.jsonl --needs sinks", "compare run.jsonl other.jsonl"]
    Path("other.jsonl").write_bytes(run_file.read_bytes())
    done = subprocess.run([sys.executable, "-c", ALL, *commands], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("form", [name for name in FORMATS if name != "pytest-benchmark"])
def test_a_file_whose_name_is_no_text_is_reported(run_file, typed, form):
    strange = run_file.rename(run_file.with_name(os.fsdecode(b"\xff.jsonl")))
    assert typed(f"report --format {form} --output report", strange).code == 0
    assert Path("report").read_text(encoding="utf-8")


def test_needs_name_right_backends_with_their_time(report):
    done = report("--needs sinks --needs block_size=16")
    assert done.code == 0
    assert done.out.partition("\n\n")[2] == snapshot("""\
accepts it and returns wrong output
  Liar: wrong in 1 of 1
    finding: the sinks are ignored (1 case)

right in every case that needs all of this
  Good: 1 case; 2.00 ms (geometric mean over 1 case)
""")
    ((liar, good),) = (
        device["backends"] for device in json.loads(report("--needs sinks --format json").out)["devices"]
    )
    assert (good["backend"], good["standing"], good["right"]) == ("Good", "right", 1)
    assert good["median_ns"] == pytest.approx(2e6)
    assert (liar["backend"], liar["standing"], liar["wrong"]) == ("Liar", "wrong", 1)
    assert liar["findings"] == ["the sinks are ignored (1 case)"]
    assert report("--needs lse").code == 1  # declared by one, measured of none


def test_all_files_of_a_device_have_one_answer(folder, header, make_record, write_run, typed):
    """Which is no, if a backend is right for each need alone."""
    for name, outcome, place in (
        ("reference", "passed", "a"),
        ("Wrong", "passed", "b"),
        ("reference", "failed", "faults"),
    ):
        later = header.model_copy(update={"started": f"2026-01-02T00:00:0{len(place)}+00:00"})
        records = [make_record(outcome, backend=name, case_id=need, needs=(need,)) for need in ("sinks", "lse")]
        write_run(folder / "runs" / place / "run.jsonl", later, *records)
    words = "report --runs runs --skip faults --device cpu --needs"
    done = typed(f"{words} sinks")
    assert done.code == 0
    assert done.out.count("which backend is right") == 1
    assert {"reference: 1 case", "Wrong: 1 case"} <= {line.strip() for line in done.out.splitlines()}
    assert typed(f"{words} sinks,lse").code == 1


def test_a_wrong_backend_is_green_with_the_expectations_written_from_its_run(here, folder, typed):
    options = "--backend ./wrong.py:Wrong --check numerics --check lse"
    printed = here(f"{options} --output run.jsonl").out
    assert typed("report run.jsonl --format expect --output known.yaml").code == 0
    assert here(f"{options} --expect known.yaml").code == 0
    assert {entry.expectation.check for entry in load_expectations(folder / "known.yaml")} == {"numerics"}
    assert {*printed.splitlines()[1:-1]} <= {*typed("report run.jsonl").out.splitlines()}
