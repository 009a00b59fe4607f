"""A question put in several rounds is one question, and its worst round counts."""

from collections.abc import Callable

from attncheck.reports import github
from attncheck.reports.analysis.summary import summarise, worst_rounds
from attncheck.reports.markdown import run as markdown
from attncheck.reports.run_file.records import BUDGET_SHARE, Record
from attncheck.reports.run_file.store import Run
from attncheck.reports.terminal import run as terminal

Make = Callable[..., Record]


def round_records(make: Make, *outcomes: str, **fields: object) -> list[Record]:
    return [make(outcome, check="timing", round=index, **fields) for index, outcome in enumerate(outcomes)]


def test_the_worst_outcome_of_its_rounds_counts_once(make):
    for outcomes, worst in (
        (("passed", "passed"), "passed"),
        (("passed", "failed", "passed"), "failed"),
        (("failed", "errored", "crashed"), "crashed"),
        (("failed", "errored"), "errored"),
        (("xfailed", "failed"), "failed"),
        (("xpassed", "xfailed"), "xpassed"),
        # What could not be examined once was not examined in as many rounds as requested.
        (("passed", "unavailable"), "unavailable"),
    ):
        summary = summarise(round_records(make, *outcomes))
        assert summary.total.counts == ((worst, 1),)
        assert summary.most_rounds == len(outcomes)
    for shares, worst in (((0.2, 0.9, 0.4), 0.9), ((0.2, "NaN", 3.0), float("inf"))):
        records = [make("passed", check="timing", round=n, figures={BUDGET_SHARE: x}) for n, x in enumerate(shares)]
        assert summarise(records).total.worst_share == worst
    assert summarise([make("passed"), make("failed", check="lse")]).rounds == {}


def test_questions_stay_apart_and_in_order(make):
    records = [
        *round_records(make, "passed", "failed", case_id="b"),
        *round_records(make, "passed", "passed", case_id="a"),
        make("passed", case_id="b"),
        *round_records(make, "errored", "failed", case_id="b", backend="Wrong"),
    ]
    found = [(each.record.case_id, each.record.outcome, each.rounds, each.short) for each in worst_rounds(records)]
    assert found == [("b", "failed", 2, 1), ("a", "passed", 2, 0), ("b", "passed", 1, 0), ("b", "errored", 2, 2)]


def test_reports_list_a_failure_of_several_rounds_once(make, header):
    header = header.model_copy(update={"checks": ("timing",), "rounds": 4})
    records = round_records(make, "failed", "passed", "failed", "failed")
    text = terminal.render(header, records)
    assert text.count("repeat: ") == 1
    assert "  case: smoke/edge, check timing (in 3 of 4 rounds)\n" in text
    assert "\nfailed: 2 backends (1 failed, 1 not examined), 1 case (the worst of 4 rounds counts)" in text
    run = Run("run.jsonl", header, tuple(records))
    page = markdown.render_run(run)
    assert "- case: smoke/edge, check timing (in 3 of 4 rounds)\n" in page
    assert "- Rounds: 4, each in a process of its own\n" in page
    assert page.count("### reference: ") == 1
    assert github.annotations([run]).count("smoke/edge: 7 of 40 rows (in 3 of 4 rounds)") == 1
