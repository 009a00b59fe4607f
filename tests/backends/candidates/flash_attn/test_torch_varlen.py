"""torch's ``varlen_attn`` as a candidate: its real Python layer runs, down to the operator that needs a GPU."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot
from torch.nn.attention import varlen

from attncheck.backends.candidates.flash_attention import TorchVarlenBackend, flash_implementation
from attncheck.reference.spec import AttentionType, BatchSpec, CacheSpec, LayerSpec, RequestSpec

PLAIN = LayerSpec(num_heads=6, num_kv_heads=2, head_size=24, dtype="float16", scale=0.3)
MIXED = [(1, 5), (1, 300), (7, 19), (20, 20), (3, 515)]
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


@pytest.fixture
def aten_calls(documented):
    """What torch's own ``varlen_attn`` hands to its operator, which has no kernel for a CPU but this stand-in."""
    calls = []

    def forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, **rest):
        rest = dict.fromkeys(("seqused_k", "block_table", "num_splits")) | rest  # defaults do not arrive
        given = {"key": key, "cum_seq_q": cum_seq_q, "cum_seq_k": cum_seq_k, "max_q": max_q, "max_k": max_k}
        calls.append(("_flash_attention_forward", {**given, "is_causal": is_causal, **rest}))
        assert (dropout_p, return_debug_mask) == (0.0, False)
        table = rest["block_table"]
        assert (table is None) == (rest["seqused_k"] is None)
        assert rest["num_splits"] == (None if table is None else 1)  # split over pages, keys are combined wrongly
        out, lse = documented(
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


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("modifiers", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("is_old", [False, True], ids=["pages", "torch 2.11"])
def test_the_call_of_the_operator_has_the_values_of_the_question(
    is_old, modifiers, block_size, layout, make_written_step, aten_calls, assert_right, monkeypatch
):
    if is_old:
        monkeypatch.setattr(varlen, "varlen_attn", old_varlen_attn)
    layer, cache = replace(PLAIN, **modifiers), CacheSpec(block_size=block_size, layout=layout)
    requests = [(1, 5), (1, 40), (7, 19), (20, 20), (3, 75)] if block_size == 16 else MIXED
    if layer.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
        requests = [(n, n) for n, _ in requests]
    step = make_written_step(TorchVarlenBackend, layer, requests, cache=cache, padding=(2, 3), gain=2.0)
    step.run()
    assert_right(step)
    (_, given), *others = aten_calls
    assert not others
    reads_pages = given["block_table"] is not None
    has_pages = layer.attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)
    assert reads_pages == (has_pages and block_size == 256 and not is_old)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 530)), min_size=1, max_size=4),
    sliding_window=st.none() | st.integers(1, 40),
    causal=st.booleans(),
    padding=st.sampled_from([(0, 0), (1, 4)]),
)
def test_any_lengths_and_windows(
    requests, sliding_window, causal, padding, make_written_step, aten_calls, assert_right
):
    """More rows than keys, and no keys, among them."""
    layer = replace(PLAIN, head_size=16, sliding_window=sliding_window, causal=causal)
    step = make_written_step(TorchVarlenBackend, layer, requests, padding=padding)
    step.run()
    assert_right(step)


def test_the_arguments_are_these(make_written_step, aten_calls):
    layer = replace(PLAIN, sliding_window=9)
    step = make_written_step(TorchVarlenBackend, layer, [(2, 300), (5, 5)], padding=(1, 0))
    step.run()
    ((_, given),) = aten_calls
    assert given["cum_seq_q"].tolist() == [0, 2, 7, 7]
    assert given["cum_seq_k"].tolist() == [0, 300, 305, 305]
    assert given["seqused_k"].tolist() == [300, 5, 0]
    assert torch.equal(given["block_table"], step.common.block_table_tensor)
    assert given["key"].data_ptr() == step.kv_cache.data_ptr()  # in place
    assert given["key"].shape == (40, 256, 2, 24)
    assert (given["max_q"], given["max_k"]) == (step.common.max_query_len, step.common.max_seq_len)
    assert (given["window_size_left"], given["window_size_right"], given["is_causal"]) == (8, 0, False)
    assert (given["scale"], given["num_splits"]) == (0.3, 1)


def test_a_plain_causal_step_is_recognised_as_one(make_written_step, aten_calls):
    make_written_step(TorchVarlenBackend, PLAIN, [(2, 3)]).run()
    assert aten_calls[0][1]["is_causal"] is True


def test_pages_that_a_window_has_freed_are_not_gathered(make_written_step, aten_calls, assert_right):
    step = make_written_step(
        TorchVarlenBackend, replace(PLAIN, sliding_window=5), [(1, 30)], cache=CacheSpec(block_size=4)
    )
    step.common.block_table_tensor[0, :6] = 10**6  # positions 0 to 23; the row at 29 sees 25 to 29
    step.run()
    assert_right(step)


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("attn_type", [AttentionType.DECODER, AttentionType.ENCODER_ONLY])
def test_devices_are_not_mixed(attn_type, block_size, make_written_step, on_meta):
    layer = replace(PLAIN, attn_type=attn_type)
    on_meta(make_written_step(TorchVarlenBackend, layer, [(2, 2), (5, 5)], cache=CacheSpec(block_size=block_size)))


def test_a_step_without_rows_calls_nothing(make_written_step, aten_calls):
    step = make_written_step(TorchVarlenBackend, PLAIN, [(1, 3)])
    step.common.query_start_loc_cpu.zero_()
    step.common.query_start_loc.zero_()
    step.common.slot_mapping = torch.full((1,), -1)
    step.run()
    assert not aten_calls
    assert step.output.isnan().all()


@pytest.mark.parametrize(
    ("modifiers", "reason"),
    [
        ({"scale": 0.0}, snapshot("scale 0: FlashAttention-2 needs one above 0")),
        ({"scale": -0.5}, snapshot("scale -0.5: FlashAttention-2 needs one above 0")),
        ({"logits_soft_cap": 5.0}, snapshot("logits_soft_cap 5.0: feature 'logits_soft_cap' is not declared")),
        ({"alibi": True}, snapshot("the layer has ALiBi slopes: feature 'alibi' is not declared")),
        (
            {"head_size": 20},
            snapshot(
                "head_size 20: supported are 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 144, 152, 160, 168, 176, 184, 192, 200, 208, 216, 224, 232, 240, 248, 256"
            ),
        ),
        (
            {"head_size": 264},
            snapshot(
                "head_size 264: supported are 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 144, 152, 160, 168, 176, 184, 192, 200, 208, 216, 224, 232, 240, 248, 256"
            ),
        ),
        ({"dtype": "float32"}, snapshot("dtype float32: supported are float16, bfloat16")),
    ],
)
def test_what_the_kernels_cannot_do_is_declared_and_refused(modifiers, reason, make_step):
    layer = replace(PLAIN, **modifiers)
    batch = BatchSpec(requests=(RequestSpec(query_len=1),))
    (found,) = TorchVarlenBackend.unsupported_reasons(layer, CacheSpec(), batch)
    assert found == reason
    step = make_step(TorchVarlenBackend, layer, [(1, 3)])
    with pytest.raises((ValueError, NotImplementedError)):
        step.run()
    assert step.output.isnan().all()


def test_a_torch_whose_function_takes_less_is_unavailable(monkeypatch):
    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
        raise NotImplementedError

    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    device, missing = TorchVarlenBackend.unavailable_reasons("cpu")
    assert device == "device cpu: the backend runs on cuda"
    assert missing == f"torch {torch.__version__}: varlen_attn takes no scale, window_size"


def test_a_torch_without_the_kernels_is_unavailable(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    reasons = TorchVarlenBackend.unavailable_reasons("cpu")
    assert reasons[1:] == [f"torch {torch.__version__} was built without FlashAttention"]


@pytest.mark.parametrize(("activated", "kernel"), [(None, "FA2"), ("FA3", "FA3")])
def test_the_flash_attention_that_torch_calls_is_named(activated, kernel, make_written_step, aten_calls, monkeypatch):
    monkeypatch.setattr(torch.nn.attention._registry, "_FLASH_ATTENTION_ACTIVE", activated and (activated, None))
    step = make_written_step(TorchVarlenBackend, PLAIN, MIXED)
    impl = step.impl()
    step.impl = lambda: impl
    step.run()
    assert impl.chosen_kernels == {kernel}


def test_a_torch_without_another_flash_attention_runs_its_own(make_written_step, aten_calls, monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "current_flash_attention_impl")
    assert flash_implementation() == "FA2"
