"""Show that reshape_and_cache_flash does not end where a token's keys have fewer than 32 numbers.

    python show.py

Exits 0 while the defect is there, 1 when it is gone, and 77 without a CUDA GPU. Each write runs in a process of its
own, which is killed after 20 seconds.
"""

import subprocess
import sys

import torch

SECONDS, PAGE, PAGES = 20, 16, 4


def write(kv_heads: int, head_size: int) -> None:
    """Write one token into a cache with keys and values side by side, as FlashAttentionImpl.do_kv_cache_update does."""
    from vllm import _custom_ops as ops

    cache = torch.zeros(PAGES, PAGE, kv_heads, 2 * head_size, dtype=torch.float16, device="cuda")
    key_cache, value_cache = cache.split(head_size, dim=-1)
    keys, values = torch.ones(2, 1, kv_heads, head_size, dtype=torch.float16, device="cuda")
    slots, scale = torch.tensor([PAGE], device="cuda"), torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    print("ready", flush=True)
    ops.reshape_and_cache_flash(keys, values, key_cache, value_cache, slots, "auto", scale, scale)
    torch.cuda.synchronize()


def does_end(kv_heads: int, head_size: int) -> bool:
    """Return whether the write ends within 20 seconds, which begin when vLLM is imported."""
    command = [sys.executable, __file__, str(kv_heads), str(head_size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 (this file)
        while (line := process.stdout.readline()) and line.strip() != "ready":
            pass
        try:
            returned = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return False
    if returned:
        raise RuntimeError(f"the write of {kv_heads} KV heads of {head_size} failed with exit code {returned}")
    return True


def main() -> int:
    """Write tokens of 16, 24, 32 and 64 numbers."""
    if not torch.cuda.is_available():
        print("this machine has no CUDA GPU")
        return 77
    ends = {}
    for kv_heads, head_size in ((1, 16), (1, 24), (2, 16), (1, 64)):
        ends[kv_heads * head_size] = does_end(kv_heads, head_size)
        print(f"{kv_heads} KV heads of {head_size}: {'ends' if ends[kv_heads * head_size] else 'does not end'}")
    return 0 if ends[64] and not ends[16] else 1


if __name__ == "__main__":
    if len(sys.argv) == 3:
        write(int(sys.argv[1]), int(sys.argv[2]))
        sys.exit(0)
    sys.exit(main())
