"""Candidates ``flash_attn`` and ``torch_varlen``: what they pass to FlashAttention-2, and what they make of its results.

The kernels need a GPU. Each stand-in has the signature of the real function, refuses what the library's own checks
refuse, records the call, and computes by the reference what its arguments state. Of torch, the real Python layer runs,
down to the operator.
"""

import importlib.metadata
import inspect
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

import attncheck
from attncheck.backends.base import machine
from attncheck.backends.candidates import flash_attention as backend_module
from attncheck.backends.candidates.flash_attention import FlashAttnBackend, TorchVarlenBackend, flash_implementation
from attncheck.backends.contract import CommonAttentionMetadata
from attncheck.reference import AttentionParams, paged_attention, varlen_attention
from attncheck.reference.spec import AttentionType, LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, RequestSpec


def require(*facts):
    """Some of the checks of ``flash_api.cpp`` or of the Python layer."""
    if not all(facts):
        raise RuntimeError(f"the library would refuse this call: {facts}")


def answer(query, key, value, starts, lens, table, *, scale, causal, window, softcap=0.0, slopes=None):
    """Output ``[rows, heads, size]`` and log-sum-exp ``[rows, heads]``, +inf of nothing; NaN for rows of no request.

    Without ``table`` key and value are packed, and ``lens`` are the ends of each request's.
    """
    heads, size = query.shape[1:]
    require(query.dtype in (torch.float16, torch.bfloat16), query.dtype == key.dtype == value.dtype)
    require(query.stride(-1) == key.stride(-1) == value.stride(-1) == 1, size % 8 == 0, heads % key.shape[-2] == 0)
    require(*(numbers.dtype == torch.int32 and numbers.is_contiguous() for numbers in (starts, lens)))
    require(slopes is None or slopes.dtype == torch.float32)
    params = AttentionParams(
        heads,
        key.shape[-2],
        size,
        scale=scale,
        causal=causal,
        window=window,
        logits_soft_cap=softcap,
        alibi_slopes=None if slopes is None else tuple(slopes.tolist()),
    )
    rows = int(starts[-1])
    if table is None:
        found, lse = varlen_attention(query[:rows], key, value, starts, lens, params)
    else:
        require(key.shape[1] % 256 == 0, table.dtype == torch.int32, len(table) == len(lens) == len(starts) - 1)
        found, lse = paged_attention(query[:rows], key, value, table, lens, starts, params)
    out = torch.full(query.shape, torch.nan, dtype=query.dtype)
    out[:rows] = found.to(out.dtype)
    out_lse = torch.full(query.shape[:2], torch.nan)
    out_lse[:rows] = lse.float().masked_fill(lse.isneginf(), torch.inf)
    return out, out_lse


def require_bounds(starts, lens, longest_q, longest_k, rows):
    require(int(starts.diff().max()) <= longest_q, int(lens.max()) <= longest_k)
    # With at most one row a request, each is taken to have exactly one.
    require(longest_q > 1 or rows == len(starts) - 1)


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


def signature(name):
    return inspect.signature(eval(f"lambda {SIGNATURES[name]}: None"))


def scores(given):
    return {
        "scale": given["softmax_scale"],
        "causal": given["causal"],
        "window": given["window_size"],
        "softcap": given["softcap"],
        "slopes": given["alibi_slopes"],
    }


def flash_attn_varlen_func(given):
    q, starts, ends, table = given["q"], given["cu_seqlens_q"], given["cu_seqlens_k"], given["block_table"]
    require(given["return_attn_probs"])
    if q.is_meta:
        return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32), q.new_empty(0)
    require_bounds(starts, ends.diff(), given["max_seqlen_q"], given["max_seqlen_k"], len(q))
    lens = ends if table is None else ends.diff()
    out, lse = answer(q, given["k"], given["v"], starts, lens, table, **scores(given))
    return out, lse.t(), None


def flash_attn_with_kvcache(given):
    q, lens = given["q"], given["cache_seqlens"]
    require(given["k"] is given["v"] is None, given["return_softmax_lse"])
    if q.is_meta:
        return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    starts = torch.arange(len(q) + 1, dtype=torch.int32) * q.shape[1]
    caches = given["k_cache"], given["v_cache"]
    out, lse = answer(q.flatten(0, 1), *caches, starts, lens, given["block_table"], **scores(given))
    return out.view(q.shape), lse.view(q.shape[:3]).transpose(1, 2)


@pytest.fixture
def flash_attn_calls(monkeypatch):
    """flash-attn's stand-in, importable as ``flash_attn``; the calls it got: names, and arguments by name."""
    calls = []

    def recorded(stand_in):
        def record(*args, **kwargs):
            bound = signature(stand_in.__name__).bind(*args, **kwargs)
            bound.apply_defaults()
            calls.append((stand_in.__name__, bound.arguments))
            return stand_in(bound.arguments)

        return record

    module = ModuleType("flash_attn")
    for stand_in in (flash_attn_varlen_func, flash_attn_with_kvcache):
        setattr(module, stand_in.__name__, recorded(stand_in))
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return calls


@pytest.fixture
def aten_calls():
    """What torch's own ``varlen_attn`` hands to its operator, which has no kernel for a CPU but this stand-in."""
    calls = []

    def forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, **rest):
        rest = dict.fromkeys(("seqused_k", "block_table", "num_splits")) | rest  # defaults do not arrive
        calls.append({"key": key, "max_q": max_q, "max_k": max_k, "is_causal": is_causal, **rest})
        table = rest["block_table"]
        assert (table is None) == (rest["seqused_k"] is None)
        assert rest["num_splits"] == (None if table is None else 1)  # split over pages, keys are combined wrongly
        lens = cum_seq_k if table is None else rest["seqused_k"]
        require_bounds(cum_seq_q, cum_seq_k.diff() if table is None else lens, max_q, max_k, len(query))
        window = (rest["window_size_left"], rest["window_size_right"])
        scores = {"scale": rest["scale"], "causal": is_causal, "window": window}
        out, lse = answer(query, key, value, cum_seq_q, lens, table, **scores)
        return out, lse.t(), torch.zeros(2, dtype=torch.uint64), torch.zeros(()), torch.zeros(0)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    yield calls
    library._destroy()


_NEW = varlen.varlen_attn


def old_varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):
    """The signature published with torch 2.11, which documents equally many heads for query and key."""
    assert query.shape[1] == key.shape[1]
    keywords = {"return_aux": return_aux, "scale": scale, "window_size": window_size}
    return _NEW(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **keywords)


@pytest.fixture
def make_written_step(make_step):
    """A step of exact bounds whose new keys and values are in the cache already, as in the harness."""

    def make(backend, layer, requests, *, block_size=256, layout="NHD", **options):
        if layer.attn_type == AttentionType.ENCODER_ONLY:
            requests = [(query_len, query_len) for query_len, _ in requests]
        cache = CacheSpec(block_size=block_size, layout=layout)
        step = make_step(backend, layer, requests, cache=cache, **options)
        step.common.max_query_len = max(query_len for query_len, _ in requests)
        step.common.max_seq_len = max(seq_len for _, seq_len in requests)
        if layer.attn_type != AttentionType.ENCODER_ONLY:
            slots = step.common.slot_mapping
            new = (slots >= 0).nonzero().squeeze(1)
            codec = backend.kv_cache_codec(layer, step.cache)
            codec.write(step.kv_cache, slots[new], step.key[new], step.value[new])
        return step

    return make


def assert_right(step):
    """Output and log-sum-exp of every row, as near to the truth as its dtype is fine; no other row was touched."""
    rows = step.num_rows
    unit = torch.finfo(step.output.dtype).eps
    assert float((step.output[:rows].double() - step.truth).abs().max()) <= unit * float(step.truth.abs().max())
    assert torch.allclose(step.output_lse[:rows].double(), step.truth_lse, rtol=1e-6, atol=1e-5)
    assert step.output[rows:].isnan().all()


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
    "window": {"sliding_window": 9},
    "not causal": {"causal": False},
    "not causal, window": {"causal": False, "sliding_window": 4},
    "encoder only": {"attn_type": AttentionType.ENCODER_ONLY},
    "cross": {"attn_type": AttentionType.ENCODER_DECODER},
}
OF_FLASH_ATTN = {"cap": {"logits_soft_cap": 2.0}, "alibi": {"alibi": True}}


@pytest.mark.parametrize(
    ("batch", "name"),
    [
        *(("mixed", name) for name in (*LAYERS, *OF_FLASH_ATTN)),
        *(
            (batch, name)
            for batch in ("decode", "verify")
            for name in ("plain", "window", "not causal", *OF_FLASH_ATTN)
        ),
        ("prompts of one length", "plain"),
    ],
)
def test_a_call_of_flash_attn_has_the_values_of_the_question(batch, name, make_written_step, flash_attn_calls):
    layer = replace(PLAIN, **(LAYERS | OF_FLASH_ATTN)[name])
    layout = "NHD" if batch in ("mixed", "verify") else "HND"
    step = make_written_step(FlashAttnBackend, layer, BATCHES[batch], layout=layout, padding=(2, 3), gain=2.0)
    impl = step.impl()
    step.impl = lambda: impl
    step.run()
    # Under the causal mask alone ALiBi's bias is slope * j: the same output, and a log-sum-exp from position 0.
    assert FlashAttnBackend.conventions.alibi_reference == "zero"
    assert_right(step)
    ((called, given),) = flash_attn_calls
    assert called == ("flash_attn_with_kvcache" if batch in ("decode", "verify") else "flash_attn_varlen_func")
    assert impl.chosen_kernels == {f"FA2 {called}"}
    assert (given["block_table"] is None) == (name == "encoder only")


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
    options = {"block_size": block_size, "layout": "HND" if is_old else "NHD", "padding": (2, 3), "gain": 2.0}
    step = make_written_step(TorchVarlenBackend, layer, requests, **options)
    step.run()
    assert_right(step)
    (given,) = aten_calls
    assert (given["block_table"] is not None) == (name != "encoder only" and block_size == 256 and not is_old)
    assert given["is_causal"] == (name == "plain")  # the operator has no window beside it


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
            key = given["k"]
        else:
            (given,) = aten_calls
            assert (given["max_q"], given["max_k"]) == bounds
            key = given["key"]
        assert key.data_ptr() == step.kv_cache[0].data_ptr()
        assert key.shape == (40, 256, 2, 24)


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
    step = make_written_step(TorchVarlenBackend, replace(PLAIN, sliding_window=5), [(1, 30)], block_size=4)
    step.common.block_table_tensor[0, :6] = 10**6  # positions 0 to 23; the row at 29 sees 25 to 29
    step.run()
    assert_right(step)


@pytest.mark.parametrize(
    ("backend", "modifiers", "requests", "block_size"),
    [
        (FlashAttnBackend, {}, [(2, 2), (5, 5)], 256),
        (FlashAttnBackend, {"alibi": True}, [(2, 5), (2, 9)], 256),
        (TorchVarlenBackend, {}, [(2, 2), (5, 5)], 256),
        (TorchVarlenBackend, {}, [(2, 2), (5, 5)], 16),
    ],
)
def test_devices_are_not_mixed(backend, modifiers, requests, block_size, make_written_step, flash_attn_calls):
    """Tensors have a device, shapes and no contents: whatever mixes devices fails."""

    def moved(tensor):
        return tensor.to("meta") if isinstance(tensor, Tensor) else tensor

    step = make_written_step(backend, replace(PLAIN, **modifiers), requests, block_size=block_size)
    host = ("query_start_loc_cpu", "seq_lens_cpu", "num_computed_tokens_cpu")
    fields = {name: value if name in host else moved(value) for name, value in vars(step.common).items()}
    spec = step.builder().kv_cache_spec
    builder = backend.get_builder_cls()(spec, ["layer.0"], None, torch.device("meta"))
    builder.has_exact_lens = False  # a tensor without contents has no lengths to read
    metadata = builder.build(0, CommonAttentionMetadata(**fields))
    names = ("query", "key", "value", "kv_cache", "output", "output_lse")
    out = step.run(attn_metadata=metadata, **{name: moved(getattr(step, name)) for name in names})
    assert out.is_meta


@pytest.mark.parametrize("backend", [FlashAttnBackend, TorchVarlenBackend])
def test_a_step_without_rows_calls_nothing(backend, make_written_step, flash_attn_calls, aten_calls):
    step = make_written_step(backend, PLAIN, [(1, 3)])
    step.common.query_start_loc_cpu.zero_()
    step.common.query_start_loc.zero_()
    step.common.slot_mapping = torch.full((1,), -1)
    step.run()
    assert step.output.isnan().all()
    assert flash_attn_calls == aten_calls == []


@pytest.mark.parametrize(
    ("backend", "modifiers", "reason"),
    [
        (FlashAttnBackend, {"scale": 0.0}, "scale 0: FlashAttention-2 needs one above 0"),
        (
            FlashAttnBackend,
            {"alibi": True, "sliding_window": 4},
            "ALiBi beside a sliding window: the log-sum-exp is then measured from another place",
        ),
        (FlashAttnBackend, {"alibi": True, "causal": False}, "feature 'alibi_non_causal' is not declared"),
        (TorchVarlenBackend, {"head_size": 264}, f"supported are {', '.join(map(str, range(8, 257, 8)))}"),
    ],
)
def test_what_the_kernels_cannot_do_is_declared_and_refused(backend, modifiers, reason, make_step, flash_attn_calls):
    layer, cache = replace(PLAIN, **modifiers), CacheSpec(block_size=256)
    (found,) = backend.unsupported_reasons(layer, cache, DECODE)
    assert found.endswith(reason)
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


ON_CPU = "device cpu: the backend runs on cuda"


def test_flash_attn_needs_the_library_that_was_read_and_states_its_version(monkeypatch):
    for installed, reasons in (
        ("", ["flash-attn is not installed"]),
        ("2.7.4.post1", ["flash-attn 2.7.4.post1: written against 2.8"]),
    ):
        monkeypatch.setattr(backend_module, "library_version", lambda installed=installed: installed)
        assert FlashAttnBackend.unavailable_reasons("cpu") == [ON_CPU, *reasons]
    monkeypatch.undo()
    monkeypatch.setattr(attncheck, "__version__", "0.1", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", {"flash-attn": "2.8.3"}.__getitem__)
    assert FlashAttnBackend.version() == "0.1, flash-attn 2.8.3"
    monkeypatch.setattr(machine, "import_reasons", lambda module: [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    old = "device cuda:0: compute capability 7.5, and the kernels need 8.0"
    assert FlashAttnBackend.unavailable_reasons("cuda:0") == [old]


def test_a_torch_whose_function_takes_less_is_unavailable(monkeypatch):
    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
        raise NotImplementedError

    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    version = TorchVarlenBackend.version()
    assert version == f"torch {torch.__version__}"
    takes_less = f"{version}: varlen_attn takes no scale, window_size"
    assert TorchVarlenBackend.unavailable_reasons("cpu") == [ON_CPU, takes_less]
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert TorchVarlenBackend.unavailable_reasons("cpu") == [ON_CPU, f"{version} was built without FlashAttention"]


def test_the_stand_ins_have_the_signatures_of_the_installed_library():
    real = pytest.importorskip("flash_attn.flash_attn_interface", reason="flash-attn needs a GPU")
    for name in SIGNATURES:
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
