"""The latent kernel, the cache writer and the merge of states compile for GPUs that are not here, and fit into them.

That a compiled kernel is right, only a GPU shows.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

LAUNCHES = Path(__file__).parents[1] / "compiling" / "launches.py"

SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory that a block can have, of NVIDIA's tables of compute capabilities."""

A_FEW_REGISTERS = 128
"""Bytes a thread may spill; a tile too large spills thousands."""

FUNCTIONS = """
import torch
from torch import bfloat16, float16, float32, float8_e4m3fn, float8_e5m2
from attncheck.backends.triton_mla.attention import latent_attention
from attncheck.backends.triton_unified.cache import reshape_and_cache
from attncheck.backends.triton_unified.merging import merge_attn_states
from attncheck.backends.triton_unified.scratch import SplitScratch

def attend(rows, heads, dtype, stored=None, *, rank=512, rotary=64, segments=1):
    latent, rest = (torch.zeros(2 * rows, heads, size, dtype=dtype) for size in (rank, rotary))
    latent_attention(
        latent, rest, torch.zeros(8, 64, rank + rotary, dtype=stored or dtype), torch.empty_like(latent),
        block_table=torch.zeros(2, 64, dtype=torch.int32), seq_lens=torch.zeros(2, dtype=torch.int32),
        query_start_loc=torch.zeros(3, dtype=torch.int32), max_query_len=rows, scale=0.1, causal=True,
        k_scale=torch.ones(1), output_lse=torch.zeros(2 * rows, heads),
        scratch=SplitScratch(torch.empty(2**20), torch.empty(2**12), 10_000, segments),
    )

def write(dtype, stored):
    rows, cache = torch.zeros(4, 8, 128, dtype=dtype), torch.zeros(4, 16, 8, 128, dtype=stored)
    reshape_and_cache(rows, rows, cache, cache.clone(), torch.zeros(4, dtype=torch.int64))

def merge(dtype):
    state = torch.zeros(4, 8, 128, dtype=dtype), torch.zeros(4, 8)
    merge_attn_states(*state, *state)

"""
LARGEST = {
    "attend(1, 128, bfloat16)": ["attend_latent"],
    "attend(9, 16, float16, float8_e5m2)": ["attend_latent"],
    "attend(9, 16, float32)": ["attend_latent"],
}
OTHERS = {
    "attend(1, 16, bfloat16, segments=8)": ["attend_latent", "merge_segments"],
    "attend(33, 3, float16, rank=96, rotary=0)": ["attend_latent"],
    "write(bfloat16, float8_e4m3fn)": ["write_cache_kernel"],
    "write(float32, bfloat16)": ["write_cache_kernel"],
    "merge(bfloat16)": ["merge_states_kernel"],
}


@pytest.mark.parametrize(("capability", "launches"), [(80, LARGEST), (90, LARGEST | OTHERS)])
def test_they_compile_and_fit(capability: int, launches: dict[str, list[str]]) -> None:
    statement = FUNCTIONS + "\n".join(launches)
    names = [name for kernels in launches.values() for name in kernels]
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(LAUNCHES), str(capability), statement]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = json.loads(done.stdout)
    assert [kernel["name"] for kernel in kernels] == names
    for kernel in kernels:
        assert kernel["shared"] <= SHARED[capability], kernel
        assert kernel["spilled"] <= A_FEW_REGISTERS, kernel
