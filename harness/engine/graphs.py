"""Observes layers that run in a captured CUDA graph, whose Python is called at the capture alone."""

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attncheck.harness.engine.events import LayerRows

# A FULL graph contains the attention of all layers. While it is captured, copies of query, key, value and output are
# captured with each layer. A replay fills the copies, and they are observed after it. A piecewise graph contains no
# attention, so that the layers between its pieces are observed as without a graph.


class GraphCopies:
    """Passes the rows of each layer to ``receive``: at once, or after the replay of the graph that computes them.

    All graphs share one buffer for each tensor of a
    layer, as large as the largest graph needs. vLLM captures the largest graph first.
    """

    def __init__(self, receive: Callable[[LayerRows], None]) -> None:
        self._receive = receive
        self._copies: WeakKeyDictionary[Any, list[LayerRows]] = WeakKeyDictionary()
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._captured: Any = None
        self._restore: Callable[[], None] = lambda: None

    def layer_rows(self, rows: LayerRows) -> None:
        """Take what a layer computes, or what it will compute in each replay."""
        if self._captured is None:
            self._receive(rows)
            return
        copies = rows._replace(
            query=self._copy(rows.layer, "query", rows.query),
            key=None if rows.key is None else self._copy(rows.layer, "key", rows.key),
            value=None if rows.value is None else self._copy(rows.layer, "value", rows.value),
            output=self._copy(rows.layer, "output", rows.output),
        )
        self._copies.setdefault(self._captured, []).append(copies)

    def install(self, graph_class: type[Any] = torch.cuda.CUDAGraph) -> None:
        """Watch the graphs that are captured and replayed from now on."""
        originals = {name: graph_class.__dict__[name] for name in ("capture_begin", "capture_end", "replay")}

        def capture_begin(graph: Any, *args: Any, **keywords: Any) -> Any:
            started = originals["capture_begin"](graph, *args, **keywords)
            self._copies.pop(graph, None)
            self._captured = graph
            return started

        def capture_end(graph: Any, *args: Any, **keywords: Any) -> Any:
            self._captured = None
            return originals["capture_end"](graph, *args, **keywords)

        def replay(graph: Any, *args: Any, **keywords: Any) -> Any:
            replayed = originals["replay"](graph, *args, **keywords)
            for copies in self._copies.get(graph, ()):
                self._receive(copies)
            return replayed

        for around in (capture_begin, capture_end, replay):
            original = originals[around.__name__]
            setattr(graph_class, around.__name__, functools.wraps(original)(around))

        def restore() -> None:
            for name, original in originals.items():
                setattr(graph_class, name, original)

        self._restore = restore

    def remove(self) -> None:
        """Restore the methods of the graph class. Graphs keep the copies that were captured with them."""
        self._restore()

    def _copy(self, layer: str, name: str, rows: Tensor) -> Tensor:
        """Copy rows to the buffer of the layer. This happens in a capture, so that each replay copies them again."""
        buffer = self._buffers.get((layer, name))
        if (
            buffer is None
            or len(buffer) < len(rows)
            or buffer.shape[1:] != rows.shape[1:]
            or buffer.dtype != rows.dtype
        ):
            buffer = self._buffers[layer, name] = torch.empty_like(rows, memory_format=torch.contiguous_format)
        copied = buffer[: len(rows)]
        copied.copy_(rows)
        return copied
