"""Requests of several kinds, drawn from a seed, that vLLM serves in a process of its own while it is observed.

Kinds, requests and options load no vLLM. :func:`serve` runs one kind of traffic through a new engine. ``python -m`` of
this module imports vLLM once, and forks a process for each kind, so that an engine that crashes costs one case, and
each repeats alone.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from attncheck.harness.engine.events import CheckKind, ObserverResult
from attncheck.harness.engine.findings import EngineCase, backend_of, records_of
from attncheck.harness.engine.models import CONFIGS, make_model
from attncheck.harness.run.outcomes import Circumstances, ProcessEnd, ended
from attncheck.reports.run_file.header import BackendInfo, CaseInfo, Environment
from attncheck.reports.run_file.records import Record
from attncheck.reports.run_file.store import count_outcomes

MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 16

PREFIX_HITS, RESUMED, DRAFTS = "tokens of prefix hits", "requests resumed after preemption", "drafts"
"""Names of an observer's counts that show what an engine did."""

_NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
"""A drafter without a model: it proposes what followed the same tokens earlier in the request."""


@dataclass(frozen=True)
class TrafficKind:
    """What requests have in common, and how the engine is set up for them.

    shared: prompts begin with one of three prefixes. long: prompts exceed the tokens of a step. repeats: prompts repeat
    themselves, so that drafts are found. small_pool: the pool has few blocks. drafts: the engine verifies drafts.
    shown_by: names of counts. If one is 0, the engine did not do what the kind is for.
    """

    description: str
    shared: bool = False
    long: bool = False
    repeats: bool = False
    small_pool: bool = False
    drafts: bool = False
    shown_by: tuple[str, ...] = ()

    @property
    def due(self) -> tuple[CheckKind, ...]:
        """The checks that must compare something."""
        always: tuple[CheckKind, ...] = ("output", "token", "position", "count", "write")
        return (*always, "prefix_hit") if PREFIX_HITS in self.shown_by else always


TRAFFIC: Mapping[str, TrafficKind] = {
    "shared-prefixes": TrafficKind(
        "prompts share prefixes, whose blocks the prefix cache keeps", shared=True, shown_by=(PREFIX_HITS,)
    ),
    "chunked-prefill": TrafficKind(
        "prompts are longer than the tokens of a step, and are computed in parts", long=True
    ),
    "preempted": TrafficKind(
        "the pool has few blocks, so that requests are preempted and resumed", small_pool=True, shown_by=(RESUMED,)
    ),
    "drafts": TrafficKind(
        "drafts are verified, and rejected ones are rolled back", repeats=True, drafts=True, shown_by=(DRAFTS,)
    ),
    "mixed": TrafficKind(
        "shared prefixes, long prompts, drafts, and a pool of few blocks at once",
        shared=True,
        long=True,
        repeats=True,
        small_pool=True,
        drafts=True,
        shown_by=(RESUMED, DRAFTS),
    ),
}


class EngineRun(BaseModel):
    """One kind of traffic through one engine; the fields are options of ``attncheck engine``.

    model: what the user typed. folder: the model's folder. blocks: size of the small pool; by default, what
    1.25 requests of the greatest length need. budget: tokens of a step. steps: number of steps; by default, until all
    requests end.
    every: outputs of every Nth step are judged. follow: one of M requests is followed. limit_s: wall-clock seconds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    folder: str
    traffic: str
    seed: int = 0
    requests: int = 16
    blocks: int | None = None
    budget: int = 128
    dtype: str = "auto"
    steps: int | None = None
    every: int = 1
    follow: int = 1
    limit_s: int = 600

    @property
    def kind(self) -> TrafficKind:
        """What its requests have in common."""
        return TRAFFIC[self.traffic]

    @property
    def case_id(self) -> str:
        """``hybrid-preempted``: the name of the model's folder, or of a made model, and the kind of traffic."""
        return f"{self.model if self.model in CONFIGS else Path(self.folder).name}-{self.traffic}"

    def case(self, lacks: str = "") -> EngineCase:
        """Return it as a case. ``lacks``: why the engine did not do what the kind of traffic is for, or ""."""
        return EngineCase(self.case_id, self.kind.description, self.options, self.kind.due, lacks)

    @property
    def options(self) -> dict[str, int | str]:
        """The options that repeat it, besides the seed and the number of steps; those at their default are left out."""
        required = ("model", "traffic")
        optional = ("requests", "blocks", "budget", "dtype", "every", "follow")
        defaults = type(self).model_fields
        changed = (name for name in optional if getattr(self, name) != defaults[name].default)
        return {name: getattr(self, name) for name in (*required, *changed)}


class ServedTraffic(BaseModel):
    """What serving one kind of traffic gave.

    not_started: why the engine could not be started, or "". ended: how its process ended before it had a result, or "".
    The other fields are those of the run file; without a result they are None or empty. A first line with the
    environment alone states that the engine has started.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    not_started: str = ""
    ended: str = ""
    case: CaseInfo | None = None
    backend: BackendInfo | None = None
    environment: Environment | None = None
    records: tuple[Record, ...] = ()

    @property
    def is_start(self) -> bool:
        """Whether it states only that the engine has started."""
        return self.case is None and self.environment is not None

    @property
    def verdict(self) -> str:
        """The outcomes of its records, such as ``5 passed, 1 unsupported``."""
        return ", ".join(f"{count} {outcome}" for outcome, count in count_outcomes(self.records).items())


def ended_traffic(run: EngineRun, cause: str, environment: Environment, output: str) -> ServedTraffic:
    """Return the result of a run whose process ended while it served: each check is ``crashed``.

    ``output``: the end of what it printed.
    """
    case, result = run.case(), ObserverResult()
    backend, circumstances = backend_of(result.engine), circumstances_of(run, environment)
    end = ProcessEnd(cause, output)
    records = tuple(ended(circumstances, case, backend, check, "serving", end) for check in case.due)
    return ServedTraffic(case=case.info(result), backend=backend.info, environment=environment, records=records)


def circumstances_of(run: EngineRun, environment: Environment) -> Circumstances:
    """Return what all records of a run share."""
    return Circumstances(run.seed, environment.digest, environment.attncheck)


# Requests.


@dataclass(frozen=True)
class TrafficRequest:
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
    requests, arrival = [], 0
    for index in range(count):
        prompt = prefixes[index % 3][: draw.choice([64, 100, 200])] if kind.shared and index % 4 else []
        if kind.repeats and index % 3 == 0:
            prompt += pattern * 30
        else:
            prompt += tokens(draw.choice([150, 300, 400] if kind.long else [5, 20, 60, 150]))
        max_tokens = draw.choice([32, 96, 160] if kind.small_pool else [8, 32, 96])
        requests.append(TrafficRequest(str(index), arrival, tuple(prompt), max_tokens))
        arrival += 0 if kind.small_pool else draw.choice([0, 1, 4, 8])
    return tuple(requests)


# The engine.


def engine_options(run: EngineRun, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments of vLLM's ``LLM`` for a run."""
    config = json.loads((Path(run.folder) / "config.json").read_text())
    text_config = config.get("text_config", config)
    is_latent = "kv_lora_rank" in text_config
    max_model_len = min(MAX_MODEL_LEN, text_config.get("max_position_embeddings", MAX_MODEL_LEN))
    options: dict[str, Any] = {
        "model": run.folder,
        "skip_tokenizer_init": True,
        "dtype": run.dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": run.budget,
        "seed": 0,
        "disable_log_stats": True,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
    }
    block_size = (16 if is_latent else 32) if on_cpu else (64 if is_latent else 16)
    if on_cpu:
        options["block_size"] = block_size
        options["enforce_eager"] = True  # vLLM compiles for the CPU otherwise, which takes minutes
        options["max_num_batched_tokens"] = max_model_len if is_latent else run.budget  # no chunks there
    per_request = -(-max_model_len // block_size)
    if run.kind.small_pool:
        options["num_gpu_blocks_override"] = run.blocks or per_request * 5 // 4
    elif on_cpu:
        options["num_gpu_blocks_override"] = per_request * MAX_NUM_SEQS
    if run.kind.drafts:
        options["speculative_config"] = dict(_NGRAM)
    return options


def serve(run: EngineRun, started: Callable[[ServedTraffic], None]) -> ServedTraffic:
    """Serve the requests of ``run`` by a new engine of this process, and judge it.

    ``started`` is called with the environment when the engine can serve.
    An engine that cannot be started is part of the result; one that raises later has records of outcome ``errored``.
    """
    from attncheck.harness.device import collect_environment
    from attncheck.harness.driver.observation import capture_exception
    from attncheck.harness.engine.events import ObserverSettings
    from attncheck.harness.engine.observer import EngineObserver
    from attncheck.harness.engine.vllm_runner import EngineHooks, watch_workers

    observer = EngineObserver(ObserverSettings(judge_every=run.every, follow_one_of=run.follow))
    raised, lacks = None, ""
    platform = import_module("vllm.platforms").current_platform
    watch_workers(EngineHooks(observer).install)
    try:
        engine = import_module("vllm").LLM(**engine_options(run, on_cpu=platform.is_cpu())).llm_engine
    except Exception as error:  # noqa: BLE001 (whatever a model makes vLLM raise)
        traceback.print_exc()
        return ServedTraffic(not_started=f"{type(error).__name__}: {error}")
    environment = collect_environment("cpu" if platform.is_cpu() else platform.device_type)
    started(ServedTraffic(environment=environment))
    began = time.monotonic()
    try:
        _serve_requests(engine, run, observer)
    except Exception as error:  # noqa: BLE001 (a fault of the engine is a result)
        traceback.print_exc()
        raised = capture_exception("serving", error)
    seconds = time.monotonic() - began
    result = observer.result()
    if not run.steps:
        lacks = _lacking(run, result.counts, engine.vllm_config)
    case = run.case(lacks)
    records = records_of(case, result, circumstances_of(run, environment), seconds, raised=raised)
    info, backend = case.info(result), backend_of(result.engine).info
    return ServedTraffic(case=info, backend=backend, environment=environment, records=records)


def _serve_requests(engine: Any, run: EngineRun, observer: Any) -> None:
    """Add each request at its step, and run the engine until all have ended, or for the steps of ``run``."""
    params = import_module("vllm").SamplingParams
    vocab_size = engine.model_config.get_vocab_size()
    waiting = list(draw_requests(run.kind, run.seed, run.requests, vocab_size))
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and (waiting[0].arrival <= step or not engine.has_unfinished_requests()):
            request = waiting.pop(0)
            sampling = params(max_tokens=request.max_tokens, temperature=0, ignore_eos=True, detokenize=False)
            prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
            engine.add_request(request.request_id, prompt, sampling)
        engine.step()
        step += 1
        is_over = run.steps is not None and observer.result().steps >= run.steps
        if is_over or observer.failure is not None:
            return


def _lacking(run: EngineRun, counts: Mapping[str, int], config: Any) -> str:
    """Return why the engine did not do what the kind of traffic is for, or ""."""
    if run.kind.long and not run.kind.small_pool and not config.scheduler_config.enable_chunked_prefill:
        return "vLLM has switched chunked prefill off for this model and platform"
    missing = [name for name in run.kind.shown_by if not counts.get(name)]
    if PREFIX_HITS in missing and not config.cache_config.enable_prefix_caching:
        return "vLLM has switched prefix caching off for this model and platform"
    advice = {RESUMED: "; give fewer --blocks or more --requests", DRAFTS: "; give more --requests"}
    return f"the engine had no {missing[0]}{advice.get(missing[0], '')}" if missing else ""


# The process that serves: one line of JSON on stdin, one on the descriptor that is given for each run.


def _serve_in_fork(run: EngineRun, write_to: int) -> None:
    """Serve ``run`` in a fork of this process; a line goes to the descriptor ``write_to``, whatever the fork does."""
    child = os.fork()
    if child == 0:
        signal.alarm(run.limit_s)  # ends this process
        code = 1
        try:
            _write_line(write_to, serve(run, partial(_write_line, write_to)))
            code = 0
        except BaseException:  # noqa: BLE001 (the process ends here)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGALRM:
        _write_line(write_to, ServedTraffic(ended=f"not finished within {run.limit_s} s"))
    elif code:
        cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        _write_line(write_to, ServedTraffic(ended=cause))


def _write_line(descriptor: int, served: ServedTraffic) -> None:
    line = memoryview(f"{served.model_dump_json()}\n".encode())
    while line:
        line = line[os.write(descriptor, line) :]


def main(arguments: Sequence[str]) -> None:
    """Serve the runs that are on stdin as a JSON list, and write a line for each to the descriptor ``arguments[0]``."""
    write_to = int(arguments[0])
    runs = [EngineRun(**each) for each in json.load(sys.stdin)]
    import_module("vllm").LLM  # noqa: B018 (imported once, before the forks)
    for run in runs:
        if run.model in CONFIGS and not Path(run.folder).exists():
            Path(run.folder).mkdir()
            make_model(Path(run.folder), run.model)
        _serve_in_fork(run, write_to)


if __name__ == "__main__":
    main(sys.argv[1:])
