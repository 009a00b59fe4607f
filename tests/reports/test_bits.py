"""Equal bits in reports: a line for each backend, a table of all changes, and the cases that differ in two runs."""

import pytest
from inline_snapshot import snapshot

from attncheck.reports.comparison.compare import compare_runs
from attncheck.reports.document import run as document
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.markdown import run as markdown
from attncheck.reports.terminal import run as terminal
from attncheck.reports.terminal.text import Style, render


def rung(name, outcome="equal", **fields):
    return {"name": name, "outcome": outcome, "rows": 8} | fields


@pytest.fixture
def bitwise(make):
    """``bitwise(rung(...), ..., digest="a", case_id="b")``: a record of the check with these rungs."""

    def record(*rungs, digest="a", row_digests="", **fields):
        bits = {"rungs": rungs, "digest": digest, "row_digests": row_digests}
        fields = {"figures": {"rows": 2}} | fields
        return make(fields.pop("outcome", "passed"), check="bitwise", bits=bits, **fields)

    return record


@pytest.fixture
def run(bitwise, run_of):
    moved = {"outcome": "differs", "rows_moved": 2}
    return run_of(
        [
            bitwise(rung("repetition"), rung("order"), rung("chunks", **moved, ulps=3)),
            bitwise(rung("repetition"), rung("order", "not examined", reason="one request"), case_id="b"),
            bitwise(rung("repetition"), rung("order", **moved, ulps=7), backend="Wrong", outcome="failed"),
            bitwise(rung("repetition", **moved, ulps=None), backend="third"),
        ]
    )


def test_the_first_change_of_any_case_ends_the_level(run):
    brief = document.blocks(RunValues.of(run), ["bits"], whole=False)
    assert render(brief, Style(100)) == snapshot("""\
Equal bits
  reference: equal up to order (not examined: pages, neighbours, padding, graph); bits depend on
    chunks in 1 of 1 case
  Wrong: equal up to repetition (not examined: pages); bits depend on order in 1 of 1 case
  third: no level; bits depend on repetition in 1 of 1 case\
""")


def test_the_table_has_all_changes_of_all_backends(run):
    assert markdown.render_sections(run, ["bits"]) == snapshot("""\
## Equal bits

Cases with equal bits / cases examined, and the largest difference in units in the last place; batch_invariant promises the changes up to graph.

| change | reference | Wrong | third |
| --- | --- | --- | --- |
| repetition | 2/2 | 1/1 | 0/1, NaN |
| pages | - | - | - |
| order | 1/1 | 0/1, up to 7 | - |
| neighbours | - | - | - |
| padding | - | - | - |
| graph | - | - | - |
| chunks | 0/1, up to 3 | - | - |
| decode | - | - | - |
| splits | - | - | - |
""")


def test_a_run_without_the_check_has_no_section(run_of, make):
    assert markdown.render_sections(run_of([make("passed")]), ["bits"]) == "The run has no bits.\n"
    assert "bits" not in terminal.render_run(run_of([make("passed")]))


def test_a_comparison_lists_the_cases_of_other_bits_and_their_errors(bitwise, make, run_of):
    def records(case, share, **fields):
        yield make("passed", case_id=case, figures={"budget_share": share})
        yield bitwise(rung("repetition"), case_id=case, **fields)

    base = [
        *records("same", 0.2, digest="a"),
        *records("near", 0.2, digest="b", row_digests="AAAABBBB"),
        *records("far", 0.5, digest="c"),
        bitwise(rung("repetition"), case_id="seed", seed=0),
    ]
    new = [
        *records("same", 0.2, digest="a"),
        *records("near", 0.3, digest="x", row_digests="AAAACCCC"),
        *records("far", 0.4, digest="x"),
        bitwise(rung("repetition"), case_id="seed", seed=1),
    ]
    found = compare_runs(run_of(base), run_of(new, path="new.jsonl"))
    assert [(pair.case, pair.rows, pair.rows_moved, pair.shares) for pair in found.bits] == [
        ("smoke/same", 2, 0, (0.2, 0.2)),
        ("smoke/near", 2, 1, (0.2, 0.3)),
        ("smoke/far", 2, None, (0.5, 0.4)),
    ]
    assert found.verdict == "no regression"
    text = markdown.render_comparison(found)
    assert text[text.index("## Equal bits") :].split("\n##")[0] == snapshot("""\
## Equal bits

1 of 3 cases have equal bits in both runs.

| backend | case | rows that differ | worst error / allowed BASE | worst error / allowed NEW |
| --- | --- | --- | --- | --- |
| reference | smoke/near | 1 of 2 | 0.20 | 0.30 |
| reference | smoke/far | some of 2 | 0.50 | 0.40 |
""")
