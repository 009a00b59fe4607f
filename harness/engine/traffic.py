"""Requests of several kinds, drawn from a seed, that vLLM serves in a process of its own while it is observed.

Kinds, requests and options load no vLLM. :func:`import_vllm` imports it once. :func:`serve_apart` then forks a process
for each kind, so that an engine that crashes costs one case, and each repeats alone.
"""

import json
import os
import random
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from attncheck.errors import QuestionError, UnknownNameError
from attncheck.harness.device import collect_environment
from attncheck.harness.driver.observation import capture_exception
from attncheck.harness.engine.events import ObserverResult, ObserverSettings
from attncheck.harness.engine.findings import KINDS, EngineCase, EngineRecords, records_of
from attncheck.harness.engine.models import CONFIGS, make_model
from attncheck.harness.engine.observer import EngineObserver
from attncheck.harness.engine.vllm_runner import EngineHooks, watch_workers
from attncheck.harness.run.options import split_commas
from attncheck.harness.workers.limits import Limit
from attncheck.harness.workers.process import ProcessEndedError, RefusedError, WorkerProcess
from attncheck.harness.workers.protocol import Message
from attncheck.harness.workers.starting import fork_worker
from attncheck.harness.workers.worker import Server
from attncheck.harness.workers.worker import serve as serve_calls
from attncheck.reports.analysis.repro import ENGINE_OPTION
from attncheck.reports.run_file.header import Environment

MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 16

PREFIX_HITS, PARTS = "tokens of prefix hits", "prompts that are computed in parts"
RESUMED, DRAFTS = "requests resumed after preemption", "drafts"
"""What an engine does with requests, by the name of an observer's count; parts of prompts are not counted."""

_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
"""A drafter without a model: it proposes what followed the same tokens earlier in the request."""


class TrafficKind(NamedTuple):
    """What requests have in common. ``does``: what an engine that is set up for them does."""

    description: str
    does: tuple[str, ...]

    @property
    def shown_by(self) -> tuple[str, ...]:
        """What it must have done. In a small pool, the blocks of shared prefixes may be gone."""
        return tuple(name for name in self.does if name in (RESUMED, DRAFTS)) or self.does


TRAFFIC: Mapping[str, TrafficKind] = {
    "shared-prefixes": TrafficKind("prompts share prefixes, whose blocks the prefix cache keeps", (PREFIX_HITS,)),
    "chunked-prefill": TrafficKind("prompts are longer than the tokens of a step, and are computed in parts", (PARTS,)),
    "preempted": TrafficKind("the pool has few blocks, so that requests are preempted and resumed", (RESUMED,)),
    "drafts": TrafficKind("drafts are verified, and rejected ones are rolled back", (DRAFTS,)),
    "mixed": TrafficKind(
        "shared prefixes, long prompts, drafts, and a pool of few blocks at once", (PREFIX_HITS, PARTS, RESUMED, DRAFTS)
    ),
}


class EngineRun(Message):
    """One kind of traffic through one engine; the fields are options of ``attncheck engine``.

    model: what the user typed. folder: the model's folder. blocks: size of the small pool; by default, what
    1.25 requests of the greatest length need. budget: tokens of a step. steps: number of steps; by default, until all
    requests end. every: outputs of every Nth step are judged. follow: one of M requests is followed.
    """

    model: str
    folder: Path
    traffic: str
    seed: int = 0
    requests: int = 16
    blocks: int | None = None
    budget: int = 128
    steps: int | None = None
    every: int = 1
    follow: int = 1

    @property
    def case(self) -> EngineCase:
        """Its case, such as ``hybrid-preempted``: the name of the model or of its folder, and the kind of traffic."""
        kind, name = TRAFFIC[self.traffic], self.model if self.model in CONFIGS else self.folder.name
        options = self.model_dump(exclude={"folder", "seed", "steps"}, exclude_defaults=True)
        keys = {f"{ENGINE_OPTION}{option}": value for option, value in options.items()}
        due = tuple(check for check in KINDS if check != "prefix_hit" or PREFIX_HITS in kind.shown_by)
        return EngineCase(id=f"{name}-{self.traffic}", description=kind.description, checks=due, keys=keys)


def runs_of(given: Mapping[str, Any], folder: Path) -> list[EngineRun]:
    """Return the runs of ``given`` options, a model after the other. ``folder``: where small models are made.

    Raises:
        QuestionError: a kind of traffic or a model is unknown, or two models have the same name.
    """
    common = {name: value for name, value in given.items() if name not in ("model", "traffic")}
    kinds = split_commas(given.get("traffic", TRAFFIC))
    for kind in kinds:
        if kind not in TRAFFIC:
            raise UnknownNameError("kind of traffic", kind, list(TRAFFIC))
    runs: list[EngineRun] = []
    for model in dict.fromkeys(split_commas(given.get("model", CONFIGS))):
        place = folder / model if model in CONFIGS else Path(model).resolve()
        if model not in CONFIGS and not (place / "config.json").is_file():
            names = ", ".join(CONFIGS)
            raise QuestionError(f"--model {model}: no folder with a config.json, and none of the small models {names}")
        runs += [EngineRun(model=model, folder=place, traffic=kind, **common) for kind in kinds]
    if len({run.case.id for run in runs}) < len(runs):
        raise QuestionError("--model: two folders have the same name; judge them in two runs")
    return runs


# Requests.


class TrafficRequest(NamedTuple):
    """A request: it arrives at the step ``arrival``, and ends after ``max_tokens`` tokens."""

    request_id: str
    arrival: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int


def draw_requests(kind: TrafficKind, seed: int, count: int, vocab_size: int) -> tuple[TrafficRequest, ...]:
    """Return ``count`` requests of a kind, by arrival. Equal arguments give equal requests.

    No request needs more than :data:`MAX_MODEL_LEN` tokens.
    """
    draw = random.Random(seed)  # noqa: S311 (no secret)

    def tokens(number: int) -> list[int]:
        return [draw.randrange(vocab_size) for _ in range(number)]

    prefixes = [tokens(200) for _ in range(3)]
    pattern = tokens(3)
    prompt_sizes = [150, 300, 400] if PARTS in kind.does else [5, 20, 60, 150]
    is_small_pool = RESUMED in kind.does
    requests, arrival = [], 0
    for index in range(count):
        prompt = prefixes[index % 3][: draw.choice([64, 100, 200])] if PREFIX_HITS in kind.does and index % 4 else []
        if DRAFTS in kind.does and index % 3 == 0:
            prompt += pattern * 30
        else:
            prompt += tokens(draw.choice(prompt_sizes))
        max_tokens = draw.choice([32, 96, 160] if is_small_pool else [8, 32, 96])
        requests.append(TrafficRequest(str(index), arrival, tuple(prompt), max_tokens))
        arrival += 0 if is_small_pool else draw.choice([0, 1, 4, 8])
    return tuple(requests)


# The engine.


def engine_options(run: EngineRun, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments of vLLM's ``LLM`` for a run."""
    config = json.loads((run.folder / "config.json").read_text())
    is_latent = "kv_lora_rank" in config.get("text_config", config)
    options: dict[str, Any] = {
        "model": str(run.folder),
        "skip_tokenizer_init": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": run.budget,
        "seed": 0,
        "disable_log_stats": True,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
    }
    block_size = 64 if is_latent else 16
    if on_cpu:
        block_size = options["block_size"] = 16 if is_latent else 32
        options["enforce_eager"] = True  # vLLM compiles for the CPU otherwise, which takes minutes
        options["num_gpu_blocks_override"] = MAX_MODEL_LEN // block_size * MAX_NUM_SEQS
        if is_latent:
            options["max_num_batched_tokens"] = MAX_MODEL_LEN  # no chunks there
    if RESUMED in TRAFFIC[run.traffic].does:
        options["num_gpu_blocks_override"] = run.blocks or MAX_MODEL_LEN // block_size * 5 // 4
    if DRAFTS in TRAFFIC[run.traffic].does:
        options["speculative_config"] = dict(_NGRAM)
    return options


# The process that serves, a fork of this one.

_VARIABLES: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler and the model runner in one process
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",  # findings name requests as they are drawn
}
_DEFAULTS: Mapping[str, str] = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "NUMBA_NUM_THREADS": "1",  # of the drafter; vLLM uses one of them
}
"""Environment variables of the process that serves, unless they are given."""


def import_vllm() -> None:
    """Import vLLM, and set the environment variables that it reads. This process must not use a device.

    Raises:
        QuestionError: it is not installed, or cannot be imported.
    """
    os.environ.update({**_DEFAULTS, **os.environ, **_VARIABLES})
    try:
        import_module("vllm").LLM  # noqa: B018 (what it imports takes seconds)
    except Exception as error:  # whatever its modules raise
        raise QuestionError(
            f"vLLM cannot be imported here: {type(error).__name__}: {error}; "
            "install attncheck in the environment of a vLLM that can be imported, and type the command there"
        ) from error


def serve_apart(run: EngineRun, limit: Limit) -> EngineRecords:
    """Serve the requests of ``run`` by a new engine in a fork of this process, and judge it.

    If the process ends while it serves, or exceeds ``limit``, the record of each check states this.

    Raises:
        QuestionError: the engine cannot be started.
        WorkerError: attncheck itself failed in the process.
    """
    serve = partial(serve_calls, make=lambda _: TrafficServer())
    with WorkerProcess(start=lambda _: fork_worker(serve)) as process:
        process.ref = run.case.id
        process.send(TrafficServer.serve, run)
        try:
            environment: Environment = process.receive(limit)
        except (RefusedError, ProcessEndedError) as error:
            printed = "".join(f"\nvLLM | {line}" for line in process.output(limit=2000).splitlines())
            raise QuestionError(f"{run.case.id}: vLLM did not start: {error}{printed}") from error
        try:
            served: EngineRecords = process.receive(limit)
        except ProcessEndedError as ended:
            served = records_of(run.case, ObserverResult(), environment, seed=run.seed, ended_by=ended.end)
        return served


class TrafficServer(Server):
    """Serves the requests of one run."""

    def serve(self, run: EngineRun, emit: Callable[[Environment], None]) -> EngineRecords:
        """Serve the requests of ``run`` by a new engine of this process, and judge it.

        The event: the engine has started. One that cannot be started is refused; one that raises later has records of
        outcome ``errored``.
        """
        observer = EngineObserver(ObserverSettings(judge_every=run.every, follow_one_of=run.follow))
        platform = import_module("vllm.platforms").current_platform
        watch_workers(EngineHooks(observer).install)
        try:
            if run.model in CONFIGS and not run.folder.exists():
                make_model(run.folder, run.model)
            engine = import_module("vllm").LLM(**engine_options(run, on_cpu=platform.is_cpu())).llm_engine
        except Exception as error:
            traceback.print_exc()
            raise RefusedError(f"{type(error).__name__}: {error}") from error
        environment = collect_environment(platform.device_type)
        emit(environment)
        began, raised = time.monotonic(), None
        try:
            _serve_requests(engine, run, observer)
        except Exception as error:  # noqa: BLE001 (a fault of the engine is a result)
            traceback.print_exc()
            raised = capture_exception("serving", error)
        duration_s = time.monotonic() - began
        result = observer.result()
        unmet = "" if run.steps else _unmet(run, result.counts, engine.vllm_config)
        return records_of(
            run.case, result, environment, seed=run.seed, duration_s=duration_s, unmet=unmet, ended_by=raised
        )


def _serve_requests(engine: Any, run: EngineRun, observer: EngineObserver) -> None:
    """Add each request at its step, and run the engine until all have ended, or for the steps of ``run``."""
    params, vocab_size = import_module("vllm").SamplingParams, engine.model_config.get_vocab_size()
    waiting = list(draw_requests(TRAFFIC[run.traffic], run.seed, run.requests, vocab_size))
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and (waiting[0].arrival <= step or not engine.has_unfinished_requests()):
            request = waiting.pop(0)
            sampling = params(max_tokens=request.max_tokens, temperature=0, ignore_eos=True, detokenize=False)
            engine.add_request(request.request_id, {"prompt_token_ids": list(request.prompt_token_ids)}, sampling)
        engine.step()
        step += 1
        is_over = run.steps is not None and observer.result().steps >= run.steps
        if is_over or observer.failure is not None:
            return


def _unmet(run: EngineRun, counts: Mapping[str, int], config: Any) -> str:
    """Return why the engine did not do what the kind of traffic is for, or ""."""
    is_on = {
        PREFIX_HITS: config.cache_config.enable_prefix_caching,
        PARTS: config.scheduler_config.enable_chunked_prefill,
    }
    for name in TRAFFIC[run.traffic].shown_by:
        if not is_on.get(name, True):
            return f"the engine had no {name}: vLLM has switched this off for the model and platform"
        if name != PARTS and not counts.get(name):
            return f"the engine had no {name}; give more --requests{' or fewer --blocks' * (name == RESUMED)}"
    return ""
