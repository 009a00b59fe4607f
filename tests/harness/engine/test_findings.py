"""What an engine's observer found, as records and reports: grouping, outcomes, causes and the command that repeats it."""

from collections import Counter

import pytest
from inline_snapshot import snapshot

from attncheck.harness.driver.observation import Raised
from attncheck.harness.engine.events import EngineFacts, EngineFinding, ObserverResult
from attncheck.harness.engine.findings import KINDS, STOPPED, EngineCase, grouped, joined, records_of
from attncheck.reference.spec import CHECKS as CHECKS_OF_ALL
from attncheck.reports.analysis.findings import findings
from attncheck.reports.analysis.repro import repro_command
from attncheck.reports.run_file.header import BackendInfo, Environment
from attncheck.reports.run_file.records import ENGINE_CHECKS
from attncheck.reports.run_file.store import Run
from attncheck.reports.terminal import run as terminal

LAYER = "model.layers.{}.self_attn.attn"
CHECKS = {"output": 4000, "token": 2000, "position": 2000, "prefix_hit": 20, "count": 300, "write": 500}
FACTS = EngineFacts(
    BackendInfo(name="vllm:CPU_ATTN", ref="vllm:CPU_ATTN", version="0.32.0"),
    shape="bfloat16, KV cache auto, blocks of 32 tokens, runner CPUModelRunner V1",
)
ENVIRONMENT = Environment(
    attncheck="0.1.0",
    python="3.11",
    torch="2.13.0",
    numpy="2",
    platform="Linux",
    cpu="a CPU",
    cores=2,
    device="cpu",
    device_name="a CPU",
)
SHARED = EngineCase(
    id="hybrid-shared-prefixes",
    description="prompts share prefixes",
    checks=KINDS,
    keys={"engine.model": "hybrid", "engine.traffic": "shared-prefixes", "engine.requests": 9},
)
SERVED = EngineCase(id="served")

STALE = "from position 64 on, block 17 (number 2 of the table) holds old content of request 4"
BAD_BLOCK = (
    EngineFinding("prefix_hit", 12, "3", 64, group=0, block_id=17, block_index=2, note="other tokens are in it"),
    *(
        EngineFinding(
            "output",
            step,
            request,
            80 + step,
            LAYER.format(layer),
            group=0,
            block_id=17,
            block_index=2,
            num_rows=2,
            budget_share=10.0 * step,
            cause=STALE if layer else None,
        )
        for step in (13, 14, 15)
        for request in ("3", "5")
        for layer in (0, 2)
    ),
)
SHORT = tuple(
    EngineFinding("output", step, str(step), 90, LAYER.format(1), group=1, cause=f"the row sees {step} keys too few")
    for step in (20, 30)
)


def observed(*found, **changes):
    values = {"steps": 120, "checks": CHECKS, "not_followed": {}, "worst_share": 0.3, "engine": FACTS} | changes
    return ObserverResult(findings=found, **values)


def recorded(result, case=SHARED, **changes):
    return {record.check: record for record in records_of(case, result, ENVIRONMENT, seed=7, **changes).records}


def run_of(result, case=SHARED, command=()):
    served = records_of(case, result, ENVIRONMENT, seed=7)
    return Run("run.jsonl", joined([served], "2026-01-01T00:00:00+00:00", command).header, served.records)


def test_the_rows_layers_requests_and_steps_of_one_bad_block_are_one_finding():
    assert [len(group.findings) for group in grouped(BAD_BLOCK)] == [13]
    run = run_of(observed(*BAD_BLOCK))
    (found,) = findings(run.records, run.header)
    assert {record.check for record in found.records} == {"prefix_hit", "output"}
    output, hit = recorded(observed(*BAD_BLOCK))["output"], recorded(observed(*BAD_BLOCK))["prefix_hit"]
    assert (output.figures["wrong"], output.figures["first_step"], output.figures["findings"]) == (24, 13, 1)
    assert (hit.figures["wrong"], hit.figures["first_step"]) == (1, 12)
    assert output.meaning == STALE


def test_findings_without_a_block_are_grouped_by_cause_whatever_its_figures():
    assert [len(group.findings) for group in grouped(SHORT)] == [2]
    other = EngineFinding("output", 21, "20", 91, LAYER.format(1), group=1, cause="no window")
    assert [len(group.findings) for group in grouped([*SHORT, other])] == [2, 1]
    same_id = EngineFinding("output", 21, "20", 91, LAYER.format(1), group=1, block_id=17)
    assert len(grouped([*BAD_BLOCK, same_id])) == 2, "block 17 of another KV-cache group is another block"


def test_outputs_whose_cause_was_not_sought_are_a_group_of_their_own():
    def wrong(step, request, cause=None, is_sought=True):
        return EngineFinding("output", step, request, 9, "layer", group=0, cause=cause, is_sought=is_sought)

    sought = [wrong(3, "1", "no window"), wrong(3, "1")]
    others = [wrong(3, "1", is_sought=False), wrong(4, "2", is_sought=False)]
    groups = grouped([*sought, *others])
    assert [group.findings for group in groups] == [(sought[0],), (sought[1],), tuple(others)]
    assert [group.words for group in groups] == [
        "no window",
        "an output row is wrong, and its cause is not known",
        "an output row is wrong, and its cause was not sought",
    ]


def lacking(step, request, block_id, block_index):
    place = {"group": 0, "block_id": block_id, "block_index": block_index}
    return EngineFinding("write", step, request, 32 * block_index, LAYER.format(0), note=f"{block_id} lacks", **place)


def test_blocks_that_one_step_makes_wrong_in_the_same_way_are_one_finding():
    act = [lacking(20, "3", 40 + index, index) for index in range(12)]
    read = EngineFinding("output", 25, "3", 400, LAYER.format(0), group=0, block_id=43, block_index=3)
    later = lacking(21, "3", 60, 12)
    assert [len(group.findings) for group in grouped([*act, read, later])] == [13, 1]


def test_a_block_at_another_place_of_a_table_has_another_request_and_is_another_finding():
    assert [len(group.findings) for group in grouped([lacking(20, "3", 40, 2), lacking(90, "7", 40, 5)])] == [1, 1]


def test_a_finding_names_its_first_step_request_position_layer_block_and_cause():
    text = terminal.render_run(
        run_of(observed(*BAD_BLOCK, *SHORT, not_followed={"images": 3}, counts=Counter(rows=9))), width=110
    )
    assert text == snapshot("""\
attncheck 0.1.0, torch 2.13.0, 2 cores, suite engine: 1 case, seed 7
note: compared: output 4000, token 2000, position 2000, prefix_hit 20, count 300, write 500
note: rows not followed: output 3, token 3, position 3, prefix_hit 3, count 3, write 3

warning: run.jsonl was cut off before its footer: what follows is 6 records of an unfinished run

vllm:CPU_ATTN: FAILED: 1 finding in 1 of 1 case

backend        output  token  position  prefix_hit  count  write  worst    not
                                                                  error /  examined
                                                                  allowed
vllm:CPU_ATTN  0/1     1/1    1/1       0/1         1/1    1/1    0.30     -

finding 1 of 1, vllm:CPU_ATTN: from position 64 on, block 17 (number 2 of the table) holds old content of
  request 4
  1 case, checks output and prefix_hit; the examination fails because of it
  case: engine/hybrid-shared-prefixes, check output: prompts share prefixes
    bfloat16, KV cache auto, blocks of 32 tokens, runner CPUModelRunner V1
    26 of 4000 output rows are wrong in 2 ways, the first is in step 13: request 3, position 93, layer
      model.layers.0.self_attn.attn, block 17, number 2 of its table
    1 mapped block and 24 output rows of 2 layers and 2 requests in steps 12 to 15; first: request 3, position
      64, block 17, number 2 of its table; the largest error is 150 times the allowed error
      likely cause: from position 64 on, block 17 (number 2 of the table) holds old content of request 4
      other tokens are in it
    and 4 more lines
    repeat: attncheck engine --model hybrid --traffic shared-prefixes --requests 9 --seed 7 --steps 13

failed: 1 backend, 1 case: 1 failed\
""")


def test_a_check_that_compared_nothing_is_not_passed():
    left_out = {"not_followed": {"images": 8}, "not_compared": {("write", "pages with async scheduling"): 3}}
    found = recorded(observed(checks={"output": 5}, counts=Counter(rows=20), **left_out))
    assert {check: record.outcome for check, record in found.items()} == {
        "output": "passed",
        **dict.fromkeys(("token", "position", "prefix_hit", "count", "write"), "unsupported"),
    }
    assert found["token"].reasons == ("no token was compared", "not followed: images (8 rows)")
    assert found["write"].reasons[1:] == (
        "not followed: images (8 rows)",
        "not compared: pages with async scheduling (3)",
    )
    figures = {"compared": 5, "not_compared": 0, "steps": 120, "rows_not_followed": 8}
    assert found["output"].figures == {"budget_share": 0.3, **figures}
    assert "not followed: images (8 rows)" in found["output"].notes


@pytest.mark.parametrize(
    ("left_out", "passed"),
    [
        ({"not_followed": {"too long": 10}}, set(KINDS)),
        ({"not_followed": {"too long": 11}}, set()),
        ({"not_followed": {"--follow 8 leaves out": 18, "too long": 1}}, set(KINDS)),
        ({"not_followed": {"--follow 8 leaves out": 16, "too long": 3}}, set()),
        ({"not_compared": {("output", "layers of one kind"): 4000}}, set(KINDS)),
        ({"not_compared": {("output", "layers of one kind"): 4001}}, set(KINDS) - {"output"}),
        ({"not_compared": {("output", "layers of the KV-cache spec MambaSpec"): 9000}}, set(KINDS)),
    ],
)
def test_a_check_of_which_most_was_left_out_is_not_passed(left_out, passed):
    found = recorded(observed(counts=Counter(rows=20), **left_out))
    assert {check for check, record in found.items() if record.outcome == "passed"} == passed
    for record in found.values():
        assert record.outcome == "passed" or "most was left out: only" in record.reasons[0]


def test_the_printed_report_counts_what_was_left_out():
    result = observed(not_followed={"images": 8}, counts=Counter(rows=2020), not_compared={("output", "one layer"): 30})
    text = terminal.render_run(run_of(result), width=110)
    assert "note: compared: output 4000, token 2000, position 2000, prefix_hit 20, count 300, write 500\n" in text
    assert "note: not compared: output 30\n" in text
    assert "note: rows not followed: output 8, token 8, position 8, prefix_hit 8, count 8, write 8\n" in text


def test_checks_that_are_not_due_and_compared_nothing_have_no_record():
    assert set(recorded(observed(checks={"output": 5}), SERVED)) == {"output"}


@pytest.mark.parametrize(
    ("result", "options", "outcome"),
    [
        ({"failure": "KeyError: 3"}, {}, ("unsupported", f"{STOPPED}KeyError: 3")),
        ({}, {"ended_by": Raised("serving", "AssertionError", "no free block")}, ("errored", "serving")),
        ({}, {"unmet": "nothing was preempted"}, ("unavailable", "nothing was preempted")),
    ],
    ids=["the observer failed", "the engine raised", "nothing of the kind happened"],
)
def test_a_finding_fails_its_check_whatever_keeps_the_others_from_passing(result, options, outcome):
    found = recorded(observed(*BAD_BLOCK, **result), **options)
    assert (found["output"].outcome, found["prefix_hit"].outcome) == ("failed", "failed")
    other = found["token"]
    assert (other.outcome, other.stage if other.outcome == "errored" else other.reasons[0]) == outcome


def test_a_finding_is_repeated_up_to_its_first_step():
    run = run_of(observed(*BAD_BLOCK))
    (output,) = (record for record in run.records if record.check == "output")
    repeat = "attncheck engine --model hybrid --traffic shared-prefixes --requests 9 --seed 7 --steps 13"
    assert repro_command(output, run.header) == repeat


def test_no_command_repeats_a_finding_in_a_server():
    command = ("attncheck", "engine", "--every", "4", "--", "vllm", "serve", "a model")
    run = run_of(observed(*BAD_BLOCK), SERVED, command)
    assert repro_command(run.records[0], run.header) == ""
    assert "repeat" not in terminal.render_run(run, width=110)


def test_the_checks_of_engines_have_the_same_names_everywhere():
    assert {name for name, info in CHECKS_OF_ALL.items() if info.applies_to == "engine"} == set(KINDS) == ENGINE_CHECKS


def test_the_first_finding_of_each_kind_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check whose findings all come behind the limit must not pass."""
    monkeypatch.setattr("attncheck.harness.engine.events.MAX_FINDINGS", 1)
    result = ObserverResult()
    for kind in ("output", "output", "token"):
        result.find(kind, "a", 0)
    assert [finding.kind for finding in result.findings] == ["output", "token"]
    assert result.findings_left_out == 1
