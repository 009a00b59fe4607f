"""The library's operator, interpreted, over the bias that candidate ``xformers`` makes around a step's tensors."""

import pytest
import torch

from attncheck.backends.candidates.xformers.backend import library_reasons

if reasons := library_reasons("cpu"):
    pytest.skip("; ".join(reasons), allow_module_level=True)

from attncheck.backends.candidates.xformers.impl import (
    operator_for,
    paged_decode,
    single_token_bias,
    supported_head_sizes,
)

SCALE = 0.3


def step(lens, page_size, group=2, head_size=32, kv_heads=2, extra_pages=1, seed=0):
    """Query, both caches, table, lengths: requests in pages of their own, NaN in every slot that no request owns."""
    generator = torch.Generator().manual_seed(seed)
    width = -(-max(lens) // page_size) + extra_pages
    blocks = len(lens) * width + 1
    query = torch.randn(len(lens), kv_heads * group, head_size, generator=generator)
    caches = torch.full((2, blocks, page_size, kv_heads, head_size), torch.nan)
    table = (torch.randperm(blocks - 1, generator=generator)[: len(lens) * width] + 1).view(len(lens), width)
    for row, length in zip(table, lens, strict=True):
        for position in range(length):
            place = row[position // page_size], position % page_size
            caches[(slice(None), *place)] = torch.randn(2, kv_heads, head_size, generator=generator)
    return query, *caches, table.to(torch.int32), torch.tensor(lens, dtype=torch.int32)


def decode(query, key_cache, value_cache, table, lens):
    out, lse = torch.full_like(query, torch.nan), torch.full(query.shape[:2], torch.nan)
    paged_decode(query, key_cache, value_cache, table, lens, SCALE, out, lse)
    return out, lse


@pytest.mark.parametrize(
    ("page_size", "tile"), [(16, 16), (32, 32), (48, 16), (64, 64), (80, 16), (96, 32), (112, 16), (128, 64)]
)
def test_the_largest_tile_that_divides_a_page_is_taken(page_size, tile):
    operator = operator_for(page_size)
    found = operator.BLOCK_N, operator.NAME
    assert found == (tile, f"paged_triton_splitK_n{tile}")


@pytest.mark.parametrize("page_size", [1, 8, 24])
def test_a_page_that_no_tile_divides_is_refused(page_size):
    with pytest.raises(ValueError, match=f"page size {page_size} is no multiple of 16"):
        operator_for(page_size)


def test_without_a_log_sum_exp_the_output_is_the_same():
    arguments = step([3, 17], 16)
    out = torch.full_like(arguments[0], torch.nan)
    paged_decode(*arguments, SCALE, out, None)
    assert torch.equal(out, decode(*arguments)[0])


def test_the_bias_is_the_step_s_own_tensors():
    _, _, _, table, lens = step([5, 37, 0], 16)
    bias = single_token_bias(lens, table, 16)
    assert bias.k_seqinfo.seqlen.data_ptr() == lens.data_ptr()
    assert bias.block_tables is table
    assert bias.q_seqinfo.seqstart.tolist() == bias.q_seqinfo.seqstart_py == [0, 1, 2, 3]
    assert bias.k_seqinfo.padding == bias.k_seqinfo.max_seqlen == table.shape[1] * 16


def test_a_call_is_one_operator_of_torch():
    """So a recorder of calls sees it, and what it writes; fake tensors pass."""
    query, key_cache, value_cache, table, lens = step([5, 9], 16)
    out, lse = torch.empty_like(query), torch.empty(query.shape[:2])
    arguments = (query, key_cache, value_cache, table, lens, SCALE, out, lse)
    torch.library.opcheck(paged_decode, arguments, test_utils=("test_schema", "test_faketensor"))


def test_the_operator_s_own_check_refuses_what_it_cannot_do():
    query, key_cache, value_cache, table, lens = step([5, 9], 16, head_size=80)
    with pytest.raises(ValueError, match="Embed dim 80 not supported"):
        decode(query, key_cache, value_cache, table, lens)
    query, key_cache, value_cache, table, lens = step([5, 9], 16)
    with pytest.raises(ValueError, match="should either all have the same dtype"):
        decode(query, key_cache.half(), value_cache.half(), table, lens)


def test_the_head_sizes_are_those_the_operator_names():
    assert supported_head_sizes() == [16, 32, 64, 128, 256, 512]
