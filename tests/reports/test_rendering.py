"""Reports for people: everything that matters is there, it fits, and messages stay text."""

import re
from typing import Any

import pytest

from attncheck.reports.markdown import run as markdown
from attncheck.reports.run_file.header import BackendInfo
from attncheck.reports.run_file.records import BUDGET_SHARE
from attncheck.reports.run_file.store import read_run
from attncheck.reports.terminal import run as terminal

FAILURE: dict[str, Any] = {
    "backend": "Wrong",
    "case_id": "window.bfloat16-16",
    "figures": {"rows": 40, "bad_rows": 7, BUDGET_SHARE: 18.4},
    "summary": "7 of 40 rows are wrong, the first is row 3 (request 0, position 35), all heads; the largest error is 18.4 times the allowed error, at head 2",
    "meaning": "the window is one key too long (the truth with sliding_window=129 fits all rows)",
    "details": ["row 3: found 0.5, expected 0.25"],
}


@pytest.fixture
def records(make):
    return [
        make("passed", figures={BUDGET_SHARE: 0.5}),
        make("passed", check="lse"),
        make("failed", **FAILURE),
        make("errored", backend="Wrong", check="cache_write", traceback='  File "wrong.py", line 9, in forward\n    x'),
        *(make("unsupported", backend="Wrong", check="lse", case_id=f"c{i}", reasons=["no lse"]) for i in range(3)),
        make("xfailed", backend="Wrong", case_id="known", reason="upstream issue 5"),
    ]


def paragraph(text: str, first: str) -> str:
    """Return the paragraph that begins with ``first``, its lines joined."""
    (found,) = (part for part in text.split("\n\n") if part.startswith(first))
    return " ".join(found.split())


def row(text: str, first: str) -> list[str]:
    """The words of the line that begins with ``first``."""
    return next(line.split() for line in text.splitlines() if line.startswith(first))


def test_a_backend_that_cannot_run_here_is_in_the_table_if_nothing_else_was_examined(header, make):
    foreign = BackendInfo(name="third", ref="third", version="0.32.0", conventions={"lse_base": "e"})
    header = header.model_copy(update={"backends": (*header.backends, foreign)})
    unavailable = make("unavailable", backend="third")
    alone = terminal.render(header, [unavailable])
    assert "third    unavailable  1 case  needs CUDA" in alone
    assert "conventions of " not in alone
    assert "conventions of third (0.32.0): " in terminal.render(header, [unavailable], verbose=True)
    assert terminal.render(header, []).splitlines()[-1] == "not examined: 3 backends (3 not examined), 0 cases"


WIDTHS = (60, 120)


@pytest.mark.parametrize("width", WIDTHS)
def test_lines_keep_to_the_requested_width(header, records, make, width):
    """A path and the line that repeats a case are pasted, and stay whole."""
    path = "/" + "a/" * 60 + "mine.py"
    records = [*records, make("errored", case_id="p", traceback=f'  File "{path}", line 3, in forward', message=path)]
    many = [
        make("passed", backend=f"backend{number}", suite=suite) for number in range(6) for suite in ("smoke", "mine")
    ]
    infos = tuple(BackendInfo(name=f"backend{number}", ref="b") for number in range(6))
    header = header.model_copy(update={"backends": (*header.backends, *infos)})
    text = terminal.render(header, [*records, *many], width=width)
    long = [line for line in text.splitlines() if len(line) > width]
    assert [line for line in long if "repeat: " not in line and path not in line] == []
    whole = terminal.render(header, [*records, *many], width=width, verbose=True)
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


@pytest.mark.parametrize("width", WIDTHS)
def test_colours_on_request_change_no_line(header, records, width):
    plain = terminal.render(header, records, width=width)
    assert "\033" not in plain
    coloured = terminal.render(header, records, color=True, width=width)
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


def test_markdown_names_a_dozen_cases_and_counts_the_others(write, make):
    records = [make("failed", **FAILURE | {"case_id": f"c{n}"}) for n in range(14)]
    (names,) = re.findall(r"^- cases: (.*)", markdown.render_run(read_run(write(*records))), re.MULTILINE)
    assert names == ", ".join(f"smoke/c{n}" for n in range(12)) + " and 2 more"
