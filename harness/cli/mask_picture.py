"""Draws an attention mask as characters. Loads no torch.

``#``: visible. ``.``: hidden. ``+``: a cell of several rows or keys, some of them visible.
"""

from collections.abc import Sequence

from attncheck.reference.spec import AttentionType, FastPrefillOptions, LayerSpec, PathSpec, RequestSpec, TreeOptions
from attncheck.reports.analysis.phrases import plural

_HIDDEN, _SOME, _VISIBLE = ".+#"

MOST_LINES = 16
"""Maximum number of lines of a picture; if there are more rows, each line shows several."""


def num_keys(layer: LayerSpec, request: RequestSpec) -> int:
    """Return the number of keys of a request: of the encoder in cross attention, else ``seq_len``."""
    is_cross = layer.attn_type == AttentionType.ENCODER_DECODER
    return (request.encoder_len or 0) if is_cross else request.total_len


def num_rows(path: PathSpec, request: RequestSpec) -> int:
    """Return the number of rows that a request computes: the last ones in a fast prefill, else all new tokens."""
    options = path.options
    return min(options.rows, request.query_len) if isinstance(options, FastPrefillOptions) else request.query_len


def visible_keys(layer: LayerSpec, position: int, keys: int) -> range:
    """Return which of ``keys`` keys the row at ``position`` sees, not counting what a tree mask hides.

    >>> visible_keys(LayerSpec(num_heads=1, num_kv_heads=1, head_size=8, sliding_window=3), 5, 9)
    range(3, 6)
    """
    first, end = 0, keys
    left, right = layer.window
    if layer.is_causal:
        end = min(end, position + 1)
    if right >= 0:
        end = min(end, position + right + 1)
    if left >= 0:
        first = max(first, position - left)
    if layer.attn_chunk_size is not None:
        chunk = position // layer.attn_chunk_size
        first = max(first, chunk * layer.attn_chunk_size)
        end = min(end, (chunk + 1) * layer.attn_chunk_size)
    return range(first, max(first, end))


def hidden_nodes(path: PathSpec, row: int) -> list[int]:
    """Return the draft tokens of a tree that ``row`` must not see: all but itself and its ancestors.

    Empty without a tree.
    """
    if not isinstance(path.options, TreeOptions):
        return []
    parents, node = path.options.parents, row
    seen = {row}
    while (node := parents[node]) >= 0:
        seen.add(node)
    return [other for other in range(len(parents)) if other not in seen]


def draw_mask(layer: LayerSpec, path: PathSpec, request: RequestSpec, width: int) -> list[str]:
    """Return the lines of the picture, at most ``width`` characters wide; rows run downwards, keys to the right.

    The first line has the number of rows and keys, and how many of them a character covers.
    """
    keys, rows = num_keys(layer, request), num_rows(path, request)
    tall, wide = -(-rows // MOST_LINES), max(-(-keys // width), 1)
    scale = f", a character is {tall} x {wide}" if tall * wide > 1 else ""
    lines = [f"{plural(rows, 'row')} x {plural(keys, 'key')}{scale}"]
    start = keys - rows  # the rows are aligned to the end of the keys
    for top in range(0, rows, tall):
        block = range(top, min(top + tall, rows))
        seen = [visible_keys(layer, start + row, keys) for row in block]
        hidden = [[start + node for node in hidden_nodes(path, row)] for row in block]
        cells = (range(left, min(left + wide, keys)) for left in range(0, keys, wide))
        lines.append("".join(_character(cell, seen, hidden) for cell in cells))
    return lines


def _character(cell: range, seen: Sequence[range], hidden: Sequence[Sequence[int]]) -> str:
    """Return the character for the keys of ``cell``; ``seen``, ``hidden``: the visible and hidden keys of each row."""
    count = 0
    for own, nodes in zip(seen, hidden, strict=True):
        common = range(max(own.start, cell.start), min(own.stop, cell.stop))
        count += len(common) - sum(node in common for node in nodes)
    if not count:
        return _HIDDEN
    return _VISIBLE if count == len(cell) * len(seen) else _SOME
