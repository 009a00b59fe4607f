"""Latent attention as a question: exact weights, one truth for every formulation, a budget for every honest way."""

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from attncheck.backends.caches.codecs import packed_codec
from attncheck.backends.candidates.reference_mla import ReferenceMLABackend, ReferenceMLAImpl
from attncheck.backends.candidates.torch_mla import TorchMLABackend
from attncheck.harness.checks.interface import dump_case
from attncheck.harness.driver.construction import KVBProj
from attncheck.harness.driver.session import Fill, Session
from attncheck.harness.problem.problem import Problem, build_problem
from attncheck.harness.problem.sizes import naive_layer, needed_bytes, stored_sizes
from attncheck.harness.problem.storage import make_up_projections
from attncheck.harness.run.selection import unanswered_reasons
from attncheck.harness.truth.truth import Truth, truth_of
from attncheck.harness.truth.unpaged import share_of_budget
from attncheck.reference import mla_attention_absorbed, mla_attention_chunked, mla_attention_naive, mla_params
from attncheck.reference.spec import CacheSpec, MLASpec

CPU = torch.device("cpu")
SIZES = MLASpec(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24)
LAYER = {"num_heads": 3, "num_kv_heads": 1, "head_size": 80, "mla": SIZES}


@pytest.fixture
def make_latent(make_case: Any) -> Any:
    """A case of a latent layer; keywords as of ``make_case``."""
    return lambda *requests, **fields: make_case(*requests, **(LAYER | fields))


def paged(problem: Problem) -> tuple[Any, ...]:
    """The arguments of the reference's functions over pages; what belongs to no request is NaN."""
    size = problem.cache.block_size
    rows = torch.cat([problem.keys, problem.values], dim=-1)[:, 0]
    cache = torch.full((problem.num_blocks * size, rows.shape[1]), torch.nan, dtype=problem.dtype)
    cache[problem.key_slots] = rows
    weights, mla = problem.up_projections, problem.layer.mla
    assert weights is not None
    assert mla is not None
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
def test_the_truth_is_that_of_the_reference_over_pages_in_either_form(make_latent: Any, dtype: str, mla: Any) -> None:
    problem = build_problem(make_latent(dtype=dtype, mla=mla, scale=0.3), 0)
    truth = truth_of(problem, CPU)
    for out, lse in (
        mla_attention_naive(*paged(problem)),
        mla_attention_absorbed(*paged(problem)),
        mla_attention_chunked(*paged(problem), workspace=13),
    ):
        assert torch.allclose(out, truth.out, rtol=1e-10, atol=1e-10)
        assert torch.allclose(lse, truth.lse, rtol=1e-10, atol=1e-10)


def test_keys_of_latent_rows_by_hand(make_latent: Any) -> None:
    problem = build_problem(make_latent((2, 9)), 0)
    rows, weights = truth_of(problem, CPU).rows, problem.up_projections
    assert weights is not None
    token, head = 4, 2
    latent, rotary = problem.keys[token, 0].double(), problem.values[token, 0].double()
    for channel in range(32):
        column = weights.w_uk[:, head, channel].double()
        assert rows.keys[token, head, channel] == sum(a * b for a, b in zip(latent, column, strict=True))
    assert torch.equal(rows.keys[token, head, 32:], rotary)
    assert torch.equal(rows.values[token, head], latent @ weights.w_uv[:, head].double())


@pytest.mark.parametrize("rank", [16, 64, 512])
def test_products_are_exact_in_any_order(make_latent: Any, rank: int) -> None:
    mla = replace(SIZES, kv_lora_rank=rank)
    problem = build_problem(make_latent((1, 300), mla=mla, head_size=rank + 16, dtype="float32"), 0)
    weights = problem.up_projections
    assert weights is not None
    keys = weights.keys(problem.keys, problem.values)
    order = torch.randperm(rank, generator=torch.Generator().manual_seed(0))
    shuffled = replace(weights, w_uk=weights.w_uk[order]).keys(problem.keys[..., order], problem.values)
    assert torch.equal(keys, shuffled)
    assert torch.equal(keys * 2.0**46, (keys * 2.0**46).round())
    assert 1.2 < float(keys[..., :32].var()) < 1.5, "as of the keys of other layers: 4/3"


@pytest.mark.parametrize(("dtype", "digest"), [("bfloat16", "4598c60cac1578cd"), ("float32", "4b14d4d9a2119b26")])
def test_the_same_case_and_seed_give_the_same_bits_on_every_machine(make_latent: Any, dtype: str, digest: str) -> None:
    # Pinned: if this changes, GENERATOR_VERSION has to change with it.
    problem = build_problem(make_latent(dtype=dtype), 3)
    assert problem.up_projections is not None
    tensors = (problem.query, problem.keys, problem.values, problem.up_projections.fused())
    assert hashlib.sha256(b"".join(t.float().numpy().tobytes() for t in tensors)).hexdigest()[:16] == digest


def test_weights_belong_to_the_layer(make_latent: Any) -> None:
    case = make_latent()
    one, other = (make_up_projections(layer, torch.bfloat16) for layer in (case.layer, replace(case.layer, scale=0.7)))
    assert one is not None
    assert other is not None
    assert torch.equal(one.w_uk, other.w_uk)
    assert torch.equal(build_problem(case, 0).up_projections.w_uv, build_problem(case, 7).up_projections.w_uv)  # type: ignore[union-attr]
    assert not torch.equal(one.w_uk[:, 0], one.w_uk[:, 1]), "heads differ"
    plain = replace(case.layer, mla=None)
    assert make_up_projections(plain, torch.bfloat16) is None
    assert naive_layer(plain) is plain
    assert stored_sizes(plain) == (80, 80)


def test_the_fused_weight_alternates_by_head(make_latent: Any) -> None:
    problem = build_problem(make_latent(), 0)
    weights = problem.up_projections
    assert weights is not None
    fused = weights.fused()
    assert fused.shape == (3 * (32 + 24), 64)
    assert torch.equal(fused[56 + 5], weights.w_uk[:, 1, 5])
    assert torch.equal(fused[2 * 56 + 32 + 7], weights.w_uv[:, 2, 7])
    rows, nothing = KVBProj(fused)(problem.keys[:, 0])
    assert nothing is None
    made = rows.unflatten(-1, (3, 56))
    assert torch.equal(made[..., 32:], weights.values(problem.keys).to(problem.dtype))


def test_every_row_points_somewhere(make_latent: Any) -> None:
    problem = build_problem(make_latent((6, 40), inputs=("needles",)), 0)
    truth = truth_of(problem, CPU)
    weights = torch.softmax(
        torch.einsum("thd,nhd->thn", problem.query.double(), truth.rows.keys)[-1] * problem.layer.softmax_scale, -1
    )
    assert float(weights.amax(-1).median()) > 0.3


def low_precision(problem: Problem, *, absorbed: bool) -> torch.Tensor:
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


def shares(truth: Truth, output: torch.Tensor) -> torch.Tensor:
    return share_of_budget(output.double() - truth.out, truth.budget)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("absorbed", [True, False])
def test_both_forms_in_low_precision_stay_within_the_budget(make_latent: Any, dtype: str, absorbed: bool) -> None:
    for seed in range(3):
        problem = build_problem(make_latent(dtype=dtype), seed)
        truth = truth_of(problem, CPU)
        assert float(shares(truth, low_precision(problem, absorbed=absorbed)).max()) < 0.9
        assert float(shares(truth, truth.out * 1.02).max()) > 1
        assert float(shares(truth, torch.zeros_like(truth.out)).min()) > 1


class Recorder(ReferenceMLABackend):
    """Keeps what it is handed."""

    seen: list[Any] = []  # noqa: RUF012 (emptied by the fixture)

    @staticmethod
    def get_impl_cls() -> Any:
        return RecorderImpl


class RecorderImpl(ReferenceMLAImpl):
    backend = Recorder

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        Recorder.seen.append(("init", arguments, keywords))
        super().__init__(*arguments, **keywords)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        Recorder.seen.append(("weights", (act_dtype,), {}))
        super().process_weights_after_loading(act_dtype)

    def forward(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        Recorder.seen.append(("forward", arguments, keywords))
        return super().forward(*arguments, **keywords)


@pytest.fixture
def recorder() -> Any:
    Recorder.seen.clear()
    return Recorder


def test_a_layer_is_driven_as_the_contract_requires(make_latent: Any, recorder: Any) -> None:
    mla = replace(SIZES, workspace=24)
    problem = build_problem(make_latent((1, 37), (5, 40), padding=(1, 3), dtype="float16", mla=mla), 0)
    seen = Session(recorder, problem, CPU).run()
    assert seen.output.shape == (6 + 3, 3, 24)
    (_, arguments, keywords), weights, (_, call, options) = recorder.seen
    assert arguments == (3, 80, 48**-0.5, 1, None, None, "auto", None, "decoder", None)
    assert keywords.pop("kv_b_proj").weight.shape == (3 * 56, 64)
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "qk_head_dim": 48, "v_head_dim": 24}
    assert keywords == {"q_lora_rank": None, **sizes}
    assert weights == ("weights", (torch.float16,), {})
    _, query, kv_c_normed, k_pe, kv_cache, metadata = call
    assert [tuple(x.shape) for x in (query, kv_c_normed, k_pe)] == [(9, 3, 48), (9, 64), (9, 1, 16)]
    assert tuple(kv_cache.shape) == (problem.num_blocks, 16, 80)
    assert tuple(options["output"].shape) == (9, 3 * 24)
    assert metadata.workspace == 24
    assert not query.is_contiguous(), "slices of a fused tensor"


class WithoutCodec(TorchMLABackend):
    """Filled through its own writer."""

    @classmethod
    def kv_cache_codec(cls, layer: Any, cache: Any) -> None:
        return None


def test_a_backend_without_a_codec_is_filled_through_its_own_writer(make_latent: Any) -> None:
    problem = build_problem(make_latent(), 0)
    seen = Session(WithoutCodec, problem, CPU).run(Fill())
    assert float(shares(truth_of(problem, CPU), seen.output).max()) <= 1


def test_the_default_codec_of_a_latent_cache(make_latent: Any) -> None:
    layer, cache = make_latent(dtype="float32").layer, CacheSpec(block_size=4)
    codec = packed_codec(TorchMLABackend, layer, cache)
    assert codec is not None
    pool = torch.zeros(3, 4, 80)
    latent, rotary = torch.arange(128.0).view(2, 64) + 1, torch.arange(32.0).view(2, 16) + 500
    codec.write(pool, torch.tensor([11, 5]), latent, rotary)
    assert torch.equal(pool[2, 3], torch.cat([latent[0], rotary[0]]))
    assert torch.equal(pool[1, 1], torch.cat([latent[1], rotary[1]]))
    assert int(pool.count_nonzero()) == 160
    assert all(
        torch.equal(a, b) for a, b in zip(codec.read(pool, torch.tensor([11, 5])), (latent, rotary), strict=True)
    )


def test_a_shape_that_is_no_latent_cache_has_no_codec(make_latent: Any) -> None:
    class Odd(TorchMLABackend):
        @classmethod
        def get_kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> Any:
            return (num_blocks, head_size, block_size)

    assert packed_codec(Odd, make_latent().layer, CacheSpec()) is None


def test_paths_of_latent_layers(make_latent: Any) -> None:
    case = make_latent()
    for path, is_answered in (("mla", True), ("spec_decode", True), ("tree", False), ("fast_prefill", False)):
        batch = replace(case.batch, path=replace(case.batch.path, name=path))
        assert (unanswered_reasons(replace(case, batch=batch)) == ()) == is_answered


def test_memory_counts_what_latent_rows_become(make_latent: Any) -> None:
    case = make_latent((8, 4000), num_heads=3)
    more = make_latent((8, 4000), num_heads=64)
    assert needed_bytes(more) - needed_bytes(case) >= 4000 * 61 * (48 + 24) * 8


def test_a_dump_holds_the_weights(make_latent: Any, tmp_path: Any) -> None:
    problem = build_problem(make_latent(), 0)
    content = torch.load(dump_case(tmp_path, problem, truth_of(problem, CPU), "b", None), weights_only=True)
    assert problem.up_projections is not None
    assert torch.equal(content["w_uk"], problem.up_projections.w_uk)
    assert torch.equal(content["w_uv"], problem.up_projections.w_uv)
