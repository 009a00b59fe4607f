"""What of two runs is compared, what else differs between them, and which changes of outcomes are worse."""

from dataclasses import replace

import pytest

from attncheck.errors import QuestionError
from attncheck.reports.comparison.changes import compare_outcomes
from attncheck.reports.comparison.compare import ComparedCounts, ComparisonTerms, compare_runs
from attncheck.reports.comparison.summary import closing
from attncheck.reports.run_file.header import BackendInfo
from attncheck.reports.run_file.records import OUTCOMES
from attncheck.reports.run_file.store import Run


def test_a_part_that_one_run_alone_timed_is_warned_of(compare, rounds_of, around):
    found = compare(rounds_of(around(1e6), build=around(1e4)), rounds_of(around(1e6)))
    assert "1 time" in found.warnings[0]
    assert [(each.part, each.verdict) for each in found.speeds] == [("forward", "same")]


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


def test_a_run_in_part_is_compared_by_what_it_reached_and_is_incomplete(compare, make):
    late = {"reasons": ["the case did not run, because earlier cases used up the time of the backend by --within"]}
    whole = [make("passed", case_id=case, check=check) for case in "ab" for check in ("numerics", "cudagraph")]
    part = [whole[0], make("unavailable", case_id="a", check="cudagraph", **late)]
    part += [make("unavailable", case_id="b", check=check, **late) for check in ("numerics", "cudagraph")]
    whole, part = ([*records, make("unsupported", case_id="b", check="lse")] for records in (whole, part))
    found = compare(whole, part)
    assert (found.verdict, found.outcomes) == ("incomplete", ())
    assert (found.compared.cases, found.compared.of_cases) == (1, 2)
    assert [(each.check, each.cases) for each in found.lost] == [("", ("smoke/b",)), ("cudagraph", ("smoke/a",))]
    found = compare(part, whole)
    assert (found.verdict, found.outcomes) == ("incomplete", ())
    assert "missing: 3 checks not reached in BASE" in closing(found)


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


GPU = {"device": "cuda", "device_name": "H200"}


@pytest.mark.parametrize(
    ("machine", "changed", "is_other"),
    [
        ({}, {"cpu": "another"}, True),
        ({}, {"cores": 64}, True),
        ({}, {"torch": "2.14.0"}, False),
        (GPU, {"device_name": "A100"}, True),
        (GPU, {"cpu": "another", "cores": 64, "driver": "2"}, False),
    ],
)
def test_times_of_another_device_are_not_compared_and_outcomes_are(
    run_of, make, rounds_of, around, machine, changed, is_other
):
    before = run_of([]).header.environment.model_copy(update=machine)
    base = run_of([make("passed"), *rounds_of(around(1e6))], environment=before)
    new = run_of([make("failed"), *rounds_of(around(2e6))], environment=before.model_copy(update=changed))
    found = compare_runs(base, new)
    (speed,) = found.speeds
    assert (speed.verdict == "cannot tell", "another device" in speed.reason) == (is_other, is_other)
    assert [each.kind for each in found.outcomes] == ["worse"]
    assert {each.field for each in found.environments} == set(changed)


def test_every_field_that_differs_is_listed(run_of, rounds_of, around):
    before = BackendInfo(
        name="reference", ref="reference", version="0.1.0", features=("sinks", "lse"), conventions={"lse_base": "e"}
    )
    changed = {"version": "2", "features": ("lse",), "conventions": {"lse_base": "2"}}
    after = before.model_copy(update=changed | {"required_environment": {"A": "1"}})
    base = run_of(rounds_of(around(1e6, rounds=6)), backends=(before,))
    environment = base.header.environment.model_copy(update={"torch": "2.14.0", "git_commit": "abc", "tf32": True})
    new = run_of(rounds_of(around(1e6, rounds=7)), backends=(after,), environment=environment, seed=3)
    changes = {each.field: (each.base, each.new) for each in compare_runs(base, new).environments}
    assert changes == {
        "torch": ("2.13.0+cpu", "2.14.0"),
        "git_commit": ("none", "abc"),
        "tf32": ("no", "yes"),
        "seed": ("0", "3"),
        "rounds": ("6", "7"),
        "reference: version": ("0.1.0", "2"),
        "reference: lse_base": ("e", "2"),
        "reference: started with": ("none", "A=1"),
        "reference: features declared on one side only": ("sinks", "none"),
    }
    assert compare_runs(base, Run("elsewhere", base.header, base.records)).environments == ()


def state(**fields):
    return {"device": fields}


def ceilings(rate):
    return {"ceilings": {"copy_bytes_per_s": rate, "matmul_flops_per_s": 1e12, "dtype": "bfloat16"}}


@pytest.mark.parametrize(
    ("base", "new", "message"),
    [
        (state(), state(throttle_reasons=("sw_power_cap",)), "held back in 10 of 10 timings of NEW: sw_power_cap"),
        (state(sm_clock_mhz=1980), state(sm_clock_mhz=1900), "the SM clock is 4.0% lower in NEW"),
        (state(sm_clock_mhz=1980), state(sm_clock_mhz=1975), ""),
        (ceilings(1e12), ceilings(0.9e12), "the rate of a large copy is 10.0% lower in NEW"),
        (ceilings(1e12), ceilings(0.98e12), ""),
        (ceilings(1e12), {}, ""),
    ],
)
def test_a_machine_that_became_slower_is_warned_of(run_of, rounds_of, around, base, new, message):
    runs = [run_of(rounds_of(around(1e6), build=around(1e4), timing=timing)) for timing in (base, new)]
    warnings = compare_runs(*runs).warnings
    assert len(warnings) == bool(message)
    assert all(message in warning for warning in warnings)


def test_times_that_all_moved_one_way_are_laid_at_the_machines_door(run_of, rounds_of, around):
    def of(factors, seed):
        records = []
        for backend, factor in factors.items():
            for case in range(4):
                times = around(factor * 1e6, spread=0.002, seed=seed + case)
                records += rounds_of(times, case_id=f"c{case}", backend=backend)
        return run_of(records)

    base = of({"reference": 1, "fast": 0.5}, 0)
    (warning,) = compare_runs(base, of({"reference": 1.06, "fast": 0.53}, 10)).warnings
    assert warning.startswith("8 of 8 times are longer in NEW, whatever the backend, by 6.")
    assert compare_runs(base, of({"reference": 1, "fast": 0.53}, 10)).warnings == ()
    assert compare_runs(of({"fast": 1}, 0), of({"fast": 1.06}, 10)).warnings == ()
    # Backends of one run may all be slower than others.
    one = of({"reference": 1, "fast": 1.06, "Wrong": 1.13}, 0)
    found = compare_runs(one, one, backends={"reference": "fast", "fast": "Wrong"})
    assert [change.ratio > 1 for change in found.speeds] == [True] * 8
    assert found.warnings == ()


def test_other_kernels_of_a_library_are_listed_where_both_runs_have_them(make, run_of):
    for base, new, expected in (
        (("flash",), ("cudnn", "flash"), {"reference: kernels": ("flash", "cudnn, flash")}),
        ((), ("flash",), {}),
        (("flash",), (), {}),
    ):
        runs = [run_of([make("passed", chosen_kernels=kernels)]) for kernels in (base, new)]
        assert {each.field: (each.base, each.new) for each in compare_runs(*runs).environments} == expected


def change(before, after):
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


def test_every_change_of_an_outcome_has_a_kind(make):
    kinds = {"w": "worse", "b": "better", "o": "other"}
    for before, letters in TABLE.items():
        for after, letter in zip(OUTCOMES, letters.split(), strict=True):
            found = compare_outcomes("fast", make(before), make(after))
            expected = None if letter == "=" else (before, after, kinds[letter])
            assert (found and (found.before, found.after, found.kind)) == expected


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


def test_a_lowered_level_is_worse_though_the_check_passes(at_level):
    for before, after, kind, what in (
        (("ALWAYS", "ALWAYS"), ("NEVER", "ALWAYS"), "worse", "declared level ALWAYS -> NEVER"),
        (("NEVER", "ALWAYS"), ("NEVER", "UNIFORM_BATCH"), "worse", "measured level ALWAYS -> UNIFORM_BATCH"),
        (("NEVER", "NEVER"), ("NEVER", "UNIFORM_BATCH"), "better", "measured level NEVER -> UNIFORM_BATCH"),
        (("NEVER", "ALWAYS"), ("ALWAYS", "ALWAYS"), "other", "declared level NEVER -> ALWAYS"),
        (("NEVER", "ALWAYS"), ("NEVER", None), "other", "measured level ALWAYS -> cannot tell"),
    ):
        found = change(at_level(before[0], measured=before[1]), at_level(after[0], measured=after[1]))
        assert (found.before, found.after, found.kind, found.what) == ("passed", "passed", kind, what)
    # Levels of two recorders are not measured against each other.
    emulated, real = at_level("NEVER", measured="ALWAYS"), at_level("NEVER", measured="NEVER", recorder="cuda")
    found = change(emulated, real)
    assert found.kind == "other"
    assert "recorder emulated -> cuda" in found.what
    assert compare_outcomes("fast", emulated, at_level("NEVER", measured="ALWAYS", recorder="cuda")) is None
