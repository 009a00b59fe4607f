"""Model runner V2 and async scheduling of the real vLLM, on a CPU: watched by a worker's hooks.

vLLM's CPU build has runner V2, whose Triton kernels are interpreted here. It turns async scheduling off for CPUs, and
the test turns it on.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from attncheck.harness.engine.models import make_model
from attncheck.harness.engine.plugin import WatchSettings
from attncheck.reports.run_file.store import read_run

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

SERVE = """
import json, os, random, sys
from pathlib import Path

from attncheck.backends.candidates.vllm.interpreted import import_triton_utils

folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])


def main():
    if options["v2"]:
        import_triton_utils()
    from vllm import LLM, SamplingParams
    from vllm.platforms.cpu import CpuPlatform

    from attncheck.harness.engine import plugin
    from attncheck.harness.engine.observer import EngineObserver

    update = CpuPlatform.check_and_update_config.__func__

    def updated(cls, config):
        update(cls, config)
        config.scheduler_config.async_scheduling = options["async"]

    CpuPlatform.check_and_update_config = classmethod(updated)
    begins, late = EngineObserver.step_begins, []

    def step_begins(observer, plan):
        step = begins(observer, plan)
        late.append(step is not observer._steps[0])  # another one has not ended
        return step

    EngineObserver.step_begins = step_begins
    plugin.register()
    drafts = {"speculative_config": {
        "method": "ngram_gpu", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1
    }} if options["drafts"] else {}
    engine = LLM(
        model=str(folder / "model"), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=256, max_num_seqs=8,
        max_num_batched_tokens=64, block_size=32, enforce_eager=True, num_gpu_blocks_override=16, seed=0,
        disable_log_stats=True, **drafts,
    )
    draw = random.Random(0)
    shared = [draw.randrange(512) for _ in range(70)]
    prompts = [
        {"prompt_token_ids": (shared if index % 2 else []) + [draw.randrange(512)] + [7, 8, 9] * draw.choice([2, 20])}
        for index in range(8)
    ]
    limits = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False)
    answers = engine.generate(prompts, limits, use_tqdm=False)
    tokens = [list(answer.outputs[0].token_ids) for answer in answers]
    (folder / "answer.json").write_text(json.dumps({"late": late, "tokens": tokens}))


if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    def served(**options):
        folder = tmp_path_factory.mktemp("served")
        make_model(folder / "model", "full")
        (folder / "serve.py").write_text(SERVE)
        settings = WatchSettings(path=folder / "run.jsonl", judge_every=1)
        environment = os.environ | {
            **settings.environment(),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        if options["v2"]:
            environment |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
        done = subprocess.run(
            [sys.executable, str(folder / "serve.py"), str(folder), json.dumps(options)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=1200,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads((folder / "answer.json").read_text()), read_run(folder / "run.jsonl")

    return served


def test_runner_v2_with_async_scheduling_and_drafts(served):
    if version("vllm-cpu").startswith("0.31."):
        pytest.skip("its runner V2 needs Triton's own CPU backend")
    answer, run = served(v2=True, drafts=True, **{"async": True})
    compared = check_late(answer, run, "CPUModelRunner V2")
    assert compared["position"] / 2 < compared["token"] < compared["position"]  # rejected drafts are any tokens


def test_runner_v1_with_async_scheduling(served):
    answer, run = served(v2=False, drafts=False, **{"async": True})
    compared = check_late(answer, run, "CPUModelRunner V1")
    assert compared["token"] == compared["position"]


def check_late(answer, run, runner):
    records = {record.check: record for record in run.records}
    assert records.pop("write").outcome == "unsupported"
    assert {record.outcome for record in records.values()} == {"passed"}
    assert {"output", "token", "position", "count", "prefix_hit"} == records.keys()
    (backend,) = run.header.backends
    assert backend.conventions["runner"] == runner
    steps = len(answer["late"])
    assert sum(answer["late"]) > steps / 2, "async scheduling was off"
    compared = {check: record.figures["compared"] for check, record in records.items()}
    assert compared["output"] == 2 * compared["position"] > 1000
    return compared
