"""``attncheck engine`` finds faults that are planted in vLLM, with request, position and step, and none without them."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default")]

FAULTS = Path(__file__).with_name("engine_faults")

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Expected:
    """What is found of a fault.

    kind: of a finding. words: a regular expression that a cause or note of this kind matches. exact: the finding is of
    the position of the act; otherwise a position that the act made wrong. names_block: the block is named.
    is_at_once: it is found in the step of the act; otherwise later.
    """

    kind: str
    words: str
    exact: bool = True
    names_block: bool = True
    is_at_once: bool = True


EXPECTED: dict[str, Expected] = {
    "block_has_two_owners": Expected("write", "lacks .*positions?"),
    "chunk_loses_its_last_token": Expected("write", "lacks .*positions?"),
    "common_prefix_one_block_too_long": Expected("output", "is read in place of block"),
    "count_kept_after_preemption": Expected("prefix_hit", "the prefix hit maps block", is_at_once=False),
    "hit_one_block_too_many": Expected("prefix_hit", "the prefix hit maps block", exact=False),
    "key_before_rotary": Expected("write", "lacks .*positions?"),
    "keys_written_after_attention": Expected("output", "read before they are written"),
    "new_block_not_appended": Expected("write", "lacks .*positions?"),
    "new_block_one_place_early": Expected("write", "lacks .*positions?", exact=False),
    "not_causal": Expected("output", "without a causal mask"),
    "output_not_a_number": Expected("output", "the output is NaN"),
    "padding_row_written": Expected("output", "holds zeros"),
    "position_one_more": Expected("position", r"position \d+, not \d+"),
    "position_restarts_after_preemption": Expected("position", "position 0, not"),
    "query_start_one_more": Expected("output", "the pages hold the right keys"),
    "rotary_key_of_another_row": Expected("write", "lacks .*positions?"),
    "row_not_moved": Expected("write", "lacks .*positions?", exact=False),
    "rows_of_two_requests_exchanged": Expected("write", "lacks .*positions?", exact=False),
    "seq_len_one_less": Expected("output", r"sees \d+ keys? too few"),
    "seq_len_one_more": Expected("output", "1 key too many", names_block=False),
    "seq_len_without_drafts": Expected("output", r"sees \d+ keys? too few"),
    "scale_larger": Expected("output", "the pages hold the right keys"),
    "slot_of_the_next_block": Expected("write", "lacks .*positions?"),
    "slot_one_more": Expected("write", "lacks .*positions?"),
    "slots_of_another_group": Expected("write", "lacks .*positions?"),
    "stale_draft_given": Expected("token", r"token \d+, not \d+"),
    "stale_table_after_preemption": Expected("write", "lacks .*positions?"),
    "table_of_another_group": Expected("output", "the pages hold the right keys", exact=False),
    "token_of_the_step_before": Expected("token", r"token \d+, not \d+"),
    "used_block_zeroed": Expected("output", "holds zeros"),
    "value_of_another_row": Expected("write", "lacks .*positions?"),
    "window_one_less": Expected("output", "one key too short"),
    "window_one_more": Expected("output", "one key too long"),
    "write_skipped_after_rejection": Expected("output", "a rejected draft"),
    "write_skipped_at_block_start": Expected("write", "lacks .*positions?"),
}

NOT_SEEN = {
    "tokens_of_two_requests_exchanged": "the sampled tokens are taken from the model runner",
}
"""Faults of what is not judged."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What was found, by fault."""
    folder = tmp_path_factory.mktemp("faults")
    command = [sys.executable, str(FAULTS), str(folder)]
    subprocess.run(command, env=os.environ | ENVIRONMENT, check=True, timeout=3000)
    lines = (folder / "found.jsonl").read_text().splitlines()
    return {line["fault"]: line for line in map(json.loads, lines)}


@pytest.mark.parametrize("engine", ["full", "hybrid", "latent"])
def test_nothing_is_found_without_a_fault(found, engine):
    line = found[f"none-{engine}"]
    assert (line["findings"], line["left_out"], line["failure"], line["raised"]) == ([], [], None, "")
    assert min(line["checks"][kind] for kind in ("output", "token", "position", "count", "write")) > 100
    if engine != "hybrid":  # whose pool has room for all requests
        assert line["counts"]["requests resumed after preemption"] > 0


@pytest.mark.parametrize("fault", sorted(EXPECTED))
def test_a_planted_fault_is_found(found, fault):
    line, expected = found[fault], EXPECTED[fault]
    assert line["failure"] is None
    act = line["acts"][0]
    own = [each for each in line["findings"] if act["request_id"] in (None, each["request_id"])]
    of_kind = [each for each in own if each["kind"] == expected.kind]
    first = of_kind[0]
    assert first["step"] == act["step"] if expected.is_at_once else first["step"] > act["step"]
    if expected.exact and act["position"] is not None:
        assert any(act["position"] in _positions(each) for each in of_kind)
    if expected.names_block and act["block_id"] is not None:
        assert act["block_id"] in {each["block_id"] for each in own}
    said = [f"{each['cause']}; {each['note']}" for each in of_kind]
    assert any(re.search(expected.words, words) for words in said), said


def _positions(finding):
    """Return the positions of a finding; those of an output are of rows that read a wrong key, which is before them."""
    if finding["kind"] == "output" and finding["block_index"] is not None:
        return range(finding["position"] + 1)
    if finding["kind"] == "write":
        first, last = re.search(r"lacks (?:\d+ of )?positions? (\d+)(?: to (\d+))?", finding["note"]).groups()
        return range(int(first), int(last or first) + 1)
    return range(finding["position"], finding["position"] + finding["num_rows"])


@pytest.mark.parametrize("fault", sorted(NOT_SEEN))
def test_what_is_not_judged_is_not_found(found, fault):
    assert found[fault]["acts"]
    assert found[fault]["findings"] == []
