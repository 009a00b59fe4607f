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

FAULTS = Path(__file__).with_name("engine_faults.py")

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

    kind: of the first finding. words: of a cause or note of it, a regular expression. later: it shows in a later step.
    """

    kind: str
    words: str = ""
    later: bool = False


EXPECTED: dict[str, Expected] = {}

NOT_SEEN = {
    "logits_of_the_row_before": "which row is sampled is not judged",
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
    assert (line["findings"], line["not_followed"], line["failure"], line["raised"]) == ([], {}, None, "")
    assert min(line["checks"][kind] for kind in ("output", "token", "position", "count", "write")) > 100
    assert line["counts"]["requests resumed after preemption"] > 0


@pytest.mark.parametrize("fault", sorted(EXPECTED))
def test_a_planted_fault_is_found(found, fault):
    line, expected = found[fault], EXPECTED[fault]
    assert line["failure"] is None
    act = line["acts"][0]
    own = [each for each in line["findings"] if act["request_id"] in (None, each["request_id"])]
    first = next(each for each in own if each["kind"] == expected.kind)
    assert first["step"] >= act["step"] if expected.later else first["step"] == act["step"]
    if act["position"] is not None:
        assert act["position"] in range(first["position"], first["position"] + first["num_rows"])
    if act["block_id"] is not None:
        assert act["block_id"] in {each["block_id"] for each in own}
    said = [each["cause"] or each["note"] for each in own if each["kind"] == expected.kind]
    assert any(re.search(expected.words, words) for words in said)


@pytest.mark.parametrize("fault", sorted(NOT_SEEN))
def test_what_is_not_judged_is_not_found(found, fault):
    assert found[fault]["acts"]
    assert found[fault]["findings"] == []
