"""Show that reshape_and_cache_flash does not end for a layer whose keys have fewer than 32 numbers a token.

    python show.py

Exits 0 while the defect is there, 1 when it is gone, and 77 without a GPU. Each write runs in a process of its own,
which is ended after 30 seconds.
"""

import subprocess
import sys

import torch

PAGE, LIMIT_S = 16, 30


def write(num_kv_heads: int, head_size: int) -> None:
    """Write one token to a cache that holds key and value of a head side by side, as FLASH_ATTN's cache does."""
    import vllm._custom_ops as ops

    kv_cache = torch.zeros(2, PAGE, num_kv_heads, 2 * head_size, dtype=torch.float16, device="cuda")
    key_cache, value_cache = kv_cache.split(head_size, dim=-1)
    rows = torch.ones(1, num_kv_heads, head_size, dtype=torch.float16, device="cuda")
    slots, scale = torch.tensor([PAGE], device="cuda"), torch.ones(1, device="cuda")
    ops.reshape_and_cache_flash(rows, rows, key_cache, value_cache, slots, "auto", scale, scale)
    torch.cuda.synchronize()
    print(f"{num_kv_heads} x {head_size}: written, {int(kv_cache.sum())} of {2 * rows.numel()} numbers")


def main() -> int:
    """Write with 32 numbers a token and with 16; return whether only the second does not end."""
    ended = []
    for num_kv_heads, head_size in ((2, 16), (1, 32), (1, 16)):
        command = [sys.executable, __file__, str(num_kv_heads), str(head_size)]
        try:
            done = subprocess.run(command, timeout=LIMIT_S, capture_output=True, text=True, check=False)  # noqa: S603
        except subprocess.TimeoutExpired:
            print(f"{num_kv_heads} x {head_size}: did not end in {LIMIT_S} s")
            ended.append(False)
            continue
        print(done.stdout.strip() or done.stderr.strip().splitlines()[-1])
        ended.append(done.returncode == 0)
    return 0 if ended == [True, True, False] else 1


if __name__ == "__main__":
    if not torch.cuda.is_available():
        print("the kernel runs on a GPU only, and there is none")
        sys.exit(77)
    if len(sys.argv) == 3:
        write(int(sys.argv[1]), int(sys.argv[2]))
        sys.exit(0)
    sys.exit(main())
