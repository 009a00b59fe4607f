"""Show that CPU_ATTN's AMX path reads the smallest e4m3 codes of an FP8 cache as 0.

    python show.py

Exits 0 while the defect is there, 1 when it is gone, and 77 on a machine without AMX. Needs vLLM's CPU build.
"""

import sys

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

PAGE, HEAD, FORMAT = 32, 64, "fp8_e4m3"


def read(isa: str, codes: torch.Tensor) -> torch.Tensor:
    """Return what one key with these value codes (uint8) is read as: one query's answer over it, in bfloat16."""
    key_cache, value_cache = torch.zeros(1, 1, 2 * PAGE, HEAD, dtype=torch.uint8).chunk(2, dim=2)
    row = codes.view(torch.float8_e4m3fn).to(torch.bfloat16).view(1, 1, HEAD)
    ops.cpu_attn_reshape_and_cache(
        torch.zeros_like(row),
        row,
        key_cache,
        value_cache,
        torch.zeros(1, dtype=torch.int64),
        isa,
        kv_cache_dtype=FORMAT,
    )
    starts, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        1,
        1,
        1,
        HEAD,
        lengths,
        torch.bfloat16,
        starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
        kv_cache_dtype=FORMAT,
    )
    output, pages = torch.empty(1, 1, HEAD, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int32)
    ops.cpu_attention_with_kv_cache(
        torch.zeros(1, 1, HEAD, dtype=torch.bfloat16),
        key_cache,
        value_cache,
        output,
        starts,
        lengths,
        1.0,
        True,
        None,
        -1,
        pages,
        0.0,
        schedule,
        None,
        kv_cache_dtype=FORMAT,
    )
    return output[0, 0].float()


def main() -> int:
    """Read the first 64 codes of e4m3, all of which bfloat16 holds exactly, by both paths."""
    if not torch.cpu._is_amx_tile_supported():
        print("this machine has no AMX; the path cannot be run")
        return 77
    current_platform.import_kernels()
    codes = torch.arange(HEAD, dtype=torch.uint8)
    meant = codes.view(torch.float8_e4m3fn).float()
    wrong = {isa: (read(isa, codes) != meant).nonzero().flatten().tolist() for isa in ("vec", "amx")}
    for isa, where in wrong.items():
        print(f"{isa}: {len(where)} of {HEAD} exact codes are read as another number: {where}")
    return 0 if wrong["amx"] and not wrong["vec"] else 1


if __name__ == "__main__":
    sys.exit(main())
