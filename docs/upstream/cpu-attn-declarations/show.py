"""Show where CPU_ATTN's declarations and its kernel differ: head sizes, and attention sinks.

    python show.py

Exits 0 while they differ, and 1 when they do not. Needs vLLM's CPU build.
"""

import sys

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

PAGE, ISA, SINK = 32, "vec", 0.5
STARTS, LENGTHS = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)


def schedule(head: int) -> torch.Tensor:
    """Return the kernel's schedule for one request and one head of size ``head``."""
    return ops.cpu_attn_get_scheduler_metadata(
        1,
        1,
        1,
        head,
        LENGTHS,
        torch.float32,
        STARTS,
        causal=True,
        sliding_window_size=-1,
        isa=ISA,
        enable_kv_split=True,
    )


def sink_error() -> float:
    """Return the largest error of the kernel's answer for a layer with a sink."""
    keys, values, query = torch.randn(3, 1, 64), torch.randn(3, 1, 64), torch.randn(1, 1, 64)
    key_cache, value_cache = torch.zeros(1, 1, 2 * PAGE, 64).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, torch.arange(3), ISA)
    output, sinks = torch.empty(1, 1, 64), torch.tensor([SINK])
    ops.cpu_attention_with_kv_cache(
        query,
        key_cache,
        value_cache,
        output,
        STARTS,
        LENGTHS,
        0.125,
        True,
        None,
        -1,
        torch.zeros(1, 1, dtype=torch.int32),
        0.0,
        schedule(64),
        sinks,
    )
    scores = torch.cat([keys[:, 0].double() @ query[0, 0].double() * 0.125, sinks.double()])
    return (output[0, 0].double() - scores.softmax(0)[:3] @ values[:, 0].double()).abs().max().item()


def main() -> int:
    """Compare what the class says with what the kernel does."""
    current_platform.import_kernels()
    torch.manual_seed(0)
    try:
        schedule(72)
        refusal = ""
    except RuntimeError as error:
        refusal = str(error).splitlines()[0]
    print(
        f"get_supported_head_sizes() has 72: {72 in CPUAttentionBackend.get_supported_head_sizes()}; "
        f"the kernel: {refusal or 'takes it'}"
    )
    error, says = sink_error(), CPUAttentionBackend.supports_sink()
    print(f"supports_sink(): {says}; a layer with a sink is answered with an error of at most {error:.1e}")
    return 0 if not says and error < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
