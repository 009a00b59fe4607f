"""Plans of candidate ``flashinfer``: the library's wrappers, and the calls of ``plan`` for the parts of a step.

A wrapper holds one plan at a time, and runs by the latest. Metadata therefore keep their own plan, since running them
by another one would use the lengths of another step without an error.

Index tensors are int32. Offsets and lengths are on the host, where the library uses them, and pages are on the device.
Nothing waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.dtypes import FP8_DTYPES
from attncheck.backends.paged import PagedImpl
from attncheck.backends.paged_metadata import PagedMetadata

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
