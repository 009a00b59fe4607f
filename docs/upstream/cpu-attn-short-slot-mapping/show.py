"""Show that CPU_ATTN's writer reads slots behind the end of a slot mapping that is shorter than the keys.

    python show.py

Exits 0 while the defect is there, and 1 when it is gone. Needs vLLM's CPU build.
"""

import subprocess
import sys

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

PAGE, HEAD, ISA, ROWS, MAPPED = 32, 64, "vec", 5, 3


def written(behind: int) -> list[int]:
    """Return the slots that change where 3 of 5 rows have a slot, and ``behind`` follows the slots in memory."""
    key_cache, value_cache = torch.zeros(1, 1, 2 * PAGE, HEAD).chunk(2, dim=2)
    memory = torch.tensor([0, 1, 2, behind, behind])
    rows = torch.ones(ROWS, 1, HEAD)
    ops.cpu_attn_reshape_and_cache(rows, rows, key_cache, value_cache, memory[:MAPPED], ISA)
    return value_cache[0, 0].any(dim=1).nonzero().flatten().tolist()


def main() -> int:
    """Let a slot of the cache follow the slot mapping; in a process of its own, a number far outside of the cache."""
    current_platform.import_kernels()
    if len(sys.argv) > 1:
        written(int(sys.argv[1]))
        return 0
    try:
        slots = written(behind=20)
    except (RuntimeError, ValueError) as error:
        print(f"the writer refuses it: {error}")
        return 1
    print(f"{ROWS} rows, slot_mapping [0, 1, 2], 20 behind it in memory: the slots {slots} are written")
    far = 1 << 40
    code = subprocess.run([sys.executable, __file__, str(far)], check=False, capture_output=True).returncode  # noqa: S603
    print(f"{ROWS} rows, slot_mapping [0, 1, 2], {far} behind it in memory: the process ends with {code}")
    return 0 if 20 in slots else 1


if __name__ == "__main__":
    sys.exit(main())
