"""An audit: what a library's classes declare is beside what the records of a run show, cell by cell."""

import json
from dataclasses import replace

import pytest

from attncheck.reports.audit import page
from attncheck.reports.audit.page import audited_levels
from attncheck.reports.run_file.header import BackendInfo, SurveyedBackend
from attncheck.reports.run_file.store import read_run

SINGLE = "UNIFORM_SINGLE_TOKEN_DECODE"
DECLARED = {
    "layers": ("keys and values",),
    "dtype": ("float16", "bfloat16", "float32"),
    "block_size": ("multiples of 16",),
    "head_size": ("64", "80"),
    "sinks": ("yes",),
    "sliding_window": ("no",),
    "dcp": ("yes",),
}
NEEDS = ("attn_type=decoder", "block_size=32", "head_size=64")


def levels(measured, *outcomes):
    """Levels of a backend that declares UNIFORM_BATCH, with a probe for each level above NEVER."""
    probes = [
        {"name": f"probe {level}", "level": level, "outcome": outcome, "reason": "" if outcome == "passed" else "moved"}
        for level, outcome in zip((SINGLE, "UNIFORM_BATCH", "ALWAYS"), outcomes, strict=True)
    ]
    return {"declared": "UNIFORM_BATCH", "measured": measured, "recorder": "emulated", "probes": probes}


@pytest.fixture
def run(tmp_path, graph_header, make, write_run):
    """A run of ``vllm:*`` of which ONE was examined, TWO has no level, and THREE cannot run."""
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
    short = {"check": "cudagraph", "graph": levels(SINGLE, "passed", "failed", "not run")}
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
    assert row["dcp"] == "yes: not tried"
    state = SurveyedBackend(name="vllm:ONE", declared={"layers": ("state",)}, level="UNIFORM_BATCH")
    of_state = replace(run, header=run.header.model_copy(update={"surveyed": (state,)}), records=run.records[:1])
    (line,) = [line for line in page.render(of_state).splitlines() if line.startswith("| `ONE` | state")]
    assert set(line.strip("| ").split(" | ")[2:]) == {"-"}  # a builder that passes has no sizes


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
    assert "within the time limit, and not measured:\n\n- `ONE`: 2 of 3 cases\n" in text
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
    reached = levels("UNIFORM_BATCH", "passed", "passed", "failed")
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
