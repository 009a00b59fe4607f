"""The contract of a candidate: its defaults, the metadata of a step, and steps of equally many rows."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.backends import uniform
from attncheck.backends.candidates.flex_attention.backend import FlexBackend
from attncheck.backends.candidates.torch_sdpa import UNIFORM_ROWS, SDPABackend, SDPABuilder
from attncheck.backends.contract import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    Conventions,
    KVCacheSpec,
    MultipleOf,
    QuantKey,
)
from attncheck.backends.paged_metadata import PagedMetadata, refuse_tree, tree_mask, tree_of
from attncheck.backends.uniform import uniform_query_len, write_slots
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, RequestSpec


class Impl(AttentionImpl):
    def __init__(self, *args, **kwargs):
        self.args = args

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output=None, **scales):
        return output


class Builder(AttentionMetadataBuilder):
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return common_attn_metadata


class Minimal(AttentionBackend):
    """The three members that have no default, and a shape of its own."""

    get_name = staticmethod(lambda: "MINIMAL")
    get_impl_cls = staticmethod(lambda: Impl)
    get_builder_cls = staticmethod(lambda: Builder)

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size):
        return (2, num_blocks, block_size, num_kv_heads, head_size)


def test_defaults_of_a_minimal_backend():
    assert Minimal.accept_output_buffer is False
    assert Minimal.forward_includes_kv_cache_update is True
    assert Minimal.features == frozenset()
    assert Minimal.conventions == Conventions()
    assert Minimal.supported_kv_cache_dtypes == ("auto",)
    assert Minimal.supported_layouts == ("NHD",)
    assert [str(kind) for kind in Minimal.supported_attn_types] == ["decoder"]
    assert Minimal.get_supported_dtypes() == [torch.float16, torch.bfloat16]
    assert Minimal.get_supported_head_sizes() == []
    assert Minimal.get_supported_kernel_block_sizes() == [MultipleOf(1)]
    assert (Minimal.functions(), Minimal.version()) == ({}, "")
    impl = Impl(8, 64, 0.125)
    assert impl.fused_output_quant_supported(QuantKey(torch.float8_e4m3fn, None)) is False
    with pytest.raises(NotImplementedError, match="Impl writes the cache in forward"):
        impl.do_kv_cache_update(None, None, None, None, None)
    assert Builder.cudagraph_support is AttentionCGSupport.NEVER
    assert Builder.reorder_batch_threshold is None
    spec = KVCacheSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    assert (spec.head_size_v, spec.sliding_window, spec.attention_chunk_size) == (64, None, None)


def test_what_a_minimal_backend_supports():
    layer, batch = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64), BatchSpec(requests=(RequestSpec(query_len=3),))
    assert Minimal.unsupported_reasons(layer, CacheSpec(), batch) == []
    assert Minimal.kv_cache_codec(layer, CacheSpec()).packing == "split_first"
    assert Minimal.unavailable_reasons("cpu") == Minimal.unavailable_reasons("cuda:3") == []
    (reason,) = Minimal.unavailable_reasons("mps")
    assert "mps" in reason
    assert "cpu, cuda" in reason
    narrow = type("Narrow", (Minimal,), {"get_supported_head_sizes": classmethod(lambda cls: [64, 128])})
    narrow.validate_head_size(64)
    Minimal.validate_head_size(7)
    with pytest.raises(ValueError, match=r"head size 80 is not supported by MINIMAL; supported: \[64, 128\]"):
        narrow.validate_head_size(80)


def test_declarations_in_the_form_of_vllm_are_read():
    class Theirs(AttentionBackend):
        supported_dtypes = (torch.float32,)
        supports_sink = supports_non_causal = classmethod(lambda cls: True)
        supports_attn_type = classmethod(lambda cls, kind: kind in ("decoder", "encoder_only"))
        supports_kv_cache_dtype = classmethod(lambda cls, name: name in (None, "auto", "fp8"))

    class Narrower(Theirs):
        supports_sink = classmethod(lambda cls: False)

    class TheirBuilder(Builder):
        _cudagraph_support = AttentionCGSupport.ALWAYS

    assert Theirs.get_supported_dtypes() == [torch.float32]
    assert Theirs.features == {"sinks", "non_causal", "fp8_kv"}
    assert Narrower.features == {"non_causal", "fp8_kv"}
    assert [str(kind) for kind in Theirs.supported_attn_types] == ["decoder", "encoder_only"]
    assert Theirs.supported_kv_cache_dtypes == ("auto", "fp8")
    assert Theirs.get_kv_cache_shape(7, 16, 2, 64) == (7, 2, 16, 128)
    assert TheirBuilder.cudagraph_support is AttentionCGSupport.ALWAYS
    assert (AttentionBackend.features, Builder.cudagraph_support) == (frozenset(), AttentionCGSupport.NEVER)


def test_conventions_and_multiples_are_closed():
    wrong = [("lse_base", "10"), ("alibi_reference", "key"), ("padded_rows", "nan")]
    for field, value in [*wrong, ("pad_seq_len", -1), ("pad_seq_len", True), ("pad_seq_len", 1.5)]:
        with pytest.raises(ValueError, match=f"{field} = {value!r}"):
            Conventions(**{field: value})
    with pytest.raises(ValueError, match="base = 0: must be at least 1"):
        MultipleOf(0)


CPU = torch.device("cpu")


def test_branches_do_not_see_each_other():
    """Two drafts after the root; the second has a child, whose choice has number 3."""
    assert tree_mask("[(0,), (1,), (1, 3)]").tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, False, True, False],
        [True, False, True, True],
    ]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=7))
def test_a_row_sees_those_whose_choices_begin_its_own(steps):
    """Nodes grown one by one: each appends a choice to an earlier one."""
    nodes = [()]
    for number, back in enumerate(steps):
        nodes.append((*nodes[max(0, len(nodes) - 1 - back)], number))
    mask = tree_mask(str(nodes[1:]))
    assert mask.tolist() == [[node[: len(other)] == other for other in nodes] for node in nodes]


def test_what_is_no_tree_is_refused(refusals):
    reasons = {
        "[(0,), (1, 0)]": "[(0,), (1, 0)]: (1, 0) comes before its parent",
        "[(0, 0), (0,)]": "[(0, 0), (0,)]: (0, 0) comes before its parent",
        "[(0,), (0,)]": "'[(0,), (0,)]' lists a node twice",
        "[(), (0,)]": "'[(), (0,)]' lists the root (); the tree has it without being listed",
        "[0, 1]": "'[0, 1]' is no list of tuples of choices",
        "[(0,), (1,)": "'[(0,), (1,)' is no list of tuples of choices",
        "__import__('os')": "\"__import__('os')\" is no list of tuples of choices",
    }
    assert refusals(tree_mask, list(reasons)) == [f"speculative_token_tree {reason}" for reason in reasons.values()]


def test_a_backend_that_does_not_declare_trees_refuses_them():
    for speculative in (None, SimpleNamespace(speculative_token_tree=None)):
        assert tree_of(SimpleNamespace(speculative_config=speculative), CPU) is None
    assert tree_of(SimpleNamespace(), CPU) is None
    config = SimpleNamespace(speculative_config=SimpleNamespace(speculative_token_tree="[(0,), (1,)]"))
    bare = type("Bare", (FlexBackend,), {"features": FlexBackend.features - {"tree"}})
    refuse_tree(FlexBackend, tree_of(config, CPU))
    refuse_tree(bare, None)
    with pytest.raises(NotImplementedError, match="FLEX_ATTENTION: a tree of 2 draft tokens is not supported"):
        refuse_tree(bare, tree_of(config, CPU))


PLAIN = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", scale=0.4)
ONES = SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))


def test_which_steps_are_uniform():
    expected = {(1, 1, 1): 1, (3, 3): 3, (16,): 16, (17, 17): None, (2, 2, 0, 0): 2}
    expected |= dict.fromkeys([(2, 0, 2), (0, 2), (0, 0), (1, 2), ()])
    for lens, query_len in expected.items():
        starts = tuple(sum(lens[:count]) for count in range(len(lens) + 1))
        step = PagedMetadata(common=None, query_start_loc=starts, seq_lens=lens, attention_chunk_size=None)
        assert uniform_query_len(step, UNIFORM_ROWS) == query_len, lens


def test_more_drafts_than_are_batched_leave_the_level_of_single_tokens():
    for drafts, level in ((None, "UNIFORM_BATCH"), (15, "UNIFORM_BATCH"), (16, "UNIFORM_SINGLE_TOKEN_DECODE")):
        config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=drafts))
        assert SDPABuilder.get_cudagraph_support(config, None) is AttentionCGSupport[level]
    assert SDPABuilder.get_cudagraph_support(SimpleNamespace(speculative_config=None), None).value == 2


def test_a_large_step_is_cut_between_requests(make_step, monkeypatch):
    for elements in (1, 2 * 4 * 48 * 16):  # of a request alone, of two
        monkeypatch.setattr(uniform, "_PIECE_ELEMENTS", elements)
        step = make_step(SDPABackend, PLAIN, [(3, 30), (3, 7), (3, 9)], padding=(1, 1))
        step.run()
        assert torch.allclose(step.output[:9].double(), step.truth, atol=2e-6)


def test_fewer_rows_than_padding_requests_would_have(make_step):
    """Two padding requests and a single padding row, as a step that no graph runs may have them."""
    step = make_step(SDPABackend, PLAIN, [(2, 9), (2, 30)], padding=(2, 1))
    step.output[4:] = 0.25
    step.run()
    assert torch.allclose(step.output[:4].double(), step.truth, atol=2e-6)
    assert (step.output[4:] == 0.25).all()


def test_a_padding_request_that_has_a_length_has_no_rows_all_the_same(make_step):
    step = make_step(SDPABackend, PLAIN, [(1, 9)], padding=(1, 1))
    step.common.seq_lens[1] = step.common.seq_lens_cpu[1] = 5
    step.common.block_table_tensor[1, 0] = 0  # whose slots hold NaN
    step.run()
    assert torch.allclose(step.output[:1].double(), step.truth, atol=2e-6)
    assert (step.output[1] == 0).all()


def test_a_row_without_a_slot_changes_no_bit_of_slot_0():
    """Slot 0 may hold a NaN that arithmetic would make another one."""
    pools = [torch.full((2, 4, 2, 16), 0x7FA1, dtype=torch.int16) for _ in range(2)]
    rows = torch.randn(3, 2, 16, dtype=torch.bfloat16)
    write_slots(ONES, rows, rows, *(pool.view(torch.bfloat16) for pool in pools), torch.tensor([-1, -1, -1]))
    assert all((pool == 0x7FA1).all() for pool in pools)
