"""Keeps as many batches of an engine as a time limit allows, and counts them many at once.

An exception here ends the recording, never the engine's step.
"""

import copy
import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from attncheck.harness.recording.metadata_batch import Snapshot, batch_of, take_snapshot
from attncheck.harness.recording.traffic import LayerKind, Lengths, Traffic

LOGGER = logging.getLogger("attncheck")

MOST_NS = 50_000
MOST_SHARE = 0.01
"""Limits of the average recording time per batch: ``MOST_NS``, or this share of the time between batches.

The larger one applies.
"""

_IDLE_NS = 1_000_000_000
"""A longer gap between two batches means that the engine was idle, and is left out of the average."""

_SMOOTHING = 16
"""Number of batches over which the average time between batches is taken."""

_MOST_PENDING = 64
_MOST_NUMBERS = 2**20
"""Maximum batches kept before they are counted, and maximum numbers in them."""


@dataclass(frozen=True)
class Group:
    """Layers that share one builder.

    ``kinds``: kinds of layers, with the number of each. ``left_out``: reasons why other layers have no kind, with
    counts.
    ``block_size``: page size of the builder's block table. ``drafts``: maximum draft tokens per request.
    """

    kinds: tuple[tuple[LayerKind, int], ...]
    left_out: dict[str, int]
    block_size: int
    drafts: int


class _Pending(NamedTuple):
    """A batch that is not counted yet. It represents ``calls`` calls per layer."""

    group: Group
    snapshot: Snapshot
    cascade: int
    graph_mode: str
    calls: int


@dataclass
class BatchRecorder:
    """The state of a recording.

    ``every``: at most one in this many batches is counted, and represents as many.
    ``on_first``: called before the first batch.
    ``seen``, ``looked_at``: number of batches, and of those kept for counting. ``spent_ns``: CPU time of the recording.
    ``host_tables``: block tables in host memory, by the address of their tensor on the device.
    """

    traffic: Traffic
    every: int = 1
    on_first: Callable[[], None] = lambda: None
    seen: int = 0
    looked_at: int = 0
    spent_ns: int = 0
    backends: dict[str, None] = field(default_factory=dict)
    is_on: bool = True
    graph_mode: str = ""
    host_tables: dict[int, Lengths] = field(default_factory=dict)
    _unseen: int = 0
    _last: tuple[int, Any] | None = None
    _last_ns: int = 0
    _gap_ns: float = 0.0
    _first_ns: int = 0
    _pending: list[_Pending] = field(default_factory=list)
    _pending_size: int = 0
    _random: random.Random = field(default_factory=lambda: random.Random(0))  # noqa: S311 (chooses batches, no secrets)

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Ignore batches during the context: they are dummy batches, or those of a drafter."""
        self._unseen += 1
        try:
            yield
        finally:
            self._unseen -= 1

    def see(self, group: Group, common_prefix_len: int, metadata: Any) -> None:
        """Keep one batch for counting if it is real and is sampled."""
        if not self.is_on or self._unseen:
            return
        began = time.thread_time_ns()
        try:
            if not self.seen:
                self.on_first()
            self.seen += 1
            self._last = common_prefix_len, metadata
            calls = self._stride()
            if self._random.random() * calls < 1:
                self.looked_at += 1
                self._keep(group, common_prefix_len, metadata, calls)
                if len(self._pending) >= _MOST_PENDING or self._pending_size >= _MOST_NUMBERS:
                    self.count_pending()
        except Exception:
            self.is_on = False
            LOGGER.exception("attncheck stops recording; the engine is not affected")
        self.spent_ns += time.thread_time_ns() - began
        self._first_ns = self._first_ns or self.spent_ns  # left out of the average: the first is slowest

    def see_update(self, group: Group, block_table: Any) -> None:
        """Keep the last batch again, for layers that reuse the metadata of others with another block table."""
        if self._last is not None and self.is_on:
            common_prefix_len, metadata = self._last
            metadata = copy.copy(metadata)
            metadata.block_table_tensor = block_table
            self.see(group, common_prefix_len, metadata)

    def count_pending(self) -> None:
        """Count the batches that were kept; many at once cost far less time per batch."""
        pending, self._pending, self._pending_size = self._pending, [], 0
        for group, snapshot, cascade, graph_mode, calls in pending:
            batch = batch_of(snapshot, group.block_size, cascade=cascade, drafts=group.drafts, graph_mode=graph_mode)
            if batch is not None:
                self.traffic.add(batch, [(kind, layers * calls) for kind, layers in group.kinds])

    def _stride(self) -> int:
        """Return how many batches a batch kept now represents, so that recording stays within its time limit."""
        now = time.perf_counter_ns()
        gap, self._last_ns = now - self._last_ns, now
        if gap < _IDLE_NS:
            self._gap_ns += (gap - self._gap_ns) / min(self.seen, _SMOOTHING)
        look_ns = (self.spent_ns - self._first_ns) / max(self.looked_at, 1)
        return max(self.every, math.ceil(look_ns / max(MOST_NS, MOST_SHARE * self._gap_ns)))

    def _keep(self, group: Group, common_prefix_len: int, metadata: Any, calls: int) -> None:
        for reason, layers in group.left_out.items():
            self.traffic.leave_out(reason, layers * calls)
        if not group.kinds:
            return
        table = self._host_table(vars(metadata).get("block_table_tensor"))
        snapshot = take_snapshot(metadata, table, group.block_size)
        if isinstance(snapshot, str):
            self.traffic.leave_out(snapshot, sum(layers for _, layers in group.kinds) * calls)
            return
        self._pending.append(_Pending(group, snapshot, int(common_prefix_len), self.graph_mode, calls))
        self._pending_size += snapshot.size

    def _host_table(self, table: Any) -> Lengths | None:
        if table is None:
            return None
        pages: Lengths | None = table.numpy() if table.device.type == "cpu" else self.host_tables.get(table.data_ptr())
        return pages
