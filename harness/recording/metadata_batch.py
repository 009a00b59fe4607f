"""Reads a batch from the attention metadata that a model runner passes to a builder.

Only tensors in host memory are read, so that nothing synchronises with a device. During the step they are only copied.
"""

from typing import Any, NamedTuple

import numpy as np

from attncheck.harness.recording.traffic import Batch, Lengths, shared_prefix

_NO_WORD = (
    "mm_req_doc_ranges",
    "dcp_local_seq_lens",
    "encoder_seq_lens",
    "rswa_prefix_lens",
    "num_logits_indices",
)
"""Fields of the metadata that change the correct result if they are set, and that no case key expresses."""


class Snapshot(NamedTuple):
    """Copies of a batch's metadata, taken during its step because the engine reuses the buffers for the next batch.

    ``starts``, ``totals``: ``query_start_loc`` and ``seq_lens``. ``pages``: the used part of the block table, or None
    if host memory has no copy of it.
    """

    starts: Lengths
    totals: Lengths
    pages: Lengths | None
    table_width: int
    table_stride: int
    num_actual_tokens: int
    causal: bool

    @property
    def size(self) -> int:
        """Total number of elements."""
        return self.starts.size + self.totals.size + (0 if self.pages is None else self.pages.size)


def take_snapshot(metadata: Any, host_table: Lengths | None, block_size: int) -> Snapshot | str:
    """Return a snapshot of vLLM's ``CommonAttentionMetadata``, or the reason why no case describes the batch.

    ``host_table``: the block table in host memory, or None; without it shared prefixes are not detected.
    """
    given = vars(metadata)  # reading a property could synchronise with the device
    for name in _NO_WORD:
        value = given.get(name)
        if any(value.values()) if isinstance(value, dict) else value is not None:
            return f"no case describes {name}"
    causal = given.get("causal", True)
    if not isinstance(causal, bool):
        return "no case describes causal for each request"
    starts = _on_host(given, "query_start_loc_cpu", "query_start_loc")
    totals = _on_host(given, "seq_lens", "seq_lens_cpu_upper_bound", "_seq_lens_cpu", "seq_lens_cpu")
    if starts is None or totals is None:
        return "the lengths are on the device alone"
    table, columns = given.get("block_table_tensor"), -(-int(metadata.max_seq_len) // block_size)
    return Snapshot(
        starts=starts.copy(),
        totals=totals.copy(),
        pages=None if host_table is None else host_table[: starts.size - 1, :columns].copy(),
        table_width=0 if table is None else table.shape[1],
        table_stride=0 if table is None else table.stride(0),
        num_actual_tokens=int(metadata.num_actual_tokens),
        causal=causal,
    )


def batch_of(snapshot: Snapshot, block_size: int, *, cascade: int, drafts: int, graph_mode: str) -> Batch | None:
    """Return the batch of a snapshot, or None if no request has a new token.

    ``cascade``, ``drafts``, ``graph_mode``: see :class:`~attncheck.harness.recording.traffic.Batch`.
    """
    query_lens = np.diff(snapshot.starts)
    live = np.flatnonzero(query_lens)
    if not live.size:
        return None
    padded = query_lens.size - live.size
    seq_lens, query_lens = snapshot.totals[live], query_lens[live]
    pages_shared, has_null_pages = 0, False
    sharers: tuple[int, ...] = ()
    if snapshot.pages is not None and snapshot.pages.size:
        pages = snapshot.pages[live]
        has_null_pages = not pages[:, 0].all()
        pages_shared, sharers = shared_prefix(pages, (seq_lens - query_lens) // block_size)
    return Batch(
        query_lens=query_lens,
        seq_lens=seq_lens,
        padding_requests=padded,
        padding_tokens=max(0, snapshot.num_actual_tokens - int(snapshot.starts[-1])),
        table_width=snapshot.table_width,
        table_stride=snapshot.table_stride,
        prefix=pages_shared * block_size,
        sharers=sharers,
        has_null_pages=has_null_pages,
        cascade=cascade,
        drafts=drafts,
        causal=snapshot.causal,
        graph_mode=graph_mode,
    )


def _on_host(given: dict[str, Any], *names: str) -> Lengths | None:
    for name in names:
        tensor = given.get(name)
        if tensor is not None and tensor.device.type == "cpu":
            lengths: Lengths = tensor.numpy()
            return lengths
    return None
