"""Memory for the results of segments, kept from step to step, so that a graph finds it where it was at capture.

Must not know: metadata, kernels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.backends.candidates.triton_unified.tiling import INTERPRETED_SEGMENTS, MAX_SEGMENTS

_PROGRAMS_PER_PROCESSOR = 16
"""Programs that are worth having for each multiprocessor: several run at once, and the last ones to end count less."""

_INTERPRETED_PROGRAMS = 8
"""Where there is nothing to be filled, so that small batches are cut up, too."""

_LEAST_LINES = 16
"""Rows times heads of a group of the smallest tile."""


@dataclass(frozen=True)
class SplitScratch:
    """Room for ``len(lse)`` results: one a row, query head and segment.

    out: float32, the results themselves, one after another. lse: float32, their log-sum-exps. programs: how many a
    launch should have at least; with fewer, keys are cut into segments. most: segments at most.
    """

    out: Tensor
    lse: Tensor
    programs: int
    most: int


def allocate_scratch(
    *, num_heads: int, num_kv_heads: int, head_size_v: int, max_rows: int, device: torch.device, interpreted: bool
) -> SplitScratch:
    """Scratch for steps of up to ``max_rows`` rows on ``device``.

    It holds what as many programs as ``device`` wants leave behind, each with a small tile of rows; larger tiles make
    do with fewer segments.
    """
    most = INTERPRETED_SEGMENTS if interpreted else MAX_SEGMENTS
    programs = _INTERPRETED_PROGRAMS
    if not interpreted:
        programs = _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    lines = max(_LEAST_LINES, num_heads // num_kv_heads)
    results = min(programs * lines, max_rows * num_heads * most)
    return SplitScratch(
        out=torch.empty(results * head_size_v, dtype=torch.float32, device=device),
        lse=torch.empty(results, dtype=torch.float32, device=device),
        programs=programs,
        most=most,
    )
