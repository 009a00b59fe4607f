"""The library's wrappers as candidate ``flashinfer`` makes them: once a builder, and for graphs once a batch size.

All wrappers of a builder share one workspace, since their kernels run one after another. ``fa2`` is asked for by name:
left to choose, the library takes other kernels on other GPUs, and what was examined would depend on the machine. For
decodes, too, its tensor cores are used, which take any number of query heads a KV head.
"""

from typing import Any

import torch
from torch import Tensor

from attncheck.backends.candidates.flashinfer.metadata import PlannedWrapper
from attncheck.backends.candidates.flashinfer.settings import LayerSettings

_KERNELS = "fa2"

_LEAST_WORKSPACE = 128 * 2**20
"""What the library recommends."""

_TILES = (16, 64, 128)
"""Rows of a tile of its fa2 kernels, each row being that of one query head."""


class Wrappers:
    """Made when they are first asked for. ``kv_layout``: ``NHD`` or ``HND``."""

    def __init__(self, kv_layout: str, device: torch.device, workspace_bytes: int) -> None:
        self.kv_layout, self.device = kv_layout, device
        self._workspace_bytes = workspace_bytes
        self._workspace: Tensor | None = None
        self._made: dict[str, PlannedWrapper] = {}
        self._graphs: dict[int, PlannedWrapper] = {}

    def decode(self) -> PlannedWrapper:
        """For single-token requests of an eager step."""
        return self._get("BatchDecodeWithPagedKVCacheWrapper", use_tensor_cores=True)

    def prefill(self) -> PlannedWrapper:
        """For requests of any number of rows, whose keys are in pages."""
        return self._get("BatchPrefillWithPagedKVCacheWrapper")

    def ragged(self) -> PlannedWrapper:
        """For requests whose keys and values come with the step."""
        return self._get("BatchPrefillWithRaggedKVCacheWrapper")

    def graph_decode(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> PlannedWrapper:
        """For graphs of ``len(last_page_len)`` single-token requests: its plans refill these buffers, on the device.

        indptr: int32 ``[n + 1]``. indices: int32, with room for the pages of any step. last_page_len: int32 ``[n]``.
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
    """Bytes in which the parts of split keys fit, as the library lays them out; too few are an error of its plan.

    Of every part it keeps a tile of float32 outputs, and of log-sum-exps, for every query head. It splits an eager step
    into at most two parts an SM, over all KV heads; a graph has at least that many, and room for a tile more a request.

    largest_graph: requests of the largest graph, 0 for none.
    """
    group = settings.num_heads // settings.num_kv_heads
    tile = next(rows for rows in _TILES if group <= rows or rows == _TILES[-1])
    split_rows = -(-2 * num_sms // settings.num_kv_heads) * _TILES[-1]
    graph_rows = largest_graph * (group + tile)
    needed = 4 * settings.num_heads * (settings.head_size + 1) * max(split_rows, graph_rows)
    return max(_LEAST_WORKSPACE, needed + 2**20)
