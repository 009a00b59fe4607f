"""Requests and engine options of each kind of traffic, and the small models, without vLLM."""

import json

import pytest

from attncheck.errors import QuestionError
from attncheck.harness.engine.models import CONFIGS, make_model
from attncheck.harness.engine.traffic import MAX_MODEL_LEN, TRAFFIC, EngineRun, draw_requests, engine_options

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
        run = EngineRun(model=model, folder=str(tmp_path), traffic=kind, **fields)
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


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_small_model_has_the_weights_of_its_config_and_the_same_each_time(kind, tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        make_model(tmp_path / name, kind)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert one.keys() == two.keys()
    assert all(one[name].equal(two[name]) for name in one)
    layers = {name.split(".")[2] for name in one if name.startswith("model.layers.")}
    assert len(layers) == config["num_hidden_layers"]
    assert one["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])


def test_an_unknown_small_model_is_refused(tmp_path):
    with pytest.raises(QuestionError, match="'tiny' is unknown; known: full, hybrid, latent"):
        make_model(tmp_path, "tiny")
