"""Which change of an outcome or of a CUDA-graph level is for the worse."""

import pytest

from attncheck.reports.comparison.changes import OutcomeChange, compare_outcomes
from attncheck.reports.run_file.records import OUTCOMES, Record


def change(before: Record, after: Record) -> OutcomeChange:
    found = compare_outcomes("fast", before, after)
    assert found is not None
    return found


# Rows: BASE; columns: NEW, in the order of OUTCOMES. w worse, b better, o other, = no change.
TABLE = {
    "passed": "= w w w w w w o o",
    "failed": "b = o o o o o o b",
    "errored": "b o = o o o o o b",
    "crashed": "b o o = o o o o b",
    "timed_out": "b o o o = o o o b",
    "unsupported": "b w w w w = o o b",
    "unavailable": "b o o o o o = o b",
    "xfailed": "b o w w w o o = b",
    "xpassed": "o w w w w w w o =",
}


@pytest.mark.parametrize("before", TABLE)
def test_every_change_of_an_outcome_has_a_kind(make, before):
    kinds = {"w": "worse", "b": "better", "o": "other"}
    for after, letter in zip(OUTCOMES, TABLE[before].split(), strict=True):
        found = compare_outcomes("fast", make(before), make(after))
        if letter == "=":
            assert found is None, after
        else:
            assert found is not None
            assert (found.before, found.after, found.kind) == (before, after, kinds[letter])


def test_a_change_states_what_happened(make):
    short = change(make("passed"), make("failed", summary="3 of 40 rows", case_id="long", check="lse"))
    assert (short.backend, short.case, short.check) == ("fast", "smoke/long", "lse")
    assert short.what == "3 of 40 rows"
    assert change(make("passed"), make("unsupported", reasons=["no sinks", "no cap"])).what == "no sinks; no cap"
    raised = change(make("passed"), make("errored", message="a\x1b[2Jb\nsecond line"))
    assert raised.what == "RuntimeError in forward: a?[2Jb"
    assert "expected: known" in change(make("passed"), make("xfailed")).what


def test_a_fall_that_was_there_before_and_what_is_not_examined_by_choice_are_not_worse(make, at_level):
    hidden, promised = make("xfailed", underlying="crashed"), at_level("ALWAYS", measured="NEVER")
    assert promised.outcome == "failed"
    for before, after, kind in (
        (hidden, make("crashed"), "other"),
        (hidden, make("failed"), "worse"),
        (make("passed"), make("unsupported", by="attncheck"), "other"),
        (make("passed"), make("unsupported", by="backend"), "worse"),
        (promised, at_level("NEVER", measured="NEVER"), "better"),  # a declaration made honest
    ):
        assert change(before, after).kind == kind


@pytest.mark.parametrize(
    ("before", "after", "kind", "what"),
    [
        (("ALWAYS", "ALWAYS"), ("NEVER", "ALWAYS"), "worse", "declared level ALWAYS -> NEVER"),
        (("NEVER", "ALWAYS"), ("NEVER", "UNIFORM_BATCH"), "worse", "measured level ALWAYS -> UNIFORM_BATCH"),
        (("NEVER", "NEVER"), ("NEVER", "UNIFORM_BATCH"), "better", "measured level NEVER -> UNIFORM_BATCH"),
        (("NEVER", "ALWAYS"), ("ALWAYS", "ALWAYS"), "other", "declared level NEVER -> ALWAYS"),
        (("NEVER", "ALWAYS"), ("NEVER", None), "other", "measured level ALWAYS -> cannot tell"),
    ],
)
def test_a_lowered_level_is_worse_though_the_check_passes(at_level, before, after, kind, what):
    found = change(at_level(before[0], measured=before[1]), at_level(after[0], measured=after[1]))
    assert (found.before, found.after) == ("passed", "passed")
    assert (found.kind, found.what) == (kind, what)


def test_levels_of_two_recorders_are_not_measured_against_each_other(at_level):
    emulated, real = at_level("NEVER", measured="ALWAYS"), at_level("NEVER", measured="NEVER", recorder="cuda")
    found = change(emulated, real)
    assert found.kind == "other"
    assert "recorder emulated -> cuda" in found.what
    assert compare_outcomes("fast", emulated, at_level("NEVER", measured="ALWAYS", recorder="cuda")) is None
