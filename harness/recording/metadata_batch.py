"""Reads a batch out of the attention metadata that a model runner hands to a builder.

Only tensors in the host's memory are read, so that nothing waits for a device. In the step itself they are only copied.
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
"""Fields of the metadata that, where they are given, change what is asked, and that no case key says."""


class Snapshot(NamedTuple):
    """What is copied of a batch's metadata during its step; the engine writes the next batch in the same place.

    ``starts``, ``totals``: ``query_start_loc`` and ``seq_lens``. ``pages``: the block table as far as it is used; None:
    the host has none.
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
        """Numbers that it holds."""
        return self.starts.size + self.totals.size + (0 if self.pages is None else self.pages.size)


def take_snapshot(metadata: Any, host_table: Lengths | None, block_size: int) -> Snapshot | str:
    """Return what is needed of vLLM's ``CommonAttentionMetadata``, or why no case describes the batch.

    ``host_table``: the block table in the host's memory; None: it is not there, so that shared prefixes are not seen.
    """
    given = vars(metadata)  # a property may wait for the device
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
    """Return the batch of a snapshot; None where no request has a new token.

    The others: see :class:`~attncheck.harness.recording.traffic.Batch`.
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
    """Return the first of these fields that lies in the host's memory."""
    for name in names:
        tensor = given.get(name)
        if tensor is not None and tensor.device.type == "cpu":
            lengths: Lengths = tensor.numpy()
            return lengths
    return None
