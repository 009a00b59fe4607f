"""The measurement of a level, and its judgement: of right backends, of wrong ones, and of odd ones."""

from dataclasses import replace
from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from inline_snapshot import snapshot
from made_cases import make_case
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl
from attncheck.backends.candidates.torch_sdpa import SDPABackend, SDPABuilder, SDPAImpl
from attncheck.backends.mutants import graphs
from attncheck.backends.paged_metadata import PagedBuilder
from attncheck.backends.registry import load
from attncheck.harness.checks.cudagraph import check as check_module
from attncheck.harness.checks.cudagraph import replay
from attncheck.harness.checks.cudagraph.check import (
    GraphLevelCheck,
    LevelMeasurement,
    ProbeOutcome,
    declared_level,
    judge_level,
    measure_level,
)
from attncheck.harness.checks.cudagraph.probes import Bucket, Probe, ProbeStep
from attncheck.harness.checks.cudagraph.replay import ProbeProblems
from attncheck.harness.checks.findings import Broken, Holds, NotExamined
from attncheck.harness.checks.interface import CheckedCase, SharedByChecks
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.run.selection import select_cases
from attncheck.harness.truth.truth import TruthCache, truth_of
from attncheck.reference.spec import AttentionCGSupport, AttentionType, LayerSpec
from attncheck.reference.step_spec import BatchSpec, RequestSpec
from attncheck.reports.run_file.graph_levels import GRAPH_LEVELS, GraphLevels

CPU = torch.device("cpu")
LAYER = LayerSpec(num_heads=2, num_kv_heads=1, head_size=16, dtype="float32")
CASE = make_case((3, 9), layer=LAYER, cache={"block_size": 4})


@pytest.fixture
def questions():
    return ProbeProblems(CASE, 0, CPU)


def declaring(level, base=SDPABackend, builder=SDPABuilder):
    """``base`` whose builder declares ``level``, and nothing by configuration."""

    class Builder(builder):
        cudagraph_support = level

        @classmethod
        def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
            return cls.cudagraph_support

    class Backend(base):
        get_builder_cls = staticmethod(lambda: Builder)

    return Backend


@pytest.fixture(scope="module")
def measured():
    """The measurements of two candidates, and of each the kinds of pool that its sessions had."""
    problems, pools = ProbeProblems(CASE, 0, CPU), {}

    class Noted(replay.GraphSession):
        def __init__(self, probed, *args, **kwargs):
            super().__init__(probed, *args, **kwargs)
            pools.setdefault(probed.backend, []).append(self.is_pool_finite)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "GraphSession", Noted)
        found = {backend: measure_level(backend, problems, CPU) for backend in (SDPABackend, ReferenceBackend)}
    return {backend: (measurement, pools[backend]) for backend, measurement in found.items()}


@pytest.mark.parametrize(
    ("backend", "level", "first_fault"),
    [
        (SDPABackend, AttentionCGSupport.UNIFORM_BATCH, "mixed"),
        (ReferenceBackend, AttentionCGSupport.NEVER, "decode"),
    ],
)
def test_probes_run_up_to_the_first_that_breaks(plain, measured, questions, backend, level, first_fault):
    measurement, pools = measured[backend]
    levels = measurement.levels
    assert measurement.declared is measurement.reached is level
    assert levels.recorder == "emulated"
    assert [probe.name for probe in levels.probes] == [probe.name for probe in questions.probes]
    first = [probe.name for probe in levels.probes].index(first_fault)
    outcomes = [probe.outcome for probe in levels.probes]
    assert outcomes == ["passed"] * first + ["failed"] + ["not run"] * (len(outcomes) - first - 1)
    # What is right over NaN is not run over finite numbers, but for one session that asks if the fault is a leak.
    assert (set(pools), levels.notes) == ({False}, ())
    assert len(pools) <= first + 2
    if backend is ReferenceBackend:
        assert plain(measurement.broke[1].reason) == snapshot(
            "forward cannot be captured (8 requests of 1 token each): host read: .tolist() at src/attncheck/reference/arguments.py:N in host_ints; data-dependent shape: .nonzero() at src/attncheck/reference/attention/cache.py:N in reshape_and_cache; host read: .cpu() at src/attncheck/reference/attention/paged.py:N in paged_requests; host copy: .to() at src/attncheck/reference/attention/paged.py:N in paged_requests"
        )


def test_another_library_s_enum_counts_by_its_names(questions):
    theirs = Enum("Theirs", ["ALWAYS"])
    assert declared_level(declaring(theirs.ALWAYS), questions) is AttentionCGSupport.ALWAYS


@pytest.mark.parametrize("nonsense", ["ALWAYS", 2, None])
def test_a_declaration_that_is_no_level_is_errored(questions, nonsense):
    with pytest.raises(StageError) as caught:
        declared_level(declaring(nonsense), questions)
    assert caught.value.raised.stage == "declaration"
    assert repr(nonsense) in caught.value.raised.message


def test_one_layer_and_cache_is_measured_once_a_backend(measured, monkeypatch):
    made = []
    found = measured[ReferenceBackend][0]
    monkeypatch.setattr(check_module, "measure_level", lambda backend, *_: made.append(backend) or found)
    check = GraphLevelCheck(0, CPU)
    other_batch = replace(CASE, id="d", batch=BatchSpec(requests=(RequestSpec(query_len=1, seq_len=30),)))
    same_cache = replace(CASE, id="e", cache=replace(CASE.cache, num_blocks=77))
    findings = [check.examine(ReferenceBackend, case) for case in (CASE, other_batch, same_cache)]
    assert made == [ReferenceBackend]
    assert findings[0] is findings[1] is findings[2]
    check.examine(ReferenceBackend, replace(CASE, layer=replace(LAYER, head_size=32)))
    check.examine(SDPABackend, CASE)
    assert made == [ReferenceBackend, ReferenceBackend, SDPABackend]


@pytest.mark.parametrize("attn_type", [AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER])
def test_layers_that_no_graph_is_captured_for_are_not_examined(attn_type):
    case = replace(CASE, layer=replace(LAYER, attn_type=attn_type))
    finding = check_module.CHECKS["cudagraph"].not_applicable(case, SDPABackend.features)
    assert finding.by == "attncheck"


def test_a_level_whose_batches_are_declined_is_not_reached(questions):
    class DecodesOnly(declaring(AttentionCGSupport.UNIFORM_BATCH)):
        @classmethod
        def unsupported_reasons(cls, layer, cache, batch):
            return [f"query_len {batch.max_query_len}: only decodes"] if batch.max_query_len > 1 else []

    measurement = measure_level(DecodesOnly, questions, CPU)
    assert measurement.reached is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    finding = judge_level(measurement)
    assert finding.summary == snapshot(
        "declared UNIFORM_BATCH, measured UNIFORM_SINGLE_TOKEN_DECODE: probe 'verify 2' broke: the backend declares that it does not serve such batches: query_len 2: only decodes"
    )


class TwoLayouts(graphs.Base):
    """Keeps the lengths in one of two places, by ``is_second``; ``forward`` reads the place of the capture."""

    class Builder(PagedBuilder):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            most = self.vllm_config.scheduler_config.max_num_seqs
            self.lens = torch.zeros(2, most, dtype=torch.int32, device=self.device)

        def build_for_cudagraph_capture(self, common_attn_metadata):
            assert common_attn_metadata.max_seq_len == self.vllm_config.model_config.max_model_len
            return self.build(0, common_attn_metadata)

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            place = int(self.backend.is_second(common_attn_metadata))
            self.lens.fill_(0)
            self.lens[place, : common_attn_metadata.num_reqs] = common_attn_metadata.seq_lens
            metadata.plan = self.lens[place, : common_attn_metadata.num_reqs]
            return metadata

    class Impl(graphs.PlannedImpl):
        def locate(self, metadata, num_rows):
            return graphs.locate_by(metadata.common, num_rows, metadata.plan)


@pytest.mark.parametrize(
    ("is_second", "measured", "broken_probe"),
    [
        (lambda common: common.max_seq_len > 40, "NEVER", "decode"),
        (lambda common: common.max_query_len == 1, "UNIFORM_BATCH", "mixed"),
    ],
)
def test_a_graph_is_replayed_with_the_maxima_of_the_step_and_not_those_of_the_capture(
    questions, is_second, measured, broken_probe
):
    backend = type("Layouts", (TwoLayouts,), {"is_second": staticmethod(is_second)})
    measurement = measure_level(backend, questions, CPU)
    assert (measurement.levels.declared, measurement.levels.measured) == ("ALWAYS", measured)
    probe, fault = measurement.broke
    assert probe.name == broken_probe
    assert "right without a graph" in fault.reason


def test_a_backend_that_makes_no_step_at_all_raises_what_it_raised(questions):
    class Impl(ReferenceImpl):
        def attend(self, *args):
            raise RuntimeError("no kernel for this machine")

    class Broken(ReferenceBackend):
        get_impl_cls = staticmethod(lambda: Impl)

    with pytest.raises(StageError) as caught:
        measure_level(Broken, questions, CPU)
    assert caught.value.raised.message == snapshot("no kernel for this machine")


def test_one_that_refuses_only_to_be_captured_measures_never(questions):
    class Builder(ReferenceBuilder):
        def build_for_cudagraph_capture(self, common_attn_metadata):
            raise NotImplementedError("no graphs")

    class Refuses(ReferenceBackend):
        get_builder_cls = staticmethod(lambda: Builder)

    measurement = measure_level(Refuses, questions, CPU)
    assert measurement.reached is AttentionCGSupport.NEVER
    assert measurement.broke[1].reason == snapshot(
        "build for capture raised NotImplementedError: no graphs (8 requests of 1 token each)"
    )
    assert isinstance(judge_level(measurement), Holds)


def backend_of(builder=SDPABuilder, impl=SDPAImpl, **declarations):
    parts = {"get_builder_cls": staticmethod(lambda: builder), "get_impl_cls": staticmethod(lambda: impl)}
    return type("Backend", (SDPABackend,), parts | declarations)


def examined(backend):
    return GraphLevelCheck(0, CPU).examine(backend, CASE)


def test_a_frozen_number_is_a_fault_although_no_two_answers_have_the_same_bits():
    class Builder(SDPABuilder):
        def build_for_cudagraph_capture(self, common_attn_metadata):
            common_attn_metadata.max_seq_len = 1
            return self.build(0, common_attn_metadata)

    class Impl(SDPAImpl):
        def _attend_uniform(self, *args):
            out = super()._attend_uniform(*args)
            return out * (1 + torch.rand_like(out) * 1e-7)

    finding = examined(backend_of(Builder, Impl))
    assert "frozen at capture, such as these: metadata.seq_lens[0] was 1 at capture" in finding.meaning


def test_what_it_cannot_do_at_all_above_its_level_leaves_the_level_measured():
    class Builder(SDPABuilder):
        @classmethod
        def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            if 1 < common_attn_metadata.max_query_len < 9:
                raise NotImplementedError("no drafts")
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    finding = examined(backend_of(Builder))
    assert isinstance(finding, Holds)
    assert finding.graph.measured == "UNIFORM_SINGLE_TOKEN_DECODE"

    class Promises(Builder):
        @classmethod
        def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
            return AttentionCGSupport.UNIFORM_BATCH

    with pytest.raises(StageError) as failure:
        examined(backend_of(Promises))
    assert failure.value.raised.message == "no drafts"


class CopiesTooMuch(SDPAImpl):
    """Raises in its first call of more rows than before, by an error of torch; another call of as many is right."""

    workspace = torch.empty(1)

    def forward(self, layer, query, key, value, kv_cache, metadata, **keywords):
        room, self.workspace = self.workspace, torch.empty(max(len(query), len(self.workspace)))
        room[: len(query)].copy_(query[:, 0, 0])
        return super().forward(layer, query, key, value, kv_cache, metadata, **keywords)


class RaisesSecond(SDPAImpl):
    """Raises in its second call: a capture that follows a warm-up."""

    calls = 0

    def forward(self, *args, **keywords):
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("the second call")
        return super().forward(*args, **keywords)


class RaisesWatched(SDPAImpl):
    """Does not run while a mode of torch watches it."""

    def forward(self, *args, **keywords):
        if _get_current_dispatch_mode_stack():
            raise RuntimeError("no rule for this mode")
        return super().forward(*args, **keywords)


@pytest.mark.parametrize(
    ("impl", "message"),
    [
        (CopiesTooMuch, "RuntimeError: output with shape"),
        (RaisesSecond, "the second call"),
    ],
)
def test_what_is_raised_once_is_a_finding(impl, message):
    finding = examined(backend_of(impl=impl))
    assert "probe 'decode' broke: warm-up for capture raised RuntimeError: " in finding.summary
    assert message in finding.summary


def test_what_the_watch_causes_is_no_finding():
    finding = examined(backend_of(impl=RaisesWatched))
    assert finding.reasons[0] == snapshot(
        "level UNIFORM_BATCH, probe 'decode': cannot be examined here: it does not run while torch's modes watch it: RuntimeError: no rule for this mode"
    )


def test_what_was_raised_is_raised_once_for_all_cases_of_a_layer():
    made = []

    class Builder(SDPABuilder):
        def __init__(self, *args):
            made.append(self)
            raise RuntimeError("no builder")

    check = GraphLevelCheck(0, CPU)
    backend, raised = backend_of(Builder), []
    for _ in range(2):
        with pytest.raises(StageError) as failure:
            check.examine(backend, CASE)
        raised.append(failure.value.raised)
    assert raised[0] is raised[1]
    assert raised[0].stage == "builder"
    assert len(made) == 1


def test_a_threshold_that_raises_is_the_builder_s_fault():
    class Builder(SDPABuilder):
        @property
        def reorder_batch_threshold(self):
            raise ValueError("no threshold")

    finding = examined(backend_of(Builder))
    assert finding.summary == snapshot(
        "declared UNIFORM_BATCH, measured NEVER: probe 'decode' broke: graph captured for 8 requests of 1 token each, replayed with 8 requests (query_len/seq_len 1/15, 1/7, 1/35, 1/1, 1/2, 1/16, 1/17, 1/17): builder raised ValueError: no threshold"
    )


class Closed:
    """Cannot be looked into."""

    def __getattribute__(self, name):
        raise ValueError(name)


class OddBuilder(SDPABuilder):
    """Builds metadata with objects that nothing can trace, and sets the lengths of dummies to 1, as builders of vLLM do.

    The model runner refills the lengths.
    """

    def build(self, *args, **keywords):
        metadata = super().build(*args, **keywords)
        metadata.oddities = [Closed(), SimpleNamespace(rest=torch), list(range(100_000))]
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata):
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        metadata.common.seq_lens.fill_(1)
        return metadata


class OwnOutput(SDPAImpl):
    """Returns an output in memory of its own."""

    def forward(self, *args, output=None, **keywords):
        own = torch.empty_like(output)
        super().forward(*args, output=own, **keywords)
        return own


def test_what_is_odd_but_allowed_has_its_level():
    finding = examined(backend_of(OddBuilder, OwnOutput, accept_output_buffer=False))
    assert isinstance(finding, Holds)
    assert finding.graph.measured == "UNIFORM_BATCH"
    assert isinstance(examined(backend_of(impl=OwnOutput)), Broken)  # who promises to use the buffer has to


def test_a_fault_that_shows_without_a_graph_too_gets_a_cause():
    class Impl(SDPAImpl):
        def __init__(self, num_heads, head_size, scale, *args, **keywords):
            super().__init__(num_heads, head_size, 2 * scale, *args, **keywords)

    finding = examined(backend_of(impl=Impl))
    assert finding.graph.notes == ()  # it is no leak
    assert finding.meaning == (
        "the scores are multiplied by 2: a reference with this fault gives the same output in all rows, "
        "without a graph, too"
    )


NEVER, SINGLE, UNIFORM, ALWAYS = (AttentionCGSupport[name] for name in GRAPH_LEVELS)


def measurement(declared, reached, reason=None):
    """``reason``: why the first probe above ``reached`` broke."""
    broke = None
    if reason is not None:
        level = AttentionCGSupport(reached.value + 1)
        broke = (Probe("lengths", level, "replays follow", (Bucket(1, 1, 1),), (ProbeStep(((1, 1),)),)), reason)
    measured = None if reason is not None and reason.outcome == "not examined" else reached.name
    levels = GraphLevels(declared=declared.name, measured=measured, recorder="emulated")
    return LevelMeasurement(declared, reached, levels, broke)


def test_truths_of_probes_come_from_the_cache_of_the_run(monkeypatch):
    given = []

    class Cache(TruthCache):
        def truth_of(self, problem, *, refuse_blindness=True):
            given.append((problem.case.suite, refuse_blindness))
            return super().truth_of(problem, refuse_blindness=refuse_blindness)

    def measure(backend, questions, device):
        probe = questions.probes[0]
        for _ in range(2):
            questions.truth(questions.case(probe, probe.steps[0]))
        return measurement(NEVER, NEVER, ProbeOutcome("failed", "wrong"))

    monkeypatch.setattr(check_module, "measure_level", measure)
    (case,) = select_cases(["smoke"], ["decode.float32"]).cases
    problem = build_problem(case, 0)
    shared = SharedByChecks()
    shared.get(TruthCache, lambda: Cache(CPU))
    checked = CheckedCase(load("reference"), problem, truth_of(problem, CPU), CPU, (), shared)
    assert isinstance(check_module.CHECKS["cudagraph"].run(checked), Holds)
    assert given == [("cudagraph", False)]


WRONG, UNSEEN = ProbeOutcome("failed", "3 of 8 rows", "metadata.lens moved"), ProbeOutcome("not examined", "hidden")


@pytest.mark.parametrize(
    ("declared", "reached", "broke", "outcome"),
    [
        (NEVER, NEVER, WRONG, Holds),
        (SINGLE, SINGLE, WRONG, Holds),
        (ALWAYS, ALWAYS, None, Holds),
        (SINGLE, NEVER, WRONG, Broken),
        (ALWAYS, UNIFORM, WRONG, Broken),
        (SINGLE, NEVER, UNSEEN, NotExamined),
        (ALWAYS, SINGLE, UNSEEN, NotExamined),
        (NEVER, NEVER, UNSEEN, NotExamined),  # what cannot be seen is never a pass
    ],
)
def test_a_declared_level_is_held_against_the_measured_one(declared, reached, broke, outcome):
    finding = judge_level(measurement(declared, reached, broke))
    assert isinstance(finding, outcome)
    if outcome is Broken:
        assert finding.summary == (
            f"declared {declared.name}, measured {reached.name}: probe 'lengths' broke: 3 of 8 rows"
        )
        assert finding.meaning == "metadata.lens moved"
        assert finding.graph.declared == declared.name
    elif outcome is NotExamined:
        assert finding.by == "attncheck"
        assert "hidden" in finding.reasons[0]
    else:
        assert finding.notes == ()
        assert finding.figures["declared_level"] == finding.figures["measured_level"] == declared.value


def test_notes_name_the_head_room_and_what_is_unknown_above_it():
    measured = measurement(SINGLE, UNIFORM)
    noted = replace(measured, levels=measured.levels.model_copy(update={"notes": ("over numbers",)}))
    assert judge_level(noted).notes == snapshot(
        ("over numbers", "head-room: UNIFORM_SINGLE_TOKEN_DECODE is declared, UNIFORM_BATCH measured")
    )
    assert judge_level(measurement(NEVER, SINGLE, UNSEEN)).notes == snapshot(
        (
            "head-room: NEVER is declared, UNIFORM_SINGLE_TOKEN_DECODE measured",
            "above UNIFORM_SINGLE_TOKEN_DECODE nothing is known: probe 'lengths' cannot be examined here: hidden",
        )
    )
