"""Layers with a state and sparse attention in an audit: what ran, what is wrong, and what was not examined."""

import json

import pytest

from attncheck.reports.audit import page
from attncheck.reports.run_file.header import BackendInfo, CaseInfo, SurveyedBackend

STATE, SPARSE = {"layers": ("state",)}, {"layers": ("latent", "sparse")}
KNOWN = "drafts are mixed (their-fault)"
NO_GRAPHS = "its layers run without graphs"
SURVEYED = (
    SurveyedBackend(name="vllm:GDN", declared=STATE),
    SurveyedBackend(name="vllm:BARE", declared=STATE),
    SurveyedBackend(name="vllm:PLAIN", declared={"layers": ("keys and values",)}),
    SurveyedBackend(name="vllm:CHOSEN", declared=SPARSE, reason="CHOSEN needs a GPU"),
)
DECODE, PROMPT, CHUNK = (
    f"batch has a {what}" for what in ("decode", "prefill without context", "prefill with context")
)
CASES = {
    "steps": {DECODE: True, PROMPT: True, "batch is padded": True},
    "chunks": {DECODE: True, CHUNK: True},
    "drafts": {DECODE: True, CHUNK: True, "path.num_speculative_tokens": 3},
    "graphs": {DECODE: True, "path.mamba_cache_mode": "all"},
    "stored": {DECODE: True},
}
NEEDS = ("path=recurrence", "rule=gdn", "state_dtype=float32")
NO_DRAFTS = "num_speculative_tokens 2: at most 0 are supported"


@pytest.fixture
def records(make):
    """Of GDN: right steps, wrong chunks, drafts whose fault is known, and two cases whose outputs no check compares.
    BARE runs no layer, and PLAIN has other layers."""

    def one(outcome, case, check="numerics", backend="vllm:GDN", **fields):
        known = {"case_id": case, "check": check, "backend": backend, "needs": NEEDS, "suite": "state"}
        return make(outcome, **(known | fields))

    return [
        *(one("passed", "steps", check) for check in ("numerics", "cache_write", "invariance")),
        one("unsupported", "refused", "cudagraph", reasons=("rule linear: supported are gdn",)),
        one("unsupported", "steps", "cudagraph", reasons=(NO_GRAPHS,)),
        one("unsupported", "chunks", "cudagraph", reasons=("another reason",)),
        one("unsupported", "steps", "lse", reasons=("a layer with a state has none",), by="attncheck"),
        one("failed", "chunks", meaning="the state is not kept"),
        one("passed", "chunks", "cache_write"),
        one("xfailed", "drafts", underlying="failed", summary="7 of 9 rows are wrong", reason=KNOWN),
        one("xfailed", "chunks", "invariance", underlying="failed", summary="other bits", reason=KNOWN),
        one("passed", "graphs", "determinism"),
        one("passed", "stored", "cache_write"),
        one("unsupported", "steps", backend="vllm:BARE", reasons=("only its builder is run",)),
        one("unsupported", "steps", backend="vllm:PLAIN", reasons=("it is a layer with a state",)),
        one("passed", "plain", backend="vllm:PLAIN", needs=("dtype=float16",)),
    ]


@pytest.fixture
def run(run_of, records):
    cases = tuple(CaseInfo(suite="state", id=name, shape="2 heads", keys=keys) for name, keys in CASES.items())
    names = dict.fromkeys(record.backend for record in records)
    backends = tuple(BackendInfo(name=name, ref=name, version="9.9") for name in names)
    return run_of(records, cases=cases, surveyed=SURVEYED, backends=backends)


def rows(text):
    """The rows of each table of a page, as columns with cells, by the start of its first cell."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("| "):
            head, _, *body = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines())
            found += [dict(zip(head, row, strict=True)) for row in body]
    return found


def section(run, title):
    return page.render(run).partition(f"### {title}\n")[2].partition("\n### ")[0]


def test_a_batch_is_right_only_where_a_check_compared_its_outputs(run):
    batches, checks, *_ = rows(section(run, "Layers with a state"))
    assert {name: batches[name] for name in ("decode", "prefill", "prefill with context", "padding")} == {
        "decode": "1 of 2 right",
        "prefill": "right (1)",
        "prefill with context": "0 of 1 right",
        "padding": "right (1)",
    }
    assert batches["drafts"] == "0 of 1 right"
    assert batches["prefix caching"] == "not examined"  # determinism compares no truth
    assert batches["state_dtype"] == "float32: 1 of 3 right"
    assert batches["head_size"] == "not examined"
    assert checks == {
        "backend": "`GDN`",
        "numerics": "1 of 3 right",
        "cache_write": "right (3)",
        "invariance": "1 of 2 right",
        "determinism": "right (1)",
    }


def test_faults_are_named_and_known_ones_as_such(run):
    text = section(run, "Layers with a state")
    faults = [tuple(row.values())[1:] for row in rows(text) if "what is wrong" in row]
    assert faults == [
        ("`state/chunks`", "numerics", "perhaps: the state is not kept", "no"),
        ("`state/drafts`", "numerics", KNOWN, "yes"),
        ("`state/chunks`", "invariance", KNOWN, "yes"),
    ]


def test_what_was_not_examined_has_its_reason(run):
    reasons = {row["reason"]: row["backend"] for row in rows(section(run, "Layers with a state")) if "reason" in row}
    assert reasons == {NO_GRAPHS: "`GDN` (cudagraph)", "only its builder is run": "`BARE`"}
    levels = {row["reason"]: row["backend (declared)"] for row in rows(section(run, "CUDA-graph levels"))}
    assert levels[NO_GRAPHS] == "`GDN` (unknown)"  # not the reason of the case that it refuses
    sparse = section(run, "Sparse attention")
    assert rows(sparse) == [{"backend": "`CHOSEN`", "reason": "it needs a GPU"}]
    features = rows(section(run, "Features, declared and measured"))
    assert [row["backend"] for row in features] == ["`PLAIN`"]


def test_what_is_no_result_of_the_backend_counts_for_and_against_nothing(make, run_of):
    def one(outcome, case, check="numerics", **fields):
        return make(outcome, case_id=case, check=check, backend="GDN", needs=NEEDS, suite="state", **fields)

    late = {"cause": "the time of the backend was over", "stage": "", "limit_s": 3.0}
    ours = {"stage": "attncheck itself", "error_type": "KeyError", "message": "x"}
    found = run_of(
        [
            one("xpassed", "steps", reason=KNOWN),
            one("timed_out", "chunks", **late),
            one("passed", "chunks", "cache_write"),
            one("timed_out", "chunks", "determinism", **late),
            one("errored", "stored", **ours),
            one("errored", "stored", "invariance", **ours),
            one("passed", "stored", "cache_write"),
            one("unsupported", "drafts", reasons=("rule linear: supported are gdn", NO_DRAFTS)),
        ],
        cases=tuple(CaseInfo(suite="state", id=name, shape="2 heads", keys=keys) for name, keys in CASES.items()),
    )
    batches, checks, *others = rows(section(found, "Layers with a state"))
    assert (batches["decode"], batches["prefill"], batches["prefill with context"]) == (
        "right (1)",
        "right (1)",
        "not examined",
    )
    assert checks == {"backend": "`GDN`", "numerics": "right (1)", "cache_write": "right (2)"}
    assert {row["backend"]: row["reason"] for row in others} == {
        "`GDN` (invariance)": "attncheck itself raised KeyError",
        "`GDN` (determinism)": "the time of the backend was used up",
        "`GDN` (drafts)": NO_DRAFTS,
    }
    assert "### Features" not in page.render(found)


def test_drafts_of_sparse_attention_have_a_column_and_an_indexer_has_no_head_size(make, run_of):
    kinds = {
        "drafts": {"path": "spec_decode", CHUNK: True, "path.num_speculative_tokens": 3},
        "tree": {"path": "tree", CHUNK: True},
        "indexer": {"path": "indexer", DECODE: True},
    }
    found = run_of(
        [
            make("passed", case_id=name, suite="sparse", needs=("sparse", "head_size=64", f"path={keys['path']}"))
            for name, keys in kinds.items()
        ],
        cases=tuple(CaseInfo(suite="sparse", id=name, shape="2 heads", keys=keys) for name, keys in kinds.items()),
    )
    batches, *_ = rows(section(found, "Sparse attention"))
    assert (batches["drafts"], batches["prefill with context"], batches["decode"]) == (
        "right (2)",
        "not examined",
        "right (1)",
    )
    assert batches["head_size"] == "64: right (2)"


def test_a_run_without_such_layers_says_so_and_one_that_was_cut_off_does_not(run, records, run_of):
    others = records[-1:]
    for is_complete, reason in ((True, "no case of the run has such a layer"), (False, "the run ended before")):
        short = run_of(others, is_complete=is_complete, surveyed=SURVEYED[:2])
        assert rows(section(short, "Layers with a state")) == [{"backend": "`GDN`, `BARE`", "reason": reason}]


def test_a_run_of_refusals_alone_says_so(make, run_of):
    refused = make("passed", check="refusals", backend="vllm:GDN", needs=NEEDS, notes=("refused at construct",))
    text = section(run_of([refused], surveyed=SURVEYED[:1]), "Layers with a state")
    assert rows(text) == [{"backend": "`GDN`", "reason": "only its refusals were examined"}]


def test_the_document_has_the_same(run):
    layers = json.loads(page.document(run))["layers"]
    own, bare = layers["state"]
    assert own["batches"]["decode"] == {"right": 1, "short": 1}
    assert own["faults"][0] == {
        "words": "perhaps: the state is not kept",
        "is_known": False,
        "cases": ["state/chunks"],
        "checks": ["numerics"],
    }
    assert (bare["backend"], bare["reason"], bare["checks"]) == ("vllm:BARE", "only its builder is run", {})
    assert [(each["backend"], each["reason"]) for each in layers["sparse"]] == [("vllm:CHOSEN", "CHOSEN needs a GPU")]
