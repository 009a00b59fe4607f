"""Declarations against verdicts: of a backend, and of all backends of an audit."""

import json
from dataclasses import replace

import pytest

from attncheck.reports.analysis.support import ANSWERED, REFUSED
from attncheck.reports.analysis.verdicts import run_findings
from attncheck.reports.audit import page
from attncheck.reports.audit.claims import audited_claims
from attncheck.reports.audit.page import audited_levels
from attncheck.reports.run_file.header import BackendInfo, CaseInfo, DeclaredClaim, SurveyedBackend
from attncheck.reports.run_file.store import read_run

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


DECLARED = {
    "layers": ("keys and values",),
    "dtype": ("float16", "bfloat16", "float32"),
    "block_size": ("multiples of 16",),
    "head_size": ("64", "80"),
    "sinks": ("yes",),
    "sliding_window": ("no",),
}
NEEDS = ("attn_type=decoder", "block_size=32", "head_size=64")


def levels_of_audit(measured, *outcomes):
    """Levels of a backend that declares UNIFORM_BATCH, with a probe for each level above NEVER."""
    probes = [
        {"name": f"probe {level}", "level": level, "outcome": outcome, "reason": "" if outcome == "passed" else "moved"}
        for level, outcome in zip((SINGLE, "UNIFORM_BATCH", "ALWAYS"), outcomes, strict=True)
    ]
    return {"declared": "UNIFORM_BATCH", "measured": measured, "recorder": "emulated", "probes": probes}


@pytest.fixture
def run(tmp_path, graph_header, make, write_run):
    """A run of ``vllm:*``: ONE was examined, TWO has no level, and THREE cannot run."""
    surveyed = (
        SurveyedBackend(name="vllm:ONE", declared=DECLARED, level="UNIFORM_BATCH"),
        SurveyedBackend(name="vllm:TWO", declared={"layers": ("latent",)}, level="NEVER"),
        SurveyedBackend(name="vllm:THREE", declared=DECLARED, level="ALWAYS", reason="THREE needs a GPU"),
        SurveyedBackend(name="vllm:FOUR", reason="No module named 'four'"),
    )
    backends = tuple(
        BackendInfo(name=f"vllm:{name}", ref=f"vllm:{name}", version="9.9", features=features)
        for name, features in (("ONE", ("sinks",)), ("TWO", ()))
    )
    header = graph_header.model_copy(
        update={"backends": backends, "surveyed": surveyed, "command": ("attncheck", "run", "--backend", "vllm:*")}
    )

    def one(outcome, case, needs, **fields):
        return make(outcome, backend="vllm:ONE", backend_ref="vllm:ONE", case_id=case, needs=needs, **fields)

    half, sinks = ("dtype=float16", *NEEDS), ("dtype=bfloat16", "sinks", *NEEDS)
    short = {"check": "cudagraph", "graph": levels_of_audit(SINGLE, "passed", "failed", "not run")}
    no_latent = {"check": "cudagraph", "reasons": ("the layer has no latent cache",)}
    records = [
        one("passed", "plain", half),
        one("passed", "plain", half, **short),
        one("failed", "sinks", sinks, concerns=("sinks", "dtype=bfloat16")),
        one("failed", "sinks", sinks, **short, summary="declared UNIFORM_BATCH"),
        one("unsupported", "window", ("sliding_window", *half), reasons=("feature 'sliding_window' is not declared",)),
        make("unsupported", backend="vllm:TWO", backend_ref="vllm:TWO", **no_latent),
    ]
    return read_run(write_run(tmp_path / "run.jsonl", header, *records))


def cells_of(run, heading, first):
    """The cells, by column, of the line of a page that begins with ``first``, in the table that begins so."""
    lines = page.render(run).splitlines()
    head = next(line for line in lines if line.startswith(heading))
    row = next(line for line in lines[lines.index(head) :] if line.startswith(first))
    split = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in (head, row))
    return dict(zip(*split, strict=True))


def test_levels_are_listed_per_kind_of_layer_and_of_batch(run):
    one, *others = audited_levels(run)
    assert (one.backend, one.declared, one.measured, one.falls_short) == ("vllm:ONE", "UNIFORM_BATCH", SINGLE, True)
    assert dict(one.batches) == {
        "decodes of one token": "right (1 probe)",
        "uniform batches of several tokens": "breaks",
        "mixed batches": "not tried",
    }
    assert set(one.layers) == {"plain", "sinks"}
    assert "moved" in one.breaks
    assert [(each.declared, each.measured, each.breaks) for each in others] == [
        ("NEVER", "not measured", "the layer has no latent cache"),
        ("ALWAYS", "not measured", "THREE needs a GPU"),
        ("unknown", "not measured", "No module named 'four'"),
    ]


def test_each_cell_has_what_is_declared_and_what_is_measured(run):
    row = cells_of(run, "| backend | layers | dtype", "| `ONE` | keys")
    assert row["dtype"] == "right: float16 (1); **wrong**: bfloat16 (1 of 1); not tried: float32"
    assert row["head_size"] == "right: 64 (1); not tried: 80"
    assert row["block_size"] == "multiples of 16 (right: 32 (1))"
    assert row["sinks"] == "yes: **wrong** (1 of 1)"
    assert row["sliding_window"] == "no: not tried"


def test_what_cannot_run_is_listed_with_its_declarations_and_its_reason(run):
    text = page.render(run)
    assert text.startswith("## Attention backends of vllm 9.9: declared and measured\n")
    assert "| `THREE` (ALWAYS) | it needs a GPU |" in text
    assert "| `THREE` | keys and values | float16, bfloat16, float32 |" in text
    assert "| `FOUR` |" not in text


def test_what_a_backend_had_no_time_for_is_left_and_neither_right_nor_wrong(run, make):
    """ONE stops within a case that needs sinks, and does not begin the next one."""
    who = {"backend": "vllm:ONE", "backend_ref": "vllm:ONE"}
    late = {"cause": "the case did not run, because earlier cases used up the time of the backend by --within"}
    records = (
        make("passed", case_id="plain", needs=("dtype=float16", *NEEDS), **who),
        make("passed", case_id="cut", needs=("dtype=float32", *NEEDS), **who),
        make("timed_out", case_id="cut", check="cudagraph", needs=("dtype=float32", *NEEDS), **late, **who),
        make("timed_out", case_id="next", needs=("dtype=bfloat16", "sinks", *NEEDS), stage="", **late, **who),
    )
    cut = replace(run, records=records)
    text = page.render(cut)
    assert "Not reached in time, so not measured in whole or in part:\n\n- `ONE`: 2 of 3 cases\n" in text
    assert "| `ONE` (UNIFORM_BATCH) | timed_out in smoke/cut: the time of the backend was used up |" in text
    row = cells_of(cut, "| backend | layers | dtype", "| `ONE` | keys")
    assert row["dtype"] == "right: float16 (1), float32 (1); not reached in time: bfloat16"
    assert row["sinks"] == "yes: not reached in time"
    assert json.loads(page.document(cut))["left"] == {"vllm:ONE": {"left": 2, "cases": 3}}


def test_a_run_that_was_cut_off_lists_the_backends_that_it_did_not_reach(run):
    records = tuple(record for record in run.records if record.backend == "vllm:ONE" and record.check == "numerics")
    cut = replace(run, records=records, footer=None)
    text = page.render(cut)
    assert "there is no record of 1 of 2 backends: vllm:TWO" in text
    assert "| `ONE` (UNIFORM_BATCH), `TWO` (NEVER) | the run ended before |" in text


def test_several_runs_have_their_levels_side_by_side(run, make):
    """The other machine is a GPU, where THREE can run, and ONE has other cases."""
    environment = run.header.environment.model_copy(update={"device": "cuda", "device_name": "NVIDIA H200"})
    surveyed = list(run.header.surveyed)
    surveyed[2] = surveyed[2].model_copy(update={"reason": ""})
    backends = (*run.header.backends, BackendInfo(name="vllm:THREE", ref="vllm:THREE", version="9.9"))
    changed = {"environment": environment, "surveyed": tuple(surveyed), "backends": backends}
    reached = levels_of_audit("UNIFORM_BATCH", "passed", "passed", "failed")
    records = [
        make("passed", backend=f"vllm:{name}", case_id="fp8", check="cudagraph", needs=("fp8_kv",), graph=graph)
        for name, graph in (("ONE", reached), ("THREE", reached | {"declared": "ALWAYS"}))
    ]
    gpu = replace(run, header=run.header.model_copy(update=changed), records=tuple(records))
    table = page.render(gpu, run).split("several runs\n\n")[1].split("\n\n")[0].splitlines()
    gpu_name, cpu_name = "NVIDIA H200", f"{run.header.environment.device_name}, emulated"
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in (table[0], *table[2:])] == [
        ["backend", *(f"{what} ({of})" for of in (gpu_name, cpu_name) for what in ("declared", "measured"))],
        ["`ONE`", "UNIFORM_BATCH", "UNIFORM_BATCH (fp8_kv)", "UNIFORM_BATCH", f"{SINGLE} (plain; sinks)"],
        ["`THREE`", "ALWAYS", "UNIFORM_BATCH (fp8_kv)", "ALWAYS", "not measured"],
    ]
    (beside,) = json.loads(page.document(gpu, run))["beside"]
    assert beside == {key: value for key, value in json.loads(page.document(run)).items() if key in beside}
    assert "several runs" not in page.render(gpu)


def test_claims_that_a_check_measures_have_its_outcome(run, make, graph):
    """A claim about graphs has an outcome in the levels; one of bits counts only if the run claims it."""

    def claim(member, **ways):
        return DeclaredClaim(member=member, value="yes", **ways)

    draft, table = "supports_draft_decode_metadata_update", "supports_update_block_table"
    own = (
        claim(draft, check="cudagraph"),
        claim(table, check="builder"),
        claim("supports_batch_invariance", check="bitwise"),
        claim("indexes_kv_by_block_stride", form="cache.pool_order"),
        claim("supports_sink", feature="sinks"),
        claim("supports_rswa", unexamined="no case has it"),
        claim("supports_<b>", unexamined="<img> @you"),
    )
    infos = (BackendInfo(name="vllm:ONE", ref="vllm:ONE", conventions={"batch_invariant": True}, claims=own),)
    infos += (BackendInfo(name="vllm:TWO", ref="vllm:TWO", conventions={"batch_invariant": False}, claims=own),)
    surveyed = SurveyedBackend(name="vllm:THREE", reason="needs a GPU", claims=own)
    found = [{"name": draft, "value": True, "outcome": outcome, "reason": ""} for outcome in ("failed", "passed")]

    def of(name, outcome, check, case, **fields):
        return make(outcome, backend=name, backend_ref=name, check=check, case_id=case, **fields)

    records = [
        of("vllm:ONE", "passed", "cudagraph", "a", graph=levels_of_audit(SINGLE, *["passed"] * 3) | {"claims": [each]})
        for each in found
    ]
    records += [of(name, "passed", "bitwise", "a") for name in ("vllm:ONE", "vllm:TWO")]
    records += [
        of("vllm:ONE", "failed", "bitwise", "b", summary="order: other bits"),
        of("vllm:ONE", "failed", "builder", "a", summary="with update_block_table for a second group of layers: no"),
        of("vllm:TWO", "failed", "builder", "a", summary="shared metadata are changed"),
        of(
            "vllm:ONE",
            "errored",
            "numerics",
            "pool",
            stage="forward",
            error_type="ValueError",
            message="no",
            traceback="",
        ),
        of("vllm:ONE", "passed", "numerics", "dense"),
    ]
    cases = [
        CaseInfo(suite="smoke", id="pool", shape="", keys={"cache.pool_order": "BL"}),
        CaseInfo(suite="smoke", id="dense", shape="", keys={}),
    ]
    header = run.header.model_copy(update={"backends": infos, "surveyed": (surveyed,), "cases": tuple(cases)})
    states = {
        (each.backend, each.claim.member): each.state
        for each in audited_claims(replace(run, header=header, records=tuple(records)))
    }
    one = {member: state for (name, member), state in states.items() if name == "vllm:ONE"}
    assert one == {
        draft: "wrong (1 of 2)",
        table: "wrong (1 of 1)",
        "supports_batch_invariance": "wrong (1 of 2)",
        "indexes_kv_by_block_stride": "wrong (1 of 1)",
        "supports_sink": "not tried",
        "supports_rswa": "declared, not examined: no case has it",
        "supports_<b>": "declared, not examined: <img> @you",
    }
    assert {states["vllm:TWO", member] for member in (table, draft, "supports_batch_invariance")} == {"not tried"}
    assert states["vllm:THREE", "supports_sink"] == "declared, not examined here"
    text = page.render(replace(run, header=header, records=tuple(records)))
    assert f"| `{draft}` | check cudagraph | **wrong** (1 of 2): `ONE`; not tried: `TWO`" in text.replace(
        "declared, not examined here: `THREE`; ", ""
    )
    assert "<img>" not in text
    lines = text.splitlines()
    assert "| `supports_rswa` | nothing | declared, not examined: no case has it: `THREE`, `ONE`, `TWO` |" in lines
