"""Candidate ``flashinfer``: its declarations, its builder, which plans every step, and its impl, which runs the parts.

Neither flashinfer nor Triton is imported before a step is planned or a layer runs. The library itself is imported only
on a GPU, if nothing else prevents its use. The kernels are those of its ``fa2`` family, which it compiles on first use.
On an H200 it has passed one case. All other statements come from reading the source of the pinned version. According to
it, these features are not supported:

- ALiBi: the library computes the slopes from the number of heads; none can be passed.
- Sinks: ``run`` accepts them but does not pass them to its fa2 kernels, which would silently ignore them.
- Windows without a causal mask: there is a left bound only.
- More rows than keys under a causal mask: the tiles that need the mask are computed in unsigned integers, which wrap
  around for such a request.
- Scales close to 0 or negative: the kernels use 5e4 as infinity and also scale masked scores.
- Rows of a request without keys: their LSE would be about -5e4. Padding in a graph has no keys either; its outputs are
  0.

The soft cap is declared but may be too coarse: it uses ``tanh.approx.f32``, whose relative error is up to ``2**-11``.

A wrapper of the library holds one plan at a time, and runs by the latest. Metadata therefore keep their own plan, since
running them by another one would use the lengths of another step without an error.

Index tensors are int32. Offsets and lengths are on the host, where the library uses them, and pages are on the device.
Nothing waits for the device.
"""

import importlib.util
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attncheck
from attncheck.backends import interpreter
from attncheck.backends.base import machine
from attncheck.backends.base.layer import Call
from attncheck.backends.contract import (
    AttentionCGSupport,
    AttentionLayer,
    AttentionType,
    CommonAttentionMetadata,
    Conventions,
)
from attncheck.backends.dtypes import FP8_DTYPES
from attncheck.backends.paged import PagedBackend, PagedImpl
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec

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


LEAST_SCALE = 2.0**-11
"""Minimum scale. The kernels mask a key with the score -5e4 before they scale.

At this scale a masked key has the weight ``exp(-24)``, about the resolution of float32. With a smaller scale masked
keys count, and a negative one turns the greatest score into the least.
"""

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16)
"""Dtypes of query and output for which the library has kernels; with another one ``plan`` raises a KeyError."""


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """Settings of one layer, as the library's ``plan`` takes them.

    Raise ``ValueError`` below :data:`LEAST_SCALE`, and ``NotImplementedError`` for an unsupported dtype.

    scale: multiplies the scores.
    window_left: how far back a row sees, its own key at distance 0; -1 means no limit.
    logits_soft_cap: None if off.
    dtype: that of query and output.
    kv_dtype: that of keys and values.
    has_cache: False for encoder layers, whose keys and values are passed with the step.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window_left: int
    logits_soft_cap: float | None
    dtype: torch.dtype
    kv_dtype: torch.dtype
    has_cache: bool

    def __post_init__(self) -> None:
        if self.scale < LEAST_SCALE:
            raise ValueError(f"FLASHINFER: scale {self.scale}: must be at least {LEAST_SCALE}")
        if self.dtype not in SUPPORTED_DTYPES:
            names = ", ".join(map(str, SUPPORTED_DTYPES))
            raise NotImplementedError(f"FLASHINFER: {self.dtype} is not supported; supported are {names}")

    @classmethod
    def of(cls, impl: PagedImpl, dtype: torch.dtype) -> "LayerSettings":
        """Return the settings of a layer whose rows have ``dtype``."""
        return cls(
            num_heads=impl.num_heads,
            num_kv_heads=impl.num_kv_heads,
            head_size=impl.head_size,
            scale=impl.scale,
            window_left=impl.sliding_window[0],
            logits_soft_cap=impl.logits_soft_cap,
            dtype=dtype,
            kv_dtype=FP8_DTYPES.get(impl.kv_cache_dtype, dtype) if impl.attn_type.has_cache else dtype,
            has_cache=impl.attn_type.has_cache,
        )


def group_settings(vllm_config: Any, layer_names: list[str], impl_cls: type[PagedImpl]) -> LayerSettings:
    """Return the settings that all layers of a group share, found in the config's ``static_forward_context``.

    Raise ``TypeError`` for a layer with another impl, and ``NotImplementedError`` if two layers differ: one plan serves
    the whole group, and would apply one layer's window, cap or scale to another.
    """
    layers = vllm_config.compilation_config.static_forward_context
    found: dict[str, LayerSettings] = {}
    for name in layer_names:
        impl = layers[name].impl
        if not isinstance(impl, impl_cls):
            raise TypeError(
                f"FLASHINFER: {name} must have a {impl_cls.__qualname__}, and has a {type(impl).__qualname__}"
            )
        found[name] = LayerSettings.of(impl, vllm_config.model_config.dtype)
    first, *others = found.items()
    for name, settings in others:
        if settings != first[1]:
            raise NotImplementedError(
                f"FLASHINFER: one plan for layers that differ: {first[0]} {first[1]}, {name} {settings}"
            )
    return first[1]


class Plan:
    """One call of a wrapper's ``plan``, identified by object identity."""


class PlannedWrapper:
    """A wrapper of the library, and its latest plan."""

    def __init__(self, wrapper: Any, device: torch.device, *, is_for_graphs: bool) -> None:
        """Store the wrapper; with ``is_for_graphs``, plans refill its buffers, and a graph uses the latest one."""
        self.wrapper, self.is_for_graphs, self._device = wrapper, is_for_graphs, device
        self.latest: Plan | None = None
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    @property
    def kernels(self) -> str:
        """The kernel family of the latest plan, such as ``fa2``, and the class of the wrapper."""
        return f"{self.wrapper._backend} {type(self.wrapper).__name__}"

    def plan(self, **arguments: Any) -> Plan:
        """Plan for another step, which invalidates the previous plan.

        The library composes a plan in pinned memory, which the device copies later. The next plan waits until that copy
        is done.
        """
        if self._copied is not None:
            self._copied.synchronize()
        self.latest = None
        self.wrapper.plan(**arguments)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
        self.latest = Plan()
        return self.latest


@dataclass(frozen=True)
class PlannedRows:
    """Rows of a step that one call of a wrapper attends to, by ``plan``, for layers with these ``settings``.

    kv_layout: the memory order of a page, ``NHD`` or ``HND``.
    """

    rows: slice
    planned: PlannedWrapper
    plan: Plan
    settings: LayerSettings
    kv_layout: str

    @property
    def is_current(self) -> bool:
        """Whether this is still the wrapper's latest plan."""
        return self.planned.latest is self.plan


@dataclass
class FlashInferMetadata(PagedMetadata):
    """Metadata of one step, its rows in at most two parts: leading single-token requests, then all others."""

    decode: PlannedRows | None = None
    prefill: PlannedRows | None = None

    @property
    def parts(self) -> tuple[PlannedRows, ...]:
        """The parts that exist."""
        return tuple(part for part in (self.decode, self.prefill) if part is not None)


_KERNELS = "fa2"

_LEAST_WORKSPACE = 128 * 2**20
"""Workspace size that the library recommends, in bytes."""

_TILES = (16, 64, 128)
"""Rows per tile of its fa2 kernels; each query head counts as a row."""


class Wrappers:
    """Wrappers constructed on first use, once per builder, and for graphs once per batch size.

    All share one workspace, since their kernels run one after another. ``fa2`` is selected by name: by default the
    library uses other kernels on other GPUs, and the result would depend on the machine. Decodes also use its tensor
    cores, which accept any number of query heads per KV head. ``kv_layout`` is ``NHD`` or ``HND``.
    """

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
    supported_head_sizes = (64, 128, 256)
    supported_devices = ("cuda",)

    get_name = staticmethod(lambda: "FLASHINFER")
    get_impl_cls = staticmethod(lambda: FlashInferImpl)
    get_builder_cls = staticmethod(lambda: FlashInferBuilder)

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
