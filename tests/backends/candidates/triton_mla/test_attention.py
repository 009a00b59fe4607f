"""The latent kernel against sums written out in float64, over pages with NaN in every slot that no row sees."""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from paged_batches import dense, make_batch
from torch import Tensor

pytest.importorskip("triton")

from attncheck.backends.candidates.triton_mla.attention import choose_latent_tiling, latent_attention
from attncheck.backends.candidates.triton_unified.tiling import SplitScratch
from attncheck.reference import AttentionParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.4


@dataclass
class Step:
    """The arguments of one call, and what is right for every row."""

    latent: Tensor
    rotary: Tensor
    kv_cache: Tensor
    tables: dict[str, Any]
    out: Tensor
    lse: Tensor

    def answer(self, **options):
        """Output and LSE, with NaN where nothing was written."""
        output = torch.full(self.latent.shape, torch.nan, dtype=self.latent.dtype, device=DEVICE)
        lse = torch.full(self.latent.shape[:2], torch.nan, device=DEVICE)
        given = {"output": output, "output_lse": lse, "scale": SCALE, "causal": True, **self.tables, **options}
        latent_attention(self.latent, self.rotary, self.kv_cache, **given)
        return given["output"], given["output_lse"]

    def check(self, **options):
        out, lse = self.answer(**options)
        torch.testing.assert_close(out.double(), self.out, rtol=2e-6, atol=2e-6, equal_nan=True)
        torch.testing.assert_close(lse.double(), self.lse, rtol=2e-6, atol=2e-6, equal_nan=True)


def make_step(requests, *, heads=3):
    """Latent parts of 20 and rotary ones of 6 numbers in float32, on pages of 4 tokens; two rows of no request."""
    rank, rotary = 20, 6
    layer = AttentionParams(heads, 1, rank + rotary, rank, scale=SCALE)
    batch = make_batch(*zip(*requests, strict=True), layer, dtype=torch.float32)
    out, lse = dense(replace(batch, values=tuple(keys[..., :rank] for keys in batch.keys)), layer)
    out[-2:], lse[-2:] = torch.nan, torch.nan
    tables = {name: getattr(batch, name).int().to(DEVICE) for name in ("block_table", "seq_lens", "query_start_loc")}
    return Step(
        *batch.query.to(DEVICE).split([rank, rotary], -1),
        batch.key_cache[:, :, 0].to(DEVICE),
        {**tables, "k_scale": torch.ones(1, device=DEVICE), "max_query_len": max(length for length, _ in requests)},
        out.to(DEVICE),
        lse.to(DEVICE),
    )


def scratch(results, rank, segments):
    """Full of NaN, and wanted by any step."""
    out, lse = (torch.full((size,), torch.nan, device=DEVICE) for size in (results * rank, results))
    return SplitScratch(out, lse, programs=10_000, most=segments)


@pytest.mark.parametrize("segments", [2, 16])
def test_keys_in_segments_some_of_them_empty(segments):
    step = make_step(((1, 150), (2, 3), (3, 1)), heads=2)
    step.check(scratch=scratch(1_000, 20, segments))


@pytest.mark.parametrize("segments", [1, 4])
def test_what_is_no_number_stays_none(segments):
    """A key of NaN, seen by the first request alone; not the answer of a row that sees nothing."""
    step = make_step(((1, 150), (1, 30)), heads=2)
    step.kv_cache[step.tables["block_table"][0, 20], 1] = torch.nan
    step.out[0], step.lse[0] = torch.nan, torch.nan
    step.check(scratch=scratch(1_000, 20, segments))


def test_tensors_lie_in_any_way():
    step = make_step(((1, 20), (3, 9)))
    rows, heads, rank = step.latent.shape
    wide = step.kv_cache.new_full((len(step.kv_cache), 6, 60), torch.nan)[:, 1:-1, 4:56:2]
    step.kv_cache = wide.copy_(step.kv_cache)
    step.latent = step.latent.transpose(0, 1).contiguous().transpose(0, 1)
    step.rotary = step.rotary.repeat_interleave(2, -1)[..., ::2]
    step.tables["block_table"] = step.tables["block_table"].repeat(1, 2)[:, : step.tables["block_table"].shape[1]]
    output = torch.full((rank, heads, rows), torch.nan, device=DEVICE).permute(2, 1, 0)
    lse = torch.full((heads, rows), torch.nan, device=DEVICE).T
    step.check(output=output, output_lse=lse)


def test_what_does_not_go_together_is_refused():
    step = make_step(((1, 20), (3, 9)))
    for options, message in (
        ({"output": torch.zeros(6, 3, 19)}, r"output has shape \(6, 3, 19\), not \(6, 3, 20\)"),
        ({"output_lse": torch.zeros(6)}, r"output_lse has shape \(6,\), not \(6, 3\)"),
        ({"query_start_loc": torch.zeros(2)}, r"query_start_loc has shape \(2,\), not \(3,\)"),
        ({"block_table": torch.zeros(3, 2).T}, "block_table has strides"),
        ({"seq_lens": torch.zeros(4, dtype=torch.int32)[::2]}, "has gaps between its entries"),
        ({"output": torch.zeros(6, 3, 20, dtype=torch.float64)}, "output torch.float64"),
    ):
        with pytest.raises(ValueError, match=message):
            step.answer(**options)
    step.kv_cache = step.kv_cache.to(torch.float8_e5m2)
    with pytest.raises(ValueError, match="latent attention: a cache of codes needs a k_scale of one element"):
        step.answer(k_scale=None)
    step.kv_cache = step.kv_cache.to(torch.float64)
    with pytest.raises(ValueError, match="latent attention: kv_cache is torch"):
        step.answer()


def test_tiles_hold_whole_rows_and_fit():
    for max_query_len, heads, rank, itemsize, is_coded in itertools.product(
        (1, 3, 700), (1, 24, 128), (512, 1024), (2, 4), (False, True)
    ):
        tiling = choose_latent_tiling(
            max_query_len=max_query_len,
            num_heads=heads,
            kv_lora_rank=rank,
            itemsize=itemsize,
            is_coded=is_coded,
            shared_memory=163 * 1024,
            interpreted=False,
        )
        assert tiling.block_h * tiling.block_q <= tiling.block_m
        assert min(tiling.block_m, tiling.block_n) >= 16
        assert tiling.one_block == (max_query_len <= tiling.block_q)
        assert tiling.block_m * rank * 4 <= tiling.num_warps * 32 * 128 * 4, "half of the registers"
        keys = tiling.block_n * tiling.num_stages
        assert (tiling.block_m + keys) * (rank + 64) * itemsize <= 163 * 1024
        # Every request's rows have programs, wherever they begin.
        blocks = tiling.num_programs(2 * max_query_len, 2, heads) / math.ceil(heads / tiling.block_h)
        assert blocks >= 2 * math.ceil(max_query_len / tiling.block_q)
