"""Which backends are right for a combination of needs: what became of the cases that need all of it, or each."""

import pytest

from attncheck.reports.analysis.measured import Time, measured_run, subjects
from attncheck.reports.analysis.recommendation import checked_needs, known_needs, recommend
from attncheck.reports.analysis.support import REFUSED
from attncheck.reports.run_file.header import BackendInfo


@pytest.fixture
def ranked(run_of):
    """``ranked("sinks,lse", *records)``: the suitability of each backend, in the order of the answer."""

    def by_backend(needs, *records, times=None, **features):
        names = dict.fromkeys(record.backend for record in records)
        backends = tuple(BackendInfo(name=name, ref=name, features=features.get(name, ())) for name in names)
        run = run_of(records, backends=backends)
        timed = {key: Time(median, median, median, 1, "a machine") for key, median in (times or {}).items()}
        members = subjects([measured_run(run, "run", timed)])
        return {each.subject.name: each for each in recommend(checked_needs(needs, known_needs(members)), members)}

    return by_backend


def standings(found):
    return {name: each.standing for name, each in found.items()}


def test_a_case_that_needs_all_proves_more_than_a_case_for_each(ranked, make):
    both = ("sinks", "block_size=32")
    found = ranked(
        "sinks,block_size=32",
        make("passed", backend="Each", case_id="a", needs=("sinks",)),
        make("passed", backend="Each", case_id="b", needs=("block_size=32",)),
        make("passed", backend="All", case_id="c", needs=both),
        make("passed", backend="All", case_id="d", needs=(*both, "alibi")),
        make("passed", backend="Half", case_id="a", needs=("sinks",)),
    )
    assert standings(found) == {"All": "right", "Each": "right in each", "Half": "not examined"}
    assert list(found) == ["All", "Each", "Half"]
    assert found["All"].right == 2
    assert found["Each"].why == "sinks: right (1); block_size=32: right (1)"
    assert found["Half"].why == "block_size=32: no case"


def test_a_backend_is_wrong_with_the_finding_of_the_cases_that_need_all(ranked, make):
    ignored = {"finding": "the sinks are ignored", "meaning": "the sinks are ignored", "concerns": ("sinks",)}
    records = [
        make("failed", backend="Liar", case_id="a", needs=("sinks", "lse"), **ignored),
        make("passed", backend="Liar", case_id="b", needs=("lse",)),
        make("failed", backend="Liar", case_id="c", needs=("sinks",), **ignored),
    ]
    liar = ranked("sinks,lse", *records)["Liar"]
    assert (liar.standing, liar.right, liar.wrong) == ("wrong", 0, 1)
    assert [finding.title for finding in liar.findings] == ["likely: the sinks are ignored"]
    assert ranked("sinks", *records)["Liar"].wrong == 2
    # A false claim of a need that was not requested explains the failure.
    lse = ranked("lse", *records)["Liar"]
    assert (lse.standing, lse.right, lse.why) == ("right", 1, "fails only with sinks")


def test_a_failure_that_no_false_claim_explains_counts(ranked, make):
    records = [
        make("passed", case_id="a", needs=("lse", "head_size=64")),
        make("passed", case_id="b", needs=("lse",)),
        make("failed", case_id="c", needs=("lse", "head_size=64")),
    ]
    (only,) = ranked("lse", *records).values()
    assert (only.standing, only.why) == ("wrong", "wrong in 1 of 3")
    # A need that is wrong alone makes the combination wrong.
    (only,) = ranked("lse,sinks", *records[:2], make("failed", case_id="d", needs=("sinks",))).values()
    assert (only.standing, only.why) == ("wrong", "sinks: wrong in 1 of 1")


def test_declared_alone_and_refused_are_different(ranked, make):
    out = {"case_id": "a", "needs": ("sinks",)}
    found = ranked(
        "sinks",
        make("unavailable", backend="Away", **out),
        make("passed", backend="Idle", case_id="b", needs=("lse",)),
        make("unsupported", backend="Refusing", **out),
        make("passed", backend="Refusing", check="refusals", notes=(f"{REFUSED} construct: no",), **out),
        Away=("sinks",),
        Idle=("sinks", "lse"),
    )
    assert standings(found) == {"Away": "not examined", "Idle": "not examined", "Refusing": "refused"}
    assert found["Away"].why == "sinks: declared: not examined"
    assert found["Idle"].why == "sinks: declared: no case"
    assert found["Refusing"].why == "sinks: not declared: refused (1)"


def test_right_backends_are_ordered_by_their_multiple_of_the_fastest(ranked, make):
    records = [
        make("passed", backend=name, case_id=case, needs=("lse",))
        for name in ("Slow", "Fast", "Untimed")
        for case in ("a", "b", "c")
    ]
    case = records[0].case.replace("/a", "/{}").format
    times = {("Slow", case("a")): 4e3, ("Slow", case("b")): 9e3, ("Fast", case("a")): 1e3, ("Fast", case("b")): 1e3}
    found = ranked("lse", *records, times=times | {("Slow", case("c")): 6e3})
    assert list(found) == ["Fast", "Slow", "Untimed"]
    assert [found[name].median_ns for name in found] == [pytest.approx(1e3), pytest.approx(6e3), None]
    assert [each.pace and each.pace.ratio for each in found.values()] == [1, pytest.approx(6), None]
    assert found["Slow"].timed == 3
