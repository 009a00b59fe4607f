"""The worker of a server, watched by its model runner alone; a failure of ours leaves the engine alone.

``Runner`` has the methods of vLLM's model runners that are watched. It serves one request with one layer.
"""

import sys
import time
from types import SimpleNamespace

import pytest
import torch

from attncheck.harness.engine.observer import EngineObserver
from attncheck.harness.engine.plugin import WatchSettings
from attncheck.harness.engine.served_engine import ServedEngine
from attncheck.harness.engine.vllm_runner import EngineHooks, watch_workers
from attncheck.reports.run_file.store import read_run

BLOCK, SIZE, STEPS = 4, 16, 12


class Impl:
    scale = SIZE**-0.5

    def __init__(self):
        self.keys, self.values = [], []

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output):
        self.keys.append(key.clone())
        self.values.append(value.clone())
        keys, values = torch.cat(self.keys)[:, 0].float(), torch.cat(self.values)[:, 0].float()
        at = torch.arange(len(keys) - len(query), len(keys))
        scores = (query[:, 0].float() @ keys.T * self.scale).masked_fill(torch.arange(len(keys)) > at[:, None], -1e9)
        output[:, 0] = (scores.softmax(-1) @ values).to(output.dtype)


class Attention:
    num_heads = num_kv_heads = 1
    head_size = SIZE
    sliding_window, kv_cache_dtype, attn_type = None, "auto", "decoder"

    def __init__(self):
        self.impl = Impl()

    def get_attn_backend(self):
        return type("FakeBackend", (), {"get_name": staticmethod(lambda: "FAKE")})


class Runner:
    """One request of four tokens, which are given in one step, and of one in each later step."""

    device = torch.device("cpu")
    model_config = SimpleNamespace(dtype=torch.bfloat16, is_diffusion=False)
    cache_config = SimpleNamespace(cache_dtype="auto")

    def __init__(self, *, is_async=False, **parallel):
        sizes = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "rank": 0, "data_parallel_rank": 0}
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(async_scheduling=is_async),
            parallel_config=SimpleNamespace(**(sizes | parallel)),
            kv_transfer_config=None,
            speculative_config=None,
            model_config=self.model_config,
        )
        self.layer = Attention()
        self.compilation_config = SimpleNamespace(static_forward_context={"layer": self.layer})
        self.weights = torch.randn(100, 3, 1, SIZE, generator=torch.Generator().manual_seed(0)).bfloat16()
        self.outputs = []

    def initialize_kv_cache(self, kv_cache_config, is_profiling=False):
        self.kv_cache_config = kv_cache_config

    def forward(self, ids):
        query, key, value = self.weights[ids].unbind(1)
        output = torch.zeros_like(query)
        self.layer.impl.forward(self.layer, query, key, value, None, object(), output)
        self.outputs.append(output)

    def sampled(self, tokens):
        return SimpleNamespace(req_id_to_index={"a": 0}, sampled_token_ids=[tokens])


class RunnerV1(Runner):
    input_batch = SimpleNamespace(req_ids=["a"])

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        self.number = scheduler_output.number
        self._model_forward(input_ids=torch.tensor(scheduler_output.ids), positions=scheduler_output.positions)

    def _model_forward(self, input_ids, positions):
        self.forward(input_ids)

    def sample_tokens(self, grammar_output):
        return self.sampled([self.number])


class RunnerV2(Runner):
    def execute_model(self, scheduler_output, intermediate_tensors=None, dummy_run=False):
        self.number = scheduler_output.number
        self.forward(self.prepare_inputs(scheduler_output).input_ids)

    def prepare_inputs(self, scheduler_output):
        ids, positions = torch.tensor(scheduler_output.ids), scheduler_output.positions
        return SimpleNamespace(req_ids=["a"], input_ids=ids, positions=positions)

    def sample_tokens(self, grammar_output):
        tokens = [self.number]
        return SimpleNamespace(get_output=lambda: self.sampled(tokens))


RUNNERS = pytest.mark.parametrize("runner_class", [RunnerV1, RunnerV2])


def plan_of(number):
    """The plan of a step; the token that it samples is its number."""
    ids = [50, 51, 52, 53] if number == 0 else [number - 1]
    done = 0 if number == 0 else 3 + number
    new = SimpleNamespace(
        req_id="a",
        prompt_token_ids=ids,
        block_ids=([1],),
        num_computed_tokens=0,
        lora_request=None,
        prompt_embeds=None,
        mm_features=[],
    )
    blocks = ([2 + done // BLOCK],) if done % BLOCK == 0 else None
    cached = {"req_ids": ["a"], "new_block_ids": [blocks], "num_computed_tokens": [done]}
    if number == 0:
        cached = {name: [] for name in cached}
    return SimpleNamespace(
        number=number,
        ids=ids,
        positions=torch.arange(done, done + len(ids)),
        scheduled_new_reqs=[] if number else [new],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(), all_token_ids={}, **cached),
        num_scheduled_tokens={"a": len(ids)},
        total_num_scheduled_tokens=len(ids),
        scheduled_spec_decode_tokens={},
        finished_req_ids=set(),
        preempted_req_ids=None,
    )


class Worker:
    """The worker of a model runner, whose warm-up runs steps of invented requests."""

    def __init__(self, runner, warm_up_steps=0):
        self.model_runner, self.warm_up_steps = runner, warm_up_steps

    def compile_or_warm_up_model(self):
        for number in range(self.warm_up_steps):
            self.model_runner.execute_model(plan_of(number))
            self.model_runner.sample_tokens(None)
        for kept in (self.model_runner.layer.impl.keys, self.model_runner.layer.impl.values, self.model_runner.outputs):
            kept.clear()


def drive(worker, *, is_async=False):
    """Serve the request; with ``is_async``, a step begins before the output of the one before is taken."""
    runner = worker.model_runner
    spec = type("FullAttentionSpec", (), {"block_size": BLOCK})()
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])
    runner.initialize_kv_cache(SimpleNamespace(kv_cache_groups=[group]))
    for _ in range(2):  # as after a sleep
        worker.compile_or_warm_up_model()
    waiting = None
    for number in range(STEPS):
        runner.execute_model(plan_of(number))
        output = runner.sample_tokens(None)
        if hasattr(output, "get_output"):
            if is_async and waiting is not None:
                waiting.get_output()
            waiting = output
            if not is_async:
                output.get_output()
    if is_async:
        waiting.get_output()
    return torch.cat(runner.outputs)


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    return WatchSettings(path=tmp_path / "run.jsonl", judge_every=1, command=("attncheck", "engine"))


@pytest.fixture
def serve(settings):
    """Serve with a watched runner, and return its outputs and the run file."""

    def serve(runner, *, follow_one_of=1, **options):
        worker = Worker(runner)
        engine = ServedEngine(settings.model_copy(update={"follow_one_of": follow_one_of}), worker)
        engine.start()
        try:
            return drive(worker, **options), engine
        finally:
            engine.run_file.end()
            engine.hooks.remove()

    return serve


@RUNNERS
def test_a_worker_is_watched_by_its_runner(serve, settings, runner_class):
    outputs, engine = serve(runner_class())
    assert torch.equal(outputs, drive(Worker(runner_class())))
    result = engine.hooks.observer.result()
    assert result.findings == ()
    assert (result.steps, result.checks["output"], result.checks["token"]) == (STEPS, STEPS + 3, STEPS + 3)
    run = read_run(settings.path)
    assert run.complete
    assert run.header.command == ("attncheck", "engine")
    assert {record.check: record.outcome for record in run.records}["output"] == "passed"


@pytest.mark.parametrize(
    ("setting", "value", "left_out"),
    [
        ("sliding_window", -1, ""),
        ("sliding_window", 0, ""),
        ("logits_soft_cap", -1.0, "layers with logits_soft_cap = -1.0: must be"),
    ],
)
def test_a_setting_that_means_nothing_or_is_odd_does_not_end_the_watch(serve, settings, setting, value, left_out):
    runner = RunnerV1()
    setattr(runner.layer if hasattr(runner.layer, setting) else runner.layer.impl, setting, value)
    _, engine = serve(runner)
    result = engine.hooks.observer.result()
    assert (result.failure, result.findings) == (None, ())
    reasons = [reason for kind, reason in result.not_compared if kind == "output"]
    assert all(reason.startswith(left_out) for reason in reasons)
    assert (bool(reasons), bool(result.checks["output"])) == (bool(left_out), not left_out)


class Wrong(RunnerV1):
    """A runner that changes a key that later steps read."""

    def forward(self, ids):
        super().forward(ids)
        if len(self.outputs) == 4:
            self.layer.impl.keys[-1].mul_(5)


def test_each_engine_of_a_command_has_a_case(serve, settings):
    serve(Wrong())
    _, engine = serve(RunnerV1())
    engine.write()
    run = read_run(settings.path)
    assert run.complete
    outcomes = {record.case_id: record.outcome for record in run.records if record.check == "output"}
    assert outcomes == {"served": "failed", "served-2": "passed"}
    assert [case.description.split(" at ")[0] for case in run.header.cases] == [
        f"requests of a server's clients, up to step {STEPS}"
    ] * 2


def test_a_failed_engine_stays_failed_beside_a_right_one(serve, settings, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(EngineObserver, "inputs", None)
        serve(RunnerV1())
    serve(RunnerV1())
    run = read_run(settings.path)
    assert {record.case_id for record in run.records if record.outcome == "passed"} == {"served-2"}
    assert len(run.errors) == 1


def test_the_last_steps_are_written_soon_though_the_process_goes_on(settings):
    """vLLM may kill the process before it writes at its end."""
    worker = Worker(RunnerV1())
    engine = ServedEngine(settings, worker)
    engine.start()
    try:
        drive(worker)
        time.sleep(1.5)
        assert read_run(settings.path).records[0].figures["steps"] == STEPS
    finally:
        engine.run_file.cancel()
        engine.hooks.remove()


def test_async_scheduling_is_judged_a_step_late(serve, settings):
    outputs, engine = serve(RunnerV2(is_async=True), is_async=True)
    assert torch.equal(outputs, drive(Worker(RunnerV2())))
    result = engine.hooks.observer.result()
    assert result.findings == ()
    assert (result.checks["output"], result.checks["token"]) == (STEPS + 3, STEPS + 3)
    assert "write" not in result.checks
    records = {record.check: record for record in read_run(settings.path).records}
    assert (records["output"].outcome, records["write"].outcome) == ("passed", "unsupported")
    assert "no page was compared" in str(records["write"])
    assert "pages with async scheduling, whose steps are judged late" in str(records["write"])


def test_a_server_of_whose_requests_none_is_followed_has_no_passed_check(serve, settings):
    serve(RunnerV1(), follow_one_of=10**9)
    records = read_run(settings.path).records
    assert {record.check for record in records} == {"output", "token", "position", "write"}
    assert not any(record.outcome == "passed" for record in records)
    assert all("leaves out the first block of their prompt" in str(record) for record in records)


def test_steps_of_a_profile_and_of_a_warm_up_are_ignored(settings):
    """Runner V2 runs a dummy batch before it has a cache, and the worker's warm-up drops what its steps sample."""

    class Profiled(RunnerV2):
        def initialize_kv_cache(self, kv_cache_config, is_profiling=False):
            self.execute_model(plan_of(0), dummy_run=True)
            super().initialize_kv_cache(kv_cache_config)

    worker = Worker(Profiled(is_async=True), warm_up_steps=2)
    engine = ServedEngine(settings, worker)
    engine.hooks.install(worker)
    drive(worker, is_async=True)
    result = engine.hooks.observer.result()
    assert (result.failure, result.findings, result.steps) == (None, (), STEPS)
    assert result.checks["output"] == STEPS + 3


class NoModel(RunnerV1):
    """A runner without layers. It samples the number of the step for each request."""

    number = 0
    input_batch = SimpleNamespace(req_ids=["a", "b", "media"])

    def __init__(self):
        super().__init__(is_async=True)
        spec = type("FullAttentionSpec", (), {"block_size": BLOCK})()
        group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group])

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        self.number += 1
        self.request_ids = list(scheduler_output.num_scheduled_tokens)
        if self.request_ids == self.input_batch.req_ids:
            self._model_forward(input_ids=scheduler_output.ids, positions=scheduler_output.positions)

    def _model_forward(self, input_ids, positions):
        pass

    def sample_tokens(self, grammar_output):
        places = {request_id: place for place, request_id in enumerate(self.request_ids)}
        made = SimpleNamespace(req_id_to_index=places, sampled_token_ids=[[self.number]] * len(places))
        return SimpleNamespace(get_output=lambda: made)


def plan_with(counts, new=(), resumed=(), continued=(), **given):
    """A plan; ``new``: (id, tokens, blocks, prefix hit, other fields); ``resumed``: (id, tokens, blocks).

    ``continued``: (id, computed tokens).
    """
    plain = {"lora_request": None, "prompt_embeds": None, "mm_features": []}
    started = [
        SimpleNamespace(
            **plain | other, req_id=name, prompt_token_ids=ids, block_ids=(blocks,), num_computed_tokens=hit
        )
        for name, ids, blocks, hit, other in new
    ]
    names = [name for name, *_ in resumed]
    cached = SimpleNamespace(
        req_ids=names + [name for name, _ in continued],
        resumed_req_ids=set(names),
        all_token_ids={name: ids for name, ids, _ in resumed},
        new_block_ids=[(blocks,) for *_, blocks in resumed] + [None] * len(continued),
        num_computed_tokens=[0] * len(names) + [done for _, done in continued],
    )
    return SimpleNamespace(
        scheduled_new_reqs=started,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens={},
        finished_req_ids=set(),
        preempted_req_ids=set(names),
        **given,
    )


@pytest.mark.parametrize("is_early", [False, True])
def test_a_request_that_is_resumed_in_flight_keeps_its_adapter_and_its_reason(settings, is_early):
    """The scheduler drops the token that is sampled in flight, whether it arrives before the next step or after."""
    runner = NoModel()
    engine = ServedEngine(settings, Worker(runner))
    engine.hooks.install(Worker(runner))
    try:
        ids, adapter = [1] * 9, {"lora_request": SimpleNamespace(lora_name="french")}
        media = ("media", ids, [4, 5, 6], 0, {"mm_features": ["image"]})
        runner.execute_model(plan_with({"a": 9, "media": 9}, new=[("a", ids, [1, 2, 3], 0, adapter), media]))
        first = runner.sample_tokens(None)
        if is_early:
            first.get_output()
        resumed = [("a", ids, [7, 8, 9]), ("media", ids, [10, 11, 12])]
        runner.execute_model(plan_with({"a": 9, "media": 9}, resumed=resumed))
        second = runner.sample_tokens(None)
        if not is_early:
            first.get_output()
        second.get_output()
        ids_given = torch.tensor([2, 1, 2])  # 2 is what the second step sampled
        given = {"ids": ids_given, "positions": torch.tensor([9, 8, 9])}
        new = [("b", ids, [7, 8, 13], 8, adapter)]
        continued = [("a", 9), ("media", 9)]
        runner.execute_model(plan_with({"a": 1, "b": 1, "media": 1}, new=new, continued=continued, **given))
        runner.sample_tokens(None).get_output()
    finally:
        engine.hooks.remove()
    observer = engine.hooks.observer
    result = observer.result()
    assert (result.failure, result.findings) == (None, ())
    assert (result.checks["prefix_hit"], result.checks["token"]) == (2, 2)
    assert result.not_followed["requests with images or other media"] == 1


def test_runner_v2_follows_a_request_that_one_plan_preempts_and_resumes(settings):
    """The prefix cache was reset with ``reset_running_requests``: the request is computed again from its start."""
    runner = RunnerV2()
    worker = Worker(runner)
    engine = ServedEngine(settings, worker)
    engine.hooks.install(worker)
    drive(worker)
    runner.layer.impl.keys.clear()
    runner.layer.impl.values.clear()
    tokens = [50, 51, 52, 53, *range(STEPS)]
    resumed = ("a", tokens[:4], [1, 2, 3, 4], 0, {"prefill_token_ids": tokens})
    given = {"number": STEPS, "ids": tokens, "positions": torch.arange(len(tokens))}
    plan = plan_with({"a": len(tokens)}, new=[resumed], **given)
    plan.preempted_req_ids = {"a"}
    runner.execute_model(plan)
    runner.sample_tokens(None).get_output()
    engine.hooks.remove()
    result = engine.hooks.observer.result()
    assert (result.failure, result.findings) == (None, ())
    assert "requests whose prompt is streamed" not in result.not_followed
    assert result.checks["output"] == STEPS + 3 + len(tokens)


WATCHES = ["_install", "_warm_up_begins", "_execute_begins", "_requests_start", "_executed", "_sampled", "_step_ends"]
OBSERVES = ["engine_starts", "request_added", "step_begins", "inputs", "layer_rows", "forward_ends", "step_ends"]


@RUNNERS
@pytest.mark.parametrize("name", WATCHES + OBSERVES)
def test_a_failure_of_ours_ends_the_watching_alone(serve, settings, monkeypatch, runner_class, name):
    def fails(*_, **__):
        raise RuntimeError("ours")

    owner = EngineObserver if name in OBSERVES else EngineHooks
    monkeypatch.setattr(owner, name, fails)
    outputs, engine = serve(runner_class())
    assert torch.equal(outputs, drive(Worker(runner_class())))
    assert engine.hooks.observer.result().failure == "RuntimeError: ours"
    run = read_run(settings.path)
    assert run.errors == (
        "engine/served: attncheck itself failed, and stopped watching the engine: RuntimeError: ours",
    )
    assert not any(record.outcome == "passed" for record in run.records)


def test_a_version_of_vllm_whose_method_takes_other_arguments_is_not_watched(serve):
    class Other(RunnerV1):
        def _model_forward(self, positions, input_ids):
            self.forward(input_ids)

    outputs, engine = serve(Other())
    assert torch.equal(outputs, drive(Worker(RunnerV1())))
    assert engine.hooks.observer.failure == (
        "QuestionError: attncheck engine does not know this version of vLLM: "
        "its Other has no _model_forward(input_ids, positions)"
    )


def test_what_cannot_be_followed_is_counted(serve, settings):
    outputs, engine = serve(RunnerV1(pipeline_parallel_size=2))
    assert torch.equal(outputs, drive(Worker(RunnerV1())))
    result = engine.hooks.observer.result()
    assert result.failure is None
    assert result.not_followed == {"engines with pipeline parallelism": STEPS + 3}
    assert not any(record.outcome == "passed" for record in read_run(settings.path).records)


@pytest.mark.parametrize(("rank", "data_parallel_rank"), [(0, 0), (1, 0), (0, 1)])
def test_other_ranks_are_left_alone(monkeypatch, rank, data_parallel_rank):
    class Wrapper:
        def init_device(self):
            self.worker = SimpleNamespace(
                rank=rank, vllm_config=RunnerV1(data_parallel_rank=data_parallel_rank).vllm_config
            )
            return "made"

    base = SimpleNamespace(WorkerWrapperBase=Wrapper)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.worker_base", base)
    started = []
    for _ in range(2):
        watch_workers(started.append)
    assert Wrapper().init_device() == "made"
    assert len(started) == (rank == data_parallel_rank == 0)


def test_settings_pass_through_the_environment(tmp_path):
    settings = WatchSettings(path=tmp_path / "run.jsonl", follow_one_of=4, command=("attncheck", "engine"))
    (text,) = settings.environment().values()
    assert WatchSettings.model_validate_json(text) == settings
