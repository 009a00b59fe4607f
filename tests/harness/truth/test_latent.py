"""Latent attention as a question: exact weights, one truth for every formulation, a budget for every honest way."""

import hashlib
from dataclasses import replace

import pytest
import torch

from attncheck.backends.caches.codecs import packed_codec
from attncheck.backends.candidates.reference_mla import ReferenceMLABackend, ReferenceMLAImpl
from attncheck.backends.candidates.torch_mla import TorchMLABackend
from attncheck.errors import BlindCaseError
from attncheck.harness.checks.interface import dump_case
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.problem.sizes import needed_bytes
from attncheck.harness.problem.storage import make_up_projections
from attncheck.harness.run.selection import unanswered_reasons
from attncheck.harness.truth.truth import honest_answers, params_of, rows_of, truth_of
from attncheck.harness.truth.unpaged import share_of_budget
from attncheck.reference import (
    mla_attention_absorbed,
    mla_attention_chunked,
    mla_attention_naive,
    mla_params,
    mla_write_cache,
)
from attncheck.reference.spec import MLASpec
from attncheck.reference.step_spec import CacheSpec

CPU = torch.device("cpu")
SIZES = MLASpec(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24)
LAYER = {"num_heads": 3, "num_kv_heads": 1, "head_size": 80, "mla": SIZES}


@pytest.fixture
def make_latent(make_case):
    """A case of a latent layer; keywords as of ``make_case``."""
    return lambda *requests, **fields: make_case(*requests, **(LAYER | fields))


def paged(problem):
    """The arguments of the reference's functions over pages; what belongs to no request is NaN."""
    size = problem.cache.block_size
    rows = torch.cat([problem.keys, problem.values], dim=-1)[:, 0]
    cache = torch.full((problem.num_blocks * size, rows.shape[1]), torch.nan, dtype=problem.dtype)
    cache[problem.key_slots] = rows
    weights, mla = problem.up_projections, problem.layer.mla
    assert weights is not None
    q_nope, q_pe = problem.query.split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
    batch = problem.block_table, torch.tensor([r.num_keys for r in problem.requests]), problem.cu_seqlens_q
    pool = cache.view(problem.num_blocks, size, -1)
    return q_nope, q_pe, pool, weights.w_uk, weights.w_uv, *batch, mla_params(problem.layer)


@pytest.mark.parametrize(
    ("mla", "dtype"),
    [
        (SIZES, "float16"),
        (SIZES, "float32"),
        (replace(SIZES, qk_nope_head_dim=0), "bfloat16"),
        (replace(SIZES, v_head_dim=90), "bfloat16"),
    ],
)
def test_the_truth_is_that_of_the_reference_over_pages_in_either_form(make_latent, dtype, mla):
    problem = build_problem(make_latent(dtype=dtype, mla=mla, scale=0.3), 0)
    truth = truth_of(problem, CPU)
    for out, lse in (
        mla_attention_naive(*paged(problem)),
        mla_attention_absorbed(*paged(problem)),
        mla_attention_chunked(*paged(problem), workspace=13),
    ):
        assert torch.allclose(out, truth.out, rtol=1e-10, atol=1e-10)
        assert torch.allclose(lse, truth.lse, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rank", [16, 64, 512])
def test_products_are_exact_in_any_order(make_latent, rank):
    mla = replace(SIZES, kv_lora_rank=rank)
    problem = build_problem(make_latent((1, 300), mla=mla, head_size=rank + 16, dtype="float32"), 0)
    weights = problem.up_projections
    keys = weights.keys(problem.keys, problem.values)
    order = torch.randperm(rank, generator=torch.Generator().manual_seed(0))
    shuffled = replace(weights, w_uk=weights.w_uk[order]).keys(problem.keys[..., order], problem.values)
    assert torch.equal(keys, shuffled)
    assert torch.equal(keys * 2.0**46, (keys * 2.0**46).round())
    assert 1.2 < float(keys[..., :32].var()) < 1.5, "as of the keys of other layers: 4/3"


@pytest.mark.parametrize(("dtype", "digest"), [("bfloat16", "4598c60cac1578cd"), ("float32", "4b14d4d9a2119b26")])
def test_the_same_case_and_seed_give_the_same_bits_on_every_machine(make_latent, dtype, digest):
    # Pinned: if this changes, GENERATOR_VERSION has to change with it.
    problem = build_problem(make_latent(dtype=dtype), 3)
    tensors = (problem.query, problem.keys, problem.values, problem.up_projections.fused())
    assert hashlib.sha256(b"".join(t.float().numpy().tobytes() for t in tensors)).hexdigest()[:16] == digest


def test_weights_belong_to_the_layer(make_latent):
    case = make_latent()
    one, other = (make_up_projections(layer, torch.bfloat16) for layer in (case.layer, replace(case.layer, scale=0.7)))
    assert torch.equal(one.w_uk, other.w_uk)
    assert torch.equal(build_problem(case, 0).up_projections.w_uv, build_problem(case, 7).up_projections.w_uv)
    assert not torch.equal(one.w_uk[:, 0], one.w_uk[:, 1]), "heads differ"


def test_every_row_points_somewhere(make_latent):
    problem = build_problem(make_latent((6, 40), inputs=("needles",)), 0)
    truth = truth_of(problem, CPU)
    weights = torch.softmax(
        torch.einsum("thd,nhd->thn", problem.query.double(), truth.rows.keys)[-1] * problem.layer.softmax_scale, -1
    )
    assert float(weights.amax(-1).median()) > 0.3


def low_precision(problem, *, absorbed):
    """Plain float32 attention in one of the forms, what stays between its steps rounded to the dtype."""
    q_nope, q_pe, _, w_uk, w_uv, *_, params = paged(problem)
    dtype, rank = problem.dtype, params.kv_lora_rank
    cached = torch.cat([problem.keys, problem.values], dim=-1)[:, 0].float()
    outputs = []
    for r in problem.requests:
        own, tokens = slice(r.first_row, r.first_row + r.rows), cached[r.base : r.base + r.num_keys]
        if absorbed:
            query = torch.cat([torch.einsum("qhp,lhp->qhl", q_nope[own].float(), w_uk.float()), q_pe[own]], -1)
            keys, values = tokens[:, None], tokens[:, None, :rank]
        else:
            query = torch.cat([q_nope[own], q_pe[own]], -1)
            nope = torch.einsum("nl,lhp->nhp", tokens[:, :rank], w_uk.float()).to(dtype)
            keys = torch.cat([nope, tokens[:, None, rank:].expand(-1, nope.shape[1], -1).to(dtype)], -1)
            values = torch.einsum("nl,lhv->nhv", tokens[:, :rank], w_uv.float()).to(dtype)
        keys, values = (x.float().expand(-1, query.shape[1], -1) for x in (keys, values))
        scores = torch.einsum("qhd,nhd->hqn", query.to(dtype).float(), keys) * params.softmax_scale
        hidden = torch.arange(r.num_keys) > (torch.arange(r.rows) + r.first_position)[:, None]
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).to(dtype).float()
        out = torch.einsum("hqn,nhv->qhv", weights, values)
        outputs.append(torch.einsum("qhl,lhv->qhv", out.to(dtype).float(), w_uv.float()) if absorbed else out)
    return torch.cat(outputs).to(dtype)


def shares(truth, output):
    return share_of_budget(output.double() - truth.out, truth.budget)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("absorbed", [True, False])
def test_both_forms_in_low_precision_stay_within_the_budget(make_latent, dtype, absorbed):
    for seed in range(3):
        problem = build_problem(make_latent(dtype=dtype), seed)
        truth = truth_of(problem, CPU)
        assert float(shares(truth, low_precision(problem, absorbed=absorbed)).max()) < 0.9
        assert float(shares(truth, truth.out * 1.02).max()) > 1
        assert float(shares(truth, torch.zeros_like(truth.out)).min()) > 1


def test_a_layer_is_driven_as_the_contract_requires(make_latent):
    seen = {}

    class Impl(ReferenceMLAImpl):
        def __init__(self, *arguments, **keywords):
            seen["init"] = arguments, keywords
            super().__init__(*arguments, **keywords)

        def process_weights_after_loading(self, act_dtype):
            seen["weights"] = act_dtype
            super().process_weights_after_loading(act_dtype)

        def forward(self, *arguments, **keywords):
            seen["forward"] = arguments, keywords
            return super().forward(*arguments, **keywords)

    backend = type("Recorder", (ReferenceMLABackend,), {"get_impl_cls": staticmethod(lambda: Impl)})
    mla = replace(SIZES, workspace=24)
    problem = build_problem(make_latent((1, 37), (5, 40), padding=(1, 3), dtype="float16", mla=mla), 0)
    assert Session(backend, problem, CPU).run().output.shape == (6 + 3, 3, 24)
    arguments, keywords = seen["init"]
    assert arguments == (3, 80, 48**-0.5, 1, None, None, "auto", None, "decoder", None)
    weight, weights = keywords.pop("kv_b_proj").weight, problem.up_projections
    assert weight.shape == (3 * (32 + 24), 64)
    assert torch.equal(weight[56 + 5], weights.w_uk[:, 1, 5])  # keys and values alternate by head
    assert torch.equal(weight[2 * 56 + 32 + 7], weights.w_uv[:, 2, 7])
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "qk_head_dim": 48, "v_head_dim": 24}
    assert keywords == {"q_lora_rank": None, **sizes}
    assert seen["weights"] == torch.float16
    (_, query, kv_c_normed, k_pe, kv_cache, metadata), options = seen["forward"]
    assert [tuple(x.shape) for x in (query, kv_c_normed, k_pe)] == [(9, 3, 48), (9, 64), (9, 1, 16)]
    assert tuple(kv_cache.shape) == (problem.num_blocks, 16, 80)
    assert tuple(options["output"].shape) == (9, 3 * 24)
    assert metadata.workspace == 24
    assert not query.is_contiguous(), "slices of a fused tensor"


def test_a_latent_cache_is_filled_by_slots_or_by_the_backends_own_writer(make_latent):
    problem = build_problem(make_latent(), 0)
    backend = type("WithoutCodec", (TorchMLABackend,), {"kv_cache_codec": classmethod(lambda *_: None)})
    seen = Session(backend, problem, CPU).run()
    assert float(shares(truth_of(problem, CPU), seen.output).max()) <= 1
    layer, cache = make_latent(dtype="float32").layer, CacheSpec(block_size=4)
    codec = packed_codec(TorchMLABackend, layer, cache)
    pool = torch.zeros(3, 4, 80)
    latent, rotary = torch.arange(128.0).view(2, 64) + 1, torch.arange(32.0).view(2, 16) + 500
    codec.write(pool, torch.tensor([11, 5]), latent, rotary)
    assert torch.equal(pool[2, 3], torch.cat([latent[0], rotary[0]]))
    assert torch.equal(pool[1, 1], torch.cat([latent[1], rotary[1]]))
    assert int(pool.count_nonzero()) == 160
    backend.get_kv_cache_shape = staticmethod(
        lambda num_blocks, block_size, _heads, size: (num_blocks, size, block_size)
    )
    assert packed_codec(backend, layer, cache) is None


def test_paths_of_latent_layers(make_latent):
    case = make_latent()
    for path, is_answered in (("mla", True), ("spec_decode", True), ("tree", False), ("fast_prefill", False)):
        batch = replace(case.batch, path=replace(case.batch.path, name=path))
        assert (unanswered_reasons(replace(case, batch=batch)) == ()) == is_answered


def test_memory_counts_what_latent_rows_become(make_latent):
    case = make_latent((8, 4000), num_heads=3)
    more = make_latent((8, 4000), num_heads=64)
    assert needed_bytes(more) - needed_bytes(case) >= 4000 * 61 * (48 + 24) * 8


def test_a_dump_holds_the_weights(make_latent, tmp_path):
    problem = build_problem(make_latent(), 0)
    content = torch.load(dump_case(tmp_path, problem, truth_of(problem, CPU), "b", None), weights_only=True)
    assert torch.equal(content["w_uk"], problem.up_projections.w_uk)
    assert torch.equal(content["w_uv"], problem.up_projections.w_uv)


# Caches of FP8 codes: one scale for a whole row, and a truth taken from what the codes mean.

FORMATS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_truth_is_that_of_the_codes(make_latent, name, dtype):
    cache = {"kv_cache_dtype": name, "k_scale": 0.3, "v_scale": 5.0}
    problem = build_problem(make_latent((1, 37), (5, 40), cache=cache, dtype=dtype), 0)
    truth = truth_of(problem, CPU)
    pool = torch.zeros(problem.num_blocks, 16, 80).to(FORMATS[name])
    scale = torch.tensor(0.3)
    mla_write_cache(problem.keys[:, 0], problem.values[:, 0], pool, problem.key_slots, k_scale=scale)
    weights = problem.up_projections
    out, lse = mla_attention_naive(
        *problem.query.split([32, 16], -1),
        pool,
        weights.w_uk,
        weights.w_uv,
        problem.block_table,
        torch.tensor([37, 40]),
        problem.cu_seqlens_q,
        mla_params(problem.layer),
        k_scale=scale,
    )
    assert torch.allclose(out, truth.out, rtol=1e-10, atol=1e-10)
    assert torch.allclose(lse, truth.lse, rtol=1e-10, atol=1e-10)


def test_kernels_may_read_codes_exactly_or_rounded(make_latent):
    plain, coded = (
        build_problem(make_latent(cache=cache), 0) for cache in ({}, {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.3})
    )
    ways = [len(list(honest_answers(p, rows_of(p, CPU), params_of(p)))) for p in (plain, coded)]
    assert ways == [3, 6]


def test_one_scale_stores_the_whole_row(make_latent):
    layer = make_latent(dtype="float32").layer
    codec = packed_codec(TorchMLABackend, layer, CacheSpec(kv_cache_dtype="fp8_e4m3", k_scale=0.5, v_scale=3.0))
    pool = torch.zeros(1, 16, 80, dtype=torch.uint8)
    codec.write(pool, torch.tensor([3]), torch.full((1, 64), 2.0), torch.full((1, 16), 6.0))
    stored = pool[0, 3].view(torch.float8_e4m3fn).float()
    assert stored.tolist() == [4.0] * 64 + [12.0] * 16
    latent, rotary = codec.read(pool, torch.tensor([3]))
    assert (latent.unique().tolist(), rotary.unique().tolist()) == ([2.0], [6.0])


def test_a_scale_close_to_1_is_blind(make_latent):
    cache = {"kv_cache_dtype": "fp8_e4m3", "k_scale": 1.0 + 2**-20}
    with pytest.raises(BlindCaseError, match="blind to k_scale: only 0 of 40 rows"):
        truth_of(build_problem(make_latent(cache=cache), 0), CPU)
