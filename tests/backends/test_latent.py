"""Our candidates for latent attention: what they declare, and what they refuse."""

from types import SimpleNamespace

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.caches.packings import allocate_kv_cache, detect_packing, stride_order
from attncheck.backends.candidates.reference_mla import ReferenceMLABackend
from attncheck.backends.candidates.torch_mla import TorchMLABackend
from attncheck.backends.candidates.torch_sdpa import SDPABackend
from attncheck.backends.contract import KVCacheSpec
from attncheck.backends.verification import contract_problems
from attncheck.harness.driver.construction import latent_keywords
from attncheck.harness.problem.storage import make_up_projections
from attncheck.reference import CommonAttentionMetadata
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec, MLASpec, RequestSpec

CANDIDATES = (ReferenceMLABackend, TorchMLABackend)
SIZES = MLASpec(kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10)
LAYER = LayerSpec(num_heads=3, num_kv_heads=1, head_size=16, dtype="float32", scale=0.5, mla=SIZES)
CPU = torch.device("cpu")
ARGUMENTS = (3, 16, 0.5, 1, None, None, "auto", None, "decoder", None)
BLOCK_SIZE, BLOCKS = 4, 30


def keywords(**changes):
    weights = make_up_projections(LAYER, torch.float32)
    return latent_keywords(SIZES, weights, CPU) | changes


def impl_of(backend, *, loaded=True):
    impl = backend.get_impl_cls()(*ARGUMENTS, **keywords())
    if loaded:
        impl.process_weights_after_loading(torch.float32)
    return impl


def builder_of(backend):
    spec = KVCacheSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=16, dtype=torch.float32)
    return backend.get_builder_cls()(spec, ["layer.0"], None, CPU)


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def make_step():
    """(arguments of forward but for layer and metadata, common metadata) of a request of 3 rows and one of 1."""
    tables = torch.arange(24, dtype=torch.int32).view(2, 12) + 1
    starts, lens = int32([0, 3, 4]), int32([9, 5])
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        seq_lens_cpu=lens,
        num_computed_tokens_cpu=int32([6, 4]),
        num_reqs=2,
        num_actual_tokens=4,
        max_query_len=3,
        max_seq_len=9,
        block_table_tensor=tables,
        slot_mapping=torch.tensor([10, 11, 12, 56]),
    )
    kv_cache = torch.full((BLOCKS, BLOCK_SIZE, 16), 7.0)
    return [torch.zeros(4, 3, 10), torch.zeros(4, 12), torch.zeros(4, 1, 4), kv_cache], common


SCALES = SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1), _q_scale=torch.ones(1))


@pytest.mark.parametrize("backend", CANDIDATES)
def test_declarations(backend):
    assert contract_problems(backend) == []
    assert backend.is_mla()
    batch = BatchSpec(requests=(RequestSpec(query_len=1),))
    assert backend.unsupported_reasons(LAYER, CacheSpec(), batch) == []
    plain = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, sliding_window=9)
    assert backend.unsupported_reasons(plain, CacheSpec(), batch) == snapshot(["the layer has no latent cache"])
    assert SDPABackend.unsupported_reasons(LAYER, CacheSpec(), batch) == snapshot(
        ["the layer has a latent cache: feature 'mla' is not declared"]
    )


@pytest.mark.parametrize("backend", CANDIDATES)
def test_the_cache_has_one_layout(backend):
    for layout in ("NHD", "HND"):
        cache = CacheSpec(block_size=BLOCK_SIZE, layout=layout)
        assert detect_packing(backend, LAYER, cache) == "latent"
        assert stride_order(backend, LAYER, cache) == (0, 1, 2)
        assert allocate_kv_cache(backend, LAYER, cache, 5, "cpu").shape == (5, BLOCK_SIZE, 16)
    with pytest.raises(ValueError, match="num_kv_heads 2: a latent cache has one"):
        backend.get_kv_cache_shape(5, 4, 2, 16)


@pytest.mark.parametrize("backend", CANDIDATES)
@pytest.mark.parametrize(
    ("position", "value", "error", "message"),
    [
        (3, 3, ValueError, "num_kv_heads 3, head_size 16: a latent cache has 1 and 16"),
        (1, 20, ValueError, "num_kv_heads 1, head_size 20: a latent cache has 1 and 16"),
        (5, 9, NotImplementedError, "sliding_window is not supported"),
    ],
)
def test_what_the_constructor_refuses(backend, position, value, error, message):
    arguments = [*ARGUMENTS]
    arguments[position] = value
    with pytest.raises(error, match=message):
        backend.get_impl_cls()(*arguments, **keywords())


@pytest.mark.parametrize("backend", CANDIDATES)
def test_sizes_that_do_not_fit_and_keywords_left_out(backend):
    with pytest.raises(ValueError, match="qk_head_dim 12 is not 6 \\+ 4"):
        backend.get_impl_cls()(*ARGUMENTS, **keywords(qk_head_dim=12))
    with pytest.raises(ValueError, match=r"kv_b_proj.weight has shape \(48, 12\), not \(51, 12\)"):
        backend.get_impl_cls()(*ARGUMENTS, **keywords(v_head_dim=11))
    with pytest.raises(TypeError, match="missing 7 required keyword-only arguments"):
        backend.get_impl_cls()(*ARGUMENTS)
    with pytest.raises(TypeError, match="q_lora_rank"):
        SDPABackend.get_impl_cls()(*ARGUMENTS, **keywords())


@pytest.mark.parametrize("backend", CANDIDATES)
def test_what_forward_refuses(backend):
    arguments, common = make_step()
    impl, metadata = impl_of(backend), builder_of(backend).build(0, common)
    output = torch.zeros(4, 30)
    with pytest.raises(RuntimeError, match="before process_weights_after_loading"):
        impl_of(backend, loaded=False).forward(SCALES, *arguments, metadata, output=output)
    with pytest.raises(ValueError, match="output is None"):
        impl.forward(SCALES, *arguments, metadata)
    with pytest.raises(ValueError, match=r"query has shape \(3, 3, 10\), not \[4\+, 3, 10\]"):
        impl.forward(SCALES, arguments[0][:3], *arguments[1:], metadata, output=output)
    with pytest.raises(ValueError, match=r"output has shape \(4, 3, 10\), not \[4\+, 30\]"):
        impl.forward(SCALES, *arguments, metadata, output=torch.zeros(4, 3, 10))
    with pytest.raises(ValueError, match="one of kv_c_normed and k_pe is None"):
        impl.forward(SCALES, *arguments[:2], None, arguments[3], metadata, output=output)
    with pytest.raises(ValueError, match="kv_cache has shape"):
        impl.forward(SCALES, *arguments[:3], torch.zeros(0), metadata, output=output)
    with pytest.raises(TypeError, match="attn_metadata is a str"):
        impl.forward(SCALES, *arguments, "metadata", output=output)
    with pytest.raises(NotImplementedError, match="output_scale"):
        impl.forward(SCALES, *arguments, metadata, output=output, output_scale=torch.ones(1))
    assert not output.any()
    assert (arguments[3] == 7.0).all()


def test_a_backend_that_declares_mla_must_take_its_keywords():
    careless = type("Careless", (SDPABackend,), {"features": SDPABackend.features | {"mla"}})
    (problem,) = contract_problems(careless)
    assert "SDPAImpl.__init__" in problem
    assert "v_head_dim=, kv_b_proj=): got an unexpected keyword argument 'q_lora_rank'" in problem
