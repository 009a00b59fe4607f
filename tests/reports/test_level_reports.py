"""CUDA-graph levels of many cases: numbers add up, cases have names, and what is alike is listed once."""

import re
from collections.abc import Callable
from typing import Any

from attncheck.reports.analysis.graph_levels import level_rows, unmeasured_cases
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import BUDGET_SHARE, Record
from attncheck.reports.terminal import run as terminal

Make = Callable[..., Record]
AsMarkdown = Callable[..., str]

SINGLE = "UNIFORM_SINGLE_TOKEN_DECODE"
PLACES = "host read: .item() at wrong.py:9 in forward; host read: .item() at wrong.py:12 in forward"


def broken(declared: str, reason: str = "figures 7", *, behind: int = 3) -> dict[str, Any]:
    """Levels of a backend that is right in ``decode``, breaks at ``verify``, and ``behind`` probes are not run."""
    probes = [
        {"name": "decode", "level": SINGLE, "outcome": "passed"},
        {"name": "verify", "level": "UNIFORM_BATCH", "outcome": "failed", "reason": reason},
    ]
    for number in range(behind):
        level = "UNIFORM_BATCH" if number == 0 else "ALWAYS"
        probes.append({"name": f"probe {number}", "level": level, "outcome": "not run", "reason": "'verify' broke"})
    return {"declared": declared, "measured": SINGLE, "recorder": "emulated", "probes": probes}


def test_places_of_one_violation_are_joined_wherever_a_reason_is_shown(
    graph: Make, graph_header: RunHeader, as_markdown: AsMarkdown
) -> None:
    record = graph("failed", broken("ALWAYS", PLACES), summary=f"declared ALWAYS: {PLACES}")
    for text in (terminal.render(graph_header, [record]), as_markdown(record)):
        assert "wrong.py:9, 12 in forward" in text
        assert "wrong.py:12 in" not in text


def test_how_a_backend_was_measured_is_stated_once(
    graph: Make, graph_header: RunHeader, as_markdown: AsMarkdown
) -> None:
    note = "over huge numbers, since NaN | leaks"
    records = [
        graph("passed", broken(declared) | {"notes": [note]}, backend="Wrong", case_id=declared)
        for declared in (SINGLE, "NEVER")
    ]
    assert note not in terminal.render(graph_header, records)
    assert terminal.render(graph_header, records, verbose=True).count(note) == 1
    text = as_markdown(graph("passed", broken(SINGLE)), *records)
    assert text.count("huge") == 1
    assert "\n\n- Wrong: over huge numbers, since NaN \\| leaks.\n\n" in text


def test_padding_rows_are_a_note_beside_the_level_and_split_no_row(graph: Make, as_markdown: AsMarkdown) -> None:
    states = ("NaN or Inf", "finite", "not examined", "NaN or Inf")
    records = [
        graph("passed", broken(SINGLE) | {"padding_rows": state}, case_id=str(index))
        for index, state in enumerate(states)
    ]
    (row,) = level_rows(records)
    assert (row.padding_rows, row.cases, len(row.results)) == ("NaN or Inf", 4, 1)
    note = "padding rows of the output hold NaN or Inf; harmless unless a later layer reduces over all rows"
    assert as_markdown(*records).count(note) == 1
    assert "padding rows" not in as_markdown(*records[1:3])


def test_a_reason_that_rows_of_a_backend_share_is_shown_once(graph: Make, as_markdown: AsMarkdown) -> None:
    records = [
        graph("passed", broken("NEVER"), case_id="a"),
        graph("passed", broken("NEVER"), case_id="b"),
        graph("passed", broken("NEVER"), case_id="c"),
        graph("passed", broken("UNIFORM_BATCH", "figures 9"), case_id="d"),
        graph("passed", broken("UNIFORM_BATCH", "figures 9"), case_id="e"),
        graph("passed", broken(SINGLE), case_id="f"),
        graph("passed", broken(SINGLE), backend="Wrong", case_id="f"),
    ]
    rows = level_rows(records)
    assert [(row.backend, row.graph.declared, row.repeats) for row in rows] == [
        ("reference", "NEVER", False),
        ("reference", SINGLE, True),
        ("reference", "UNIFORM_BATCH", False),
        ("Wrong", SINGLE, False),
    ]
    reasons = re.findall(r"broke at verify \(UNIFORM_BATCH\): ([\w ]+) \|", as_markdown(*records))
    assert reasons == ["figures 7", "as above", "figures 9", "figures 7"]


def test_cases_without_a_level_are_counted_below_the_rows_of_their_backend(
    make: Make, graph: Make, as_markdown: AsMarkdown
) -> None:
    records = [
        graph("passed", broken(SINGLE), case_id="a"),
        graph("errored", None, case_id="b"),
        graph("xfailed", None, case_id="c", underlying="errored"),
        graph("unsupported", None, case_id="d"),
        graph("crashed", None, case_id="f"),
        make("errored", case_id="e"),
        graph("passed", broken(SINGLE), backend="Wrong", case_id="a"),
    ]
    assert unmeasured_cases(records) == {"reference": {"errored": 2, "crashed": 1}}
    text = as_markdown(*records)
    assert "| reference | - | **errored** | 2 | - | - | - | - |\n" in text
    assert f"| reference | - | **crashed** | 1 | - | - | - | - |\n| Wrong | {SINGLE} |" in text


def test_a_backend_without_any_level_is_named_beside_those_that_have_one(graph: Make, as_markdown: AsMarkdown) -> None:
    records = [graph("errored", None), graph("passed", broken("NEVER"), backend="Wrong")]
    assert "| Wrong | NEVER |" in (text := as_markdown(*records))
    assert "| reference | - | **errored** | 1 | - | - | - | - |\n\n" in text


def test_markdown_lists_probes_that_were_not_run_in_one_line(graph: Make, as_markdown: AsMarkdown) -> None:
    text = as_markdown(
        graph("passed", broken("NEVER", behind=4)), graph("passed", broken(SINGLE, behind=1), case_id="b")
    )
    assert "| 4 probes behind it | UNIFORM_BATCH to ALWAYS | not run | 'verify' broke |\n\n" in text
    assert "| probe 0 | UNIFORM_BATCH | not run | 'verify' broke |\n\n" in text
    assert "| probe 1 |" not in text


def test_markdown_has_one_section_for_probes_that_came_out_alike(graph: Make, as_markdown: AsMarkdown) -> None:
    text = as_markdown(
        graph("passed", broken("NEVER"), case_id="a"),
        graph("passed", broken(SINGLE), case_id="b"),
        graph("passed", broken("NEVER"), case_id="c"),
    )
    assert f"### reference: declared NEVER or {SINGLE}, measured {SINGLE}, 3 cases\n" in text
    assert f"- Cases that declare NEVER: smoke/a, smoke/c\n- Cases that declare {SINGLE}: smoke/b\n" in text
    assert text.count("| probe | level | outcome | reason |") == 1


def test_markdown_lists_a_few_of_many_reasons_and_names_all_cases(graph: Make, as_markdown: AsMarkdown) -> None:
    text = as_markdown(*(graph("passed", broken("NEVER", f"figures {n}"), case_id=f"c{n}") for n in range(7)))
    assert "| figures 4 | smoke/c4 |\n| 2 more that differ in figures alone | smoke/c5, smoke/c6 |\n" in text
    assert "figures 5" not in text


def test_markdown_lists_every_reason_that_differs_in_more_than_figures(graph: Make, as_markdown: AsMarkdown) -> None:
    reasons = [*(f"worst {n}.5e+03 budgets" for n in range(6)), "no row written"]
    text = as_markdown(*(graph("passed", broken("NEVER", why), case_id=f"c{n}") for n, why in enumerate(reasons)))
    assert "| no row written | smoke/c6 |\n" in text
    assert (
        "| worst 3.5e+03 budgets | smoke/c3 |\n| 2 more that differ in figures alone | smoke/c4, smoke/c5 |\n" in text
    )


def test_the_column_of_errors_is_there_when_any_was_measured(
    make: Make, graph: Make, graph_header: RunHeader, as_markdown: AsMarkdown
) -> None:
    for records, count in (
        ([graph("passed", broken("NEVER"))], 0),
        ([graph("passed", broken("NEVER")), make("passed", backend="Wrong", figures={BUDGET_SHARE: 0.5})], 1),
    ):
        assert terminal.render(graph_header, records).count("allowed") == count
        assert as_markdown(*records).count("worst error / allowed") == count
    table = terminal.render(graph_header, [graph("passed", broken("NEVER"))]).split("\n\n")[1]
    assert [row.split() for row in table.splitlines()] == [
        ["backend", "cudagraph", "not"],
        ["examined"],
        ["reference", "1/1", "-"],
    ]
