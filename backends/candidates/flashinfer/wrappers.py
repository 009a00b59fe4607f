"""The library's wrappers, constructed once per builder, and for graphs once per batch size.

All wrappers of a builder share one workspace, since their kernels run one after another. ``fa2`` is selected by name:
by default the library uses other kernels on other GPUs, and the result would depend on the machine. Decodes also use
its tensor cores, which accept any number of query heads per KV head.
"""

from typing import Any

import torch
from torch import Tensor

from attncheck.backends.candidates.flashinfer.metadata import PlannedWrapper
from attncheck.backends.candidates.flashinfer.settings import LayerSettings

_KERNELS = "fa2"

_LEAST_WORKSPACE = 128 * 2**20
"""Workspace size that the library recommends, in bytes."""

_TILES = (16, 64, 128)
"""Rows per tile of its fa2 kernels; each query head counts as a row."""


class Wrappers:
    """Wrappers constructed on first use. ``kv_layout`` is ``NHD`` or ``HND``."""

    def __init__(self, kv_layout: str, device: torch.device, workspace_bytes: int) -> None:
        self.kv_layout, self.device = kv_layout, device
        self._workspace_bytes = workspace_bytes
        self._workspace: Tensor | None = None
        self._made: dict[str, PlannedWrapper] = {}
        self._graphs: dict[int, PlannedWrapper] = {}

    def decode(self) -> PlannedWrapper:
        """Return the wrapper for single-token requests of an eager step."""
        return self._get("BatchDecodeWithPagedKVCacheWrapper", use_tensor_cores=True)

    def prefill(self) -> PlannedWrapper:
        """Return the wrapper for requests of any number of rows, whose keys are in pages."""
        return self._get("BatchPrefillWithPagedKVCacheWrapper")

    def ragged(self) -> PlannedWrapper:
        """Return the wrapper for requests whose keys and values are passed with the step."""
        return self._get("BatchPrefillWithRaggedKVCacheWrapper")

    def graph_decode(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> PlannedWrapper:
        """Return the wrapper for graphs of ``len(last_page_len)`` single-token requests.

        Its plans refill these buffers.

        The buffers are on the device. indptr: int32 ``[n + 1]``. indices: int32, with room for the pages of any step.
        last_page_len: int32 ``[n]``.
        """
        num_reqs = len(last_page_len)
        if num_reqs not in self._graphs:
            self._graphs[num_reqs] = self._make(
                "BatchDecodeWithPagedKVCacheWrapper",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=indptr,
                paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=last_page_len,
            )
        return self._graphs[num_reqs]

    def _get(self, name: str, **keywords: Any) -> PlannedWrapper:
        if name not in self._made:
            self._made[name] = self._make(name, **keywords)
        return self._made[name]

    def _make(self, name: str, **keywords: Any) -> PlannedWrapper:
        import flashinfer

        if self._workspace is None:
            self._workspace = torch.zeros(self._workspace_bytes, dtype=torch.uint8, device=self.device)
        wrapper = getattr(flashinfer, name)(self._workspace, self.kv_layout, backend=_KERNELS, **keywords)
        return PlannedWrapper(wrapper, self.device, is_for_graphs=keywords.get("use_cuda_graph", False))


def workspace_bytes(settings: LayerSettings, num_sms: int, largest_graph: int) -> int:
    """Return the bytes that the parts of split keys need in the library's layout; its ``plan`` fails with fewer.

    For every part and query head it keeps a tile of float32 outputs and of log-sum-exps. It splits an eager step into
    at most two parts per SM, over all KV heads. A graph has at least that many, and room for one more tile per request.

    largest_graph: requests of the largest graph, 0 for none.
    """
    group = settings.num_heads // settings.num_kv_heads
    tile = next(rows for rows in _TILES if group <= rows or rows == _TILES[-1])
    split_rows = -(-2 * num_sms // settings.num_kv_heads) * _TILES[-1]
    graph_rows = largest_graph * (group + tile)
    needed = 4 * settings.num_heads * (settings.head_size + 1) * max(split_rows, graph_rows)
    return max(_LEAST_WORKSPACE, needed + 2**20)
