"""Latent caches of FP8 codes: one scale for a whole row, and a truth taken from what the codes mean."""

from typing import Any

import pytest
import torch

from attncheck.backends.caches.codecs import packed_codec
from attncheck.backends.candidates.torch_mla import TorchMLABackend
from attncheck.errors import BlindCaseError
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import honest_answers, params_of, rows_of, truth_of
from attncheck.reference import mla_attention_naive, mla_params, mla_write_cache
from attncheck.reference.spec import CacheSpec, MLASpec

CPU = torch.device("cpu")
SIZES = MLASpec(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24)
LAYER = {"num_heads": 3, "num_kv_heads": 1, "head_size": 80, "mla": SIZES}
FORMATS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_truth_is_that_of_the_codes(make_case: Any, name: str, dtype: str) -> None:
    cache = {"kv_cache_dtype": name, "k_scale": 0.3, "v_scale": 5.0}
    problem = build_problem(make_case((1, 37), (5, 40), cache=cache, dtype=dtype, **LAYER), 0)
    truth = truth_of(problem, CPU)
    pool = torch.zeros(problem.num_blocks, 16, 80).to(FORMATS[name])
    scale = torch.tensor(0.3)
    mla_write_cache(problem.keys[:, 0], problem.values[:, 0], pool, problem.key_slots, k_scale=scale)
    weights = problem.up_projections
    assert weights is not None
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


def test_kernels_may_read_codes_exactly_or_rounded(make_case: Any) -> None:
    plain, coded = (
        build_problem(make_case(cache=cache, **LAYER), 0)
        for cache in ({}, {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.3})
    )
    ways = [len(list(honest_answers(p, rows_of(p, CPU), params_of(p)))) for p in (plain, coded)]
    assert ways == [3, 6]


def test_one_scale_stores_the_whole_row(make_case: Any) -> None:
    layer = make_case(dtype="float32", **LAYER).layer
    codec = packed_codec(TorchMLABackend, layer, CacheSpec(kv_cache_dtype="fp8_e4m3", k_scale=0.5, v_scale=3.0))
    assert codec is not None
    pool = torch.zeros(1, 16, 80, dtype=torch.uint8)
    codec.write(pool, torch.tensor([3]), torch.full((1, 64), 2.0), torch.full((1, 16), 6.0))
    stored = pool[0, 3].view(torch.float8_e4m3fn).float()
    assert stored.tolist() == [4.0] * 64 + [12.0] * 16
    latent, rotary = codec.read(pool, torch.tensor([3]))
    assert (latent.unique().tolist(), rotary.unique().tolist()) == ([2.0], [6.0])


def test_a_scale_close_to_1_is_blind(make_case: Any) -> None:
    cache = {"kv_cache_dtype": "fp8_e4m3", "k_scale": 1.0 + 2**-20}
    with pytest.raises(BlindCaseError, match="blind to k_scale: only 0 of 40 rows"):
        truth_of(build_problem(make_case(cache=cache, **LAYER), 0), CPU)
