"""Faults in vLLM's scheduler, cache manager, model runner and cache writer. Each acts once.

``python engine_faults FOLDER [FAULT ...]`` starts each engine once, and serves the same requests in a fork of it for
each fault. A line of JSON for each: what the fault did, what ``attncheck engine`` found, and the greedy tokens.
"""

import json
import os
import random
import sys
import time
import traceback
from dataclasses import asdict
from functools import partial
from pathlib import Path

import inputs
import pages
import scheduling
import vllm
from planting import FAULTS, Acts, Fault, around
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from attncheck.harness.engine.events import ObserverSettings
from attncheck.harness.engine.models import CONFIGS, VOCAB_SIZE, make_model
from attncheck.harness.engine.observer import EngineObserver
from attncheck.harness.engine.vllm_runner import EngineHooks

MODULES = (inputs, pages, scheduling)
"""Imported, since each registers its faults."""

MAX_STEPS = 400
SELDOM = 4
"""Without a planted fault, one step of this many is judged."""

ENGINES = {
    "full": {"num_gpu_blocks_override": 18},
    "hybrid": {"num_gpu_blocks_override": 34},
    "latent": {"num_gpu_blocks_override": 34, "block_size": 16, "max_num_batched_tokens": 320},
}
"""What each engine is given besides :data:`OPTIONS`, by its model. Its pool is small: requests are preempted."""

OPTIONS = {
    "skip_tokenizer_init": True,
    "max_model_len": 320,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 96,
    "block_size": 32,
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "disable_log_stats": True,
    "seed": 0,
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    },
}


def serve(engine, plant):
    """Serve the requests with a fault planted, and return what was found."""
    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    acts = Acts(worker.model_runner)
    observer = EngineObserver(ObserverSettings(max_explained=2))
    _follow(acts, plant)
    _judge_near(acts, SELDOM if plant is None else 10**9)
    tokens, raised = {}, ""
    began = time.perf_counter()
    hooks = EngineHooks(observer)
    hooks.install(worker)
    try:
        tokens = _tokens(engine, lambda: acts.is_over and hooks.remove())
    except Exception:  # noqa: BLE001 (whatever a fault makes vLLM raise)
        raised = traceback.format_exc(limit=-3)
    result = observer.result()
    return {
        "acts": acts.did,
        "findings": [asdict(finding) for finding in result.findings],
        "checks": result.checks,
        "left_out": [*result.not_followed, *result.not_compared],
        "counts": result.counts,
        "failure": result.failure,
        "steps": result.steps,
        "worst_share": result.worst_share,
        "raised": raised,
        "tokens": tokens,
        "seconds": time.perf_counter() - began,
    }


def _follow(acts, plant):
    """Plant the fault, and count steps. Calls of the writer by the judge are no calls of the engine."""

    def judging(original, *args, **keywords):
        before, acts.is_judging = acts.is_judging, True
        try:
            return original(*args, **keywords)
        finally:
            acts.is_judging = before

    def execute(original, runner, scheduler_output, *args, **keywords):
        acts.step += bool(scheduler_output.total_num_scheduled_tokens)
        return original(runner, scheduler_output, *args, **keywords)

    around(EngineObserver, "step_ends", judging)
    around(EngineObserver, "layer_rows", judging)
    if plant is not None:
        plant(acts)
    around(GPUModelRunner, "execute_model", execute)


def _judge_near(acts, seldom):
    """Judge the steps near the act, and of the others one in ``seldom``. A fault may act after the step has begun."""

    def inputs_given(original, observer, *args):
        step = observer._steps[-1]
        step.is_judged = acts.is_near or step.number % seldom == 0
        return original(observer, *args)

    around(EngineObserver, "inputs", inputs_given)


def requests():
    """Return (id, step of arrival, prompt, number of tokens): some share prefixes, one repeats itself, two are long."""
    draw = random.Random(0)

    def tokens(number):
        return [draw.randrange(VOCAB_SIZE) for _ in range(number)]

    prefix, pattern = tokens(100), tokens(3)
    return [
        ("a", 0, prefix + tokens(9), 24),
        ("b", 0, tokens(210), 12),
        ("c", 1, pattern * 30, 30),
        ("d", 2, tokens(20), 24),
        ("e", 5, prefix[:70] + tokens(30), 24),
        ("f", 6, prefix + tokens(60), 24),
        ("g", 10, pattern * 34, 20),
        ("h", 20, prefix + tokens(5), 8),
    ]


def _tokens(engine, after_step):
    """Serve the requests, and return the tokens of each."""
    waiting = requests()
    step, tokens = 0, {}
    while waiting or engine.has_unfinished_requests():
        while waiting and (waiting[0][1] <= step or not engine.has_unfinished_requests()):
            request_id, _, prompt, number = waiting.pop(0)
            limits = vllm.SamplingParams(max_tokens=number, temperature=0, ignore_eos=True, detokenize=False)
            engine.add_request(request_id, {"prompt_token_ids": prompt}, limits)
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        after_step()
        step += 1
        if step > MAX_STEPS:
            raise RuntimeError(f"the requests do not end within {MAX_STEPS} steps")
    return tokens


def fork(work):
    """Run ``work`` in a fork of this process, and return its id."""
    if child := os.fork():
        return child
    try:
        work()
    except BaseException:  # noqa: BLE001 (the process ends here)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def serve_engine(name, faults, folder, out):
    """Start one engine, and serve the requests without and with each fault."""
    engine = vllm.LLM(model=str(folder / name), **OPTIONS | ENGINES[name]).llm_engine

    def one(fault):
        line = json.dumps({"fault": fault.name, "engine": name} | serve(engine, fault.plant)) + "\n"
        with out.open("a") as file:
            file.write(line)

    for each in (Fault(f"none-{name}", name, None), *faults):
        os.waitpid(fork(partial(one, each)), 0)


def main(folder, *names):
    """Serve all engines at once, or those of the named faults."""
    out = folder / "found.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    out.write_text("")
    for model in CONFIGS:
        make_model(folder / model, model)
    chosen = [FAULTS[name] for name in names] or list(FAULTS.values())
    engines = []
    for name in ENGINES:
        own = [each for each in chosen if each.engine == name]
        parts = min(4, -(-len(own) // 6))
        engines += [fork(partial(serve_engine, name, own[part::parts], folder, out)) for part in range(parts)]
    for engine in engines:
        os.waitpid(engine, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
