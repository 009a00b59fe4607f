"""A stand-in for flashinfer 0.6.8.post1 on a CPU: its signatures, its checks, and what it documents that it computes.

Every call is bound to the library's signature and recorded. ``run`` computes what was planned, densely in
float64, from the buffers that the library's kernels read: those given to the constructor in graph mode, else those of
the latest plan. It uses no block tables, requests or windows of ours.
"""

import inspect
import math
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

DECODE, PREFILL, RAGGED = (
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
)

_SCALES = "q_scale=None, k_scale=None, v_scale=None"
_OUT = "out=None, lse=None, return_lse=False, enable_pdl=None"
_PREFILL_SETTINGS = (
    "head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode='NONE'"
)
_ITEMS = "prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None"
_ROPE = "rope_scale=None, rope_theta=None"
_DTYPES = "q_data_type='float16', kv_data_type=None, o_data_type=None"

SIGNATURES = {
    (DECODE, "__init__"): "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, use_tensor_cores=False, "
    "paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, backend='auto', "
    "jit_args=None",
    (DECODE, "plan"): "indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, "
    f"pos_encoding_mode='NONE', window_left=-1, logits_soft_cap=None, {_DTYPES}, data_type=None, sm_scale=None, "
    f"{_ROPE}, non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None, disable_split_kv=False",
    (DECODE, "run"): f"q, paged_kv_cache, *args, {_SCALES}, {_OUT}, window_left=None, sinks=None, q_len_per_req=1, "
    "skip_softmax_threshold_scale_factor=None, kv_cache_sf=None",
    (PREFILL, "__init__"): "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, "
    "paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None, "
    "mask_indptr_buf=None, backend='auto', jit_args=None, jit_kwargs=None",
    (PREFILL, "plan"): "qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, "
    f"num_kv_heads, head_dim_qk, page_size, {_PREFILL_SETTINGS}, use_fp16_qk_reduction=False, sm_scale=None, "
    f"window_left=-1, logits_soft_cap=None, {_ROPE}, {_DTYPES}, non_blocking=True, {_ITEMS}, seq_lens=None, "
    "seq_lens_q=None, block_tables=None, max_token_per_sequence=None, max_sequence_kv=None, fixed_split_size=None, "
    "disable_split_kv=False",
    (PREFILL, "run"): f"q, paged_kv_cache, *args, {_SCALES}, {_OUT}, window_left=None, sinks=None, kv_cache_sf=None, "
    "skip_softmax_threshold_scale_factor=None",
    (RAGGED, "__init__"): "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, "
    "kv_indptr_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend='auto', jit_args=None, jit_kwargs=None",
    (RAGGED, "plan"): f"qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, {_PREFILL_SETTINGS}, "
    f"use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None, sm_scale=None, {_ROPE}, {_DTYPES}, "
    f"non_blocking=True, {_ITEMS}, fixed_split_size=None, disable_split_kv=False, seq_lens=None, seq_lens_q=None, "
    "max_token_per_sequence=None, max_sequence_kv=None, v_indptr=None, o_indptr=None",
    (RAGGED, "run"): f"q, k, v, *args, {_SCALES}, o_scale=None, {_OUT}",
}
"""Names, order, kinds and defaults of the parameters behind ``self``."""


def signature(wrapper: str, method: str) -> inspect.Signature:
    """Of a method of the library's."""
    return inspect.signature(eval(f"lambda self, {SIGNATURES[wrapper, method]}: None"))


@dataclass
class Called:
    """One call: of which wrapper, and every argument by name."""

    wrapper: "Wrapper"
    method: str
    arguments: dict[str, Any]


@dataclass
class Library:
    """The module in ``sys.modules``, and the calls it got."""

    calls: list[Called] = field(default_factory=list)

    def module(self) -> ModuleType:
        found = ModuleType("flashinfer")
        for name in (DECODE, PREFILL, RAGGED):
            setattr(found, name, type(name, (Wrapper,), {"library": self}))
        return found

    def of(self, method: str, *names: str) -> list[Called]:
        """The calls of a method, of wrappers of these names (none: of any)."""
        return [call for call in self.calls if call.method == method and (not names or call.wrapper.name in names)]


class Wrapper:
    """Any of the three."""

    library: Library

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.name = type(self).__name__
        given = self._called("__init__", arguments, keywords)
        self.device, self.layout = given["float_workspace_buffer"].device, given["kv_layout"]
        assert given["float_workspace_buffer"].dtype == torch.uint8
        assert self.layout in ("NHD", "HND")
        self.is_graph, self.given = given["use_cuda_graph"], given
        self._backend = given["backend"]
        self.plan_arguments: dict[str, Any] = {}
        if self.is_graph:
            assert self.name == DECODE, "no other is made for graphs here"
            self.buffers = tuple(given[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len"))
            assert all(isinstance(buffer, Tensor) and buffer.dtype == torch.int32 for buffer in self.buffers)
            assert len(self.buffers[0]) == len(self.buffers[2]) + 1
            self.offsets = torch.arange(len(self.buffers[0]), dtype=torch.int32, device=self.device)

    def plan(self, *arguments: Any, **keywords: Any) -> None:
        given = self._called("plan", arguments, keywords)
        self.plan_arguments = given
        if self.name == RAGGED:
            self.offsets, self.keys = given["qo_indptr"].clone(), given["kv_indptr"].clone()
            assert self.offsets.dtype == self.keys.dtype == torch.int32
            return
        prefix = "" if self.name == DECODE else "paged_kv_"
        pages = tuple(given[f"{prefix}{name}"] for name in ("indptr", "indices", "last_page_len"))
        _check_pages(*pages, given["page_size"])
        if self.is_graph:
            for buffer, new in zip(self.buffers, pages, strict=True):
                assert len(new) <= len(buffer)
                buffer[: len(new)].copy_(new)
            assert len(pages[2]) == len(self.buffers[2]), "a graph's batch size is fixed"
            return
        # As a copy to a device makes them: at new addresses, for each plan.
        self.buffers = tuple(new.clone() for new in pages)
        offsets = torch.arange(len(pages[0])) if self.name == DECODE else given["qo_indptr"].clone()
        self.offsets = offsets.to(torch.int32)

    def run(self, *arguments: Any, **keywords: Any) -> Any:
        given = self._called("run", arguments, keywords)
        query, out, lse = given["q"], given["out"], given["lse"]
        settings, pages = self.plan_arguments, None if self.name == RAGGED else self.buffers
        assert settings, "run before plan"
        assert not given["args"]
        keys = given["paged_kv_cache"] if pages is not None else (given["k"], given["v"])
        _check_tensors(query, *keys, out, settings)
        assert out.is_contiguous(), "kernels write by plain offsets"
        assert given["return_lse"] == (lse is not None)
        assert len(query) == (len(self.offsets) - 1 if self.name == DECODE else int(self.offsets[-1]))
        key, value, exists = self._gathered(keys, pages, settings)
        row_positions = exists.sum(1) - 1
        if self.name != DECODE:  # where a request has one row, no other belongs to it
            row = torch.arange(len(query), device=self.device)
            request = torch.searchsorted(self.offsets[1:].long(), row, right=True)
            row_positions = (row_positions - self.offsets[1:] + 1)[request] + row
            key, value, exists = key[request], value[request], exists[request]
        scale = settings["sm_scale"] * (given["k_scale"] or 1.0)
        row_out, row_lse = documented(query, key, value, exists, row_positions, settings | {"sm_scale": scale})
        out.copy_(row_out)
        if given["v_scale"] is not None:
            out.mul_(given["v_scale"])  # behind the kernel, on what it rounded
        if lse is not None:
            assert lse.shape == query.shape[:2]
            assert lse.dtype == torch.float32
            assert lse.is_contiguous()
            lse.copy_(row_lse)
        return (out, lse) if given["return_lse"] else out

    def _gathered(
        self, keys: tuple[Tensor, Tensor], pages: tuple[Tensor, ...] | None, settings: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values ``[requests, most keys, heads, size]`` in float64, and which exist; others are 0."""
        if pages is None:
            assert all(len(given) == int(self.keys[-1]) for given in keys)
            starts, lens = self.keys[:-1].long(), self.keys.diff().long()
            position = torch.arange(int(lens.max()), device=self.device)
            exists = position < lens[:, None]
            places: tuple[Tensor, ...] = ((starts[:, None] + position).clamp(max=len(keys[0]) - 1),)
        else:
            indptr, indices, last_page_len = (buffer.long() for buffer in pages)
            page_size, counts = settings["page_size"], indptr.diff()
            shape = [settings["num_kv_heads"], settings["head_dim" if self.name == DECODE else "head_dim_qk"]]
            for cache in keys:
                nhd = cache if self.layout == "NHD" else cache.transpose(1, 2)
                assert nhd.shape[1:] == torch.Size([page_size, *shape])
            keys = keys if self.layout == "NHD" else (keys[0].transpose(1, 2), keys[1].transpose(1, 2))
            lens = torch.where(counts > 0, (counts - 1) * page_size + last_page_len, 0)
            most = len(indices) // len(counts) if self.is_graph else int(counts.max())
            position = torch.arange(most * page_size, device=self.device)
            exists = position < lens[:, None]
            page = (indptr[:-1, None] + position // page_size).clamp(max=len(indices) - 1).masked_fill(~exists, 0)
            places = indices[page].masked_fill(~exists, 0), (position % page_size).expand_as(page)
        key, value = (given[places].double().masked_fill(~exists[:, :, None, None], 0) for given in keys)
        return key, value, exists

    def _called(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
        bound = signature(self.name, method).bind(self, *arguments, **keywords)
        bound.apply_defaults()
        given = {name: value for name, value in bound.arguments.items() if name != "self"}
        kept = {
            name: value.clone() if isinstance(value, Tensor) and method == "plan" else value
            for name, value in given.items()
        }
        self.library.calls.append(Called(self, method, kept))
        return given


def documented(
    query: Tensor, key: Tensor, value: Tensor, exists: Tensor, row_positions: Tensor, settings: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Attention as the library documents it: ``(out, lse)`` of ``n`` rows over ``m`` keys each, the LSE to base 2.

    The ``i``-th of a request's ``q`` rows is at position ``k - q + i`` of its ``k`` keys: it sees none behind it if
    causal, and none farther before it than ``window_left``, an inclusive distance. key, value: ``[n, m, heads, size]``.
    """
    position = torch.arange(exists.shape[1], device=query.device)
    seen = exists
    if settings.get("causal"):
        seen = seen & (position <= row_positions[:, None])
    if settings["window_left"] >= 0:
        seen = seen & (position >= row_positions[:, None] - settings["window_left"])
    key, value = (given.masked_fill(~seen[:, :, None, None], 0) for given in (key, value))  # NaN there is not looked at
    query_nhgd = query.double().unflatten(1, (settings["num_kv_heads"], -1))
    scores = torch.einsum("nhgd,nkhd->nhgk", query_nhgd, key).flatten(1, 2) * settings["sm_scale"]
    if settings["logits_soft_cap"]:
        scores = settings["logits_soft_cap"] * torch.tanh(scores / settings["logits_soft_cap"])
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    lse = scores.logsumexp(-1)
    weights = (
        (scores - lse[:, :, None]).exp().masked_fill(~seen[:, None], 0).unflatten(1, (settings["num_kv_heads"], -1))
    )
    return torch.einsum("nhgk,nkhd->nhgd", weights, value).flatten(1, 2), lse / math.log(2)


def _check_pages(indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int) -> None:
    for given in (indptr, indices, last_page_len):
        assert given.dtype == torch.int32
        assert given.dim() == 1
    counts = indptr.diff()
    assert indptr[0] == 0
    assert len(last_page_len) == len(counts) > 0
    assert (counts >= 0).all()
    assert len(indices) == indptr[-1]
    has_pages = counts > 0
    assert ((last_page_len >= 1) & (last_page_len <= page_size))[has_pages].all()
    assert (last_page_len == 0)[~has_pages].all(), "get_seq_lens makes a length of it"


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, out: Tensor, settings: dict[str, Any]) -> None:
    assert query.dtype == settings["q_data_type"]
    assert key.dtype == value.dtype == settings["kv_data_type"]
    assert out.dtype == settings["o_data_type"]
    assert out.shape == query.shape
    assert query.shape[1] == settings["num_qo_heads"]
    assert key.stride() == value.stride()
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
