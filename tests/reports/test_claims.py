"""False claims and verdicts: a claim is false where a failure needs it, and not where the fault is elsewhere."""

import pytest

from attncheck.reports.analysis.support import ANSWERED, REFUSED
from attncheck.reports.analysis.verdicts import run_findings
from attncheck.reports.run_file.header import BackendInfo, CaseInfo

ROWS = "7 of 40 rows, first: row 3 (request 0, position 35), head 1: found 0.5"
SINGLE = "UNIFORM_SINGLE_TOKEN_DECODE"
FEATURES = ("lse", "logits_soft_cap", "sinks", "sliding_window")


@pytest.fixture
def verdict_of(header):
    """``verdict_of(records)``: the verdict on ``reference``, which declares the features above."""

    def verdict(records, cases=()):
        info = BackendInfo(name="reference", ref="reference", features=FEATURES)
        stated = header.model_copy(update={"backends": (info,), "cases": cases})
        (found,) = run_findings(records, stated).verdicts
        return found

    return verdict


@pytest.fixture
def right_cases(make):
    """Thirty cases that need nothing, and pass."""
    return [make("passed", case_id=f"plain{number}", needs=("head_size=64",)) for number in range(30)]


def claims(found):
    return [(claim.capability, claim.wrong, claim.examined) for claim in found.false_claims]


def test_false_claims_are_listed(make, right_cases, verdict_of):
    """It declares a window, a soft cap and sinks, and ignores them: the cause of one is known, of the others not."""
    window = {"meaning": "the window is ignored", "concerns": ["sliding_window"]}
    records = [
        *right_cases,
        *(make("failed", case_id=f"w{n}", needs=("sliding_window", "head_size=64"), **window) for n in range(8)),
        *(make("failed", case_id=f"c{n}", needs=("logits_soft_cap",), meaning="a cap is left out") for n in range(4)),
        *(make("failed", case_id=f"s{n}", needs=("sinks",), summary=ROWS) for n in range(2)),
    ]
    found = verdict_of(records)
    assert claims(found) == [("sliding_window", 8, 8), ("logits_soft_cap", 4, 4), ("sinks", 2, 2)]
    assert str(found.false_claims[0]) == "sliding_window (8 of 8 cases wrong)"
    assert (found.verdict, len(found.failing), found.results) == ("failed", 3, {"failed": 14, "right": 30})


WINDOW = {"meaning": "the window is ignored", "concerns": ["sliding_window"]}
LATE = {"cause": "the limit was 2 s (what was left of the time of the backend by --within)", "limit_s": 2.0}
BESIDE = {"check": "features", "summary": f"a layer without sliding_window, in the same process: {ROWS}"}


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        pytest.param(
            [("failed", "ab", ("sliding_window",), WINDOW), ("passed", "cde", ("sliding_window",), {})],
            [("sliding_window", 2, 5)],
            id="all examined cases count",
        ),
        pytest.param(
            [("failed", "abcde", ("sinks", "sliding_window"), WINDOW)],
            [("sliding_window", 5, 5)],
            id="a cause that names a feature blames no other, though no other case has sinks",
        ),
        pytest.param([("failed", "a", ("head_size=64",), WINDOW)], [], id="no failing case needs the named feature"),
        pytest.param([("xpassed", "abcd", ("sinks",), {})], [], id="passed against expectation"),
        pytest.param(
            [
                ("unsupported", "abcd", ("tree",), {}),
                ("failed", "abcd", ("tree",), {"check": "refusals", "summary": "wrong"}),
            ],
            [],
            id="undeclared cases, which the check refusals alone puts",
        ),
        pytest.param(
            [("passed", "abcde", ("sliding_window",), {}), ("failed", "abcde", ("sliding_window",), BESIDE)],
            [],
            id="right outputs: the layer beside them is wrong",
        ),
        pytest.param(
            [("passed", "abcd", ("sinks",), {}), ("timed_out", "abcd", ("sinks",), {"check": "cudagraph"} | LATE)],
            [],
            id="the last cases of a suite share a feature, and the time is up within their checks",
        ),
    ],
)
def test_a_claim_is_false_where_a_failure_is_about_it(make, right_cases, verdict_of, groups, expected):
    records = [
        make(outcome, case_id=case, needs=needs, **fields) for outcome, cases, needs, fields in groups for case in cases
    ]
    assert claims(verdict_of([*right_cases, *records])) == expected


def test_a_form_is_a_false_claim_where_it_alone_separates_the_cases(make, right_cases, verdict_of):
    records = [
        *right_cases,
        *(make("failed", case_id=f"h{n}", needs=("head_size=80", "layout=NHD"), summary=ROWS) for n in range(4)),
        *(make("passed", case_id=f"p{n}", needs=("head_size=64", "layout=NHD")) for n in range(2)),
    ]
    cases = []
    for record in records:
        keys = {"layer.head_size": 80 if record.case_id.startswith("h") else 64, "cache.layout": "NHD"}
        cases.append(CaseInfo(suite="smoke", id=record.case_id, shape="", keys=keys))
    assert claims(verdict_of(records, tuple(cases))) == [("head_size=80", 4, 4)]


def test_no_form_is_a_false_claim_where_most_cases_fall_short(make, verdict_of):
    """The last page is missing: cases with pages of one token are right, which proves nothing for the other sizes."""
    sizes = {f"c{n}": 16 if n < 8 else 1 for n in range(10)}
    records = [
        make("failed" if size > 1 else "passed", case_id=case, needs=(f"block_size={size}",))
        for case, size in sizes.items()
    ]
    cases = [CaseInfo(suite="smoke", id=case, shape="", keys={"cache.block_size": n}) for case, n in sizes.items()]
    assert claims(verdict_of(records, tuple(cases))) == []


def test_no_claim_is_false_where_the_fault_is_everywhere(make, verdict_of):
    needs = [(), ("sinks",), ("sliding_window",), ("sinks", "sliding_window"), ("logits_soft_cap",)]
    records = [make("failed", case_id=f"c{n}", summary=ROWS, needs=own) for n, own in enumerate(needs * 3)]
    found = verdict_of(records)
    assert claims(found) == []
    assert found.verdict == "failed"


def test_no_claim_is_false_where_chance_explains_what_failing_cases_need(make, verdict_of):
    """Half of all cases have sinks: that both failing ones have them happens once in four such runs."""
    for wrong, expected in (((0, 2), []), (range(0, 16, 2), [("sinks", 8, 10)])):
        records = [
            make("failed" if n in wrong else "passed", case_id=f"c{n}", needs=("sinks",) if n % 2 == 0 else ())
            for n in range(20)
        ]
        assert claims(verdict_of(records)) == expected


def test_a_log_sum_exp_that_is_wrong_where_the_output_is_right_is_a_false_claim(make, right_cases, verdict_of):
    own = [make("failed", check="lse", case_id=f"plain{n}", needs=("head_size=64",)) for n in range(30)]
    assert claims(verdict_of([*right_cases, *own])) == [("lse", 30, 30)]
    both = [
        make("failed", case_id=f"b{n}", check=check, summary=ROWS) for n in range(3) for check in ("numerics", "lse")
    ]
    assert claims(verdict_of([*right_cases, *both])) == []


def levels(declared, measured):
    order = ("NEVER", SINGLE, "UNIFORM_BATCH", "ALWAYS")
    probes = [
        {"name": level, "level": level, "outcome": "passed" if place <= order.index(measured) else "failed"}
        for place, level in enumerate(order)
    ]
    return {"declared": declared, "measured": measured, "recorder": "emulated", "probes": probes}


def test_a_graph_level_that_is_not_reached_is_a_false_claim_and_one_above_could_be_declared(graph, verdict_of):
    """The lowest level that a layer reaches is true of all."""
    short = [
        graph("failed", levels("ALWAYS", "UNIFORM_BATCH"), case_id="a", summary="x"),
        graph("failed", levels("ALWAYS", SINGLE), case_id="b", summary="y"),
        graph("passed", levels("ALWAYS", "ALWAYS"), case_id="c"),
    ]
    found = verdict_of(short)
    assert [str(claim) for claim in found.false_claims] == [f"CUDA-graph level ALWAYS (measured: {SINGLE})"]
    assert found.could_declare == ()
    roomy = [graph("passed", levels(SINGLE, "ALWAYS"), case_id=name) for name in "ab"]
    assert verdict_of(roomy).could_declare == ("CUDA-graph level ALWAYS",)
    lower = graph("passed", levels(SINGLE, "UNIFORM_BATCH"), case_id="c")
    assert verdict_of([*roomy, lower]).could_declare == ("CUDA-graph level UNIFORM_BATCH",)
    for measured in (levels(SINGLE, SINGLE), levels("ALWAYS", "ALWAYS")):
        exact = graph("passed", measured, case_id="d")
        assert verdict_of([*roomy, exact]).could_declare == ()


def test_what_is_right_without_being_declared_could_be_declared(make, right_cases, verdict_of):
    def undeclared(case, feature, **refusals):
        own = {"case_id": case, "needs": (feature, "head_size=64"), "check": "refusals"}
        reasons = [f"feature '{feature}' is not declared"]
        return [make("unsupported", reasons=reasons, **own | {"check": "numerics"}), make(**own | refusals)]

    right = {"outcome": "passed", "notes": [f"{ANSWERED}: x"]}
    refused = {"outcome": "passed", "notes": [f"{REFUSED} construct: no"]}
    records = [
        *right_cases,
        *undeclared("a", "tree", **right),
        *undeclared("b", "tree", **right),
        *undeclared("c", "alibi", **right),
        *undeclared("d", "alibi", **refused),
        *undeclared("e", "mla", **right),
        *undeclared("f", "mla", outcome="failed", summary="accepted, and wrong"),
        *undeclared("g", "fp8_kv", **refused),
    ]
    assert verdict_of(records).could_declare == ("alibi (1 of 2 right)", "tree (2 of 2 right)")
