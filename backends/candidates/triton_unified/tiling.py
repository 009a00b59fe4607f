"""How a launch is cut up: tiles, segments of the keys, and the memory in which segments leave their results.

What is chosen here is frozen by a CUDA graph, so nothing follows from lengths; ``max_query_len`` is a bound of them.
Scratch is kept from step to step, so that a graph finds it where it was at capture. No Triton is imported.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_SEGMENTS = 32
"""Segments of one row's keys at most; the kernel that merges them holds all of them at once."""

INTERPRETED_SEGMENTS = 4
"""Likewise where kernels are interpreted, which does one program after another."""

_STAGES = 5
"""Of the loop over keys. Table entries are fetched two stages ahead of keys and values, and these two ahead of their
use: with one stage less, one tile is on its way in place of two."""

_PROGRAMS_PER_PROCESSOR = 16
"""Programs that are worth having for each multiprocessor: several run at once, and the last ones to end count less."""

_INTERPRETED_PROGRAMS = 8
"""Where there is nothing to be filled, so that small batches are cut up, too."""

_LEAST_LINES = 16
"""Rows times heads of a group of the smallest tile."""

_SMALL, _LARGE = 64, 128
"""The other sizes of a tile: few sizes are few kernels to compile."""

_BESIDE = 8 * 1024
"""Bytes of shared memory that a program takes beside its tiles of queries, keys and values."""

_HOPPER = 200 * 1024
"""Bytes of shared memory that only GPUs have which multiply out of it (compute capabilities 9.0 and 10.0).

Others multiply out of registers: of 128 lines, each of 8 warps decodes every code of a tile, and the kernel
spills and takes three times as long to compile.
"""

_WAVES = 8
"""The wanted programs are about so many times those that run at once."""

_LEAST_TILES = 4
"""Tiles of a segment once all multiprocessors have work: what a segment costs beside its tiles is no longer free."""


@dataclass(frozen=True)
class Tiling:
    """One launch of the attention kernel.

    block_m: lines of a tile, ``block_q`` rows times the query heads of a group, and a rest. block_n: keys of a tile.
    one_block: no request has more rows than ``block_q``, and requests number the programs.
    """

    block_m: int
    block_q: int
    block_n: int
    one_block: bool
    num_warps: int
    num_stages: int

    def num_blocks(self, num_rows: int, num_reqs: int) -> int:
        """Blocks of rows that ``num_reqs`` requests of ``num_rows`` rows in all can have at most."""
        return num_reqs if self.one_block else num_rows // self.block_q + num_reqs


def power_of_two(number: int) -> int:
    """The least power of two that is no less than ``number``.

    >>> [power_of_two(n) for n in (1, 2, 3, 80)]
    [1, 2, 4, 128]
    """
    return 1 << max(0, number - 1).bit_length()


def tile_width(head_size: int) -> int:
    """Columns of a tile that holds heads of ``head_size``; products need 16."""
    return max(16, power_of_two(head_size))


def tiles_size(block_m: int, block_n: int, num_stages: int, head_size: int, itemsize: int) -> int:
    """Estimate the bytes of shared memory that a program takes."""
    lines = block_m + 2 * max(1, num_stages - 1) * block_n  # one tile of queries; of keys and of values at least one
    return lines * itemsize * tile_width(head_size) + _BESIDE


def choose_tiling(
    *,
    max_query_len: int,
    group: int,
    head_size: int,
    itemsize: int,
    is_coded: bool,
    shared_memory: int,
    interpreted: bool,
) -> Tiling:
    """Tiles for requests of up to ``max_query_len`` rows, ``group`` query heads a KV head, heads of ``head_size``.

    ``itemsize``: bytes of what is multiplied, 2 for tensor cores, 4 for float32. ``is_coded``: keys and values are made
    of codes. ``shared_memory``: bytes of it that a program may have.
    """
    lines = max_query_len * group
    least = max(16, power_of_two(group))
    if interpreted:
        block_m, block_n = max(least, min(64, power_of_two(lines))), 32
        return _tiling(block_m, block_n, max_query_len, group, num_warps=1, num_stages=1)
    if itemsize > 2:
        # Without tensor cores; larger tiles would not fit the registers.
        block_m, block_n, num_stages = least, (32 if head_size <= 128 else 16), 1
    else:
        # Decodes have small tiles, for which products cost nothing; prompts as large ones as the registers hold.
        most = _SMALL if is_coded and shared_memory < _HOPPER else _LARGE
        block_m = max(least, next((size for size in (_LEAST_LINES, _SMALL) if lines <= size), most))
        block_n = 64 if head_size <= 128 else 32
        num_stages = _STAGES if head_size <= 128 else _STAGES - 1
    while tiles_size(block_m, block_n, num_stages, head_size, itemsize) > shared_memory:
        if num_stages > 2:  # with one stage less, none is fetched ahead, in the same room
            num_stages -= 1
        elif block_m > max(least, _SMALL):
            block_m = max(least, _SMALL)
        elif block_n > 16:
            block_n //= 2
        else:
            break
    num_warps = 8 if block_m > _SMALL else 4
    return _tiling(block_m, block_n, max_query_len, group, num_warps=num_warps, num_stages=num_stages)


def _tiling(block_m: int, block_n: int, max_query_len: int, group: int, *, num_warps: int, num_stages: int) -> Tiling:
    block_q = block_m // group
    # Larger tiles of more rows have one kernel, which looks for the request of a block.
    one_block = max_query_len <= block_q and (max_query_len == 1 or block_m == _LEAST_LINES)
    return Tiling(block_m, block_q, block_n, one_block, num_warps, num_stages)


def choose_segments(*, programs: int, wanted: int, results: int, room: int, keys: int, block_n: int, most: int) -> int:
    """Into how many segments every row's keys are cut: a power of two, at most ``most``.

    So many that about ``wanted`` programs run in place of ``programs``, and that their results (``results`` a segment,
    of which there is ``room`` for so many) have a place. Each has a tile of the ``keys`` there may be, and four of them
    once about as many programs run as run at once.

    >>> choose_segments(programs=8, wanted=264, results=32, room=4096, keys=8192, block_n=64, most=32)
    32
    """
    segments = 1
    while 2 * segments <= most:
        doubled = 2 * segments
        tiles = 1 if segments * programs < wanted // _WAVES else _LEAST_TILES
        if doubled * programs > wanted or doubled * results > room or doubled * tiles * block_n > keys:
            break
        segments = doubled
    return segments


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
