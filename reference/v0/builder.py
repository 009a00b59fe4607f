"""The metadata builder that most first-generation backends inherit: from the scheduler's groups to metadata.

The behaviour is vLLM's. The scheduler's and the runner's objects may be any objects with the attributes named here.
Only the runner's ``graph_block_tables`` is modified.

Slots and tables are lists of Python integers. A sequence at one step has ``context_len`` tokens in the cache and
``seq_len - context_len`` new ones. The slot of the token at position ``p`` is
``table[p // block_size] * block_size + p % block_size``.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.v0.contract import AttentionMetadataBuilder
from attncheck.reference.v0.metadata import MultiModalPlaceholderMap, TAttentionMetadata

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


Array = npt.NDArray[np.int32]


class _Sequence(NamedTuple):
    """One entry of a group's parallel lists, in the order of ``_PARALLEL``."""

    seq_id: Any
    input_tokens: Sequence[int]
    orig_seq_len: int
    seq_len: int
    query_len: int
    context_len: int
    window_blocks: int


_PARALLEL = (
    "seq_ids",
    "input_tokens",
    "orig_seq_lens",
    "seq_lens",
    "query_lens",
    "context_lens",
    "curr_sliding_window_blocks",
)


class CommonMetadataBuilder(AttentionMetadataBuilder[TAttentionMetadata]):
    """Collects the sequence groups of a step, in the given order, and builds metadata from them.

    A subclass sets ``_metadata_cls``, which ``build`` calls. Every step calls ``prepare()``, then ``build(...)``.
    """

    _metadata_cls: type[TAttentionMetadata]

    _prepared = False

    def __init__(self, input_builder: Any) -> None:
        """Read ``runner``, ``sliding_window`` and ``block_size`` of the input builder; ``build`` reads the rest."""
        self.input_builder = input_builder
        self.runner = input_builder.runner
        self.sliding_window: int | None = input_builder.sliding_window
        self.block_size: int = input_builder.block_size

    def prepare(self) -> None:
        """Start a batch with empty accumulators."""
        self.slot_mapping: list[int] = []
        self.prefill_seq_lens: list[int] = []
        self.context_lens: list[int] = []
        self.block_tables: list[Sequence[int]] = []
        self.curr_seq_lens: list[int] = []
        self.multimodal_placeholder_maps: defaultdict[str, MultiModalPlaceholderMap] = defaultdict(
            MultiModalPlaceholderMap
        )
        self.num_prefills = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0
        self._prepared = True

    def _add_seq_group(self, inter_data: Any, chunked_prefill_enabled: bool) -> None:
        """Collect one group: its counts, lengths, table rows and slots.

        inter_data: ``is_prompt``, ``prefix_cache_hit``, ``block_tables`` (None, or a dict by sequence id),
            ``multi_modal_placeholder_maps`` (None, or a dict by modality), and lists with one entry per sequence:
            ``seq_ids``, ``input_tokens`` (of which only the lengths matter), ``orig_seq_lens`` (the true lengths),
            ``seq_lens`` (after the sliding window), ``query_lens``, ``context_lens``, ``curr_sliding_window_blocks``.

        Rows are not copied. The window shortens only rows and the lengths of decodes: slots come from the whole table
        and the true length.

        A group is collected whole or not at all. Raise :class:`~attncheck.errors.ReferenceArgumentError` for lists of
        different lengths, a decode of other than one token, a required table that is absent, or invalid arguments of
        the slot functions. Raise ``RuntimeError`` without ``prepare``.
        """
        self._require_prepared()
        sequences = _sequences(inter_data)
        tables, is_prompt = inter_data.block_tables, inter_data.is_prompt
        is_profile_run = is_block_tables_empty(tables)
        rows, slots = [], list[int]()
        for seq in sequences:
            if not is_prompt and seq.query_len != 1:
                required = f"1 for a decode (sequence {seq.seq_id!r}, length {seq.seq_len}, context {seq.context_len})"
                raise ReferenceArgumentError("query_len", seq.query_len, required)
            reads_cache = inter_data.prefix_cache_hit or (
                not is_profile_run and (chunked_prefill_enabled or not is_prompt)
            )
            window_blocks = 0 if inter_data.prefix_cache_hit else seq.window_blocks
            rows.append(_last(block_table_of(tables, seq.seq_id), window_blocks) if reads_cache else [])
            start = compute_slot_mapping_start_idx(is_prompt, seq.query_len, seq.context_len, self.sliding_window)
            lengths = (seq.orig_seq_len, seq.context_len)
            compute_slot_mapping(is_profile_run, slots, seq.seq_id, *lengths, start, self.block_size, tables)

        self.context_lens += [seq.context_len for seq in sequences]
        self.block_tables += rows
        self.slot_mapping += slots
        if not is_prompt:
            self.num_decode_tokens += len(sequences)
            self.curr_seq_lens += [seq.seq_len for seq in sequences]
            return
        self.num_prefills += len(sequences)
        self.num_prefill_tokens += sum(len(seq.input_tokens) for seq in sequences)
        self.prefill_seq_lens += [seq.orig_seq_len for seq in sequences]
        for _ in sequences:
            for modality, placeholders in (inter_data.multi_modal_placeholder_maps or {}).items():
                self.multimodal_placeholder_maps[modality].extend(placeholders)

    def build(
        self, seq_lens: list[int], query_lens: list[int], cuda_graph_pad_size: int, batch_size: int
    ) -> TAttentionMetadata:
        """Return the step's metadata, with tensors on the runner's device.

        seq_lens, query_lens: of every sequence of the batch. They are not modified, and this method does not pad them.
        cuda_graph_pad_size: -1 without a captured graph, else the number of padding sequences up to ``batch_size``.
            With a graph, the rows are written in place into the first rows of the runner's ``graph_block_tables``,
            which it reads.

        ``_metadata_cls`` is called with these keywords:

        ======================================  ======================================================================
        ``num_prefills``                        prompt sequences
        ``num_prefill_tokens``                  their new tokens
        ``num_decode_tokens``                   decode sequences; with a graph ``batch_size``
        ``slot_mapping``                        int64 ``[tokens]``; with a graph, then one -1 per padding sequence
        ``seq_lens``, ``seq_lens_tensor``       the argument, and as int32
        ``max_query_len``                       longest query
        ``max_prefill_seq_len``                 longest prompt, 0 if there is none
        ``max_decode_seq_len``                  longest decode after the sliding window, 0 if there is none
        ``query_start_loc``, ``seq_start_loc``  int32, 0 and the running sums of ``query_lens``, ``seq_lens``
        ``context_lens_tensor``                 int32, one per collected sequence
        ``block_tables``                        int32 ``[sequences, longest]``, zeros after a row's end; with a
                                                graph ``[batch_size, width of the array]``, stale after a row's end
        ``multi_modal_placeholder_index_maps``  modality to ``IndexMap``
        ``enable_kv_scales_calculation``        True
        ``use_cuda_graph``                      whether there is a graph
        ======================================  ======================================================================

        With a padded graph, the runner's ``seq_lens`` includes the padding, and so do ``seq_lens_tensor`` and
        ``seq_start_loc``. ``query_start_loc`` and ``context_lens_tensor`` cover the real sequences only.

        Raise, before the runner's array changes, :class:`~attncheck.errors.ReferenceArgumentError` for lengths or sizes
        that do not fit, ``RuntimeError`` without ``prepare`` since the last ``build``, and ``TypeError`` if the
        subclass has no ``_metadata_cls``.
        """
        if getattr(self, "_metadata_cls", None) is None:
            raise TypeError(
                f"{type(self).__qualname__} does not set _metadata_cls, the class of the metadata it builds"
            )
        self._require_prepared()
        if cuda_graph_pad_size < -1:
            raise ReferenceArgumentError("cuda_graph_pad_size", cuda_graph_pad_size, "-1 (no graph) or at least 0")
        if min(query_lens, default=0) < 0 or max(query_lens, default=0) < 1:
            raise ReferenceArgumentError("query_lens", query_lens, "lengths of at least 0, one of them at least 1")
        try:
            for inter_data in self.input_builder.inter_data_list:
                self._add_seq_group(inter_data, self.input_builder.chunked_prefill_enabled)
        finally:
            self._prepared = False

        use_cuda_graph = cuda_graph_pad_size != -1
        padding = [PAD_SLOT_ID] * max(cuda_graph_pad_size, 0)
        index_maps = {modality: ranges.index_map() for modality, ranges in self.multimodal_placeholder_maps.items()}
        tensors = {
            "slot_mapping": self._tensor(self.slot_mapping + padding, torch.int64),
            "seq_lens_tensor": self._tensor(seq_lens, torch.int32),
            "query_start_loc": self._tensor([0, *accumulate(query_lens)], torch.int32),
            "seq_start_loc": self._tensor([0, *accumulate(seq_lens)], torch.int32),
            "context_lens_tensor": self._tensor(self.context_lens, torch.int32),
        }
        if use_cuda_graph:
            array = self.runner.graph_block_tables
            tables = write_graph_block_tables(array, self.block_tables, cuda_graph_pad_size, batch_size)
        else:
            tables = padded_block_tables(self.block_tables)
        # Copied even on the CPU: a step's metadata must not change when the next step fills the array.
        block_tables = torch.tensor(tables, device=self.runner.device)
        make: Callable[..., TAttentionMetadata] = self._metadata_cls
        return make(
            num_prefills=self.num_prefills,
            num_prefill_tokens=self.num_prefill_tokens,
            num_decode_tokens=batch_size if use_cuda_graph else self.num_decode_tokens,
            seq_lens=seq_lens,
            max_query_len=int(max(query_lens)),
            max_prefill_seq_len=int(max(self.prefill_seq_lens, default=0)),
            max_decode_seq_len=int(max(self.curr_seq_lens, default=0)),
            block_tables=block_tables,
            multi_modal_placeholder_index_maps=index_maps,
            enable_kv_scales_calculation=True,
            use_cuda_graph=use_cuda_graph,
            **tensors,
        )

    def _tensor(self, numbers: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self.runner.device)

    def _require_prepared(self) -> None:
        if not self._prepared:
            raise RuntimeError(f"{type(self).__qualname__}: every batch begins with a prepare() of its own")


def _sequences(inter_data: Any) -> list[_Sequence]:
    """Return the sequences of a group; raise if its lists have different lengths."""
    lists = {name: getattr(inter_data, name) for name in _PARALLEL}
    size = len(lists["seq_ids"])
    for name, entries in lists.items():
        if len(entries) != size:
            raise ReferenceArgumentError(f"len({name})", len(entries), f"{size}, one entry for each of seq_ids")
    return [_Sequence(*entries) for entries in zip(*lists.values(), strict=True)]


def _last(table: Sequence[int], window_blocks: int) -> Sequence[int]:
    """Return the last ``window_blocks`` blocks of a table, or the whole table if it is 0."""
    if window_blocks < 0:
        raise ReferenceArgumentError("curr_sliding_window_blocks", window_blocks, "at least 0")
    return table[-window_blocks:] if window_blocks else table


def padded_block_tables(rows: Sequence[Sequence[int]]) -> Array:
    """Return int32 ``[rows, longest row]`` with zeros after a row's end; no columns if every row is empty.

    >>> padded_block_tables([[], [5, 6], [7]]).tolist()
    [[0, 0], [5, 6], [7, 0]]
    """
    tables = np.zeros((len(rows), max(map(len, rows), default=0)), dtype=np.int32)
    for table, row in zip(tables, rows, strict=True):
        table[: len(row)] = row
    return tables


def write_graph_block_tables(
    graph_block_tables: Array, rows: Sequence[Sequence[int]], pad_size: int, batch_size: int
) -> Array:
    """Write the rows into the first rows of the array, in place, and return the view of its first ``batch_size`` rows.

    Nothing is cleared. After a row's end, in empty rows and in the ``pad_size`` padding rows, entries of earlier steps
    remain. A correct kernel does not read them, because of the lengths.

    All arguments are checked before the first write. Raise :class:`~attncheck.errors.ReferenceArgumentError` if rows
    and padding do not add up to ``batch_size``, or the array has too few rows or columns.

    >>> array = np.arange(90, 96, dtype=np.int32).reshape(3, 2)
    >>> write_graph_block_tables(array, [[5], []], 0, 2).tolist(), array.tolist()
    ([[5, 91], [92, 93]], [[5, 91], [92, 93], [94, 95]])
    """
    if len(rows) + pad_size != batch_size:
        required = f"{len(rows) + pad_size}: {len(rows)} sequences and cuda_graph_pad_size {pad_size}"
        raise ReferenceArgumentError("batch_size", batch_size, required)
    num_rows, width = graph_block_tables.shape
    if batch_size > num_rows:
        raise ReferenceArgumentError("batch_size", batch_size, f"at most {num_rows}, the rows of graph_block_tables")
    for index, row in enumerate(rows):
        if len(row) > width:
            allowed = f"at most {width}, the columns of graph_block_tables"
            raise ReferenceArgumentError(f"len(block_tables[{index}])", len(row), allowed)
    ready = [np.asarray(row, dtype=graph_block_tables.dtype) for row in rows]
    for table, blocks in zip(graph_block_tables, ready, strict=False):
        table[: len(blocks)] = blocks
    return graph_block_tables[:batch_size]
