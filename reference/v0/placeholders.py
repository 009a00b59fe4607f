"""Mapping from rows of multi-modal embeddings to the rows of a token batch that they replace.

The behaviour is vLLM's.
"""

from typing import Any, NamedTuple

from attncheck.errors import ReferenceArgumentError


class MultiModalPlaceholderMap:
    """Ranges of embedding rows (source) and token rows (destination), matched in order.

    A new map is empty. ``src_len`` and ``dest_len`` are the row counts of the whole source and destination tensors,
    which the ranges need not cover.

    >>> from types import SimpleNamespace
    >>> image = SimpleNamespace(src_ranges=[range(2)], src_len=2, dest_ranges=[range(1, 3)], dest_len=5)
    >>> collected = MultiModalPlaceholderMap()
    >>> collected.extend(image)
    >>> collected.extend(image)
    >>> collected.index_map()
    IndexMap(src=[0, 1, 2, 3], dest=[1, 2, 6, 7])
    """

    class IndexMap(NamedTuple):
        """Flat indices: row ``src[i]`` of the embeddings goes to row ``dest[i]`` of the batch."""

        src: list[int]
        dest: list[int]

    src_ranges: list[range]
    src_len: int
    dest_ranges: list[range]
    dest_len: int

    def __init__(self) -> None:
        self.src_ranges, self.src_len = [], 0
        self.dest_ranges, self.dest_len = [], 0

    def extend(self, other: Any) -> None:
        """Append ``other`` as if its tensors followed this map's: its ranges are shifted by the current lengths.

        other: any object with the four attributes; it is not modified.
        """
        self.src_ranges.extend([_moved(rows, self.src_len) for rows in other.src_ranges])
        self.dest_ranges.extend([_moved(rows, self.dest_len) for rows in other.dest_ranges])
        self.src_len += other.src_len
        self.dest_len += other.dest_len

    def index_map(self) -> IndexMap:
        """Return the flattened ranges; raise ReferenceArgumentError if the two sides differ in the number of rows."""
        src = [row for rows in self.src_ranges for row in rows]
        dest = [row for rows in self.dest_ranges for row in rows]
        if len(src) != len(dest):
            raise ReferenceArgumentError("src_ranges", f"{len(src)} rows", f"as many as dest_ranges has: {len(dest)}")
        return self.IndexMap(src, dest)


IndexMap = MultiModalPlaceholderMap.IndexMap


def _moved(rows: range, offset: int) -> range:
    return range(rows.start + offset, rows.stop + offset, rows.step)
