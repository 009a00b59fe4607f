"""Candidate ``flashinfer``: its declarations, its builder, which plans every step, and its impl, which runs the parts.

Neither flashinfer nor Triton is imported before a step is planned or a layer runs. The library itself is
imported only on a GPU, if nothing else prevents its use. The kernels are those of its ``fa2`` family, which it compiles
on first use. According to the source of the pinned version, these features are not supported:

- ALiBi: the library computes the slopes from the number of heads; none can be passed.
- Sinks: ``run`` accepts them but does not pass them to its fa2 kernels, which would silently ignore them.
- Windows without a causal mask: there is a left bound only.
- More rows than keys under a causal mask: the tiles that need the mask are computed in unsigned integers, which wrap
  around for such a request.
- Scales close to 0 or negative: the kernels use 5e4 as infinity and also scale masked scores.
- Rows of a request without keys: their LSE would be about -5e4. Padding in a graph has no keys either; its outputs are
  0.

The soft cap is declared but may be too coarse: it uses ``tanh.approx.f32``, whose relative error is up to ``2**-11``.
"""

import importlib.util
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import attncheck
from attncheck.backends import interpreter
from attncheck.backends.base import machine
from attncheck.backends.base.layer import Call
from attncheck.backends.candidates.flashinfer.planner import (
    LEAST_SCALE,
    SUPPORTED_DTYPES,
    FlashInferMetadata,
    GraphBuffers,
    LayerSettings,
    PlannedRows,
    Planner,
    Wrappers,
    group_settings,
    workspace_bytes,
)
from attncheck.backends.contract import (
    AttentionCGSupport,
    AttentionLayer,
    AttentionType,
    CommonAttentionMetadata,
    Conventions,
    MultipleOf,
)
from attncheck.backends.paged import PagedBackend, PagedImpl
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec

if TYPE_CHECKING:
    from attncheck.backends.candidates.flashinfer.planner import FlashInferMetadata

DISTRIBUTION = "flashinfer-python"

PINNED = "0.6.8.post1"
"""The only version whose signatures, checks and kernels were read. It belongs to torch 2.11, as vLLM pairs them."""

LOWEST_CAPABILITY = (8, 0)
"""Minimum compute capability of the kernels, for bfloat16 and for direct copies from global to shared memory."""

_COMPILED_KERNELS = "flashinfer_jit_cache"
"""Package of kernels precompiled by the library's authors; with it nothing needs to be compiled."""


def library_reasons(device: str) -> list[str]:
    """Return why the pinned flashinfer cannot run on ``device``, such as ``"cuda:1"``; an empty list if it can."""
    installed = machine.installed_version(DISTRIBUTION)
    reasons = []
    if installed is None:
        reasons.append(f"{DISTRIBUTION} is not installed")
    elif machine.public(installed) != PINNED:
        reasons.append(f"{DISTRIBUTION} {installed} is installed, and what is relied on was read in {PINNED}")
    if torch.device(device).type != "cuda":
        return reasons
    reasons += [*machine.gpu_reasons(device, LOWEST_CAPABILITY), *interpreter.unavailable_reasons(device)]
    if installed is not None and not _can_get_kernels():
        reasons.append(
            f"there is neither nvcc, by which flashinfer compiles its kernels, nor the package {_COMPILED_KERNELS}"
        )
    return reasons or machine.import_reasons("flashinfer")


def library_version() -> str:
    """Return the version of each part under test: the attention kernels and the cache writer."""
    theirs = machine.installed_version(DISTRIBUTION) or "of no version"
    return interpreter.marked(f"{DISTRIBUTION} {theirs} (fa2), attncheck {attncheck.__version__} (cache writer)")


def _can_get_kernels() -> bool:
    """Return whether kernels exist or can be compiled; nvcc is searched for where the library searches."""
    if importlib.util.find_spec(_COMPILED_KERNELS) is not None:
        return True
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and shutil.which("nvcc") is not None:
        return True
    return (Path(home or "/usr/local/cuda") / "bin" / "nvcc").is_file()


class FlashInferBackend(PagedBackend):
    """Backend for pages of any size, each with keys before values as in the library's tutorial; both layouts.

    attncheck's own Triton kernel writes new rows. The library's ``append_paged_kv_cache`` addresses rows by position,
    and has no slot value for a row that must not be written.
    """

    packing = "split_second"
    features = frozenset({"sliding_window", "logits_soft_cap", "non_causal", "lse", "kv_sharing", "fp8_kv"})
    conventions = Conventions(lse_base="2", padded_rows="finite")
    supported_kv_cache_dtypes = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
    supported_attn_types = tuple(AttentionType)
    supported_dtypes = SUPPORTED_DTYPES
    supported_devices = ("cuda",)

    get_name = staticmethod(lambda: "FLASHINFER")
    get_impl_cls = staticmethod(lambda: FlashInferImpl)
    get_builder_cls = staticmethod(lambda: FlashInferBuilder)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [64, 128, 256]

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        return [*super().unavailable_reasons(device), *library_reasons(device)]

    @classmethod
    def unsupported_reasons(cls, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        reasons = super().unsupported_reasons(layer, cache, batch)
        if layer.sliding_window is not None and not layer.is_causal:
            reasons.append(f"sliding_window {layer.sliding_window} without a causal mask: there is a left bound only")
        if layer.attn_type == AttentionType.ENCODER_DECODER and any(
            request.query_len and not request.encoder_len for request in batch.requests
        ):
            reasons.append("encoder_len 0: rows of a request without keys")
        if layer.softmax_scale < LEAST_SCALE:
            reasons.append(f"scale {layer.softmax_scale}: must be at least {LEAST_SCALE}")
        return reasons

    @classmethod
    def version(cls) -> str:
        return library_version()


class FlashInferImpl(PagedImpl):
    """One layer.

    Raise ``RuntimeError`` for metadata whose plan a later step has replaced, and if a graph captures a step whose plan
    cannot be refilled.
    """

    backend = FlashInferBackend
    metadata_cls = FlashInferMetadata

    def write(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        from attncheck.backends.candidates.triton_unified.cache import reshape_and_cache

        k_scale, v_scale = layer._k_scale, layer._v_scale
        reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        caches: tuple[Tensor, Tensor] | None,
        metadata: PagedMetadata,
        output: Tensor,
        output_lse: Tensor | None,
    ) -> None:
        """Run each part; the LSE has base 2, as in the library."""
        for part in _parts(metadata):
            rows = part.rows
            lse = None if output_lse is None else output_lse[rows]
            if caches is not None:
                _run(part, query[rows], _paged(part, caches), output=output[rows], lse=lse, **_scales(layer, caches[0]))
            elif key is not None and value is not None:
                _run(part, query[rows], _dense(key[rows]), _dense(value[rows]), output=output[rows], lse=lse)
            else:
                raise RuntimeError("neither a cache nor keys and values to attend to")
            self.chosen_kernels.add(part.planned.kernels)

    def _refuse_wrong_step(self, call: Call[PagedMetadata]) -> None:
        super()._refuse_wrong_step(call)
        query, output, metadata = call.query, call.output, call.metadata
        name, own = self.backend.get_name(), LayerSettings.of(self, query.dtype)
        if output.dtype != query.dtype:
            raise ValueError(f"{name}: output has dtype {output.dtype}, and query {query.dtype}")
        for part in _parts(metadata):
            if not part.is_current:
                raise RuntimeError(f"{name}: attn_metadata of an earlier step: its builder has planned another since")
            if _is_captured(query) and not part.planned.is_for_graphs:
                raise RuntimeError(f"{name}: a graph is captured of a step that was planned for no graph")
            if part.settings != own:
                raise ValueError(f"{name}: planned for {part.settings}, run for {own}")


def _is_captured(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _parts(metadata: PagedMetadata) -> tuple[PlannedRows, ...]:
    if not isinstance(metadata, FlashInferMetadata):
        raise TypeError(f"attn_metadata is a {type(metadata).__qualname__}, not a {FlashInferMetadata.__qualname__}")
    return metadata.parts


def _paged(part: PlannedRows, caches: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return both caches as ``[blocks, block size, num_kv_heads, head size]``; for ``HND``, heads before tokens."""
    key_cache, value_cache = caches
    if part.kv_layout == "NHD":
        return key_cache, value_cache
    return key_cache.transpose(1, 2), value_cache.transpose(1, 2)


def _scales(layer: AttentionLayer, cache: Tensor) -> dict[str, float]:
    """Return the scales of FP8 codes; a graph may freeze these numbers, because they belong to the layer."""
    return {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float} if cache.itemsize == 1 else {}


def _run(
    part: PlannedRows,
    query: Tensor,
    *keys: Tensor | tuple[Tensor, Tensor],
    output: Tensor,
    lse: Tensor | None,
    **scales: float,
) -> None:
    # The kernels write contiguous rows, whatever the strides of a tensor.
    out, out_lse = output.contiguous(), None if lse is None else lse.contiguous()
    part.planned.wrapper.run(_dense(query), *keys, out=out, lse=out_lse, return_lse=lse is not None, **scales)
    if out is not output:
        output.copy_(out)
    if lse is not None and out_lse is not None and out_lse is not lse:
        lse.copy_(out_lse)


def _dense(rows: Tensor) -> Tensor:
    """Return rows whose last dimension is contiguous, as the kernels require."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class FlashInferBuilder(PagedBuilder):
    """Builder that plans each step; raise ``NotImplementedError`` naming two layers of the group that differ.

    A plan stores what the library computed from the lengths on the host: where each part of a request runs. So
    ``build`` plans every time, outside any graph, from the ``_cpu`` twins. A graph of ``n`` single-token requests reads
    its plan and the pages from device buffers with fixed addresses. The next ``build`` for ``n`` requests refills them.

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
