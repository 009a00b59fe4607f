"""FlashAttention-2 as its sources document it, in plain float64: what a recorded call means, and what it must not be.

The kernels need a GPU. These tests are about what is handed to them and what is done with their answer, never about the
kernels: each stand-in has the signature of the real function, refuses what the library's own checks refuse, keeps the
call, and answers it by the documented meaning of the arguments, one request after another.
"""

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from attncheck.backends.contract import CommonAttentionMetadata
from attncheck.reference.spec import AttentionType, CacheSpec


def _require(*facts: bool) -> None:
    """One of the checks of ``flash_api.cpp`` or of the Python layer."""
    if not all(facts):
        raise RuntimeError(f"the library would refuse this call: {facts}")


def _keys(cache: Tensor, table: Tensor | None, request: int, start: int, length: int) -> Tensor:
    """``[length, heads, size]`` of one request, out of its pages or of the packed rows."""
    if table is None:
        return cache[start : start + length]
    positions = torch.arange(length)
    return cache[table[request, positions // cache.shape[1]].long(), positions % cache.shape[1]]


def attend(query, key, value, *, scale, causal, window, softcap=0.0, slopes=None) -> tuple[Tensor, Tensor]:
    """One request: output ``[rows, heads, size]`` and log-sum-exp ``[rows, heads]`` in float64; 0 and +inf of nothing.

    Rows are aligned to the last key. ``window``: inclusive distances, negative for unlimited; ``causal``: the right one
    is 0. The bias is ``-slope * |distance|``, but under the causal mask alone ``slope * j``: the same, and a constant.
    """
    rows, heads, _ = query.shape
    left, right = window[0], 0 if causal else window[1]
    ahead = torch.arange(len(key))[None, :] - (torch.arange(rows)[:, None] + len(key) - rows)
    seen = torch.ones_like(ahead, dtype=torch.bool)
    seen &= (ahead >= -left) if left >= 0 else seen
    seen &= (ahead <= right) if right >= 0 else seen
    read = seen.any(0)  # a key that no row sees is not read, whatever it holds
    seen, ahead = seen[:, read], ahead[:, read]
    groups = heads // key.shape[1]
    key_jHD, value_jHD = (t[read].double().repeat_interleave(groups, dim=1) for t in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query.double(), key_jHD) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        far = torch.arange(len(key))[read].expand_as(ahead) if causal and left < 0 else -ahead.abs()
        scores = scores + slopes.double()[:, None, None] * far
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0)[:, :, None])
    out = torch.einsum("hij,jhd->ihd", weights, value_jHD)
    return out, lse.masked_fill(lse.isneginf(), torch.inf).t()


def packed_call(
    query, key, value, ends_q, ends_k, longest_q, longest_k, *, used=None, table=None, slopes=None, **scores
):
    """A call for packed queries: output ``[rows, heads, size]``, log-sum-exp ``[heads, rows]``.

    Rows of no request stay unwritten: they are NaN. With ``table`` key and value are pages.
    """
    num_reqs, (rows, heads, size) = len(ends_q) - 1, query.shape
    _check_heads(query, key, value, slopes)
    _require(*(ends.dtype == torch.int32 and ends.is_contiguous() for ends in (ends_q, ends_k)))
    _require(len(ends_q) == len(ends_k), num_reqs > 0, int(ends_q.diff().max()) <= longest_q)
    # With at most one row a request, each is taken to have exactly one.
    _require(longest_q > 1 or rows == num_reqs)
    if table is None:
        _require(key.dim() == 3, int(ends_k[-1]) <= len(key))
    else:
        _check_pages(key, table, num_reqs)
    lengths = ends_k.diff() if used is None else used
    _require(lengths.dtype == torch.int32, lengths.is_contiguous(), len(lengths) == num_reqs)
    _require(int(lengths.max()) <= longest_k)
    out = torch.full((rows, heads, size), torch.nan, dtype=query.dtype)
    lse = torch.full((heads, rows), torch.nan)
    for request in range(num_reqs):
        own = slice(int(ends_q[request]), int(ends_q[request + 1]))
        where = request, int(ends_k[request]), int(lengths[request])
        found = attend(query[own], _keys(key, table, *where), _keys(value, table, *where), slopes=slopes, **scores)
        out[own], lse[:, own] = found[0].to(out.dtype), found[1].t().float()
    return out, lse


def _check_heads(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor | None) -> None:
    _require(query.dtype in (torch.float16, torch.bfloat16), query.dtype == key.dtype == value.dtype)
    _require(query.stride(-1) == key.stride(-1) == value.stride(-1) == 1, key.shape == value.shape)
    heads, size = query.shape[-2:]
    _require(heads % key.shape[-2] == 0, size == key.shape[-1], size % 8 == 0, size <= 256)
    # Loads of 16 bytes: not checked by the library, whose kernels would fail.
    strides = [stride for tensor in (query, key, value) for stride in tensor.stride()[:-1]]
    _require(all(stride % 8 == 0 for stride in strides))
    if slopes is not None:
        _require(slopes.dtype == torch.float32, slopes.shape == (heads,), slopes.stride(-1) == 1)


def _check_pages(pages: Tensor, table: Tensor, num_reqs: int) -> None:
    _require(pages.dim() == 4, pages.shape[1] % 256 == 0)
    _require(table.dtype == torch.int32, table.stride(-1) == 1, len(table) == num_reqs, table.dim() == 2)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """The signature of flash-attn 2.8.3."""
    out, lse = packed_call(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        table=block_table,
        slopes=alibi_slopes,
        scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """The signature of flash-attn 2.8.3."""
    _require(k is None and v is None, block_table is not None, cache_seqlens is not None)
    _check_heads(q, k_cache, v_cache, alibi_slopes)
    _check_pages(k_cache, block_table, len(q))
    _require(cache_seqlens.dtype == torch.int32, cache_seqlens.is_contiguous(), cache_seqlens.shape == (len(q),))
    _require(int(cache_seqlens.max()) <= block_table.shape[1] * k_cache.shape[1])
    out, lse = torch.empty_like(q), torch.empty(len(q), q.shape[2], q.shape[1])
    for request, length in enumerate(cache_seqlens.tolist()):
        found = attend(
            q[request],
            _keys(k_cache, block_table, request, 0, length),
            _keys(v_cache, block_table, request, 0, length),
            scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            causal=causal,
            window=window_size,
            softcap=softcap,
            slopes=alibi_slopes,
        )
        out[request], lse[request] = found[0].to(out.dtype), found[1].t().float()
    return (out, lse) if return_softmax_lse else out


Calls = list[tuple[str, dict[str, Any]]]
"""What was called, and with which arguments by name, defaults left out."""


def _recorded(function: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    def record(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(function).bind(*args, **kwargs)
        calls.append((function.__name__, dict(bound.arguments)))
        if any(isinstance(given, Tensor) and given.is_meta for given in bound.arguments.values()):
            return _shapes(function.__name__, **bound.arguments)
        return function(*args, **kwargs)

    return record


def _shapes(name: str, q: Tensor, **_: Any) -> tuple[Tensor, ...]:
    """Of tensors without contents: results of the documented shapes."""
    if name == "flash_attn_with_kvcache":
        return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32), q.new_empty(0)


@pytest.fixture
def flash_attn_calls(monkeypatch) -> Calls:
    """flash-attn's stand-in, importable as ``flash_attn``; the calls it got."""
    calls: Calls = []
    module = ModuleType("flash_attn")
    for function in (flash_attn_varlen_func, flash_attn_with_kvcache):
        setattr(module, function.__name__, _recorded(function, calls))
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return calls


@pytest.fixture
def stand_ins() -> tuple[Callable[..., Any], ...]:
    """The functions whose signatures are the library's."""
    return flash_attn_varlen_func, flash_attn_with_kvcache


@pytest.fixture
def documented() -> Callable[..., tuple[Tensor, Tensor]]:
    """:func:`packed_call`."""
    return packed_call


@pytest.fixture
def make_written_step(make_step) -> Callable[..., Any]:
    """A step of exact bounds whose new keys and values are in the cache already, as in the harness."""

    def make(backend, layer, requests, **options):
        step = make_step(backend, layer, requests, **{"cache": CacheSpec(block_size=256)} | options)
        step.common.max_query_len = max(query_len for query_len, _ in requests)
        step.common.max_seq_len = max(seq_len for _, seq_len in requests)
        if layer.attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER):
            slots = step.common.slot_mapping
            new = (slots >= 0).nonzero().squeeze(1)
            codec = backend.kv_cache_codec(layer, step.cache)
            codec.write(step.kv_cache, slots[new], step.key[new], step.value[new])
        return step

    return make


@pytest.fixture
def assert_right() -> Callable[..., None]:
    """Output and log-sum-exp of every row, as near to the truth as its dtype is fine. ``shift``: of the latter."""

    def check(step, shift: Tensor | float = 0.0) -> None:
        rows = step.num_rows
        unit = torch.finfo(step.output.dtype).eps
        assert float((step.output[:rows].double() - step.truth).abs().max()) <= unit * float(step.truth.abs().max())
        expected = step.truth_lse + shift
        assert torch.allclose(step.output_lse[:rows].double(), expected, rtol=1e-6, atol=1e-5)
        assert step.output[rows:].isnan().all()  # what belongs to no request was not touched

    return check


@pytest.fixture
def on_meta() -> Callable[..., None]:
    """Runs a step whose tensors have a device, shapes and no contents: whatever mixes devices fails."""

    def run(step) -> None:
        def moved(tensor):
            return tensor.to("meta") if isinstance(tensor, Tensor) else tensor

        host = ("query_start_loc_cpu", "seq_lens_cpu", "num_computed_tokens_cpu")
        fields = {name: value if name in host else moved(value) for name, value in vars(step.common).items()}
        step_builder = step.builder()
        builder = type(step_builder)(step_builder.kv_cache_spec, step_builder.layer_names, None, torch.device("meta"))
        metadata = builder.build(0, CommonAttentionMetadata(**fields))
        names = ("query", "key", "value", "kv_cache", "output", "output_lse")
        out = step.run(attn_metadata=metadata, **{name: moved(getattr(step, name)) for name in names})
        assert out.is_meta
        assert out.shape == step.output.shape

    return run
