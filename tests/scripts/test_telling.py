"""benchmarks/telling.py: the order of cases and checks, and what it is made from."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]

A, B, C, D = (("a", "numerics"), ("b", "numerics"), ("b", "lse"), ("c", "cudagraph"))
SECONDS = {A: 1.0, B: 2.0, C: 1.0, D: 5.0}
CAUGHT = {"one": {A, D}, "two": {A, B}, "three": {B}, "four": {B, C}, "five": {D}, "six": set()}


@pytest.fixture
def telling(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("telling")


def test_the_next_pair_catches_the_most_mutants_a_second_that_no_earlier_one_catches(telling):
    """A catches two in a second, B three in two. Then B has two left, which include that of C."""
    assert telling.order_of(CAUGHT, SECONDS) == [A, B, D]


def test_a_mutant_counts_once_the_first_pair_that_catches_it_has_ended(telling):
    taken = [(pair, SECONDS[pair]) for pair in (A, B, D)]
    assert telling.caught_after(CAUGHT, taken) == {"1": 2, "3": 4, "10": 5, "30": 5, "60": 5, "300": 5}


def test_dearer_checks_examine_what_cheaper_ones_do_not_catch_and_a_late_mutant_counts_by_its_entry(
    telling, monkeypatch
):
    """Each mutant is examined alone. The time ends with `late`; `broken` cannot be loaded."""
    names = ("cheap", "dear", "missed", "broken", "late", "last")
    catching = {"cheap": "numerics", "dear": "cudagraph", "late": "numerics"}
    examined = []

    def examine(groups, checks, jobs):
        for group in groups:
            (ref,) = group.refs
            examined.append((ref.removeprefix("mutants:"), checks))
            records = [
                SimpleNamespace(backend_ref=ref, case_id="prefill", check=check, outcome=outcome, duration_s=1.0)
                for check in checks
                for outcome in ["failed" if catching.get(examined[-1][0]) == check else "passed"]
            ]
            run = None if ref == "mutants:broken" else SimpleNamespace(records=records)
            yield SimpleNamespace(refs=group.refs, run=run)

    monkeypatch.setattr(telling, "_examined", examine)
    entries = {"late": ("smoke/prefill", "lse")}
    mutants = [
        SimpleNamespace(name=name, base_ref="right", case=case, check=check)
        for name in names
        for case, check in [entries.get(name, (None, None))]
    ]
    monkeypatch.setattr(telling, "comparable_mutants", lambda: list(mutants))
    monkeypatch.setattr(telling.random.Random, "shuffle", lambda self, values: None)
    monkeypatch.setattr(telling, "_PER_PROCESS", 1)
    monkeypatch.setattr(telling.time, "monotonic", lambda: 10.0 * any(name == "late" for name, _ in examined))
    measured = telling.measure(1, 5.0)
    cheapest, middle, dear = telling.STAGES
    assert [stage for stage in examined if stage[0] != "right"] == [
        ("cheap", cheapest),
        *(("dear", stage) for stage in (cheapest, middle, dear)),
        *(("missed", stage) for stage in (cheapest, middle, dear)),
        ("broken", cheapest),
        ("late", cheapest),
    ]
    assert measured["examined"] == ["cheap", "dear", "missed"]
    assert measured["mutants"] == ["cheap", "dear", "late", "missed"]
    assert measured["left_out"] == ["broken", "last"]
    assert sorted(measured["order"]) == ["prefill cudagraph", "prefill lse", "prefill numerics"]
    assert measured["in_this_order"]["10"] == 3
