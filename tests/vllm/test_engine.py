"""Real engines of vLLM are followed without a false finding, and a fault in the engine is found."""

import json
import subprocess
import sys

import pytest

from attncheck.harness.engine.models import CONFIGS, make_model

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

SERVE = """
import dataclasses, json, os, random, sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
import torch
set_threads = torch.set_num_threads  # vLLM replaces it
from vllm import LLM, SamplingParams
from attncheck.harness.engine.observer import EngineObserver
from attncheck.harness.engine.vllm_runner import EngineHooks, watch_workers

def serve(folder, watched, fault, options):
    observer = EngineObserver()
    exec(fault, globals())
    if watched:
        watch_workers(EngineHooks(observer).install)
    engine = LLM(
        model=folder, skip_tokenizer_init=True, max_model_len=512, max_num_seqs=8,
        enforce_eager=True, disable_log_stats=True, **options,
    )
    set_threads(1)
    draw = random.Random(0)
    shared = [draw.randrange(512) for _ in range(100)]
    prompts = [shared[: 70 * (index % 2)] + [draw.randrange(512) for _ in range(40)] + [7, 8, 9] * 8
               for index in range(8)]
    limit = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True, detokenize=False)
    made = engine.generate([{"prompt_token_ids": each} for each in prompts], limit, use_tqdm=False)
    result = observer.result()
    print("RESULT " + json.dumps({
        "tokens": [list(each.outputs[0].token_ids) for each in made], "checks": result.checks,
        "findings": [dataclasses.asdict(each) for each in result.findings], "counts": result.counts,
        "left_out": [*result.not_followed, *result.not_compared], "failure": result.failure, "worst_share": result.worst_share,
        "backend": result.engine.backend.name,
    }), flush=True)

for arguments in json.loads(sys.argv[1]):
    if (child := os.fork()) == 0:  # each engine in a process of its own, with vLLM imported
        serve(*arguments)
        os._exit(0)
    os.waitpid(child, 0)
"""
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
PAGED = {"max_num_batched_tokens": 128, "block_size": 32, "num_gpu_blocks_override": 18, "enable_prefix_caching": True}
LATENT = {
    "max_num_batched_tokens": 512,
    "block_size": 16,
    "num_gpu_blocks_override": 60,
    "enable_chunked_prefill": False,
}
READS_ONE_SHORT = """
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl as Impl
right, calls = Impl.forward, []

def forward(self, layer, query, key, value, kv_cache, metadata, output, *args, **words):
    if metadata is not None and len(calls) < 40:
        calls.append(metadata)
        if len(calls) == 40:
            metadata = dataclasses.replace(metadata, seq_lens=metadata.seq_lens - 1)
    return right(self, layer, query, key, value, kv_cache, metadata, output, *args, **words)

Impl.forward = forward
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return what each of five engines gave: the full model plain and watched, hybrid, latent, and one with a fault."""
    folder = tmp_path_factory.mktemp("engine")
    for kind in ("full", "hybrid", "latent"):
        make_model(folder / kind, kind)
    full = str(folder / "full")
    runs = [
        (full, False, "", PAGED),
        (full, True, "", PAGED),
        (str(folder / "hybrid"), True, "", PAGED | {"speculative_config": DRAFTS, "num_gpu_blocks_override": 32}),
        (str(folder / "latent"), True, "", LATENT),
        (full, True, READS_ONE_SHORT, PAGED),
    ]
    done = subprocess.run(
        [sys.executable, "-c", SERVE, json.dumps(runs)], capture_output=True, text=True, check=False, timeout=1500
    )
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(runs), done.stderr[-3000:]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("engine", [1, 2, 3])
def test_an_engine_without_a_fault_has_no_finding(results, engine):
    result = results[engine]
    assert result["failure"] is None
    assert result["findings"] == []
    assert result["left_out"] == []
    layers = {1: 2, 2: 4, 3: 2}[engine]
    checks = result["checks"]
    assert (
        checks["output"] == layers * checks["token"] == layers * checks["position"] == layers * result["counts"]["rows"]
    )
    assert checks["write"] > 0
    assert 0.1 < result["worst_share"] < 1


def test_what_the_traffic_did(results):
    _, full, hybrid, latent, _ = results
    assert full["backend"] == "vllm:CPU_ATTN"
    assert full["checks"]["prefix_hit"] > 0
    assert full["counts"]["requests resumed after preemption"] > 0
    assert hybrid["backend"] == "vllm:CPU_ATTN"
    assert hybrid["counts"]["drafts"] > hybrid["counts"]["drafts accepted"] > 0
    assert latent["backend"].endswith("MLA")


def test_watching_changes_no_token(results):
    assert results[0]["checks"] == {}
    assert results[0]["tokens"] == results[1]["tokens"]


def test_a_length_that_is_one_short_once_is_found_in_one_layer_and_step(results):
    findings = results[4]["findings"]
    assert {finding["kind"] for finding in findings} == {"output"}
    assert len({(finding["step"], finding["layer"]) for finding in findings}) == 1
    for finding in findings:
        assert finding["cause"] == "the row sees 1 key too few"
        assert (
            finding["note"]
            == "the pages hold the right keys and values, but are read wrongly or the attention is wrong"
        )


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_small_model_has_peaked_attention_and_the_same_weights_each_time(kind, tmp_path):
    from safetensors.torch import load_file

    for name in ("one", "two"):
        make_model(tmp_path / name, kind)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(one[name].equal(two[name]) for name in one)
    (spread,) = {round(float(one[name].float().std()), 2) for name in one if "_proj" in name}
    assert spread == 0.08, "what transformers draws by default, 0.02, gives nearly uniform attention"
