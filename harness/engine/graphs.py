"""Observes layers that run in a captured CUDA graph, whose Python is called at the capture alone."""

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

    All graphs share one buffer for each tensor of a layer, as large as the largest graph needs. vLLM captures the
    largest graph first.
    """

    def __init__(self, receive: Callable[[LayerRows], None]) -> None:
        self._receive = receive
        self._copies: WeakKeyDictionary[Any, list[LayerRows]] = WeakKeyDictionary()
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        self._captured: Any = None

    def install(self, wrap: Callable[..., None], graph_class: type[Any] = torch.cuda.CUDAGraph) -> None:
        """Watch the graphs that are captured and replayed from now on.

        ``wrap(owner, name, before, after)``: calls these around a method. Graphs keep the copies that were captured.
        """
        wrap(graph_class, "capture_begin", after=self._capture_begun)
        wrap(graph_class, "capture_end", before=self._capture_ends)
        wrap(graph_class, "replay", after=self._replayed)

    def layer_rows(self, rows: LayerRows) -> None:
        """Take what a layer computes, or what it will compute in each replay."""
        if self._captured is None:
            self._receive(rows)
            return
        given = {name: getattr(rows, name) for name in ("query", "key", "value", "output")}
        copies: dict[str, Any] = {
            name: self._copy(rows.layer, name, each) for name, each in given.items() if each is not None
        }
        self._copies[self._captured].append(rows._replace(**copies))

    def _capture_begun(self, _: Any, graph: Any, *__: Any, **___: Any) -> None:
        self._copies[graph] = []
        self._captured = graph

    def _capture_ends(self, *_: Any, **__: Any) -> None:
        self._captured = None

    def _replayed(self, _: Any, graph: Any) -> None:
        for copies in self._copies.get(graph, ()):
            self._receive(copies)

    def _copy(self, layer: str, name: str, rows: Tensor) -> Tensor:
        """Copy rows to the buffer of the layer. This happens in a capture, so that each replay copies them again."""
        key = (layer, name, rows.shape[1:], rows.dtype)
        if key not in self._buffers or len(self._buffers[key]) < len(rows):
            self._buffers[key] = torch.empty_like(rows, memory_format=torch.contiguous_format)
        return self._buffers[key][: len(rows)].copy_(rows)
