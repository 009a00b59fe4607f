"""CUDA-graph levels in reports: one row for what is alike, every probe listed, nothing listed twice."""

import re
from typing import Any

import pytest

from attncheck.reports.analysis.graph_levels import level_rows, unmeasured_cases
from attncheck.reports.run_file.graph_levels import GraphProbe
from attncheck.reports.run_file.records import BUDGET_SHARE
from attncheck.reports.terminal import run as terminal

SINGLE = "UNIFORM_SINGLE_TOKEN_DECODE"
PROBES = {"decode, one bucket": SINGLE, "decode, fewer requests": SINGLE, "1+K tokens": "UNIFORM_BATCH"}
READ = "host read: .item() at wrong.py:9 in forward"


def levels(declared: str, measured: str | None, *outcomes: str, reason: str = READ, **fields: Any) -> dict[str, Any]:
    """Levels with one probe an outcome; whatever did not pass did so for ``reason``."""
    probes = [
        {"name": name, "level": level, "outcome": outcome, "reason": "" if outcome == "passed" else reason}
        for (name, level), outcome in zip(PROBES.items(), outcomes, strict=False)
    ]
    return {"declared": declared, "measured": measured, "recorder": "emulated", "probes": probes} | fields


GOOD = levels(SINGLE, SINGLE, "passed", "passed", "failed")
ROOMY = levels(SINGLE, "UNIFORM_BATCH", "passed", "passed", "passed")
BROKEN = levels("UNIFORM_BATCH", SINGLE, "passed", "passed", "failed")
UNSEEN = levels(SINGLE, None, "passed", "not examined", "not run", reason="a Triton launch outside a custom op")
SHARED = GOOD | {"played_in_full": "smoke/a"}


def test_what_is_alike_is_one_row_and_most_cases_come_first(make, graph):
    records = [
        make("passed", backend="Wrong"),
        graph("passed", ROOMY, case_id="a"),
        graph("passed", GOOD, case_id="b"),
        graph("passed", GOOD, case_id="c"),
        graph("failed", BROKEN, backend="Wrong", case_id="a"),
    ]
    rows = level_rows(records)
    assert [(row.backend, row.graph.declared, row.graph.measured, row.cases) for row in rows] == [
        ("Wrong", "UNIFORM_BATCH", SINGLE, 1),
        ("reference", SINGLE, SINGLE, 2),
        ("reference", SINGLE, "UNIFORM_BATCH", 1),
    ]
    assert rows[1].results[0].cases == ("smoke/b", "smoke/c")
    assert rows[1].broke_at == GraphProbe(name="1+K tokens", level="UNIFORM_BATCH", outcome="failed", reason=READ)
    assert [row.head_room for row in rows] == [None, None, "UNIFORM_BATCH"]
    assert [row.falls_short for row in rows] == [True, False, False]
    assert [row.probes for row in (rows[1], *level_rows([graph("unsupported", UNSEEN)]))] == ["2/3", "1/1"]


@pytest.mark.parametrize(
    ("other", "rows"),
    [
        (GOOD, 1),
        (levels(SINGLE, SINGLE, "passed", "passed", "failed", reason="another"), 1),
        (levels(SINGLE, "NEVER", "passed", "passed", "failed"), 2),
        (levels("NEVER", SINGLE, "passed", "passed", "failed"), 2),
        (levels(SINGLE, SINGLE, "passed", "passed", "not examined"), 2),
        (levels(SINGLE, SINGLE, "passed", "failed", "failed"), 2),
    ],
)
def test_rows_differ_in_levels_and_in_outcomes_of_probes(graph, other, rows):
    assert len(level_rows([graph("passed", GOOD), graph("passed", other, case_id="b")])) == rows


def test_reasons_that_differ_are_one_row_and_the_commonest_comes_first(graph):
    found = [levels("NEVER", "NEVER", "failed", reason=f"worst {figure} budgets") for figure in (7, 9, 9)]
    (row,) = level_rows([graph("passed", one, case_id=name) for name, one in zip("abc", found, strict=True)])
    assert row.broke_at is not None
    assert row.broke_at.reason == "worst 9 budgets"
    assert [result.cases for result in row.results] == [("smoke/b", "smoke/c"), ("smoke/a",)]
    assert (row.cases, row.other_cases) == (3, 1)


@pytest.mark.parametrize(
    ("declared", "measured", "outcomes", "proven", "head_room"),
    [
        ("NEVER", None, ("passed", "passed", "not examined"), SINGLE, SINGLE),
        (SINGLE, None, ("passed", "passed", "not examined"), SINGLE, None),
        (SINGLE, None, ("passed", "not examined", "not run"), "NEVER", None),
        ("NEVER", SINGLE, ("passed", "passed", "failed"), SINGLE, SINGLE),
        ("ALWAYS", None, (), "NEVER", None),
    ],
)
def test_what_passed_is_proven_though_the_level_is_undecided(graph, declared, measured, outcomes, proven, head_room):
    (row,) = level_rows([graph("passed", levels(declared, measured, *outcomes))])
    assert (row.proven, row.head_room) == (proven, head_room)


def test_cases_that_played_other_probes_are_one_row_and_reports_name_the_case_that_played_all(
    graph, graph_header, as_markdown
):
    first, second, third = SHARED["probes"]
    records = [
        graph("passed", SHARED | {"probes": [second, third]}, case_id="b"),
        graph("passed", GOOD, case_id="a"),
        graph("passed", SHARED | {"probes": [first, third]}, case_id="c"),
    ]
    (row,) = level_rows(records)
    assert [probe.name for probe in row.graph.probes] == list(PROBES)
    assert (row.cases, row.probes, row.other_cases) == (3, "2/3", 0)
    assert [result.cases for result in row.results] == [("smoke/b", "smoke/a", "smoke/c")]
    (note,) = row.notes
    assert "smoke/a played all of them" in note
    assert note in " ".join(terminal.render(graph_header, records, verbose=True).split())
    assert note not in " ".join(terminal.render(graph_header, records).split())
    assert note in as_markdown(*records)


def test_figures_of_a_share_are_not_shown_beside_those_of_all_probes(graph):
    reasons = ("1 requests: a host read", "1 requests: a host copy", "8 requests: a host read")
    found = [levels(SINGLE, SINGLE, "passed", "passed", "failed", reason=reason) for reason in reasons]
    found = [*(each | {"played_in_full": "smoke/a"} for each in found[:2]), found[2]]
    (row,) = level_rows([graph("passed", each, case_id=name) for each, name in zip(found, "bca", strict=True)])
    assert [result.cases for result in row.results] == [("smoke/b", "smoke/a"), ("smoke/c",)]
    assert row.broke_at is not None
    assert row.broke_at.reason == reasons[2]


def test_the_terminal_lists_the_backends_of_each_level(graph, graph_header):
    records = [
        graph("passed", ROOMY, case_id="a"),
        graph("unsupported", UNSEEN, case_id="b"),
        graph("failed", BROKEN, backend="Wrong"),
        graph("errored", None, backend="Wrong", case_id="c"),
        graph("xfailed", GOOD, case_id="d"),
    ]
    text = terminal.render(graph_header, records)
    assert text.partition("CUDA-graph levels (recorder: emulated)\n")[2].split("\n\n")[0].splitlines() == [
        f"  declared {SINGLE}, measured UNIFORM_BATCH: reference",
        f"  declared {SINGLE}, measured cannot tell: reference",
        f"  {SINGLE}: reference",
        f"  declared UNIFORM_BATCH, measured {SINGLE}: Wrong",
        "  errored in 1 case: Wrong",
    ]
    assert text.index("examined") < text.index("finding 1 of 2, Wrong") < text.index("CUDA-graph levels (")
    assert "broke at" not in text
    coloured = terminal.render(graph_header, records, color=True)
    assert "\033[32mUNIFORM_BATCH\033[0m" in coloured
    assert f"\033[31m{SINGLE}\033[0m" in coloured
    assert "emulated" not in terminal.render(graph_header, [graph("passed", GOOD | {"recorder": "cuda"})])


def test_markdown_gives_every_reason_with_its_cases(graph, as_markdown):
    found = [levels("NEVER", "NEVER", "failed", "not examined", reason=why) for why in ("one", "two", "one")]
    text = as_markdown(*(graph("passed", one, case_id=f"c{i}") for i, one in enumerate(found)))
    assert f"broke at decode, one bucket ({SINGLE}): one (other figures or reasons in 1 of 3 cases) |" in text
    assert f"| decode, one bucket | {SINGLE} | failed | see below |\n" in text
    assert f"| decode, fewer requests | {SINGLE} | not examined here |" in text
    assert "| one | smoke/c0, smoke/c2 |\n| two | smoke/c1 |\n" in text


PLACES = "host read: .item() at wrong.py:9 in forward; host read: .item() at wrong.py:12 in forward"


def broken(declared: str, reason: str = "figures 7", *, behind: int = 3, **fields: Any) -> dict[str, Any]:
    """Levels of a backend that is right in ``decode``, breaks at ``verify``, and ``behind`` probes are not run."""
    probes = [
        {"name": "decode", "level": SINGLE, "outcome": "passed"},
        {"name": "verify", "level": "UNIFORM_BATCH", "outcome": "failed", "reason": reason},
    ]
    for number in range(behind):
        level = "UNIFORM_BATCH" if number == 0 else "ALWAYS"
        probes.append({"name": f"probe {number}", "level": level, "outcome": "not run", "reason": "'verify' broke"})
    return {"declared": declared, "measured": SINGLE, "recorder": "emulated", "probes": probes} | fields


def test_places_of_one_violation_are_joined_wherever_a_reason_is_shown(graph, graph_header, as_markdown):
    record = graph("failed", broken("ALWAYS", PLACES), summary=f"declared ALWAYS: {PLACES}")
    for text in (terminal.render(graph_header, [record]), as_markdown(record)):
        assert "wrong.py:9, 12 in forward" in text
        assert "wrong.py:12 in" not in text


def test_how_a_backend_was_measured_is_stated_once(graph, graph_header, as_markdown):
    note = "over huge numbers, since NaN | leaks"
    records = [
        graph("passed", broken(declared, notes=[note]), backend="Wrong", case_id=declared)
        for declared in (SINGLE, "NEVER")
    ]
    assert note not in terminal.render(graph_header, records)
    assert terminal.render(graph_header, records, verbose=True).count(note) == 1
    text = as_markdown(graph("passed", broken(SINGLE)), *records)
    assert text.count("huge") == text.count("\n\n- Wrong: over huge numbers, since NaN \\| leaks.\n\n") == 1


def test_padding_rows_are_a_note_beside_the_level_and_split_no_row(graph, as_markdown):
    states = ("NaN or Inf", "finite", "not examined", "NaN or Inf")
    records = [
        graph("passed", broken(SINGLE, padding_rows=state), case_id=str(index)) for index, state in enumerate(states)
    ]
    (row,) = level_rows(records)
    assert (row.padding_rows, row.cases, len(row.results)) == ("NaN or Inf", 4, 1)
    assert as_markdown(*records).count("padding rows of the output hold NaN or Inf") == 1
    assert "padding rows" not in as_markdown(*records[1:3])


def test_a_reason_that_rows_of_a_backend_share_is_shown_once(graph, as_markdown):
    other = broken("UNIFORM_BATCH", "figures 9")
    records = [
        *(graph("passed", broken("NEVER"), case_id=name) for name in "abc"),
        *(graph("passed", other, case_id=name) for name in "de"),
        graph("passed", broken(SINGLE), case_id="f"),
        graph("passed", broken(SINGLE), backend="Wrong", case_id="f"),
    ]
    assert [(row.backend, row.graph.declared, row.repeats) for row in level_rows(records)] == [
        ("reference", "NEVER", False),
        ("reference", SINGLE, True),
        ("reference", "UNIFORM_BATCH", False),
        ("Wrong", SINGLE, False),
    ]
    reasons = re.findall(r"broke at verify \(UNIFORM_BATCH\): ([\w ]+) \|", as_markdown(*records))
    assert reasons == ["figures 7", "as above", "figures 9", "figures 7"]


def test_cases_without_a_level_are_counted_below_the_rows_of_their_backend(make, graph, as_markdown):
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


def test_markdown_has_one_section_for_probes_that_came_out_alike(graph, as_markdown):
    text = as_markdown(
        graph("passed", broken("NEVER"), case_id="a"),
        graph("passed", broken(SINGLE), case_id="b"),
        graph("passed", broken("NEVER"), case_id="c"),
        graph("passed", broken("NEVER", behind=1), case_id="d", backend="Wrong"),
    )
    assert f"### reference: declared NEVER or {SINGLE}, measured {SINGLE}, 3 cases\n" in text
    assert f"- Cases that declare NEVER: smoke/a, smoke/c\n- Cases that declare {SINGLE}: smoke/b\n" in text
    assert text.count("| probe | level | outcome | reason |") == 2
    # Probes that were not run are one line.
    assert "| 3 probes behind it | UNIFORM_BATCH to ALWAYS | not run | 'verify' broke |\n\n" in text
    assert "| probe 0 | UNIFORM_BATCH | not run | 'verify' broke |\n\n" in text
    assert "| probe 1 |" not in text


def test_markdown_lists_every_reason_that_differs_in_more_than_figures(graph, as_markdown):
    reasons = [*(f"worst {n}.5e+03 budgets" for n in range(6)), "no row written"]
    text = as_markdown(*(graph("passed", broken("NEVER", why), case_id=f"c{n}") for n, why in enumerate(reasons)))
    assert "| no row written | smoke/c6 |\n" in text
    assert "5.5e+03" not in text
    assert (
        "| worst 3.5e+03 budgets | smoke/c3 |\n| 2 more that differ in figures alone | smoke/c4, smoke/c5 |\n" in text
    )


def test_the_column_of_errors_is_there_when_any_was_measured(make, graph, graph_header, as_markdown):
    without = [graph("passed", broken("NEVER"))]
    for records, count in ((without, 0), ([*without, make("passed", figures={BUDGET_SHARE: 0.5})], 1)):
        assert terminal.render(graph_header, records).count("allowed") == count
        assert as_markdown(*records).count("worst error / allowed") == count
