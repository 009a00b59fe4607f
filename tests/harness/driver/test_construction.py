"""The config of a builder: bounds that hold for each of its steps, drafts and trees as vLLM writes them."""

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl
from attncheck.backends.impl import get_current_vllm_config
from attncheck.harness.checks.again import RightRows
from attncheck.harness.checks.history import repetitions
from attncheck.harness.checks.invariance import same_requests, same_step
from attncheck.harness.driver.construction import construct_builder
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of
from attncheck.reference.step_spec import (
    DCPOptions,
    FastPrefillOptions,
    MicroBatchOptions,
    SpecDecodeOptions,
    TreeOptions,
)

CPU = torch.device("cpu")


class Bounded(ReferenceBackend):
    """Has buffers for the bounds of the config, and for no more."""

    features = ReferenceBackend.features - {"local", "cascade"}

    get_builder_cls = staticmethod(lambda: BoundedBuilder)


class BoundedBuilder(ReferenceBuilder):
    backend = Bounded
    reorder_batch_threshold = 4

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common, config = common_attn_metadata, self.vllm_config
        scheduler, longest = config.scheduler_config, config.model_config.max_model_len
        size = self.kv_cache_spec.block_size
        bounds = {
            "num_reqs": (common.num_reqs, scheduler.max_num_seqs),
            "num_actual_tokens": (common.num_actual_tokens, scheduler.max_num_batched_tokens),
            "max_query_len": (common.max_query_len, common.num_actual_tokens),
            "max_seq_len": (common.max_seq_len, longest),
            "the block table": (common.block_table_tensor.shape[1], -(-longest // size)),
        }
        for name, (value, bound) in bounds.items():
            if value > bound:
                raise RuntimeError(f"{name} is {value}, and there is room for {bound}")
        query_lens = [n for n in common.query_start_loc_cpu.diff().tolist() if n]
        is_long = [n > self.reorder_batch_threshold for n in query_lens]
        if is_long != sorted(is_long):
            raise RuntimeError(f"requests of {query_lens} rows are not ordered")
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


@pytest.mark.parametrize(
    ("path", "options", "layer", "has_codec"),
    [
        ("paged", None, {}, True),
        ("paged", None, {}, False),
        ("local", None, {"attn_chunk_size": 16}, True),
        ("local", None, {"attn_chunk_size": 512}, False),
        ("dcp", DCPOptions(size=2), {}, True),
        ("micro_batch", MicroBatchOptions(cuts=(6, 20)), {}, True),
        ("fast_prefill", FastPrefillOptions(rows=2), {}, True),
    ],
)
def test_bounds_hold_for_every_batch_that_follows(make_case, path, options, layer, has_codec):
    # Without a codec, the cache is filled by the backend's own writer.
    codec = {} if has_codec else {"kv_cache_codec": classmethod(lambda *_: None)}
    backend = type("Tried", (Bounded,), codec)
    # At 33 and 65 tokens, a batch one token shorter needs a page less and a chunk less.
    case = make_case((1, 33), (7, 65), (20, 49), padding=(1, 2), path=path, options=options, inputs=("views",), **layer)
    problem = build_problem(case, 0)
    session = Session(backend, problem, CPU)
    rows = RightRows.of(problem, truth_of(problem, CPU), session.run(), backend.conventions)
    assert bool(rows.is_right.all())
    for variation in (*same_step(rows, session), *same_requests(rows, session), *repetitions(rows, session)):
        assert variation.wrong() is None, variation.what


def config_of(case):
    return construct_builder(ReferenceBackend, [build_problem(case, 0)], CPU).vllm_config


def test_virtual_requests_are_counted_for_builders_without_chunks(make_case):
    case = make_case((5, 35), (1, 33), attn_chunk_size=32, path="local", padding=(1, 0))
    problem = build_problem(case, 0)
    known, unknown = (construct_builder(b, [problem], CPU) for b in (ReferenceBackend, Bounded))
    assert known.vllm_config.scheduler_config.max_num_seqs == 3
    assert known.kv_cache_spec.attention_chunk_size == 32
    assert unknown.vllm_config.scheduler_config.max_num_seqs == 4
    assert unknown.kv_cache_spec.attention_chunk_size is None


def test_drafts_trees_and_the_layout_are_written_as_vllm_writes_them(make_case):
    tree = config_of(make_case((4, 40), path="tree", options=TreeOptions(parents=(-1, 0, 0, 1)))).speculative_config
    assert (tree.num_speculative_tokens, tree.speculative_token_tree) == (3, "[(0,), (1,), (0, 0)]")
    chain = make_case((4, 40), path="spec_decode", options=SpecDecodeOptions(num_speculative_tokens=3))
    drafts = config_of(chain).speculative_config
    assert (drafts.num_speculative_tokens, drafts.speculative_token_tree) == (3, None)
    assert config_of(make_case()).speculative_config is None
    assert config_of(make_case(cache={"layout": "HND"})).cache_config.kv_cache_layout == "HND"


def test_the_config_is_current_while_impl_and_builder_are_made_and_holds_the_layer(make_case):
    class Impl(ReferenceImpl):
        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            config = get_current_vllm_config()
            self.was = (config.model_config.dtype, dict(config.compilation_config.static_forward_context))

    class Builder(ReferenceBuilder):
        def __init__(self, *args):
            super().__init__(*args)
            self.current = get_current_vllm_config()

    classes = {"get_impl_cls": staticmethod(lambda: Impl), "get_builder_cls": staticmethod(lambda: Builder)}
    backend = type("Keeps", (ReferenceBackend,), classes)
    session = Session(backend, build_problem(make_case((1, 5)), 0), CPU)
    assert session.impl.was == (session.problem.dtype, {})
    config = session.builder.vllm_config
    assert session.builder.current is config
    with pytest.raises(RuntimeError, match="no vllm_config is current"):
        get_current_vllm_config()
    (name,) = session.builder.layer_names
    layer = config.compilation_config.static_forward_context[name]
    assert layer is session.attn_layer
    assert layer.impl is session.impl
