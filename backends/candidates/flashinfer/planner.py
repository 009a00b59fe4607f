"""Calls the library's ``plan`` for the parts of a step, and converts block tables into the form that it takes.

Index tensors are int32. Offsets and lengths are on the host, where the library uses them, and pages are on the device.
Nothing waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.candidates.flashinfer.metadata import PlannedRows, PlannedWrapper
from attncheck.backends.candidates.flashinfer.settings import LayerSettings
from attncheck.backends.candidates.flashinfer.wrappers import Wrappers
from attncheck.backends.paged_metadata import PagedMetadata


class Planner:
    """Planner for layers of ``settings``, with pages of ``block_size`` tokens."""

    def __init__(self, settings: LayerSettings, wrappers: Wrappers, block_size: int) -> None:
        self._settings, self._wrappers, self._block_size = settings, wrappers, block_size

    def plan_decodes(self, step: PagedMetadata, num_decodes: int) -> PlannedRows:
        """Plan the first ``num_decodes`` requests, which have one row each."""
        return self._single_rows(self._wrappers.decode(), step, step.seq_lens[:num_decodes])

    def plan_graph(self, step: PagedMetadata, buffers: "GraphBuffers") -> PlannedRows:
        """Plan all requests, which have one row each; padding requests are included, and have no keys."""
        seq_lens = [s if q else 0 for q, s in zip(step.query_lens, step.seq_lens, strict=True)]
        return self._single_rows(self._wrappers.graph_decode(*buffers.of(len(seq_lens))), step, seq_lens)

    def plan_prefills(self, step: PagedMetadata, requests: Sequence[int]) -> PlannedRows:
        """Plan ``requests``, whose rows are adjacent."""
        planned, own = self._wrappers.prefill(), self._settings
        pages = page_indices(
            step.common.block_table_tensor, self._block_size, requests, [step.seq_lens[r] for r in requests]
        )
        plan = planned.plan(
            qo_indptr=_offsets(step, requests),
            paged_kv_indptr=pages.indptr,
            paged_kv_indices=pages.indices,
            paged_kv_last_page_len=pages.last_page_len,
            head_dim_qk=own.head_size,
            page_size=self._block_size,
            causal=step.common.causal,
            **self._layer_arguments(),
        )
        return PlannedRows(_rows(step, requests), planned, plan, own, self._wrappers.kv_layout)

    def plan_ragged(self, step: PagedMetadata, requests: Sequence[int]) -> PlannedRows:
        """Plan ``requests``, whose keys have the same offsets as their rows."""
        planned, own, offsets = self._wrappers.ragged(), self._settings, _offsets(step, requests)
        plan = planned.plan(
            qo_indptr=offsets,
            kv_indptr=offsets,
            head_dim_qk=own.head_size,
            causal=step.common.causal,
            **self._layer_arguments(),
        )
        return PlannedRows(_rows(step, requests), planned, plan, own, self._wrappers.kv_layout)

    def _single_rows(self, planned: PlannedWrapper, step: PagedMetadata, seq_lens: Sequence[int]) -> PlannedRows:
        """Plan the first ``len(seq_lens)`` requests; each row is the last of its sequence, so it sees all keys."""
        pages = page_indices(step.common.block_table_tensor, self._block_size, range(len(seq_lens)), seq_lens)
        plan = planned.plan(
            indptr=pages.indptr,
            indices=pages.indices,
            last_page_len=pages.last_page_len,
            head_dim=self._settings.head_size,
            page_size=self._block_size,
            **self._layer_arguments(),
        )
        return PlannedRows(slice(0, len(seq_lens)), planned, plan, self._settings, self._wrappers.kv_layout)

    def _layer_arguments(self) -> dict[str, Any]:
        own = self._settings
        return {
            "num_qo_heads": own.num_heads,
            "num_kv_heads": own.num_kv_heads,
            "sm_scale": own.scale,
            "window_left": own.window_left,
            "logits_soft_cap": own.logits_soft_cap,
            "q_data_type": own.dtype,
            "kv_data_type": own.kv_dtype,
            "o_data_type": own.dtype,
        }


class GraphBuffers:
    """The int32 device buffers that plans for graphs refill; their addresses are fixed for the life of the builder.

    Graphs of all sizes share them, because a graph is replayed only right after the ``build`` of its own step.

    num_reqs: requests of the largest graph. num_pages: pages of the widest block table row.
    """

    def __init__(self, num_reqs: int, num_pages: int, device: torch.device) -> None:
        self.indptr = torch.zeros(num_reqs + 1, dtype=torch.int32, device=device)
        self.indices = torch.zeros(num_reqs * num_pages, dtype=torch.int32, device=device)
        self.last_page_len = torch.zeros(num_reqs, dtype=torch.int32, device=device)

    def of(self, num_reqs: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return indptr, indices and last_page_len for a graph of ``num_reqs`` requests."""
        return self.indptr[: num_reqs + 1], self.indices, self.last_page_len[:num_reqs]


def _offsets(step: PagedMetadata, requests: Sequence[int]) -> Tensor:
    """Return the row offsets of ``requests``, relative to the first, and the end of the last; on the host."""
    starts = step.query_start_loc
    ends = [starts[request + 1] - starts[requests[0]] for request in requests]
    return torch.tensor([0, *ends], dtype=torch.int32)


def _rows(step: PagedMetadata, requests: Sequence[int]) -> slice:
    return slice(step.query_start_loc[requests[0]], step.query_start_loc[requests[-1] + 1])


@dataclass(frozen=True)
class PageIndices:
    """The pages of ``n`` requests.

    indptr: int32 ``[n + 1]``, host. last_page_len: int32 ``[n]``, host. indices: int32, device.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


def page_indices(block_table: Tensor, block_size: int, requests: Sequence[int], seq_lens: Sequence[int]) -> PageIndices:
    """Return the pages that hold the first ``seq_lens[i]`` tokens of row ``requests[i]`` of the table.

    Other entries are not read. block_table: ``[R, W]``, device.
    """
    lens = torch.tensor(seq_lens, dtype=torch.int64)
    counts = (lens + block_size - 1) // block_size
    indptr = torch.zeros(len(lens) + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=indptr[1:])
    rows = torch.tensor(requests, dtype=torch.int64).repeat_interleave(counts)
    columns = torch.arange(len(rows)) - indptr[:-1].repeat_interleave(counts)
    # Not pinned, so that it is read before the call returns. Non-blocking, since a blocking copy waits for the device.
    places = torch.stack([rows, columns]).to(block_table.device, non_blocking=True)
    return PageIndices(
        indptr=indptr.to(torch.int32),
        indices=block_table[places[0], places[1]].to(torch.int32),
        last_page_len=(lens - (counts - 1).clamp(min=0) * block_size).to(torch.int32),
    )
