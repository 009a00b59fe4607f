"""Where a truth is computed: on the device of the run, or on the host where that takes less time.

A GPU of consumer class computes float64 at 1/64 of the rate of float32, so that many cores of a host are faster. The
seconds are estimated from the case and the GPU's properties, never measured: equal machines choose alike.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from attncheck.cases.model import Case
from attncheck.harness.problem.layer_sizes import naive_layer
from attncheck.reference.spec import AttentionType

_PER_CYCLE = {(6, 0): 32, (7, 0): 32, (8, 0): 32, (9, 0): 64, (10, 0): 64}
"""Float64 multiply-adds a cycle of an SM, by compute capability (CUDA programming guide): data-centre parts."""

_PER_CYCLE_OF_OTHERS = 2
"""The same of every other GPU: some of before capability 7 have 4."""

_SHARE_OF_PEAK = 0.5
"""Of a GPU's float64 rate, what attention in torch reaches; of the host's the same is in ``_HOST_RATE``."""

_USUAL_CLOCK_KHZ = 1_500_000
"""Where torch does not know the clock."""

_HOST_RATE = 16e9
"""Float64 operations a second of one core."""

_BYTES_A_SECOND, _LATENCY = 10e9, 0.0002
"""Of the copies that bring a truth from the host to the device."""


class GpuProperties(Protocol):
    """What is read of ``torch.cuda.get_device_properties``; ``clock_rate`` (kHz) is read where it is there."""

    major: int
    minor: int
    multi_processor_count: int


def truth_device(case: Case, device: torch.device) -> torch.device:
    """Return ``device``, or the CPU where it gives the truth of ``case`` to ``device`` sooner."""
    if device.type != "cuda" or torch.version.hip is not None:
        return device
    properties = torch.cuda.get_device_properties(device)
    on_host = host_seconds(case, _num_cores())
    return torch.device("cpu") if on_host < device_seconds(case, properties) else device


def device_seconds(case: Case, properties: GpuProperties) -> float:
    """Estimated seconds of a truth on a GPU; what takes equally long on the host is left out."""
    per_cycle = _PER_CYCLE.get((properties.major, properties.minor), _PER_CYCLE_OF_OTHERS)
    clock = 1000 * getattr(properties, "clock_rate", _USUAL_CLOCK_KHZ)
    rate = 2 * per_cycle * properties.multi_processor_count * clock
    return _operations(case, 2) / (_SHARE_OF_PEAK * rate)


def host_seconds(case: Case, cores: int) -> float:
    """Estimated seconds of a truth on so many cores, and of its copies to a GPU; left out is the same."""
    layer = naive_layer(case.layer)
    # Two float32 operations take as long as one of float64. Output, LSE and three budgets are copied.
    operations = _operations(case, 2) + _operations(case, 1) / 2
    num_bytes = 8 * case.batch.num_tokens * layer.num_heads * (layer.value_head_size + 4)
    return operations / (_HOST_RATE * cores) + num_bytes / _BYTES_A_SECOND + _LATENCY


def truth_notes(case: Case, device: torch.device) -> tuple[str, ...]:
    """Return what a record says of the place where its truth was computed; empty: on ``device``."""
    if truth_device(case, device) == device:
        return ()
    return ("the float64 truth was computed on the CPU: by estimate, this GPU takes longer",)


@contextmanager
def all_cores() -> Iterator[None]:
    """Use every core of the host for torch's operators on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(_num_cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _num_cores() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _operations(case: Case, num_values: int) -> float:
    """Multiplications and additions of one attention with so many tensors of values: output alone, or its bound too."""
    layer, is_cross = naive_layer(case.layer), case.layer.attn_type == AttentionType.ENCODER_DECODER
    pairs = 0.0
    for each in case.batch.requests:
        num_keys = (each.encoder_len or 0) if is_cross else each.total_len
        unseen = (each.query_len - 1) / 2 if layer.is_causal else 0
        pairs += each.count * each.query_len * max(num_keys - unseen, 0)
    return 2 * pairs * layer.num_heads * (layer.head_size + num_values * layer.value_head_size)
