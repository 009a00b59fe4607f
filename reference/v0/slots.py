"""Cache slots of a sequence's new tokens from its block table, as lists of Python integers.

A sequence at one step has ``context_len`` tokens in the cache and ``seq_len - context_len`` new ones. The slot of the
token at position ``p`` is ``table[p // block_size] * block_size + p % block_size``. The behaviour is that of vLLM's
first generation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attncheck.errors import ReferenceArgumentError

PAD_SLOT_ID = -1
"""The slot of a token that is not written to the cache."""

_COMPUTE_SLOT_MAPPING_NUMPY_NUMEL = 256
"""Number of slots from which on an array is faster than a loop; the slots are the same."""

BlockTables = Mapping[Any, Sequence[int] | None]
"""Sequence id to the physical blocks of the sequence in logical order, or to None if it has no cache."""


def is_block_tables_empty(block_tables: object) -> bool:
    """Return whether a step has no cache at all, which makes it a profile run.

    That is the case for None (memory profiling), and for a dict in which no sequence has a table (an embedding model,
    or no sequence). An empty list is a table. An object that is not a dict is not empty.

    >>> is_block_tables_empty({3: None}), is_block_tables_empty({3: []})
    (True, False)
    """
    if isinstance(block_tables, dict):
        return all(table is None for table in block_tables.values())
    return block_tables is None


def compute_slot_mapping_start_idx(
    is_prompt: bool,
    query_len: int,
    context_len: int,  # noqa: ARG001 - vLLM's signature
    sliding_window: int | None,
) -> int:
    """Return the position from which a prompt's tokens are stored: tokens before the last window are never read.

    The result is 0 for a decode, and without a window. It counts from the first token of the chunk, but callers use it
    as a position in the sequence. After a context it is therefore too small, and some tokens are stored but never read.
    ``context_len`` is not used.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for a window below 1.

    >>> compute_slot_mapping_start_idx(True, 10, 0, 8), compute_slot_mapping_start_idx(False, 1, 40, 8)
    (2, 0)
    """
    if sliding_window is None:
        return 0
    if sliding_window < 1:
        raise ReferenceArgumentError("sliding_window", sliding_window, "None, or at least 1")
    return max(0, query_len - sliding_window) if is_prompt else 0


def compute_slot_mapping(
    is_profile_run: bool,
    slot_mapping: list[int],
    seq_id: Any,
    seq_len: int,
    context_len: int,
    start_idx: int,
    block_size: int,
    block_tables: BlockTables | None,
) -> None:
    """Append the slots of one sequence's new tokens to ``slot_mapping``.

    A profile run appends ``seq_len`` times -1 (for all tokens, not only the new ones) and does not read
    ``block_tables``. Otherwise new tokens before ``start_idx`` get -1 and the others their slots. With a window, a
    cyclic table gives an early and a late position the same slot, and only the late one may be stored.

    The table of ``seq_id`` may be longer than needed. All arguments are checked before the first append. Raise
    :class:`~attncheck.errors.ReferenceArgumentError` for inconsistent lengths (not ``0 <= context_len <= seq_len`` or
    not ``0 <= start_idx <= seq_len``), a ``block_size`` below 1, a table that is absent or too short, or a negative
    block.

    >>> table, block_size = [7, 2, 5], 4
    >>> slots = []
    >>> for position in range(6, 10):
    ...     slots.append(table[position // block_size] * block_size + position % block_size)
    >>> mapping = []
    >>> compute_slot_mapping(False, mapping, 3, 10, 6, 0, block_size, {3: table})
    >>> mapping == slots == [10, 11, 20, 21]
    True
    """
    if context_len < 0:
        raise ReferenceArgumentError("context_len", context_len, "at least 0")
    if seq_len < context_len:
        raise ReferenceArgumentError("seq_len", seq_len, f"at least context_len {context_len}")
    if not 0 <= start_idx <= seq_len:
        raise ReferenceArgumentError("start_idx", start_idx, f"a position from 0 to seq_len {seq_len}")
    _require_block_size(block_size)
    if is_profile_run:
        slot_mapping.extend([PAD_SLOT_ID] * seq_len)
        return
    table = block_table_of(block_tables, seq_id)
    start = max(start_idx, context_len)
    _require_blocks(f"block_tables[{seq_id!r}]", table, start, seq_len, block_size)
    appended = [PAD_SLOT_ID] * max(0, start_idx - context_len)
    long = seq_len - start >= _COMPUTE_SLOT_MAPPING_NUMPY_NUMEL
    append = _compute_slot_mapping_numpy if long else _compute_slot_mapping_python
    append(appended, table, start, seq_len, block_size)
    slot_mapping.extend(appended)


def block_table_of(block_tables: BlockTables | None, seq_id: Any) -> Sequence[int]:
    """Return the table of a sequence; raise :class:`~attncheck.errors.ReferenceArgumentError` if it has none."""
    if block_tables is None:
        raise ReferenceArgumentError("block_tables", None, f"tables by sequence id, with one of sequence {seq_id!r}")
    if seq_id not in block_tables:
        raise ReferenceArgumentError("seq_id", seq_id, f"one with a block table: {list(block_tables)}")
    table = block_tables[seq_id]
    if table is None:
        raise ReferenceArgumentError(f"block_tables[{seq_id!r}]", None, "a table, unless no sequence has one")
    return table


def _compute_slot_mapping_python(
    slot_mapping: list[int], block_table: Sequence[int], range_start: int, range_end: int, block_size: int
) -> None:
    """Append the slots of the positions ``range_start`` to ``range_end - 1``, one by one."""
    _require_blocks("block_table", block_table, range_start, range_end, block_size)
    size = int(block_size)
    slot_mapping.extend([int(block_table[p // size]) * size + p % size for p in range(range_start, range_end)])


def _compute_slot_mapping_numpy(
    slot_mapping: list[int], block_table: Sequence[int], range_start: int, range_end: int, block_size: int
) -> None:
    """Append the same slots, computed as one array; the appended elements are Python integers."""
    _require_blocks("block_table", block_table, range_start, range_end, block_size)
    positions = np.arange(range_start, range_end, dtype=np.int64)
    blocks = np.asarray(block_table, dtype=np.int64)[positions // block_size]
    slot_mapping.extend((blocks * block_size + positions % block_size).tolist())


def _require_block_size(block_size: int) -> None:
    if block_size < 1:
        raise ReferenceArgumentError("block_size", block_size, "at least 1")


def _require_blocks(name: str, table: Sequence[int], start: int, end: int, block_size: int) -> None:
    """Raise unless the table has a non-negative block for each of the positions ``start`` to ``end - 1``."""
    _require_block_size(block_size)
    if start < 0:
        raise ReferenceArgumentError("range_start", start, "at least 0")
    if end <= start:
        return
    pages = -(-end // block_size)
    where = f"positions {start} to {end - 1} in blocks of {block_size}"
    if len(table) < pages:
        raise ReferenceArgumentError(
            name, table, f"at least {pages} blocks long for {where}; its length is {len(table)}"
        )
    for block in table[start // block_size : pages]:
        if block < 0:
            raise ReferenceArgumentError(name, table, f"without a negative block for {where}; it has {block}")
