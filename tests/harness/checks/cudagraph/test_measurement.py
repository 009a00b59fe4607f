"""The measurement of a level: what is declared and reached, which backends are measured, and how often."""

from dataclasses import replace
from enum import Enum

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl
from attncheck.backends.candidates.torch_sdpa import SDPABackend, SDPABuilder
from attncheck.backends.mutants import graphs
from attncheck.backends.paged_metadata import PagedBuilder
from attncheck.cases.model import Case
from attncheck.harness.checks.cudagraph import check as check_module
from attncheck.harness.checks.cudagraph import replay
from attncheck.harness.checks.cudagraph.check import GraphLevelCheck, declared_level, measure_level
from attncheck.harness.checks.cudagraph.replay import ProbeProblems
from attncheck.harness.checks.findings import Broken, Holds, NotExamined
from attncheck.harness.driver.foreign_code import StageError
from attncheck.reference.spec import (
    AttentionCGSupport,
    AttentionType,
    BatchSpec,
    CacheSpec,
    LayerSpec,
    RequestSpec,
)

CPU = torch.device("cpu")
LAYER = LayerSpec(num_heads=2, num_kv_heads=1, head_size=16, dtype="float32")
CASE = Case(
    suite="s",
    id="c",
    layer=LAYER,
    cache=CacheSpec(block_size=4),
    batch=BatchSpec(requests=(RequestSpec(query_len=3, seq_len=9),)),
)


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
        @staticmethod
        def get_builder_cls():
            return Builder

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
def test_every_probe_has_an_outcome_and_those_behind_the_first_that_broke_are_not_run(
    measured, questions, backend, level, first_fault
):
    measurement, pools = measured[backend]
    levels = measurement.levels
    assert measurement.declared is measurement.reached is level
    assert levels.recorder == "emulated"
    assert [probe.name for probe in levels.probes] == [probe.name for probe in questions.probes]
    outcomes = [probe.outcome for probe in levels.probes]
    first = outcomes.index("failed")
    assert levels.probes[first].name == first_fault
    assert set(outcomes[:first]) <= {"passed"}
    assert set(outcomes[first + 1 :]) == {"not run"}
    # What is right over NaN is not run over finite numbers, but for one session that asks if the fault is a leak.
    assert (set(pools), levels.notes) == ({False}, ())
    assert len(pools) <= first + 2


def test_the_line_that_reads_the_host_is_named(plain, measured):
    _, fault = measured[ReferenceBackend][0].broke
    assert plain(fault.reason) == snapshot(
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
    assert isinstance(finding, NotExamined)
    assert finding.by == "attncheck"


def test_a_level_whose_batches_are_declined_is_not_reached(questions):
    class DecodesOnly(declaring(AttentionCGSupport.UNIFORM_BATCH)):
        @classmethod
        def unsupported_reasons(cls, layer, cache, batch):
            return [f"query_len {batch.max_query_len}: only decodes"] if batch.max_query_len > 1 else []

    measurement = measure_level(DecodesOnly, questions, CPU)
    assert measurement.reached is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    finding = check_module.judge_level(measurement)
    assert isinstance(finding, Broken)
    assert finding.summary == snapshot(
        "declared UNIFORM_BATCH, measured UNIFORM_SINGLE_TOKEN_DECODE: probe 'verify 2' broke: the backend declares that it does not serve such batches: query_len 2: only decodes"
    )


class TwoLayouts(graphs.Base):
    """Keeps the lengths in one of two places; ``forward`` reads the place that its metadata had at capture."""

    features = graphs.Base.features | {"sliding_window"}

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
            place = int(self.backend.is_second(common_attn_metadata, self.kv_cache_spec))
            self.lens.fill_(0)
            self.lens[place, : common_attn_metadata.num_reqs] = common_attn_metadata.seq_lens
            metadata.plan = self.lens[place, : common_attn_metadata.num_reqs]
            return metadata

    class Impl(graphs.PlannedImpl):
        def locate(self, metadata, num_rows):
            return graphs.locate_by(metadata.common, num_rows, metadata.plan)

        def attend_rows(self, query, caches, table, request, position, metadata):
            key, value, seen = graphs.gather(caches, table, request, position)
            left = self.sliding_window[0]
            if left >= 0:
                seen &= torch.arange(seen.shape[1], device=seen.device) >= position[:, None] - left
            value = value.masked_fill(~seen[..., None, None], 0)
            return graphs.attention(query, key, value, seen, self.scale)


class LayoutByTheWindow(TwoLayouts):
    """Drops a window that covers the longest request of the step."""

    @staticmethod
    def is_second(common, spec):
        return spec.sliding_window is not None and common.max_seq_len > spec.sliding_window


class LayoutByTheQuery(TwoLayouts):
    """Has another layout for steps of one token a request."""

    @staticmethod
    def is_second(common, spec):
        return common.max_query_len == 1


@pytest.mark.parametrize(
    ("backend", "layer", "measured"),
    [
        (LayoutByTheWindow, replace(LAYER, sliding_window=16), "NEVER"),
        (LayoutByTheQuery, LAYER, "UNIFORM_BATCH"),
    ],
)
def test_a_graph_is_replayed_with_the_maxima_of_the_step_and_not_those_of_the_capture(backend, layer, measured):
    measurement = measure_level(backend, ProbeProblems(replace(CASE, layer=layer), 0, CPU), CPU)
    assert measurement.declared is AttentionCGSupport.ALWAYS
    assert measurement.levels.measured == measured
    probe, fault = measurement.broke
    assert probe.name in ("decode", "mixed")
    assert "right without a graph" in fault.reason


def test_a_backend_that_makes_no_step_at_all_raises_what_it_raised(questions):
    class Impl(ReferenceImpl):
        def attend(self, *args):
            raise RuntimeError("no kernel for this machine")

    class Broken(ReferenceBackend):
        @staticmethod
        def get_impl_cls():
            return Impl

    with pytest.raises(StageError) as caught:
        measure_level(Broken, questions, CPU)
    assert caught.value.raised.message == snapshot("no kernel for this machine")


def test_one_that_refuses_only_to_be_captured_measures_never(questions):
    class Builder(ReferenceBuilder):
        def build_for_cudagraph_capture(self, common_attn_metadata):
            raise NotImplementedError("no graphs")

    class Refuses(ReferenceBackend):
        @staticmethod
        def get_builder_cls():
            return Builder

    measurement = measure_level(Refuses, questions, CPU)
    assert measurement.reached is AttentionCGSupport.NEVER
    assert measurement.broke[1].reason == snapshot(
        "build for capture raised NotImplementedError: no graphs (8 requests of 1 token each)"
    )
    assert isinstance(check_module.judge_level(measurement), Holds)
