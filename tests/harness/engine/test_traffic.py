"""Requests and engine options of each kind of traffic, without vLLM."""

import json
import os
import signal
import time
from collections.abc import Callable

import pytest

from attncheck.errors import QuestionError
from attncheck.harness.device import collect_environment
from attncheck.harness.engine.findings import EngineRecords
from attncheck.harness.engine.models import CONFIGS
from attncheck.harness.engine.traffic import (
    MAX_MODEL_LEN,
    TRAFFIC,
    EngineRun,
    TrafficServer,
    draw_requests,
    engine_options,
    serve_apart,
)
from attncheck.harness.workers.limits import Limit
from attncheck.harness.workers.process import RefusedError, WorkerError
from attncheck.reports.run_file.header import Environment

VOCAB_SIZE = 512


def drawn(kind, seed=0, count=40):
    return draw_requests(TRAFFIC[kind], seed, count, VOCAB_SIZE)


def prompts(kind):
    return [request.prompt_token_ids for request in drawn(kind)]


@pytest.mark.parametrize("kind", TRAFFIC)
def test_requests_are_those_of_their_seed_fit_the_model_and_arrive_in_order(kind):
    requests = drawn(kind)
    assert requests == drawn(kind)
    assert requests != drawn(kind, seed=1)
    assert requests[:9] == drawn(kind, count=9), "fewer requests are the first ones"
    assert len({request.request_id for request in requests}) == 40
    assert [request.arrival for request in requests] == sorted(request.arrival for request in requests)
    assert max(len(request.prompt_token_ids) + request.max_tokens for request in requests) <= MAX_MODEL_LEN
    assert {token < VOCAB_SIZE for request in requests for token in request.prompt_token_ids} == {True}


def test_each_kind_has_the_prompts_that_it_is_for():
    beginnings = [prompt[:64] for prompt in prompts("shared-prefixes")]
    assert len(set(beginnings)) < len(beginnings) / 1.5
    assert min(map(len, prompts("chunked-prefill"))) > EngineRun.model_fields["budget"].default
    repeating = [prompt for prompt in prompts("drafts") if prompt[:3] == prompt[3:6]]
    assert len(repeating) > 10
    for kind in ("chunked-prefill", "preempted"):
        assert len({prompt[:5] for prompt in prompts(kind)}) == 40


@pytest.fixture
def options_of(tmp_path):
    """``options_of("latent", "drafts", on_cpu=True, blocks=7)``: the arguments of ``LLM``."""

    def options_of(model, kind, *, on_cpu=True, **fields):
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[model]))
        run = EngineRun(model=model, folder=tmp_path, traffic=kind, **fields)
        return engine_options(run, on_cpu=on_cpu)

    return options_of


@pytest.mark.parametrize(("model", "block_size", "budget"), [("full", 32, 128), ("latent", 16, 1024)])
def test_the_small_pool_holds_no_two_requests_of_the_greatest_length(options_of, model, block_size, budget):
    small, large = options_of(model, "preempted"), options_of(model, "shared-prefixes")
    assert (small["block_size"], small["max_num_batched_tokens"]) == (block_size, budget)
    assert MAX_MODEL_LEN <= small["num_gpu_blocks_override"] * block_size < 2 * MAX_MODEL_LEN
    assert large["num_gpu_blocks_override"] * block_size == large["max_num_seqs"] * MAX_MODEL_LEN
    assert options_of(model, "mixed", blocks=70)["num_gpu_blocks_override"] == 70


def test_on_a_gpu_vllm_chooses_pages_pool_and_graphs(options_of):
    assert (
        not {"block_size", "num_gpu_blocks_override", "enforce_eager"}
        & options_of("full", "drafts", on_cpu=False).keys()
    )
    assert options_of("full", "preempted", on_cpu=False)["num_gpu_blocks_override"] == 80


def test_drafts_are_for_their_kinds_only(options_of):
    assert [kind for kind in TRAFFIC if "speculative_config" in options_of("full", kind)] == ["drafts", "mixed"]


@pytest.fixture
def served(tmp_path, monkeypatch):
    """``served(act)``: the records of an engine that starts, and then acts, in a process of its own."""

    def served(act, *, is_started=True, limit_s=60):
        def serve(self, run: EngineRun, emit: Callable[[Environment], None]) -> EngineRecords:
            os.write(1, b"a line of vLLM\n")
            if is_started:
                emit(collect_environment("cpu"))
            act()

        monkeypatch.setattr(TrafficServer, "serve", serve)
        return serve_apart(EngineRun(model="full", folder=tmp_path, traffic="drafts", seed=3), Limit(limit_s))

    return served


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(
    ("act", "limit_s", "outcome", "cause"),
    [(crash, 60, "crashed", "SIGSEGV"), (lambda: time.sleep(60), 1, "timed_out", "not finished within")],
    ids=["crash", "hang"],
)
def test_an_engine_that_ends_while_it_serves_has_a_record_of_each_check(served, act, limit_s, outcome, cause):
    found = served(act, limit_s=limit_s)
    assert [case.id for case in found.header.cases] == ["full-drafts"]
    assert {record.check for record in found.records} == {"output", "token", "position", "count", "write"}
    for record in found.records:
        assert (record.outcome, record.stage, record.seed) == (outcome, "serving", 3)
        assert cause in record.cause
        assert "a line of vLLM" in record.output


def refuse():
    raise RefusedError("ValueError: no drafts here")


def leave():
    os._exit(3)


@pytest.mark.parametrize(("act", "reason"), [(refuse, "ValueError: no drafts here"), (leave, "exited with code 3")])
def test_an_engine_that_does_not_start_is_an_error_with_the_end_of_its_output(served, act, reason):
    with pytest.raises(QuestionError, match=f"full-drafts: vLLM did not start: .*{reason}.*\nvLLM . a line of vLLM"):
        served(act, is_started=False)


def fail():
    raise KeyError("ours")


def test_a_failure_of_ours_names_the_case_whose_process_it_was(served):
    with pytest.raises(WorkerError, match=r"KeyError: 'ours' \(in the process of full-drafts\)"):
        served(fail)
