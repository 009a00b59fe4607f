"""Candidates ``flash_attn`` and ``torch_varlen``: what they pass to FlashAttention-2, and what they make of its results.

The kernels need a GPU. Each stand-in has the signature of the real function, refuses what the library's own checks
refuse, records the call, and computes what its sources document, in float64, one request after another. Of torch, the
real Python layer runs, down to the operator.
"""

import importlib.metadata
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from torch import Tensor
from torch.nn.attention import varlen

import attncheck
from attncheck.backends.base import machine
from attncheck.backends.candidates import flash_attention as backend_module
from attncheck.backends.candidates.flash_attention import FlashAttnBackend, TorchVarlenBackend, flash_implementation
from attncheck.backends.contract import CommonAttentionMetadata
from attncheck.reference.spec import AttentionType, BatchSpec, CacheSpec, LayerSpec, RequestSpec


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


SIGNATURES = {
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, "
    "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False, block_table=None",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False",
}
"""Of flash-attn 2.8.3."""


def signature(name: str) -> inspect.Signature:
    return inspect.signature(eval(f"lambda {SIGNATURES[name]}: None"))


def _scores(given: dict[str, Any]) -> dict[str, Any]:
    scale, size = given["softmax_scale"], given["q"].shape[-1]
    return {
        "scale": size**-0.5 if scale is None else scale,
        "causal": given["causal"],
        "window": given["window_size"],
        "softcap": given["softcap"],
        "slopes": given["alibi_slopes"],
    }


def flash_attn_varlen_func(given: dict[str, Any]) -> Any:
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    out, lse = packed_call(*(given[name] for name in names), table=given["block_table"], **_scores(given))
    return (out, lse, None) if given["return_attn_probs"] else out


def flash_attn_with_kvcache(given: dict[str, Any]) -> Any:
    query, lens, table = given["q"], given["cache_seqlens"], given["block_table"]
    caches = given["k_cache"], given["v_cache"]
    _require(given["k"] is None and given["v"] is None, table is not None, lens is not None)
    _check_heads(query, *caches, given["alibi_slopes"])
    _check_pages(caches[0], table, len(query))
    _require(lens.dtype == torch.int32, lens.is_contiguous(), lens.shape == (len(query),))
    _require(int(lens.max()) <= table.shape[1] * caches[0].shape[1])
    out, lse = torch.empty_like(query), torch.empty(len(query), query.shape[2], query.shape[1])
    for request, length in enumerate(lens.tolist()):
        key, value = (_keys(cache, table, request, 0, length) for cache in caches)
        found = attend(query[request], key, value, **_scores(given))
        out[request], lse[request] = found[0].to(out.dtype), found[1].t().float()
    return (out, lse) if given["return_softmax_lse"] else out


STAND_INS = {stand_in.__name__: stand_in for stand_in in (flash_attn_varlen_func, flash_attn_with_kvcache)}

Calls = list[tuple[str, dict[str, Any]]]
"""What was called, and with which arguments by name, defaults left out."""


def _recorded(name: str, calls: Calls) -> Callable[..., Any]:
    def record(*args: Any, **kwargs: Any) -> Any:
        bound = signature(name).bind(*args, **kwargs)
        calls.append((name, dict(bound.arguments)))
        if bound.arguments["q"].is_meta:
            return _shapes(name, bound.arguments["q"])
        bound.apply_defaults()
        return STAND_INS[name](bound.arguments)

    return record


def _shapes(name: str, q: Tensor) -> tuple[Tensor, ...]:
    """Of tensors without contents: results of the documented shapes."""
    if name == "flash_attn_with_kvcache":
        return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32), q.new_empty(0)


@pytest.fixture
def flash_attn_calls(monkeypatch) -> Calls:
    """flash-attn's stand-in, importable as ``flash_attn``; the calls it got."""
    calls: Calls = []
    module = ModuleType("flash_attn")
    for name in STAND_INS:
        setattr(module, name, _recorded(name, calls))
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return calls


@pytest.fixture
def aten_calls():
    """What torch's own ``varlen_attn`` hands to its operator, which has no kernel for a CPU but this stand-in."""
    calls = []

    def forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, **rest):
        rest = dict.fromkeys(("seqused_k", "block_table", "num_splits")) | rest  # defaults do not arrive
        given = {"key": key, "cum_seq_q": cum_seq_q, "cum_seq_k": cum_seq_k, "max_q": max_q, "max_k": max_k}
        calls.append({**given, "is_causal": is_causal, **rest})
        assert (dropout_p, return_debug_mask) == (0.0, False)
        table = rest["block_table"]
        assert (table is None) == (rest["seqused_k"] is None)
        assert rest["num_splits"] == (None if table is None else 1)  # split over pages, keys are combined wrongly
        out, lse = packed_call(
            query,
            key,
            value,
            cum_seq_q,
            cum_seq_k,
            max_q,
            max_k,
            used=rest["seqused_k"],
            table=table,
            scale=rest["scale"],
            causal=is_causal,
            window=(rest["window_size_left"], rest["window_size_right"]),
        )
        return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros(()), torch.zeros(0)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    yield calls
    library._destroy()


def old_varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    """The signature published with torch 2.11, which documents equally many heads for query and key."""
    assert query.shape[1] == key.shape[1]
    return _NEW(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        return_aux=return_aux,
        scale=scale,
        window_size=window_size,
    )


_NEW = varlen.varlen_attn


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


def assert_right(step, shift: Tensor | float = 0.0) -> None:
    """Output and log-sum-exp of every row, as near to the truth as its dtype is fine. ``shift``: of the latter."""
    rows = step.num_rows
    unit = torch.finfo(step.output.dtype).eps
    assert float((step.output[:rows].double() - step.truth).abs().max()) <= unit * float(step.truth.abs().max())
    expected = step.truth_lse + shift
    assert torch.allclose(step.output_lse[:rows].double(), expected, rtol=1e-6, atol=1e-5)
    assert step.output[rows:].isnan().all()  # what belongs to no request was not touched


def run_on_meta(step) -> None:
    """Run a step whose tensors have a device, shapes and no contents: whatever mixes devices fails."""

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


DECODE = BatchSpec(requests=(RequestSpec(query_len=1),))
PLAIN = LayerSpec(num_heads=6, num_kv_heads=2, head_size=24, dtype="float16", scale=0.3)
BATCHES = {
    "mixed": [(1, 5), (1, 300), (7, 19), (20, 20), (3, 515)],
    "decode": [(1, 5), (1, 300), (1, 256), (1, 0), (1, 513)],
    "verify": [(3, 5), (3, 2), (3, 300), (3, 3)],
    "prompts of one length": [(17, 17), (17, 270)],
}
LAYERS = {
    "plain": {},
    "mha": {"num_kv_heads": 6},
    "mqa": {"num_kv_heads": 1},
    "bfloat16": {"dtype": "bfloat16"},
    "window": {"sliding_window": 9},
    "window of one key": {"sliding_window": 1},
    "window wider than all": {"sliding_window": 5000},
    "not causal": {"causal": False},
    "not causal, window": {"causal": False, "sliding_window": 4},
    "head size 80": {"head_size": 80},
    "encoder only": {"attn_type": AttentionType.ENCODER_ONLY},
    "encoder": {"attn_type": AttentionType.ENCODER, "num_kv_heads": 6},
    "encoder only, window": {"attn_type": AttentionType.ENCODER_ONLY, "sliding_window": 3},
    "cross": {"attn_type": AttentionType.ENCODER_DECODER},
}
OF_FLASH_ATTN = {
    "cap": {"logits_soft_cap": 2.0},
    "cap and window": {"logits_soft_cap": 2.0, "sliding_window": 9},
    "alibi": {"alibi": True},
    "alibi and cap": {"alibi": True, "logits_soft_cap": 1.5},
    "not causal, window, cap": {"causal": False, "sliding_window": 4, "logits_soft_cap": 3.0},
}
ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


def from_position_zero(step):
    """By how much a bias of ``slope * j`` raises the log-sum-exp above one of ``slope * (j - position)``."""
    if step.layer.alibi_slopes is None:
        return 0.0
    ends, lens = step.common.query_start_loc_cpu.tolist(), step.common.seq_lens_cpu.tolist()
    positions = [
        length - (end - row)
        for start, end, length in zip(ends, ends[1:], lens, strict=False)
        for row in range(start, end)
    ]
    return torch.tensor(positions)[:, None] * torch.tensor(step.layer.alibi_slopes, dtype=torch.float64)


OF_FEW_ROWS = ("plain", "window", "not causal", *OF_FLASH_ATTN)


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        *(("mixed", name) for name in (*LAYERS, *OF_FLASH_ATTN)),
        *((batch, name) for name in OF_FEW_ROWS for batch in ("decode", "verify")),
        ("prompts of one length", "plain"),
    ],
)
def test_a_call_of_flash_attn_has_the_values_of_the_question(batch, name, make_written_step, flash_attn_calls):
    layer = replace(PLAIN, **(LAYERS | OF_FLASH_ATTN)[name])
    cache = CacheSpec(block_size=256, layout="NHD" if batch in ("mixed", "verify") else "HND")
    is_encoder, requests = layer.attn_type in ENCODERS, BATCHES[batch]
    if is_encoder:
        requests = [(query_len, query_len) for query_len, _ in requests]
    step = make_written_step(FlashAttnBackend, layer, requests, cache=cache, padding=(2, 3), gain=2.0)
    impl = step.impl()
    step.impl = lambda: impl
    step.run()
    assert_right(step, from_position_zero(step))
    ((called, given),) = flash_attn_calls
    is_uniform = batch in ("decode", "verify") and not is_encoder
    assert called == ("flash_attn_with_kvcache" if is_uniform else "flash_attn_varlen_func")
    assert impl.chosen_kernels == {f"FA2 {called}"}
    assert (given.get("block_table") is None) == is_encoder


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("is_old", "block_size"), [(False, 256), (True, 256), (False, 16)])
def test_a_call_of_torch_has_the_values_of_the_question(
    is_old, block_size, name, make_written_step, aten_calls, monkeypatch
):
    if is_old:  # torch 2.11
        monkeypatch.setattr(varlen, "varlen_attn", old_varlen_attn)
    layer, requests = replace(PLAIN, **LAYERS[name]), BATCHES["mixed"]
    if block_size == 16:
        requests = [(1, 5), (1, 40), (7, 19), (20, 20), (9, 3), (2, 0)]
    if layer.attn_type in ENCODERS:
        requests = [(query_len, query_len) for query_len, _ in requests]
    cache = CacheSpec(block_size=block_size, layout="HND" if is_old else "NHD")
    step = make_written_step(TorchVarlenBackend, layer, requests, cache=cache, padding=(2, 3), gain=2.0)
    step.run()
    assert_right(step)
    (given,) = aten_calls
    has_pages = layer.attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)
    assert (given["block_table"] is not None) == (has_pages and block_size == 256 and not is_old)


def test_pages_are_read_in_place_and_bounds_are_passed_on(make_written_step, flash_attn_calls, aten_calls):
    for backend in (FlashAttnBackend, TorchVarlenBackend):
        step = make_written_step(backend, replace(PLAIN, sliding_window=9), [(2, 300), (5, 5)], padding=(1, 0))
        step.common.max_seq_len += 7
        step.run()
        bounds = step.common.max_query_len, step.common.max_seq_len
        if backend is FlashAttnBackend:
            ((_, given),) = flash_attn_calls
            assert given["block_table"] is step.common.block_table_tensor
            assert (given["max_seqlen_q"], given["max_seqlen_k"]) == bounds
            pages = given["k"], given["v"]
        else:
            (given,) = aten_calls
            assert (given["max_q"], given["max_k"], given["num_splits"]) == (*bounds, 1)
            pages = (given["key"],)
        for cache, half in zip(pages, step.kv_cache, strict=False):
            assert cache.data_ptr() == half.data_ptr()
            assert cache.shape == (40, 256, 2, 24)


def test_torch_recognises_a_plain_causal_step(make_written_step, aten_calls):
    make_written_step(TorchVarlenBackend, PLAIN, [(2, 3)]).run()
    assert aten_calls[0]["is_causal"] is True


def test_a_bound_that_is_not_reached_makes_no_step_uniform(make_written_step, flash_attn_calls):
    """A graph for any lengths may be captured with equally many rows a request; only its bound differs."""
    step = make_written_step(FlashAttnBackend, PLAIN, [(2, 300), (2, 5)])
    step.common.max_query_len = 4
    step.run()
    assert_right(step)
    assert [called for called, _ in flash_attn_calls] == ["flash_attn_varlen_func"]


def test_rows_that_turn_into_padding_of_a_graph_become_zero(make_written_step, flash_attn_calls):
    """A call for packed queries leaves them unwritten; which rows they are is on the device alone."""
    step = make_written_step(FlashAttnBackend, PLAIN, [(1, 5), (4, 9)], padding=(1, 3))
    metadata = step.builder().build(0, step.common)
    step.run(attn_metadata=replace(metadata, query_start_loc=(0, 1, 5, 8)))
    assert step.output[:5].isfinite().all()
    assert (step.output[5:] == 0).all()
    assert step.output_lse[5:].isneginf().all()


@pytest.mark.parametrize(("max_num_seqs", "first", "second"), [(4, 1, 4), (None, 4, 1)])
def test_the_sums_of_lengths_are_in_one_buffer(max_num_seqs, first, second, make_written_step):
    steps = {count: make_written_step(FlashAttnBackend, PLAIN, [(1, 5)] * count) for count in (1, 4)}
    config = max_num_seqs and SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs))
    spec = steps[1].builder().kv_cache_spec
    builder = FlashAttnBackend.get_builder_cls()(spec, ["layer.0"], config, torch.device("cpu"))
    places = set()
    for count in (first, second):
        built = builder.build(0, steps[count].common)
        assert built.cu_seq_lens.tolist() == [5 * number for number in range(count + 1)]
        places.add(built.cu_seq_lens.data_ptr())
    assert len(places) == 1


def test_pages_that_a_window_has_freed_are_not_gathered(make_written_step, aten_calls):
    layer, cache = replace(PLAIN, sliding_window=5), CacheSpec(block_size=4)
    step = make_written_step(TorchVarlenBackend, layer, [(1, 30)], cache=cache)
    step.common.block_table_tensor[0, :6] = 10**6  # positions 0 to 23; the row at 29 sees 25 to 29
    step.run()
    assert_right(step)


@pytest.mark.parametrize(
    ("backend", "modifiers", "requests", "block_size"),
    [
        (FlashAttnBackend, {}, [(2, 2), (5, 5)], 256),
        (FlashAttnBackend, {"alibi": True}, [(2, 5), (2, 9)], 256),
        (FlashAttnBackend, {"attn_type": AttentionType.ENCODER_ONLY}, [(2, 2), (5, 5)], 256),
        (TorchVarlenBackend, {}, [(2, 2), (5, 5)], 256),
        (TorchVarlenBackend, {}, [(2, 2), (5, 5)], 16),
        (TorchVarlenBackend, {"attn_type": AttentionType.ENCODER_ONLY}, [(2, 2), (5, 5)], 16),
    ],
)
def test_devices_are_not_mixed(backend, modifiers, requests, block_size, make_written_step, flash_attn_calls):
    layer, cache = replace(PLAIN, **modifiers), CacheSpec(block_size=block_size)
    run_on_meta(make_written_step(backend, layer, requests, cache=cache))


@pytest.mark.parametrize("backend", [FlashAttnBackend, TorchVarlenBackend])
def test_a_step_without_rows_calls_nothing(backend, make_written_step, flash_attn_calls, aten_calls):
    step = make_written_step(backend, PLAIN, [(1, 3)])
    step.common.query_start_loc_cpu.zero_()
    step.common.query_start_loc.zero_()
    step.common.slot_mapping = torch.full((1,), -1)
    step.run()
    assert step.output.isnan().all()
    assert flash_attn_calls == aten_calls == []


HEAD_SIZES = ", ".join(map(str, range(8, 257, 8)))


@pytest.mark.parametrize(
    ("backend", "modifiers", "reason"),
    [
        (FlashAttnBackend, {"scale": 0.0}, "scale 0: FlashAttention-2 needs one above 0"),
        (
            FlashAttnBackend,
            {"alibi": True, "sliding_window": 4},
            "ALiBi beside a sliding window: the log-sum-exp is then measured from another place",
        ),
        (
            FlashAttnBackend,
            {"alibi": True, "causal": False},
            "the layer has ALiBi slopes and is not causal: feature 'alibi_non_causal' is not declared",
        ),
        (FlashAttnBackend, {"sinks": True}, "the layer has attention sinks: feature 'sinks' is not declared"),
        (FlashAttnBackend, {"head_size": 20}, f"head_size 20: supported are {HEAD_SIZES}"),
        (FlashAttnBackend, {"dtype": "float32"}, "dtype float32: supported are float16, bfloat16"),
        (TorchVarlenBackend, {"scale": -0.5}, "scale -0.5: FlashAttention-2 needs one above 0"),
        (
            TorchVarlenBackend,
            {"logits_soft_cap": 5.0},
            "logits_soft_cap 5.0: feature 'logits_soft_cap' is not declared",
        ),
        (TorchVarlenBackend, {"alibi": True}, "the layer has ALiBi slopes: feature 'alibi' is not declared"),
        (TorchVarlenBackend, {"head_size": 264}, f"head_size 264: supported are {HEAD_SIZES}"),
    ],
)
def test_what_the_kernels_cannot_do_is_declared_and_refused(backend, modifiers, reason, make_step, flash_attn_calls):
    layer, cache = replace(PLAIN, **modifiers), CacheSpec(block_size=256)
    assert backend.unsupported_reasons(layer, cache, DECODE) == [reason]
    step = make_step(backend, layer, [(1, 3)], cache=cache)
    with pytest.raises((ValueError, NotImplementedError)):
        step.run()
    assert step.output.isnan().all()
    assert not flash_attn_calls


def test_pages_of_flash_attn_are_multiples_of_256_tokens():
    reason = "block_size 128: supported are multiples of 256"
    assert FlashAttnBackend.unsupported_reasons(PLAIN, CacheSpec(block_size=128), DECODE) == [reason]
    assert FlashAttnBackend.unsupported_reasons(PLAIN, CacheSpec(block_size=512), DECODE) == []
    assert TorchVarlenBackend.unsupported_reasons(PLAIN, CacheSpec(block_size=1), DECODE) == []


@pytest.mark.parametrize(
    ("installed", "reason"),
    [("", "flash-attn is not installed"), ("2.7.4.post1", "flash-attn 2.7.4.post1: written against 2.8")],
)
def test_without_a_library_that_was_read_the_backend_is_unavailable(installed, reason, monkeypatch):
    monkeypatch.setattr(backend_module, "library_version", lambda: installed)
    assert FlashAttnBackend.unavailable_reasons("cpu") == [snapshot("device cpu: the backend runs on cuda"), reason]


def test_the_version_is_that_of_the_library_too(monkeypatch):
    monkeypatch.setattr(attncheck, "__version__", "0.1", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", {"flash-attn": "2.8.3"}.__getitem__)
    assert FlashAttnBackend.version() == "0.1, flash-attn 2.8.3"
    assert TorchVarlenBackend.version() == f"torch {torch.__version__}"
    assert backend_module.missing_library_reasons() == []


@pytest.mark.parametrize(
    ("capability", "reasons"),
    [((7, 5), ["device cuda:0: compute capability 7.5, and the kernels need 8.0"]), ((9, 0), [])],
)
def test_gpus_before_ampere_are_unavailable(capability, reasons, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(backend_module, "missing_library_reasons", list)
    monkeypatch.setattr(machine, "import_reasons", lambda module: [])
    assert FlashAttnBackend.unavailable_reasons("cuda:0") == reasons


def test_a_torch_whose_function_takes_less_is_unavailable(monkeypatch):
    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
        raise NotImplementedError

    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    device, missing = TorchVarlenBackend.unavailable_reasons("cpu")
    assert device == "device cpu: the backend runs on cuda"
    assert missing == f"torch {torch.__version__}: varlen_attn takes no scale, window_size"
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    missing = TorchVarlenBackend.unavailable_reasons("cpu")[1]
    assert missing == f"torch {torch.__version__} was built without FlashAttention"


def test_the_stand_ins_have_the_signatures_of_the_installed_library():
    real = pytest.importorskip("flash_attn.flash_attn_interface", reason="flash-attn needs a GPU")
    for name in STAND_INS:
        found = inspect.signature(getattr(real, name)).parameters.values()
        own = signature(name).parameters.values()
        assert [(p.name, p.default) for p in found] == [(p.name, p.default) for p in own]


@pytest.mark.parametrize(("activated", "kernel"), [(None, "FA2"), ("FA3", "FA3")])
def test_the_flash_attention_that_torch_calls_is_named(activated, kernel, make_written_step, aten_calls, monkeypatch):
    monkeypatch.setattr(torch.nn.attention._registry, "_FLASH_ATTENTION_ACTIVE", activated and (activated, None))
    step = make_written_step(TorchVarlenBackend, PLAIN, [(1, 5)])
    impl = step.impl()
    step.impl = lambda: impl
    step.run()
    assert impl.chosen_kernels == {kernel}
    monkeypatch.delattr(torch.nn.attention, "current_flash_attention_impl")
    assert flash_implementation() == "FA2"
