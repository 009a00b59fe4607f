"""Choose where a truth is computed: on the device of the run, or on the host if that takes less time.

A consumer GPU computes float64 at 1/64 of its float32 rate, so a host with many cores is faster. Times are estimated
from the case and the GPU's properties, never measured, so that equal machines make the same choice.
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
"""Float64 multiply-adds per cycle of an SM, by compute capability, of data-centre GPUs (CUDA programming guide)."""

_PER_CYCLE_OF_OTHERS = 2
"""The same for every other GPU; some with a capability below 7 have 4."""

_SHARE_OF_PEAK = 0.5
"""Share of a GPU's peak float64 rate that attention in torch reaches; ``_HOST_RATE`` includes that of the host."""

_USUAL_CLOCK_KHZ = 1_500_000
"""Clock assumed if torch does not report it."""

_HOST_RATE = 16e9
"""Float64 operations per second of one core."""

_BYTES_A_SECOND, _LATENCY = 10e9, 0.0002
"""Bandwidth, and latency in seconds, of copying a truth from the host to the device."""


class GpuProperties(Protocol):
    """The fields read from ``torch.cuda.get_device_properties``; ``clock_rate`` (kHz) is read if it exists."""

    major: int
    minor: int
    multi_processor_count: int


def truth_device(case: Case, device: torch.device) -> torch.device:
    """Return ``device``, or the CPU if it is estimated to deliver the truth of ``case`` to ``device`` sooner."""
    if device.type != "cuda" or torch.version.hip is not None:
        return device
    properties = torch.cuda.get_device_properties(device)
    on_host = host_seconds(case, _num_cores())
    return torch.device("cpu") if on_host < device_seconds(case, properties) else device


def device_seconds(case: Case, properties: GpuProperties) -> float:
    """Return the estimated seconds of a truth on a GPU, without work that takes equally long on the host."""
    per_cycle = _PER_CYCLE.get((properties.major, properties.minor), _PER_CYCLE_OF_OTHERS)
    clock = 1000 * getattr(properties, "clock_rate", _USUAL_CLOCK_KHZ)
    rate = 2 * per_cycle * properties.multi_processor_count * clock
    return _operations(case, 2) / (_SHARE_OF_PEAK * rate)


def host_seconds(case: Case, cores: int) -> float:
    """Return the estimated seconds of a truth on ``cores`` cores, including its copies to a GPU.

    Work that takes equally long on the GPU is left out.
    """
    layer = naive_layer(case.layer)
    # Two float32 operations take as long as one of float64. Output, LSE and three budgets are copied.
    operations = _operations(case, 2) + _operations(case, 1) / 2
    num_bytes = 8 * case.batch.num_tokens * layer.num_heads * (layer.value_head_size + 4)
    return operations / (_HOST_RATE * cores) + num_bytes / _BYTES_A_SECOND + _LATENCY


def truth_notes(case: Case, device: torch.device) -> tuple[str, ...]:
    """Return the notes of a record on where its truth was computed; empty if on ``device``."""
    if truth_device(case, device) == device:
        return ()
    return ("the float64 truth was computed on the CPU: by estimate, this GPU takes longer",)


@contextmanager
def all_cores() -> Iterator[None]:
    """Use every core of the host for torch's CPU operators."""
    before = torch.get_num_threads()
    torch.set_num_threads(_num_cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _operations(case: Case, num_values: int) -> float:
    """Return the multiplications and additions of one attention.

    ``num_values``: 1 for the output alone, 2 for the output and its bound.
    """
    layer, is_cross = naive_layer(case.layer), case.layer.attn_type == AttentionType.ENCODER_DECODER
    pairs = 0.0
    for each in case.batch.requests:
        num_keys = (each.encoder_len or 0) if is_cross else each.total_len
        unseen = (each.query_len - 1) / 2 if layer.is_causal else 0
        pairs += each.count * each.query_len * max(num_keys - unseen, 0)
    return 2 * pairs * layer.num_heads * (layer.head_size + num_values * layer.value_head_size)
