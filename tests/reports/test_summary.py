"""Counting: every record lands in exactly one place, and what was not examined never counts as good."""

from attncheck.reports.analysis.summary import summarise, tally
from attncheck.reports.run_file.records import OUTCOMES


def test_every_outcome_has_its_place(make):
    found = tally([make(outcome) for outcome in OUTCOMES])
    assert [found[outcome] for outcome in OUTCOMES] == [1] * 9
    assert found.examined == 7
    assert found.not_examined == 2
    assert found["passed"] == 1  # an expected failure is none
    assert found.short == 5  # failed, errored, crashed, timed_out, xpassed


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


def test_tables_are_by_backend_and_check_and_by_backend_and_suite(make):
    records = [
        make("passed", check="cache_write", backend="Wrong", suite="mine"),
        make("failed", check="numerics", backend="Wrong", suite="mine"),
        make("passed", check="numerics", backend="Wrong"),
        make("passed", check="numerics"),
    ]
    summary = summarise(records, checks=("numerics", "lse", "cache_write"))
    assert summary.backends == ("Wrong", "reference")
    assert summary.suites == ("mine", "smoke")
    assert summary.checks == ("numerics", "cache_write")
    assert summary.cases == 2
    assert (summary.by_check["Wrong", "numerics"]["passed"], summary.by_check["Wrong", "numerics"].examined) == (1, 2)
    assert (summary.by_suite["Wrong", "mine"]["passed"], summary.by_suite["Wrong", "mine"].examined) == (1, 2)
    assert ("reference", "mine") not in summary.by_suite
    assert summary.short == (records[1],)


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


def test_reasons_that_differ_in_a_size_are_one_gap(make):
    sizes = [
        make("unsupported", case_id=f"c{size}", reasons=[f"head_size {size}: no", "no window"]) for size in (80, 8)
    ]
    (gap,) = summarise(sizes).gaps
    assert gap.reasons == ("head_size 8, 80: no", "no window")
    assert gap.cases == 2


def test_kernels_are_counted_in_cases_the_most_frequent_first(make):
    records = [
        make("passed", chosen_kernels=["math"]),
        make("passed", check="timing", chosen_kernels=["flash", "math"]),
        make("failed", case_id="b", chosen_kernels=["flash"]),
        make("passed", case_id="c", chosen_kernels=["flash"]),
        make("unsupported", case_id="d"),
        make("passed", backend="Wrong"),
    ]
    assert {name: list(cases.items()) for name, cases in summarise(records).chosen_kernels.items()} == {
        "reference": [("flash", 3), ("math", 1)]
    }
