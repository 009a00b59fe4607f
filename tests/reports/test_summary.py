"""Counting: every record lands in exactly one place, and what was not examined never counts as good."""

from collections.abc import Callable

from attncheck.reports import github
from attncheck.reports.analysis.phrases import cut
from attncheck.reports.analysis.reasons import joined, listed, without_first_figure
from attncheck.reports.analysis.summary import summarise
from attncheck.reports.markdown import run as markdown
from attncheck.reports.run_file.records import BUDGET_SHARE, Record
from attncheck.reports.run_file.store import Run
from attncheck.reports.terminal import run as terminal


def test_verdicts(make):
    for outcomes, verdict in (
        (["passed", "xfailed"], "passed"),
        (["passed", "xpassed"], "failed"),
        (["passed", "errored"], "failed"),
        (["passed", "crashed"], "failed"),
        (["unsupported", "unavailable"], "not examined"),
        ([], "not examined"),
    ):
        records = [make(outcome, case_id=str(number)) for number, outcome in enumerate(outcomes)]
        assert summarise(records).verdict == verdict


def test_equal_reasons_are_one_gap(make):
    small, large = ["head_size 80"], ["head_size 256", "no window"]
    records = [
        *(make("unsupported", case_id=f"c{i}", check=check, reasons=small) for i in range(2) for check in ("a", "b")),
        *(make("unsupported", case_id=f"d{i}", check="a", reasons=large) for i in range(3)),
        make("unsupported", case_id="e", check="a", reasons=small, by="attncheck"),
        make("unavailable", case_id="f", check="a", reasons=small),
    ]
    gaps = summarise(records).gaps
    assert [(gap.outcome, gap.by, gap.reasons, gap.cases, gap.checks) for gap in gaps] == [
        ("unsupported", "backend", tuple(large), 3, ("a",)),
        ("unsupported", "backend", tuple(small), 2, ("a", "b")),
        ("unsupported", "attncheck", tuple(small), 1, ("a",)),
        ("unavailable", "machine", tuple(small), 1, ("a",)),
    ]


def round_records(make: Callable[..., Record], *outcomes: str) -> list[Record]:
    return [make(outcome, check="timing", round=index) for index, outcome in enumerate(outcomes)]


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


def test_a_failure_in_one_of_two_rounds_states_both_numbers(make, header):
    header = header.model_copy(update={"checks": ("timing",), "rounds": 2})
    text = terminal.render(header, round_records(make, "passed", "failed"))
    assert "check timing (in 1 of 2 rounds)\n" in text


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


def test_what_differs_in_its_line_alone_is_joined_and_whatever_differs_in_more_stays():
    for reason, short in (
        (
            "not captured (8 tokens): x[...] at a b.py:7 in f; x[...] at a b.py:9 in f",
            "not captured (8 tokens): x[...] at a b.py:7, 9 in f",
        ),
        (
            ".item() at g.py:1 in f; .tolist() at g.py:2 in f; .item() at g.py:3 in f; why not",
            ".item() at g.py:1, 3 in f; .tolist() at g.py:2 in f; why not",
        ),
    ):
        assert joined(reason) == short
    for reason in (
        "a; b; a",
        ".item() at g.py:1 in f; .item() at g.py:2 in g",
        ".item() at g.py:1 in f; .item() at h.py:2 in f",
        "host read: .item() at g.py:1 in f; host copy: .item() at g.py:2 in f",
        "without a graph: .item() at g.py:1 in f; with a graph: .item() at g.py:2 in f",
    ):
        assert joined(reason) == reason
    assert (cut("abcdef", 6), cut("abcdefg", 6)) == ("abcdef", "abc...")


def test_reasons_that_differ_in_their_first_figure_list_it():
    sizes = [f"block_size {size}: supported are multiples of 32" for size in (16, 8, 128, 8)]
    assert listed(sizes) == "block_size 8, 16, 128: supported are multiples of 32"
    assert len(set(map(without_first_figure, sizes))) == 1
    dtypes = [f"dtype {name}: supported are bfloat16" for name in ("float16", "float32")]
    assert list(map(without_first_figure, dtypes)) == dtypes
    assert without_first_figure("head_size 72: 64, 128") != without_first_figure("head_size 72: 64")
