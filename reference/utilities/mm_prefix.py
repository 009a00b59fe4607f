"""Ranges of a prompt with bidirectional attention, such as images in a prefix-LM, in the form kernels take.

The behaviour is vLLM's. A range ``(first, last)`` holds two positions of its request, both inclusive. Ranges of one
request do not overlap. A range with ``first >= last`` has no effect.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.utilities.host_batch import host_array, steps_of

PrefixRanges = Mapping[int, Sequence[tuple[int, int]]]
"""The ranges by request index; requests without ranges may be absent."""


def compute_mm_prefix_range_tensor(
    mm_prefix_range: PrefixRanges | None, num_seqs: int, device: torch.device
) -> Tensor | None:
    """Return int32 ``[num_seqs, most ranges of a request, 2]`` on ``device``, padded with 0, or None if it is all 0.

    >>> compute_mm_prefix_range_tensor({1: [(2, 5)]}, 2, torch.device("cpu")).tolist()
    [[[0, 0]], [[2, 5]]]
    """
    ranges = [list((mm_prefix_range or {}).get(request, ())) for request in range(num_seqs)]
    table = torch.zeros(num_seqs, max(map(len, ranges), default=0), 2, dtype=torch.int32)
    for row, own in zip(table, ranges, strict=True):
        row[: len(own)] = torch.tensor(own, dtype=torch.int32).view(-1, 2)
    return table.to(device) if table.any() else None


def fill_mm_prefix_query_ranges(
    out: npt.NDArray[np.int32],
    mm_prefix_range: PrefixRanges | None,
    query_start_loc_cpu: Tensor,
    seq_lens_cpu: Tensor,
) -> int:
    """Write the range of each new token, ``(-1, -1)`` for none, to the front of ``out``; return the number of rows.

    out: ``[at least the new tokens, 2]`` int32. If no range holds a new token, it is not written and 0 is returned.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` if ``out`` has too few rows.
    """
    starts = host_array("query_start_loc_cpu", query_start_loc_cpu)
    query_lens = steps_of("query_start_loc_cpu", starts)
    seq_lens = host_array("seq_lens_cpu", seq_lens_cpu, len(query_lens))
    if not mm_prefix_range or not starts[-1]:
        return 0
    if len(out) < starts[-1]:
        raise ReferenceArgumentError("out.shape", out.shape, f"[at least {starts[-1]}, 2]")
    rows = np.full((int(starts[-1]), 2), -1, dtype=np.int32)
    for request, ranges in mm_prefix_range.items():
        end = int(starts[request + 1])
        positions = np.arange(int(seq_lens[request] - query_lens[request]), int(seq_lens[request]))
        for first, last in ranges:
            if first < last:
                rows[int(starts[request]) : end][(first <= positions) & (positions <= last)] = first, last
    if not (rows >= 0).any():
        return 0
    out[: len(rows)] = rows
    return len(rows)
