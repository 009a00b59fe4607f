"""How a launch is divided: tiles, segments of the keys, and the memory for the results of segments.

A CUDA graph freezes these choices, so none depends on lengths; ``max_query_len`` is an upper bound of them. Scratch is
kept between steps, so that its address is the same as at capture. No Triton is imported.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_SEGMENTS = 32
"""Maximum segments of one row's keys; the merging kernel holds all of them at once."""

INTERPRETED_SEGMENTS = 4
"""The same if kernels are interpreted, one program after another."""

_STAGES = 5
"""Pipeline stages of the loop over keys.

Table entries are fetched two stages before keys and values, and these two stages before their use. With one stage less,
only one tile is loaded ahead instead of two.
"""

_PROGRAMS_PER_PROCESSOR = 16
"""Wanted programs per multiprocessor: several run at once, and more of them shorten the tail of a launch."""

_INTERPRETED_PROGRAMS = 8
"""Wanted programs if interpreted, where no device is to be filled: enough to split small batches, too."""

_LEAST_LINES = 16
"""Rows times heads of a group in the smallest tile."""

_SMALL, _LARGE = 64, 128
"""The other tile sizes; few sizes mean few kernels to compile."""

_BESIDE = 8 * 1024
"""Bytes of shared memory that a program takes besides its tiles of queries, keys and values."""

_HOPPER = 200 * 1024
"""Bytes of shared memory that only GPUs have which multiply from it (compute capabilities 9.0 and 10.0).

Other GPUs multiply from registers. With 128 lines each of 8 warps then decodes every code of a tile, the kernel spills,
and it takes three times as long to compile.
"""

_WAVES = 8
"""About the ratio of wanted programs to programs that run at once."""

_LEAST_TILES = 4
"""Minimum tiles per segment once all multiprocessors have work; from then on a segment's own overhead counts."""


@dataclass(frozen=True)
class Tiling:
    """Tile sizes of one launch of the attention kernel.

    block_m: lines of a tile, ``block_q`` rows times the query heads of a group, and a remainder.
    block_n: keys of a tile.
    one_block: no request has more rows than ``block_q``, and programs are numbered by request.
    """

    block_m: int
    block_q: int
    block_n: int
    one_block: bool
    num_warps: int
    num_stages: int

    def num_blocks(self, num_rows: int, num_reqs: int) -> int:
        """Return the maximum number of row blocks of ``num_reqs`` requests with ``num_rows`` rows in all."""
        return num_reqs if self.one_block else num_rows // self.block_q + num_reqs


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``.

    >>> [power_of_two(n) for n in (1, 2, 3, 80)]
    [1, 2, 4, 128]
    """
    return 1 << max(0, number - 1).bit_length()


def tile_width(head_size: int) -> int:
    """Return the columns of a tile for heads of ``head_size``; products need at least 16."""
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
    """Return the tiles for up to ``max_query_len`` rows, ``group`` query heads per KV head, heads of ``head_size``.

    ``itemsize``: bytes per multiplied element, 2 for tensor cores, 4 for float32. ``is_coded``: keys and values are
    decoded from FP8 codes. ``shared_memory``: bytes of shared memory available to a program.
    """
    lines = max_query_len * group
    least = max(16, power_of_two(group))
    if interpreted:
        block_m, block_n = max(least, min(64, power_of_two(lines))), 32
        return _tiling(block_m, block_n, max_query_len, group, num_warps=1, num_stages=1)
    if itemsize > 2:
        # Without tensor cores, larger tiles would not fit the registers.
        block_m, block_n, num_stages = least, (32 if head_size <= 128 else 16), 1
    else:
        # Decodes have small tiles, whose products cost almost nothing. Prompts have the largest that fit the registers.
        most = _SMALL if is_coded and shared_memory < _HOPPER else _LARGE
        block_m = max(least, next((size for size in (_LEAST_LINES, _SMALL) if lines <= size), most))
        block_n = 64 if head_size <= 128 else 32
        num_stages = _STAGES if head_size <= 128 else _STAGES - 1
    while tiles_size(block_m, block_n, num_stages, head_size, itemsize) > shared_memory:
        if num_stages > 2:  # with one stage less, none would be prefetched, in the same memory
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
    # Larger tiles of more rows share one kernel, which searches for the request of a block.
    one_block = max_query_len <= block_q and (max_query_len == 1 or block_m == _LEAST_LINES)
    return Tiling(block_m, block_q, block_n, one_block, num_warps, num_stages)


def choose_segments(*, programs: int, wanted: int, results: int, room: int, keys: int, block_n: int, most: int) -> int:
    """Return the number of segments of every row's keys: a power of two, at most ``most``.

    The number is chosen so that about ``wanted`` programs run instead of ``programs``, and that the results fit
    (``results`` per segment, ``room`` in all). Each segment has at least one tile of the possible ``keys``, and at
    least four once about as many programs run as run at once.

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
    """Memory for ``len(lse)`` results: one per row, query head and segment.

    out: float32, the results themselves, one after another.
    lse: float32, their log-sum-exps.
    programs: wanted programs of a launch; with fewer, keys are split into segments.
    most: maximum segments.
    """

    out: Tensor
    lse: Tensor
    programs: int
    most: int


def allocate_scratch(
    *, num_heads: int, num_kv_heads: int, head_size_v: int, max_rows: int, device: torch.device, interpreted: bool
) -> SplitScratch:
    """Return scratch for steps of up to ``max_rows`` rows on ``device``.

    It holds the results of the wanted number of programs, each with a small tile of rows; larger tiles use fewer
    segments.
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
