"""Backends that are odd, or raise at unexpected places: each ends as the right finding."""

from types import SimpleNamespace

import pytest
import torch
from inline_snapshot import snapshot
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from attncheck.backends.candidates.torch_sdpa import SDPABackend, SDPABuilder, SDPAImpl
from attncheck.cases.model import Case
from attncheck.harness.checks.cudagraph.check import GraphLevelCheck
from attncheck.harness.checks.findings import Broken, Holds, NotExamined
from attncheck.harness.driver.foreign_code import StageError
from attncheck.reference.spec import AttentionCGSupport, BatchSpec, CacheSpec, LayerSpec, RequestSpec

CPU = torch.device("cpu")
CASE = Case(
    suite="s",
    id="c",
    layer=LayerSpec(num_heads=2, num_kv_heads=1, head_size=16, dtype="float32"),
    cache=CacheSpec(block_size=4),
    batch=BatchSpec(requests=(RequestSpec(query_len=3, seq_len=9),)),
)


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
    assert isinstance(finding, Broken)
    assert finding.meaning == snapshot(
        "the same step is right without a graph: numbers are frozen at capture, such as these: metadata.seq_lens[0] was 1 at capture and is 15 now; metadata.common.max_seq_len was 1 at capture and is 35 now"
    )


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
    assert isinstance(finding, Broken)
    assert "probe 'decode' broke: warm-up for capture raised RuntimeError: " in finding.summary
    assert message in finding.summary


def test_what_the_watch_causes_is_no_finding():
    finding = examined(backend_of(impl=RaisesWatched))
    assert isinstance(finding, NotExamined)
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
    assert isinstance(finding, Broken)
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


def test_who_promises_to_use_the_buffer_has_to():
    assert isinstance(examined(backend_of(impl=OwnOutput)), Broken)


def test_what_is_wrong_over_finite_numbers_too_is_no_leak():
    class Impl(SDPAImpl):
        def forward(self, *args, **keywords):
            return super().forward(*args, **keywords).mul_(2)

    finding = examined(backend_of(impl=Impl))
    assert isinstance(finding, Broken)
    assert finding.graph.notes == ()


def test_a_fault_that_shows_without_a_graph_too_gets_a_cause():
    class Impl(SDPAImpl):
        def __init__(self, num_heads, head_size, scale, *args, **keywords):
            super().__init__(num_heads, head_size, 2 * scale, *args, **keywords)

    finding = examined(backend_of(impl=Impl))
    assert isinstance(finding, Broken)
    assert finding.meaning == (
        "the scores are multiplied by 2: a reference with this fault gives the same output in all rows, "
        "without a graph, too"
    )
