"""Which questions of two runs are compared, and how the others are reported."""

from dataclasses import replace

import pytest

from attncheck.errors import QuestionError, UnknownNameError
from attncheck.reports.comparison.compare import ComparedCounts, ComparisonTerms, compare_runs
from attncheck.reports.comparison.thresholds import parse_thresholds


def test_a_slowdown_and_a_lost_feature_are_both_named(compare, make, rounds_of, around):
    steady = rounds_of(around(1e6), case_id="steady")
    base = [make("passed", case_id="sinks"), *steady, *rounds_of(around(1e6), build=around(1e4))]
    slower = rounds_of(around(1.1e6, seed=1), build=around(1e4, seed=2))
    found = compare(base, [make("unsupported", case_id="sinks"), *steady, *slower])
    assert [(each.case, each.part, each.verdict) for each in found.speeds] == [
        ("smoke/steady", "forward", "same"),
        ("smoke/edge", "forward", "slower"),
        ("smoke/edge", "build", "same"),
    ]
    assert [(each.case, each.kind) for each in found.outcomes] == [("smoke/sinks", "worse")]
    assert found.is_regression
    assert found.warnings == ()
    # The slowdown alone is a regression, unless the threshold lets it pass.
    assert compare(base, [*base[:11], *slower]).is_regression
    tolerant = ComparisonTerms(thresholds=parse_thresholds(["20%"], least=0.01))
    assert not compare(base, [*base[:11], *slower], terms=tolerant).is_regression
    with pytest.raises(QuestionError, match="matches no case"):
        compare(base, base, terms=ComparisonTerms(thresholds=parse_thresholds(["decode: 5%"], least=0.01)))
    untimed = compare(base, [*base[:11], *rounds_of(around(1e6))])
    assert "1 time" in untimed.warnings[0]  # the build, which one run alone has


def test_a_time_of_a_wrong_answer_is_compared_with_nothing(compare, make, rounds_of, around):
    wrong_once = [*rounds_of(around(1e6))[:-1], make("failed", check="timing", round=9)]
    found = compare(rounds_of(around(1e6)), wrong_once)
    assert found.speeds == ()
    assert [(each.before, each.after, each.kind) for each in found.outcomes] == [("passed", "failed", "worse")]


def test_a_rewritten_case_is_another_question(compare, make):
    found = compare(
        [make("passed"), make("passed", case_id="other")],
        [make("failed", case_hash="ffffffffffff"), make("passed", case_id="other")],
    )
    assert found.outcomes == ()
    assert found.changed_cases == ("smoke/edge",)
    with pytest.raises(QuestionError, match=r"no case of the same backend; 1 case of the same name changed"):
        compare([make("passed")], [make("failed", case_hash="ffffffffffff")])


def test_what_new_lacks_is_listed_and_fails_the_comparison(compare, make):
    base = [make("passed"), make("passed", case_id="gone"), make("passed", backend="fast")]
    new = [make("passed"), make("failed", case_id="come"), make("failed", backend="Wrong")]
    found = compare(base, new)
    only = [[(each.backend, each.cases, each.is_whole) for each in side] for side in (found.only_base, found.only_new)]
    assert only == [
        [("reference", ("smoke/gone",), False), ("fast", ("smoke/edge",), True)],
        [("reference", ("smoke/come",), False), ("Wrong", ("smoke/edge",), True)],
    ]
    assert found.lost == found.only_base
    assert (found.verdict, found.fails, found.is_regression) == ("incomplete", True, False)
    assert found.compared == ComparedCounts(cases=1, of_cases=2, backends=1, of_backends=2)
    terms = ComparisonTerms(allow_missing=True)
    accepted = compare(base, new, terms=terms)
    assert (accepted.verdict, accepted.fails) == ("no regression", False)
    assert compare(base, [make("failed")], terms=terms).verdict == "regression"


def test_what_base_did_not_examine_and_what_new_adds_is_no_loss(compare, make):
    idle = [make("unavailable", backend="fast"), make("unsupported", case_id="gone")]
    added = [make("passed", check="cudagraph"), make("failed", case_id="come")]
    found = compare([make("passed"), *idle], [make("passed"), *added])
    assert [each.backend for each in found.only_base] == ["reference", "fast"]
    assert (found.lost, found.verdict) == ((), "no regression")
    both = [make("passed", case_id=case, backend=name) for case in "ab" for name in ("reference", "fast")]
    found = compare(both, both[:-1])  # a case is compared where all matched backends have it
    assert found.compared == ComparedCounts(cases=1, of_cases=2, backends=2, of_backends=2)
    assert [(each.backend, each.cases) for each in found.lost] == [("fast", ("smoke/b",))]


def test_backends_of_two_names_are_compared_as_mapped(compare, rounds_of, around):
    base = [*rounds_of(around(1e6), backend="reference"), *rounds_of(around(1e6), backend="fast")]
    new = [*rounds_of(around(2e6), backend="Wrong"), *rounds_of(around(1e6), backend="fast")]
    found = compare(base, new, backends={"reference": "Wrong"})
    assert [(each.backend, each.verdict) for each in found.speeds] == [
        ("reference -> Wrong", "slower"),
        ("fast", "same"),
    ]
    swapped = compare(new, new[10:] + base[:10], backends={"Wrong": "fast"})
    assert [each.backend for each in swapped.only_base] == ["fast"]
    assert swapped.lost == ()  # NEW has it, compared with another one
    with pytest.raises(UnknownNameError, match="'nobody'"):
        compare(base, new, backends={"nobody": "Wrong"})
    with pytest.raises(UnknownNameError, match="'nobody'"):
        compare(base, new, backends={"reference": "nobody"})


def test_two_backends_of_one_run_are_compared_round_by_round(run_of, rounds_of):
    machine = [1e6, 1.4e6, 0.8e6, 1.1e6, 1.5e6, 0.9e6, 1.2e6, 1e6, 1.3e6, 0.85e6]
    slower = [1.1 * time * (1 + 0.001 * (index % 3)) for index, time in enumerate(machine)]
    both = run_of([*rounds_of(machine), *rounds_of(slower, backend="fast")])
    found = compare_runs(both, both, backends={"reference": "fast"})
    assert [each.verdict for each in found.speeds] == ["slower"]
    assert (found.only_base, found.only_new) == ((), ())
    apart = compare_runs(run_of(rounds_of(machine)), run_of(rounds_of(slower)))
    assert [each.verdict for each in apart.speeds] == ["cannot tell"]
    with pytest.raises(QuestionError, match="--match OLD=NEW"):
        compare_runs(both, both)
    fewer = run_of([*rounds_of(machine), *rounds_of(slower[:8], backend="fast")])  # not all have a partner
    (speed,) = compare_runs(fewer, fewer, backends={"reference": "fast"}).speeds
    assert speed.verdict == "cannot tell"


def test_a_run_that_was_cut_off_or_ended_with_errors_is_warned_of(run_of, make):
    whole, cut = run_of([make("passed")]), run_of([make("passed")], is_complete=False)
    for base, new, side in ((whole, cut, "NEW"), (cut, whole, "BASE")):
        found = compare_runs(base, new)
        assert found.warnings[0].startswith(f"{side} was cut off after 1 record")
        assert found.verdict == "incomplete"
        assert not compare_runs(base, new, terms=ComparisonTerms(allow_missing=True)).fails
    stale = replace(
        whole, path="stale.jsonl", footer=whole.footer.model_copy(update={"errors": ("an entry is stale",)})
    )
    assert compare_runs(whole, stale).warnings == ("NEW ended with 1 error of its own: an entry is stale",)


@pytest.mark.parametrize(
    ("changed", "is_other"),
    [({"cpu": "another"}, True), ({"device": "cuda", "device_name": "a GPU"}, True), ({"torch": "2.14.0"}, False)],
)
def test_times_of_another_device_are_not_compared_and_outcomes_are(run_of, make, rounds_of, around, changed, is_other):
    base = run_of([make("passed"), *rounds_of(around(1e6))])
    environment = base.header.environment.model_copy(update=changed)
    new = run_of([make("failed"), *rounds_of(around(2e6))], environment=environment)
    found = compare_runs(base, new)
    (speed,) = found.speeds
    assert (speed.verdict == "cannot tell", "another device" in speed.reason) == (is_other, is_other)
    assert [each.kind for each in found.outcomes] == ["worse"]
    assert [each.field for each in found.environments] == list(changed)
