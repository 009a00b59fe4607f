"""Our candidates for latent attention: right in every form they take, and what they refuse."""

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
from attncheck.harness.driver.latent_views import latent_keywords
from attncheck.harness.problem.latent import make_up_projections
from attncheck.reference import CommonAttentionMetadata, mla_attention_naive, mla_params
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


def builder_of(backend, workspace=None):
    spec = KVCacheSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=1,
        head_size=16,
        dtype=torch.float32,
        chunked_prefill_workspace_size=workspace,
    )
    return backend.get_builder_cls()(spec, ["layer.0"], None, CPU)


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def make_step(requests, *, causal=True, padding=0):
    """(arguments of forward but for layer and metadata, common metadata, truth, lse); pages in a shuffled order."""
    generator = torch.Generator().manual_seed(1)
    free = (torch.randperm(BLOCKS - 1, generator=generator) + 1).tolist()
    starts, lens, tables, slots = [0], [], [], []
    cache = torch.full((BLOCKS * BLOCK_SIZE, 16), torch.nan)
    for query_len, seq_len in requests:
        pages = [free.pop() for _ in range(-(-seq_len // BLOCK_SIZE))]
        own = [pages[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(seq_len)]
        cache[own] = torch.randn(seq_len, 16, generator=generator)
        starts.append(starts[-1] + query_len)
        lens.append(seq_len)
        tables.append(pages + [0] * (12 - len(pages)))
        slots += [-1] * max(0, query_len - seq_len) + own[max(0, seq_len - query_len) :]
    rows = starts[-1]
    query = torch.randn(rows + padding, 3, 10, generator=generator)
    new = torch.where(torch.tensor(slots)[:, None] >= 0, cache[slots], 0.0)
    new = torch.cat([new, torch.full((padding, 16), torch.nan)])
    weights = make_up_projections(LAYER, torch.float32)
    params = mla_params(LAYER, causal=causal)
    shape = (BLOCKS, BLOCK_SIZE, 16)
    truth, lse = mla_attention_naive(
        *query[:rows].split([6, 4], -1),
        cache.view(shape),
        weights.w_uk,
        weights.w_uv,
        int32(tables),
        int32(lens),
        int32(starts),
        params,
    )
    pool = cache.clone()
    pool[[slot for slot in slots if slot >= 0]] = 7.0  # the step has to write them
    common = CommonAttentionMetadata(
        query_start_loc=int32(starts),
        query_start_loc_cpu=int32(starts),
        seq_lens=int32(lens),
        seq_lens_cpu=int32(lens),
        num_computed_tokens_cpu=int32([0] * len(lens)),
        num_reqs=len(lens),
        num_actual_tokens=rows + padding,
        max_query_len=max(query_len for query_len, _ in requests),
        max_seq_len=max(lens),
        block_table_tensor=int32(tables),
        slot_mapping=torch.tensor(slots + [-1] * padding),
        causal=causal,
    )
    return [query, new[:, :12], new[:, None, 12:], pool.view(shape)], common, truth, lse


SCALES = SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1), _q_scale=torch.ones(1))


def run(backend, arguments, common, *, workspace=None, impl=None):
    tokens = len(arguments[0])
    output, lse = torch.full((tokens, 30), torch.nan), torch.full((tokens, 3), torch.nan)
    metadata = builder_of(backend, workspace).build(0, common)
    impl = impl or impl_of(backend)
    assert impl.forward(SCALES, *arguments, metadata, output=output, output_lse=lse) is output
    return output.unflatten(1, (3, 10)), lse


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
        (4, [0.5] * 3, NotImplementedError, "alibi is not supported"),
        (5, 9, NotImplementedError, "sliding_window is not supported"),
        (6, "int8", ValueError, "kv_cache_dtype 'int8' is unknown"),
        (7, 5.0, NotImplementedError, "logits_soft_cap is not supported"),
        (8, "encoder_decoder", NotImplementedError, "attn_type encoder_decoder is not supported"),
        (9, "layer.7", NotImplementedError, "kv_sharing is not supported"),
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
    arguments, common, *_ = make_step([(3, 9), (1, 5)])
    with pytest.raises(RuntimeError, match="before process_weights_after_loading"):
        run(backend, arguments, common, impl=impl_of(backend, loaded=False))
    assert (arguments[3].view(-1, 16)[common.slot_mapping] == 7.0).all(), "the cache is as it was"
    impl, metadata = impl_of(backend), builder_of(backend).build(0, common)
    output = torch.zeros(4, 30)
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
    assert int(output.count_nonzero()) == 0


@pytest.mark.parametrize("backend", CANDIDATES)
def test_the_profiling_call_needs_no_cache(backend):
    output = torch.full((4, 30), torch.nan)
    query, latent, rotary = torch.zeros(4, 3, 10), torch.zeros(4, 12), torch.zeros(4, 1, 4)
    assert impl_of(backend).forward(SCALES, query, latent, rotary, torch.zeros(0), None, output=output) is output
    assert not output.any()


def test_a_backend_that_declares_mla_must_take_its_keywords():
    careless = type("Careless", (SDPABackend,), {"features": SDPABackend.features | {"mla"}})
    (problem,) = contract_problems(careless)
    assert "SDPAImpl.__init__" in problem
    assert "v_head_dim=, kv_b_proj=): got an unexpected keyword argument 'q_lora_rank'" in problem
