"""The Triton kernels compile for GPUs that are not here, and fit into them.

That a compiled kernel is right, only a GPU shows.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels are compiled by Triton")

LAUNCHES = Path(__file__).with_name("launches.py")

SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a block can have, of NVIDIA's tables of compute capabilities."""

UNIFIED = """
import torch
from attncheck.backends.candidates.triton_unified.attention import unified_attention
from attncheck.backends.candidates.triton_unified.tiling import SplitScratch
from attncheck.reference.attention.params import AttentionParams

def attend(rows, dtype, *, codes=None, size=128, size_v=None, heads=8, kv_heads=2, scratch=None, lse=False,
           quantised=False, tree=False, **modifiers):
    size_v = size_v or size
    query = torch.zeros(2 * rows, heads, size, dtype=dtype)
    key, value = (torch.zeros(64, 16, kv_heads, n, dtype=codes or dtype) for n in (size, size_v))
    slopes, sinks = modifiers.get("alibi_slopes"), modifiers.get("sinks")
    unified_attention(
        query, key, value, torch.zeros(2 * rows, heads, size_v, dtype=torch.float8_e4m3fn if quantised else dtype),
        block_table=torch.zeros(2, 32, dtype=torch.int32), seq_lens=torch.zeros(2, dtype=torch.int32),
        query_start_loc=torch.zeros(3, dtype=torch.int32), max_query_len=rows,
        params=AttentionParams(heads, kv_heads, size, head_size_v=size_v, **modifiers),
        alibi_slopes=None if slopes is None else torch.tensor(slopes),
        sinks=None if sinks is None else torch.tensor(sinks),
        k_scale=torch.ones(1), v_scale=torch.ones(kv_heads), scratch=scratch,
        output_lse=torch.zeros(2 * rows, heads) if lse else None, output_scale=torch.ones(1) if quantised else None,
        tree=torch.ones(rows, rows, dtype=torch.bool) if tree else None,
    )

ones = (1.0,) * 8
"""
STATEMENTS = {
    "prompts": "attend(64, torch.bfloat16)\nattend(64, torch.float16, size=256, lse=True)",
    "decodes": "attend(1, torch.bfloat16)\nattend(1, torch.float16, size=80, heads=5, kv_heads=1, lse=True)",
    "window": "attend(20, torch.bfloat16, window=(15, 0), lse=True)\nattend(4, torch.bfloat16, tree=True)",
    "modifiers": "attend(64, torch.bfloat16, logits_soft_cap=5.0, sinks=ones)\n"
    "attend(1, torch.float16, alibi_slopes=ones, attn_chunk_size=32)",
    "codes": "attend(1, torch.bfloat16, codes=torch.float8_e4m3fn)\n"
    "attend(20, torch.float16, codes=torch.float8_e5m2, size=64, size_v=96, quantised=True)",
    "float32": "attend(64, torch.float32)\nattend(1, torch.float32, size=256)",
}

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
LARGEST_TILES = """
attend(1, 128, bfloat16)
attend(9, 16, float16, float8_e5m2)
attend(9, 16, float32)
"""
OTHER_TILES = """
attend(1, 16, bfloat16, segments=8)
attend(33, 3, float16, rank=96, rotary=0)
attend(20, 16, bfloat16, float8_e4m3fn, rank=48, rotary=8)
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

A_FEW_REGISTERS = 128
"""Bytes a thread may spill where tiles are as large as they can be; a tile too large spills thousands."""


@pytest.mark.parametrize("capability", SHARED)
@pytest.mark.parametrize("name", STATEMENTS)
def test_unified_attention_compiles(name: str, capability: int) -> None:
    kernels = compiled(capability, UNIFIED + STATEMENTS[name])
    assert [kernel["name"] for kernel in kernels] == ["attend_blocks"] * 2
    # Float32 has no tensor cores, and an older GPU is not what tiles were chosen for: slower there, not wrong.
    is_chosen_for = capability == 90 and name != "float32"
    assert_fits(kernels, capability, spilled=0 if is_chosen_for else sys.maxsize)


@pytest.mark.parametrize("capability", SHARED)
def test_attention_in_segments_compiles(capability: int) -> None:
    scratch = "SplitScratch(torch.empty(2**20), torch.empty(2**12), 10_000, 32)"
    kernels = compiled(capability, UNIFIED + f"attend(1, torch.bfloat16, sinks=ones, lse=True, scratch={scratch})")
    assert [kernel["name"] for kernel in kernels] == ["attend_blocks", "merge_segments"]
    assert_fits(kernels, capability, spilled=A_FEW_REGISTERS)


@pytest.mark.parametrize(
    ("capability", "statements", "names"),
    [
        (80, LARGEST_TILES, ["attend_latent"] * 3),
        (90, LARGEST_TILES + OTHER_TILES, ["attend_latent"] * 4 + ["merge_segments"] + ["attend_latent"] * 2),
    ],
    ids=["80", "90"],
)
def test_latent_attention_compiles(capability: int, statements: str, names: list[str]) -> None:
    kernels = compiled(capability, LATENT + statements)
    assert [kernel["name"] for kernel in kernels] == names
    assert_fits(kernels, capability, spilled=A_FEW_REGISTERS)


@pytest.mark.parametrize("capability", SHARED)
def test_writers_and_merging_compile(capability: int) -> None:
    kernels = compiled(capability, OTHERS)
    assert [kernel["name"] for kernel in kernels] == ["write_cache_kernel"] * 4 + ["merge_states_kernel"]
    assert_fits(kernels, capability)


def compiled(capability: int, statement: str) -> list[dict]:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(LAUNCHES), str(capability), statement]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def assert_fits(kernels: list[dict], capability: int, *, spilled: int = 0) -> None:
    for kernel in kernels:
        assert kernel["shared"] <= SHARED[capability], kernel
        assert kernel["spilled"] <= spilled, kernel
