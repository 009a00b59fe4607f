"""An audit: what a library's classes declare is beside what the records of a run show, cell by cell."""

import json
from dataclasses import replace
from typing import Any

import pytest

from attncheck.harness.cli.app import main
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


def levels(measured: str | None, *outcomes: str) -> dict[str, Any]:
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

    half = ("dtype=float16", *NEEDS)
    records = [
        one("passed", "plain", half),
        one("passed", "plain", half, check="cudagraph", graph=levels(SINGLE, "passed", "failed", "not run")),
        one("failed", "sinks", ("dtype=bfloat16", "sinks", *NEEDS), concerns=("sinks", "dtype=bfloat16")),
        one(
            "failed",
            "sinks",
            ("dtype=bfloat16", "sinks", *NEEDS),
            check="cudagraph",
            graph=levels(SINGLE, "passed", "failed", "not run"),
            summary="declared UNIFORM_BATCH",
        ),
        one("unsupported", "window", ("sliding_window", *half), reasons=("feature 'sliding_window' is not declared",)),
        make(
            "unsupported",
            backend="vllm:TWO",
            backend_ref="vllm:TWO",
            check="cudagraph",
            reasons=("the layer has no latent cache",),
        ),
    ]
    return read_run(write_run(tmp_path / "run.jsonl", header, *records))


def test_levels_are_listed_per_kind_of_layer_and_of_batch(run):
    one, two, three, four = audited_levels(run)
    assert (one.backend, one.declared, one.measured, one.falls_short) == ("vllm:ONE", "UNIFORM_BATCH", SINGLE, True)
    assert dict(one.batches) == {
        "decodes of one token": "right (1 probe)",
        "uniform batches of several tokens": "breaks",
        "mixed batches": "not tried",
    }
    assert set(one.layers) == {"plain", "sinks"}
    assert "moved" in one.breaks
    assert (two.declared, two.measured, two.breaks) == ("NEVER", "not measured", "the layer has no latent cache")
    assert (three.declared, three.breaks) == ("ALWAYS", "THREE needs a GPU")
    assert (four.declared, four.breaks) == ("unknown", "No module named 'four'")


@pytest.mark.parametrize(
    ("state", "cell"), [("NaN or Inf", "**NaN or Inf**"), ("finite", "finite"), ("not examined", "not examined")]
)
def test_padding_rows_are_beside_the_level_of_the_real_rows(run, make, write_run, tmp_path, state, cell):
    graph = levels("UNIFORM_BATCH", "passed", "passed", "failed") | {"padding_rows": state}
    record = make("passed", backend="vllm:ONE", check="cudagraph", graph=graph)
    audited = read_run(write_run(tmp_path / "more.jsonl", run.header, record))
    head, _, row, *_ = [line for line in page.render(audited).splitlines() if line.startswith("|")]
    by_column = dict(
        zip(*([cell.strip() for cell in line.strip("|").split(" | ")] for line in (head, row)), strict=True)
    )
    assert (by_column["measured"], by_column["padding rows"]) == ("UNIFORM_BATCH", cell)
    assert json.loads(page.document(audited))["levels"][0]["padding_rows"] == state


def test_head_room_is_what_could_be_declared_instead(run, make, write_run, tmp_path):
    record = make("passed", backend="vllm:ONE", check="cudagraph", graph=levels("ALWAYS", "passed", "passed", "passed"))
    (one, *_) = audited_levels(read_run(write_run(tmp_path / "more.jsonl", run.header, record)))
    assert (one.head_room, one.falls_short, one.breaks) == ("ALWAYS", False, "")


def test_each_cell_has_what_is_declared_and_what_is_measured(run):
    (row,) = [line for line in page.render(run).splitlines() if line.startswith("| `ONE` | keys")]
    cells = [cell.strip() for cell in row.strip("|").split(" | ")]
    heads = next(line for line in page.render(run).splitlines() if line.startswith("| backend | layers | dtype"))
    by_column = dict(zip([cell.strip() for cell in heads.strip("|").split("|")], cells, strict=True))
    assert by_column["dtype"] == "right: float16 (1); **wrong**: bfloat16 (1 of 1); not tried: float32"
    assert by_column["head_size"] == "right: 64 (1); not tried: 80"
    assert by_column["block_size"] == "multiples of 16 (right: 32 (1))"
    assert by_column["sinks"] == "yes: **wrong** (1 of 1)"
    assert by_column["sliding_window"] == "no: not tried"
    assert by_column["dcp"] == "yes: not tried"


def test_a_builder_that_passes_has_no_sizes_in_the_report(run, make, write_run, tmp_path):
    state = SurveyedBackend(name="vllm:ONE", declared={"layers": ("state",)}, level="UNIFORM_BATCH")
    header = run.header.model_copy(update={"surveyed": (state,)})
    record = make("passed", backend="vllm:ONE", check="numerics", needs=("dtype=float16", *NEEDS))
    text = page.render(read_run(write_run(tmp_path / "state.jsonl", header, record)))
    (row,) = [line for line in text.splitlines() if line.startswith("| `ONE` | state")]
    assert set(row.strip("| ").split(" | ")[2:]) == {"-"}


def test_what_cannot_run_is_listed_with_its_declarations_and_its_reason(run):
    text = page.render(run)
    assert text.startswith("## Attention backends of vllm 9.9: declared and measured\n")
    assert "| `THREE` (ALWAYS) | it needs a GPU |" in text
    assert "| `THREE` | keys and values | float16, bfloat16, float32 |" in text
    assert "| `FOUR` |" not in text


def test_what_a_backend_had_no_time_for_is_left_and_neither_right_nor_wrong(run, make, write_run, tmp_path):
    """ONE stops within a case that needs sinks, and does not begin the next one."""
    who = {"backend": "vllm:ONE", "backend_ref": "vllm:ONE"}
    late = {"cause": "the case did not run, because earlier cases used up the time of the backend by --within"}
    records = [
        make("passed", case_id="plain", needs=("dtype=float16", *NEEDS), **who),
        make("passed", case_id="cut", needs=("dtype=float32", *NEEDS), **who),
        make("timed_out", case_id="cut", check="cudagraph", needs=("dtype=float32", *NEEDS), **late, **who),
        make("timed_out", case_id="next", needs=("dtype=bfloat16", "sinks", *NEEDS), stage="", **late, **who),
    ]
    cut = read_run(write_run(tmp_path / "late.jsonl", run.header, *records))
    text = page.render(cut)
    assert "within the time limit, and not measured:\n\n- `ONE`: 2 of 3 cases\n" in text
    assert "| `ONE` (UNIFORM_BATCH) | timed_out in smoke/cut: the time of the backend was used up |" in text
    (row,) = [line for line in text.splitlines() if line.startswith("| `ONE` | keys")]
    assert "| right: float16 (1), float32 (1); not reached in time: bfloat16 |" in row
    assert "| yes: not reached in time |" in row
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
    surveyed = [
        each.model_copy(update={"reason": "", "level": "ALWAYS"} if each.name == "vllm:THREE" else {})
        for each in run.header.surveyed
    ]
    backends = (*run.header.backends, BackendInfo(name="vllm:THREE", ref="vllm:THREE", version="9.9"))
    header = run.header.model_copy(
        update={"environment": environment, "surveyed": tuple(surveyed), "backends": backends}
    )
    reached = levels("UNIFORM_BATCH", "passed", "passed", "failed")
    records = [
        make("passed", backend=f"vllm:{name}", case_id="fp8", check="cudagraph", needs=("fp8_kv",), graph=graph)
        for name, graph in (("ONE", reached), ("THREE", reached | {"declared": "ALWAYS"}))
    ]
    gpu = replace(run, header=header, records=tuple(records))
    table = page.render(gpu, run).split("several runs\n\n")[1].split("\n\n")[0].splitlines()
    cpu = run.header.environment.device_name
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in (table[0], *table[2:])] == [
        [
            "backend",
            *(f"{what} ({of})" for of in ("NVIDIA H200", f"{cpu}, emulated") for what in ("declared", "measured")),
        ],
        ["`ONE`", "UNIFORM_BATCH", "UNIFORM_BATCH (fp8_kv)", "UNIFORM_BATCH", f"{SINGLE} (plain; sinks)"],
        ["`THREE`", "ALWAYS", "UNIFORM_BATCH (fp8_kv)", "ALWAYS", "not measured"],
    ]
    (beside,) = json.loads(page.document(gpu, run))["beside"]
    assert beside == {key: value for key, value in json.loads(page.document(run)).items() if key in beside}
    assert "several runs" not in page.render(gpu)


def test_the_json_has_the_same(run):
    found = json.loads(page.document(run))
    assert [row["backend"] for row in found["levels"]] == ["vllm:ONE", "vllm:TWO", "vllm:THREE", "vllm:FOUR"]
    one = {feature["column"]: feature for feature in found["backends"][0]["features"]}
    assert one["dtype"]["declared"] == ["float16", "bfloat16", "float32"]
    assert {value["value"]: value["verdict"] for value in one["dtype"]["measured"]} == {
        "float16": "right",
        "bfloat16": "short",
    }
    assert one["dcp"]["is_testable"] is False


def test_the_command_reads_one_run_or_several(run, capsys):
    assert main(["report", run.path, "--format", "audit"]) == 0
    assert capsys.readouterr().out == page.render(run)
    assert main(["report", run.path, "--format", "audit-json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "audit"
    assert main(["report", run.path, run.path, "--format", "audit"]) == 0
    assert capsys.readouterr().out == page.render(run, run)
