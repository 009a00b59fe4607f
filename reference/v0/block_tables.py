"""The block tables of a batch as one array: padded to the longest, or in the persistent array of a captured graph.

Must not know: where the rows come from, devices.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attncheck.errors import ReferenceArgumentError

Array = npt.NDArray[np.int32]


def padded_block_tables(rows: Sequence[Sequence[int]]) -> Array:
    """``[rows, longest row]`` int32, zeros behind a row's end; no columns if every row is empty.

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
    """Writes the rows into the front of the array's rows, in place; returns the view of its first ``batch_size`` rows.

    Nothing is cleared: behind a row's end, in the place of an empty row and in the ``pad_size`` rows of padding stands
    what an earlier step left. Lengths keep a right kernel from reading it.

    Everything is checked before anything is written; raises :class:`~attncheck.errors.ReferenceArgumentError` where
    rows and padding are not ``batch_size``, or the array has too few rows or columns.

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
