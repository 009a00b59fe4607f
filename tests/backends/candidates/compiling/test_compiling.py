"""Kernels of Triton and of torch's compiler compile for GPUs that are not here, fit into them, and are few.

That a compiled kernel is right, only a GPU shows. On a GPU each takes seconds of one thread, so numbers that differ
from layer to layer and step to step are arguments. At night the other kernels are compiled; whole suites, by tests marked
``kernels``.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels are compiled by Triton")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the pretended device is put into torch's Linux library")


@pytest.fixture
def printed_by(preloaded):
    """``printed_by("launches.py", *arguments)``: what the script prints, read as JSON; Triton compiles in it."""

    def run(script, *arguments):
        env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    return run


SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that a block can have, of NVIDIA's tables of compute capabilities."""

SMALLEST = 86
"""The GPU of the least shared memory; tiles fit there, or nowhere."""

UNIFIED = """
import torch
from attncheck.backends.candidates.triton_unified.attention import unified_attention
from attncheck.backends.candidates.triton_unified.tiling import SplitScratch
from attncheck.reference.attention.params import AttentionParams

def attend(rows, dtype, *, codes=None, size=128, scratch=None):
    query = torch.zeros(2 * rows, 8, size, dtype=dtype)
    pages = torch.zeros(64, 16, 2, size, dtype=codes or dtype)
    unified_attention(
        query, pages, pages, torch.empty_like(query), block_table=torch.zeros(2, 32, dtype=torch.int32),
        seq_lens=torch.zeros(2, dtype=torch.int32), query_start_loc=torch.zeros(3, dtype=torch.int32),
        max_query_len=rows, params=AttentionParams(8, 2, size), k_scale=torch.ones(1), v_scale=torch.ones(2),
        scratch=scratch, output_lse=torch.zeros(2 * rows, 8),
    )

"""
LATENT = """
import torch
from torch import bfloat16, float16, float32, float8_e4m3fn, float8_e5m2
from attncheck.backends.candidates.triton_mla.attention import latent_attention
from attncheck.backends.candidates.triton_unified.tiling import SplitScratch

def attend(rows, heads, dtype, codes=None, *, rank=512, rotary=64, segments=1):
    latent, rest = (torch.zeros(2 * rows, heads, size, dtype=dtype) for size in (rank, rotary))
    latent_attention(
        latent, rest, torch.zeros(8, 64, rank + rotary, dtype=codes or dtype), torch.empty_like(latent),
        block_table=torch.zeros(2, 64, dtype=torch.int32), seq_lens=torch.zeros(2, dtype=torch.int32),
        query_start_loc=torch.zeros(3, dtype=torch.int32), max_query_len=rows, scale=0.1, causal=True,
        k_scale=torch.ones(1), output_lse=torch.zeros(2 * rows, heads),
        scratch=SplitScratch(torch.empty(2**20), torch.empty(2**12), 10_000, segments),
    )

"""
OTHERS = """
import torch
from attncheck.backends.candidates.triton_unified.cache import reshape_and_cache
from attncheck.backends.candidates.triton_unified.merging import merge_attn_states

slots = torch.zeros(5, dtype=torch.int64)
for dtype, stored in ((torch.bfloat16,) * 2, (torch.float32, torch.float16), (torch.float16, torch.float8_e4m3fn),
                      (torch.bfloat16, torch.float8_e5m2)):
    new, pages = torch.zeros(7, 2, 80, dtype=dtype), torch.zeros(4, 16, 2, 80, dtype=stored)
    reshape_and_cache(new, new, pages, pages.clone(), slots, k_scale=torch.ones(1), v_scale=torch.ones(2))
out, lse = torch.zeros(9, 4, 80, dtype=torch.bfloat16), torch.zeros(9, 4)
merge_attn_states(out, lse, out, lse)
"""

A_FEW_REGISTERS = 512
"""Bytes a thread may spill where tiles are as large as they can be; a tile too large spills thousands."""

WIDEST = """
scratch = SplitScratch(torch.empty(2**20), torch.empty(2**12), 10_000, 32)
attend(64, torch.float16, size=256, scratch=scratch)
attend(64, torch.bfloat16, codes=torch.float8_e4m3fn)
"""


def test_the_widest_heads_fit_the_smallest_gpu(printed_by):
    kernels = printed_by("launches.py", SMALLEST, UNIFIED + WIDEST)
    assert [kernel["name"] for kernel in kernels] == ["attend_blocks", "merge_segments", "attend_blocks"]
    assert_fits(kernels, SMALLEST, spilled=A_FEW_REGISTERS)


@pytest.mark.slow
def test_the_largest_latent_tile_fits_the_smallest_gpu(printed_by):
    kernels = printed_by("launches.py", SMALLEST, LATENT + "attend(1, 128, bfloat16)")
    assert [kernel["name"] for kernel in kernels] == ["attend_latent"]
    assert_fits(kernels, SMALLEST, spilled=A_FEW_REGISTERS)


@pytest.mark.slow
def test_prompts_are_multiplied_from_registers_that_suffice(printed_by):
    """Of the GPU that tiles were chosen for."""
    kernels = printed_by("launches.py", 90, UNIFIED + "attend(64, torch.bfloat16)")
    assert_fits(kernels, 90)


@pytest.mark.slow
def test_writers_and_merging_compile(printed_by):
    kernels = printed_by("launches.py", SMALLEST, OTHERS)
    assert [kernel["name"] for kernel in kernels] == ["write_cache_kernel"] * 4 + ["merge_states_kernel"]
    assert_fits(kernels, SMALLEST)


@pytest.mark.kernels
@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize(("backend", "few"), [("triton_unified", 120), ("triton_mla", 12)])
def test_the_kernels_of_smoke_are_few_and_fit(backend, few, capability, printed_by):
    found = printed_by("census.py", capability, backend, "smoke", "--compile", 1000)
    assert len(found["compiled"]) == sum(found["kernels"].values()) <= few
    assert_fits(found["compiled"], capability, spilled=sys.maxsize)


def assert_fits(kernels, capability, *, spilled=0):
    for kernel in kernels:
        assert kernel["shared"] <= SHARED[capability], kernel
        assert kernel["spilled"] <= spilled, kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "cases"),
    [("triton_unified", ["window-prefill*", "groups*", "block-size*"]), ("triton_mla", ["latent*"])],
)
def test_windows_groups_pages_and_latent_sizes_share_kernels(backend, cases, printed_by):
    selected = [argument for case in cases for argument in ("--case", case)]
    assert sum(printed_by("census.py", 90, backend, "smoke", *selected)["kernels"].values()) <= 12


@on_linux
@pytest.mark.slow
def test_the_kernel_is_the_main_one_whatever_torch_would_choose(printed_by):
    # Torch would choose flex_decoding, which is several kernels.
    few_rows = {"num_kv_heads": 1, "rows": 6, "has_all_rows": False}
    small_heads = {"head_size": 8, "dtype": "float16", "cap": 5.0, "has_slopes": True}
    found = printed_by("flex_calls.py", json.dumps([few_rows, small_heads]))
    assert [(call["graphs"], call["error"]) for call in found] == [(1, None)] * 2
    for call in found:
        assert [kernel for kernel in call["kernels"] if "flex" in kernel] == ["triton_tem_fused_flex_attention_0"]


@on_linux
@pytest.mark.slow
def test_heads_scales_and_lengths_share_a_compilation(printed_by):
    calls = [
        {"num_heads": 16, "rows": 26, "keys": 127},  # as heads of their own: NoValidChoicesError
        {"num_heads": 21, "num_kv_heads": 3, "scale": 0.2, "rows": 131, "keys": 100},
        {"num_heads": 4, "num_kv_heads": 1, "head_size": 16, "rows": 1, "keys": 1},
        {"head_size": 80, "head_size_v": 96, "rows": 4, "keys": 300},
        {"head_size": 128, "num_heads": 16, "rows": 70, "keys": 70},
        {"num_heads": 12, "num_kv_heads": 4, "has_slopes": True},
        {"num_heads": 8, "num_kv_heads": 2, "has_slopes": True},  # so many that they fill the rows of a call exactly
    ]
    found = printed_by("flex_calls.py", json.dumps(calls))
    compiled = [(call["call"]["head_size"], call["call"]["has_slopes"]) for call in found]
    assert compiled == [(64, False), (80, False), (64, True)]
    assert [(call["graphs"], call["error"]) for call in found] == [(1, None)] * 3
