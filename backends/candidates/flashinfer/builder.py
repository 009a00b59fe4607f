"""Plans every step of candidate ``flashinfer``: which rows run through which wrapper, by which plan.

A plan stores what the library computed from the lengths on the host: where each part of a request runs. Each step
needs a new plan, so ``build`` plans every time, outside any graph, from the ``_cpu`` twins. A graph of ``n``
single-token requests reads its plan and the pages from device buffers with fixed addresses. The next ``build`` for
``n`` requests refills them, and the replay uses the new plan.
"""

from typing import Any

import torch

from attncheck.backends.candidates.flashinfer.backend import FlashInferBackend
from attncheck.backends.candidates.flashinfer.impl import FlashInferImpl
from attncheck.backends.candidates.flashinfer.metadata import FlashInferMetadata
from attncheck.backends.candidates.flashinfer.planner import GraphBuffers, Planner
from attncheck.backends.candidates.flashinfer.settings import LayerSettings, group_settings
from attncheck.backends.candidates.flashinfer.wrappers import Wrappers, workspace_bytes
from attncheck.backends.contract import AttentionCGSupport, CommonAttentionMetadata
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata


class FlashInferBuilder(PagedBuilder):
    """Builder that plans each step; raise ``NotImplementedError`` naming two layers of the group that differ.

    The graph support follows the library's documentation: a wrapper created for graphs keeps its batch size, and may be
    planned again between replays. An H200 confirms it.
    """

    backend = FlashInferBackend
    metadata_cls = FlashInferMetadata
    cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        device, block_size = torch.device(device), kv_cache_spec.block_size
        self._settings = group_settings(vllm_config, layer_names, FlashInferImpl)
        self._graph_sizes = frozenset(vllm_config.compilation_config.cudagraph_capture_sizes)
        largest = max(self._graph_sizes, default=0)
        wrappers = Wrappers(
            vllm_config.cache_config.kv_cache_layout, device, self._workspace_bytes(self._settings, device, largest)
        )
        self._planner = Planner(self._settings, wrappers, block_size)
        self._graph_buffers = GraphBuffers(largest, -(-vllm_config.model_config.max_model_len // block_size), device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """Plan the step; the metadata of the previous step cannot be run afterwards.

        Raise ``NotImplementedError`` for rows of a request without keys, and for a window without a causal mask.
        """
        step = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not isinstance(step, FlashInferMetadata):
            raise TypeError(f"FLASHINFER: {type(step).__qualname__} is no {FlashInferMetadata.__qualname__}")
        _refuse(step, self._settings)
        num_decodes = _num_decodes(step)
        others = [request for request, *_ in step.requests() if request >= num_decodes]
        if not self._settings.has_cache:
            everyone = [request for request, *_ in step.requests()]
            step.prefill = self._planner.plan_ragged(step, everyone) if everyone else None
        elif not others and self._may_be_captured(step):
            step.decode = self._planner.plan_graph(step, self._graph_buffers)
        else:
            step.decode = self._planner.plan_decodes(step, num_decodes) if num_decodes else None
            step.prefill = self._planner.plan_prefills(step, others) if others else None
        return step

    def _may_be_captured(self, step: PagedMetadata) -> bool:
        """Return whether a step of single-token requests, including padding, has the size of an announced graph."""
        return step.common.num_reqs == step.common.num_actual_tokens and step.common.num_reqs in self._graph_sizes

    @staticmethod
    def _workspace_bytes(settings: LayerSettings, device: torch.device, largest_graph: int) -> int:
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        return workspace_bytes(settings, num_sms, largest_graph)


def _num_decodes(step: PagedMetadata) -> int:
    """Return the number of leading requests with a single row; requests after the first longer one do not count."""
    return next((index for index, query_len in enumerate(step.query_lens) if query_len != 1), len(step.query_lens))


def _refuse(step: PagedMetadata, settings: LayerSettings) -> None:
    wrong = [
        f"(query_len, seq_len) {(end - start, seq_len)}: rows of a request without keys"
        for _, start, end, seq_len in step.requests()
        if seq_len == 0
    ][:1]
    if settings.window_left >= 0 and not step.common.causal:
        wrong.append(f"a window of {settings.window_left + 1} keys without a causal mask: there is a left bound only")
    if wrong:
        raise NotImplementedError(f"FLASHINFER: {'; '.join(wrong)}")
