"""Reports for people: everything that matters is there and stays text; the repro line; utilities of providers."""

import json
import re
import subprocess
from typing import get_args

import pytest

from attncheck.reports.analysis.places import place_to_show
from attncheck.reports.analysis.repro import repro_command
from attncheck.reports.analysis.summary import summarise
from attncheck.reports.analysis.utilities import function_rows, notes_by_heading
from attncheck.reports.data import runs_document
from attncheck.reports.document.blocks import BREAK, Code, Folded, Item, Items, SectionName, Span, Table
from attncheck.reports.document.run import SECTIONS
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.markdown import run as markdown
from attncheck.reports.markdown import text as md
from attncheck.reports.markdown.run import ORDER as OF_MARKDOWN
from attncheck.reports.run_file.header import BackendInfo, SuiteInfo
from attncheck.reports.run_file.records import BUDGET_SHARE, Passed
from attncheck.reports.run_file.store import Run, read_run
from attncheck.reports.terminal import run as terminal
from attncheck.reports.terminal import text as plain
from attncheck.reports.terminal.columns import Style
from attncheck.reports.terminal.run import ORDER as OF_TERMINAL


def paragraph(text, first):
    """Return the paragraph that begins with ``first``, its lines joined."""
    (found,) = (part for part in text.split("\n\n") if part.startswith(first))
    return " ".join(found.split())


def row(text, first):
    """The words of the line that begins with ``first``."""
    return next(line.split() for line in text.splitlines() if line.startswith(first))


@pytest.mark.parametrize("width", [60, 120])
def test_lines_keep_to_the_requested_width(failing_run, make, width):
    """A path and the line that repeats a case are pasted, and stay whole."""
    path = "/" + "a/" * 60 + "mine.py"
    names = [f"backend{number}" for number in range(6)]
    records = [
        *failing_run.records,
        make("errored", case_id="p", traceback=f'  File "{path}", line 3, in forward', message=path),
        *(make("passed", backend=name, suite=suite) for name in names for suite in ("smoke", "mine")),
    ]
    backends = (*failing_run.header.backends, *(BackendInfo(name=name, ref="b") for name in names))
    header = failing_run.header.model_copy(update={"backends": backends})
    long = [line for line in terminal.render(header, records, width=width).splitlines() if len(line) > width]
    assert [line for line in long if "repeat: " not in line and path not in line] == []
    whole = terminal.render(header, records, width=width, verbose=True)
    commands = ("repeat: ", "attncheck run", path)
    shown = [line for line in whole.splitlines() if not any(command in line for command in commands)]
    assert width * 0.65 < max(len(" ".join(line.split())) for line in shown) <= width  # and use it


def test_a_table_that_is_too_wide_is_turned_without_a_loss(header, make):
    checks = ("numerics", "lse", "cache_write", "containment", "cudagraph", "refusals")
    header = header.model_copy(update={"checks": checks})
    records = [make("passed", check=check) for check in checks[:-1]]
    records += [make("failed", check="numerics", case_id="b", figures={BUDGET_SHARE: 2.5})]
    table = terminal.render(header, records, width=100).split("\n\n")[1]
    assert row(table, "reference") == ["reference", "1/2", "1/1", "1/1", "1/1", "1/1", "2.50", "-"]
    listed = terminal.render(header, records, width=60).split("\n\n")[1]
    assert row(listed, "numerics") == ["numerics", "1/2"]
    assert row(listed, "worst") == ["worst", "error", "/", "allowed", "2.50"]
    others = [f"a_{number}" for number in range(12)]
    records += [make("passed", backend=name, backend_ref=name) for name in others]
    backends = (*header.backends, *(BackendInfo(name=name, ref=name) for name in others))
    header = header.model_copy(update={"backends": backends})
    text = terminal.render(header, records, width=60)
    tables = [part for part in text.split("\n\n") if part.startswith("backend ")]
    assert all(len(line) <= 60 for table in tables for line in table.splitlines())
    assert sum(len(row(table, "numerics")) - 1 for table in tables) == 13


CAUSES = ("the window", "the soft cap", "the sinks", "the slopes", "the scale", "the mask", "the page", "the head")


def test_a_run_of_many_findings_has_a_few_examples_and_counts_the_rest(header, make):
    records = [
        make("failed", case_id=f"c{number}.{cause}", meaning=f"{cause} is ignored")
        for number, cause in enumerate((*CAUSES, "a row", "a token", "a layer"))
    ]
    records += [make("failed", case_id="more", meaning="the head is ignored")]
    records += [make("failed", backend="Wrong", meaning="the window is ignored")]
    text = terminal.render(header, records, reader="attncheck report results/one.jsonl")
    assert [line.partition(":")[0] for line in text.splitlines() if line.startswith("finding ")] == [
        "finding 1 of 11, reference",
        "finding 1 of 1, Wrong",
        *(f"finding {number} of 11, reference" for number in range(2, 10)),
    ]
    assert paragraph(text, "finding 1 of 11").startswith("finding 1 of 11, reference: the head is ignored 2 cases")
    assert text.count("example: ") + text.count("  case: ") == 3
    assert text.count("repeat: ") == 3 + 7
    assert (
        "finding 4 of 11, reference: perhaps: the sinks is ignored: 1 case, check numerics\n  repeat: attncheck" in text
    )
    assert (
        "and 2 more findings\n  in full: --verbose, or attncheck report results/one.jsonl --section failures\n" in text
    )
    assert "more finding" not in terminal.render(header, records[:10])
    detailed = terminal.render(header, [make("failed", details=["one\ntwo", "three", "four", "five"])])
    assert "\n    three\n    and 2 more lines\n    repeat: " in detailed


def test_colours_on_request_change_no_line(failing_run):
    plain = terminal.render_run(failing_run)
    assert "\033" not in plain
    coloured = terminal.render_run(failing_run, color=True)
    assert re.sub(r"\033\[\d+m", "", coloured) == plain
    for text, code in (("0/1", 31), ("1/1", 32), ("FAILED", 31), ("PASSED", 32)):
        assert f"\033[{code}m{text}\033[0m" in coloured


def test_a_cut_off_run_that_has_found_nothing_wrong_has_no_verdict(write, make):
    path = write(make("passed"))
    assert "Every selected check was examined" in markdown.render_run(read_run(path))
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    for text in (terminal.render_run(read_run(path)), markdown.render_run(read_run(path))):
        assert "unfinished: 2 backends (1 passed, 1 not examined)" in text
        assert "\npassed: " not in text
        assert "was cut off before its footer" in " ".join(text.split())


def test_the_terminal_names_the_version_of_a_foreign_backend_where_all_is_shown(header, make):
    foreign = header.backends[1].model_copy(update={"version": "0.32.0, interpreted"})
    header = header.model_copy(update={"backends": (header.backends[0], foreign)})
    records = [make("passed"), make("passed", backend="Wrong")]
    assert "conventions of reference: " not in terminal.render(header, records)
    text = terminal.render(header, records, verbose=True)
    assert "conventions of reference: " in text
    assert "conventions of Wrong (0.32.0, interpreted): " in text


def test_markdown_names_a_dozen_cases_and_counts_the_others(write, make):
    records = [make("failed", case_id=f"c{n}", meaning="the window is ignored") for n in range(14)]
    (names,) = re.findall(r"^- cases: (.*)", markdown.render_run(read_run(write(*records))), re.MULTILINE)
    assert names == ", ".join(f"smoke/c{n}" for n in range(12)) + " and 2 more"


ITEMS = Items((Item((Span("a_b: ", is_bold=True), Span("failed", is_bold=True, colour="red", is_loud=True), ": *")),))
BOTH = Folded("<More>", (ITEMS, Code("x\n  y")))


def test_every_section_has_a_name_and_a_place():
    names = get_args(SectionName)
    assert tuple(SECTIONS) == names
    assert set(OF_TERMINAL) == set(names)
    assert set(OF_MARKDOWN) == set(names) - {"verdict", "conventions"}  # these come first, and beside the backends


def test_a_format_decides_on_bold_case_colour_and_folds():
    assert md.render([BOTH]) == "### &lt;More>\n\n- **a_b: failed**: \\*\n\n```text\nx\n  y\n```"
    folded = md.render([BOTH], folds=True)
    assert folded.startswith("<details><summary>&lt;More&gt;</summary>\n\n- **a_b: failed**: \\*\n\n")
    assert plain.render([ITEMS, *BOTH.blocks[1:], BOTH], Style()) == "a_b: FAILED: *\n\n  x\n    y"
    assert plain.render([ITEMS], Style(color=True)) == "a_b: \033[31mFAILED\033[0m: *"


def test_a_table_keeps_its_cells_whatever_they_hold():
    table = Table(("name\nof it", "value"), (((Span("a|b", is_code=True), BREAK, "c|d"), "1\n2"),))
    assert md.render([table]) == "| name of it | value |\n| --- | --- |\n| `a\\|b`<br>c\\|d | 1 2 |"
    assert plain.render([table], Style()) == "name   value\nof it\na|b    1 2"


def test_variables_that_a_run_needs_or_passed_are_in_the_line(make, header):
    words = ("attncheck", "run", "--pass-env", "A,B", "--suite=x", "--pass-env=C*")
    required = {"TRITON_INTERPRET": "1", "FLAGS": "a b;c"}
    backends = (header.backends[0], header.backends[1].model_copy(update={"required_environment": required}))
    stated = header.model_copy(update={"command": words, "backends": backends})
    line = repro_command(make("failed", backend="Wrong"), stated)
    assert line.startswith("TRITON_INTERPRET=1 FLAGS='a b;c' attncheck run --backend ./wrong.py:Wrong ")
    line = repro_command(make("failed"), stated)
    assert line.startswith("attncheck run --backend reference ")
    assert line.endswith("--device cpu '--pass-env=C*' --pass-env A,B --in-process")


def test_what_a_stranger_named_reaches_no_shell(make):
    name = "a'; echo $(id) `id` *.py"
    line = repro_command(make("failed", backend_ref=name))
    done = subprocess.run(["sh", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[3] == name


ONE = "attncheck run --backend reference --suite smoke --case edge --check"
CPU = "--device cpu"
WATCHED = f"{ONE} numerics {CPU}"
ALONE = f"{WATCHED} --in-process"
STOPPED = "the case did not run, because earlier cases used up the time of the backend by --backend-timeout 8"


@pytest.mark.parametrize(
    ("outcome", "fields", "device", "line"),
    [
        ("failed", {}, "cpu", ALONE),
        ("failed", {"seed": 7}, "cpu", f"{ONE} numerics --seed 7 {CPU} --in-process"),
        ("failed", {"suite": "mine"}, "cpu", ALONE.replace("smoke", "'./my suite.yaml'")),
        ("failed", {}, "cuda:0", ALONE.replace("cpu", "cuda:0")),
        ("crashed", {}, "cuda:0", f"CUDA_LAUNCH_BLOCKING=1 {ALONE.replace('cpu', 'cuda:0')}"),
        ("crashed", {"cause": "killed by SIGSEGV"}, "cpu", ALONE),
        ("crashed", {"cause": "exited with code 0"}, "cpu", WATCHED),
        ("crashed", {"cause": "out of memory (limit 4 GiB, it took 4.13 GiB)"}, "cpu", WATCHED),
        ("timed_out", {"cause": "late; the limit was 3 s (--case-timeout 3)"}, "cpu", f"{WATCHED} --case-timeout 3"),
        ("timed_out", {"cause": STOPPED}, "cpu", f"{WATCHED} --backend-timeout 8"),
        (
            "timed_out",
            {"cause": "late; the limit was 5.4 s (what was left of --backend-timeout 8)"},
            "cpu",
            f"{WATCHED} --backend-timeout 8",
        ),
    ],
)
def test_the_line_has_the_limits_and_the_process_that_show_the_failure(make, header, outcome, fields, device, line):
    assert repro_command(make(outcome, **fields), header.model_copy(update={"device": device, "rounds": 10})) == line


TRACEBACK = """Traceback (most recent call last):
  File "/work/mine.py", line 9, in attend
  File "/usr/lib/python3.12/site-packages/torch/functional.py", line 4, in einsum
"""
DIED = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/work/src/kernel.py", line 31 in launch
  File "/work/mine.py", line 9 in attend
"""


def test_the_line_is_shown_else_the_backend_else_the_suite(make, header):
    suite = SuiteInfo(name="smoke", ref="./cases/edge.yaml{seed: 1}", cases=1)
    own = {"backend_ref": "./other.py:Mine"}
    for record, expected in (
        (make("errored", traceback=TRACEBACK, **own), ("mine.py", 9)),
        (make("errored", traceback=TRACEBACK.replace("/work", "/workshop"), **own), ("other.py", None)),
        (make("crashed", output=DIED, **own), ("src/kernel.py", 31)),
        (make("failed", backend_ref="../sibling.py:Mine"), ("cases/edge.yaml", None)),
    ):
        assert place_to_show(record, header.model_copy(update={"suites": (suite,)}), "/work") == expected


@pytest.fixture
def function(make):
    def record(name, outcome="passed", **fields):
        return make(outcome, suite="utilities", case_id=name, check="utilities", backend="mine", **fields)

    return record


@pytest.fixture
def mine(header):
    return header.model_copy(
        update={
            "suites": (*header.suites, SuiteInfo(name="utilities", ref="utilities", cases=3)),
            "checks": (*header.checks, "utilities"),
            "backends": (*header.backends, BackendInfo(name="mine", ref="./mine.py", version="7")),
        }
    )


def test_functions_of_which_the_same_is_known_share_a_sentence(function):
    gone = {"reasons": ["went away"]}
    records = [
        function("f", "unsupported", **gone),
        function("g", notes=("drift: x",)),
        function("h", "unsupported", **gone),
        function("i", notes=("upper bound: 3 maxima",)),
    ]
    figures = {"questions": 9, "equal": 7, "drifted": 2, "judged": 0, "differs": 0, "drifts": 1, "judgements": 0}
    (row,) = function_rows([function("f", figures=figures)], "mine")
    assert (row.name, row.word, *row.counts) == ("f", "drifted", "9", "7", "2", "-", "-")
    assert function_rows(records, "another") == ()
    assert notes_by_heading(function_rows(records, "mine")) == (
        ("known departures", (("g", "drift: x"),)),
        ("missing", (("f, h", "went away"),)),
        ("notes", (("i", "upper bound: 3 maxima"),)),
    )


def test_providers_are_counted_apart_from_backends(function, make, mine):
    records = [make("passed"), function("f"), function("g", "unsupported", reasons=["went"])]
    summary = summarise(records, checks=mine.checks)
    assert "mine" not in summary.backends
    assert summary.providers == ("mine",)
    assert "utilities" not in {*summary.checks, *summary.suites}
    assert (summary.cases, summary.functions) == (1, 2)
    assert not summary.gaps
    counts = "passed: 1 backend, 1 case: 1 right; 1 provider, 2 functions: 1 passed, 1 unsupported"
    assert RunValues(mine, records).closing() == counts
    text = terminal.render(mine, records)
    assert text.index("backend ") < text.index("utilities of mine 7") < text.index("passed: 1 backend")


def test_functions_that_are_wrong_are_listed_with_the_line_that_repeats_them(function, mine):
    records = [function(f"f{n}", "failed", summary=f"{n} of 9 differ") for n in range(1, 6)]
    text = terminal.render(mine, records)
    assert [n for n in range(1, 6) if f"failed  mine  f{n}\n  {n} of 9 differ\n  repeat: " in text] == [1, 2, 3]
    assert "\n\nand 2 more functions\n  in full: --verbose\n" in text


def test_the_line_that_repeats_it_names_provider_function_and_suites(function, mine):
    record = function("v0.f")
    assert isinstance(record, Passed)
    record = record.model_copy(update={"backend_ref": "./mine.py", "seed": 3})
    line = "attncheck run --provider ./mine.py --case v0.f --suite smoke --suite './my suite.yaml'"
    assert repro_command(record, mine) == f"{line} --device cpu --seed 3"


def test_what_the_time_did_not_reach_is_counted_and_is_no_full_pass(header, make):
    """Of four cases, one was examined whole, one lacks its graphs, one its outputs, and one was not begun."""
    info = header.backends[0].model_copy(update={"features": ("sinks",)})
    header = header.model_copy(update={"backends": (info, *header.backends[1:])})
    late = {"reasons": ["the case did not run, because earlier cases used up the time of the backend by --within"]}
    records = [make("passed", case_id=case, check="numerics") for case in ("whole", "part")]
    records += [make("passed", case_id="whole", check="cudagraph", graph=None)]
    records += [make("unavailable", case_id="part", check="cudagraph", **late)]
    records += [make("unavailable", case_id="none", check=check, **late) for check in ("numerics", "cudagraph")]
    records += [make("passed", case_id="built", check="builder")]
    records += [make("unavailable", case_id="built", check="numerics", **late)]
    text = terminal.render(header, records, width=200)
    assert "reference: PASSED IN PART: 2 cases right, 2 not examined" in text
    assert "not reached in time: 1 of 4 cases; of other cases, cudagraph of 1, numerics of 1" in text
    assert text.splitlines()[-1].startswith("passed in part: ")
    assert "needed by no examined case" not in text
    (data,) = json.loads(runs_document([Run("run.jsonl", header, tuple(records))]))["runs"]
    assert data["not_reached"] == {"reference": {"cases": 1, "checks": {"cudagraph": 1, "numerics": 1}}}
    records = [record for record in records if record.outcome == "passed" and record.case_id != "built"]
    text = terminal.render(header, records, width=200)
    assert "reference: PASSED: 2 cases right" in text
    assert "declared, but needed by no examined case: sinks" in text
    assert "not reached" not in text
