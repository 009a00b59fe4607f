"""A recording of the real engine: dummy weights, continuous batching, prefix caching, chunked prefill, speculation."""

import json
import subprocess
import sys

import pytest

from attncheck.cases.loader import load_file
from attncheck.harness.cli import app as cli

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
SERVE = """
import json, random, sys
from vllm import LLM, SamplingParams

def main():
    engine = LLM(
        model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024,
        max_num_seqs=16, max_num_batched_tokens=256, block_size=32, enforce_eager=True,
        kv_cache_memory_bytes=2**28, enable_prefix_caching=True, enable_chunked_prefill=True, **json.loads(sys.argv[2]),
    )
    draw = random.Random(0)
    shared = [draw.randrange(512) for _ in range(200)]
    prompts, limits = [], []
    for index in range(100):
        own = [draw.randrange(512) for _ in range(draw.choice([5, 20, 60, 150, 400]))]
        prompts.append({"prompt_token_ids": (shared if index % 2 else []) + (own if index % 3 else [7, 8, 9] * 30)})
        limits.append(SamplingParams(
            max_tokens=draw.choice([4, 16, 64]), temperature=0, ignore_eos=True, detokenize=False
        ))
    engine.generate(prompts, limits, use_tqdm=False)

if __name__ == "__main__":
    main()
"""


def recorded(folder, options):
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    (folder / "serve.py").write_text(SERVE)
    output = folder / "traffic.yaml"
    command = [sys.executable, str(folder / "serve.py"), str(folder / "model"), json.dumps(options)]
    done = subprocess.run(
        [sys.executable, "-m", "attncheck", "record", "--output", str(output), "--", *command],
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return load_file(output)


def test_a_hundred_requests(tmp_path):
    suite = recorded(tmp_path, {})
    assert 10 <= len(suite) <= 100
    assert {(case.layer.num_heads, case.layer.num_kv_heads, case.layer.head_size) for case in suite} == {(8, 2, 64)}
    assert {(case.layer.dtype, case.cache.block_size, case.cache.layout) for case in suite} == {("bfloat16", 32, "HND")}
    requests = [request for case in suite for request in case.batch.requests]
    assert {case.batch.num_tokens for case in suite} <= set(range(257))
    assert any(request.query_len == 1 and request.context_len > 0 for request in requests)
    assert any(request.query_len > 1 and request.context_len > 0 for request in requests), "no prefill in chunks"
    # 200 tokens are common to half of the prompts: six whole pages of 32.
    assert 192 in {request.shared_prefix for request in requests}
    run = ["run", "--suite", str(suite.path), "--backend", "vllm:CPU_ATTN", "--check", "numerics"]
    assert cli.main([*run, "--case", suite.cases[0].id, "--output", str(tmp_path / "run.jsonl")]) == 0


def test_speculation_by_n_grams(tmp_path):
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    suite = recorded(tmp_path, {"speculative_config": ngram})
    verified = [case for case in suite if case.id.startswith("verify")]
    assert verified
    assert all(request.query_len <= 4 for case in verified for request in case.batch.requests)
