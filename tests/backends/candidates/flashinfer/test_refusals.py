"""What the library would get wrong, or ignore, is refused before the output or the cache changes."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.flashinfer.backend import FlashInferBackend, FlashInferBuilder, FlashInferImpl
from attncheck.backends.candidates.flashinfer.planner import LayerSettings, group_settings, workspace_bytes
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec, RequestSpec

Make = Callable[..., Any]

LAYER = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float16")
BATCH = BatchSpec(requests=(RequestSpec(query_len=2, seq_len=9),))


def reasons(batch: BatchSpec = BATCH, cache: CacheSpec = CacheSpec(), **layer: Any) -> list[str]:  # noqa: B008
    return FlashInferBackend.unsupported_reasons(dataclasses.replace(LAYER, **layer), cache, batch)


def test_plain_layers_are_supported() -> None:
    assert reasons() == []
    assert reasons(sliding_window=4, logits_soft_cap=30.0) == []
    assert reasons(causal=False) == []


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"sliding_window": 4, "causal": False}, "sliding_window 4 without a causal mask"),
        ({"sliding_window": 4, "attn_type": "encoder_only"}, "sliding_window 4 without a causal mask"),
        ({"scale": -0.5}, "scale -0.5: must be at least"),
        ({"scale": 0.0}, "scale 0.0: must be at least"),
        ({"scale": 0.0004}, "scale 0.0004: must be at least"),
        ({"alibi": True}, "'alibi' is not declared"),
        ({"sinks": True}, "'sinks' is not declared"),
        ({"dtype": "float32"}, "dtype float32"),
        ({"head_size": 96}, "head_size 96"),
        ({"head_size_v": 128}, "'head_size_v' is not declared"),
    ],
)
def test_a_layer_is_refused_with_the_reason(layer: dict[str, Any], words: str) -> None:
    assert any(words in reason for reason in reasons(**layer)), reasons(**layer)


def test_cross_attention_to_nothing_is_refused_with_the_reason() -> None:
    def reasons_for(encoder_len: int) -> list[str]:
        batch = BatchSpec(requests=(RequestSpec(query_len=2, seq_len=9, encoder_len=encoder_len),))
        return reasons(batch, attn_type="encoder_decoder")

    assert reasons_for(3) == []
    assert reasons_for(0) == ["encoder_len 0: rows of a request without keys"]


@pytest.mark.parametrize(
    ("options", "step", "words"),
    [
        (
            {"sliding_window": 4},
            {"requests": [(2, 9)], "causal": False},
            snapshot("FLASHINFER: a window of 4 keys without a causal mask: there is a left bound only"),
        ),
        (
            {},
            {"requests": [(1, 5), (2, 0)], "causal": False},
            snapshot("FLASHINFER: (query_len, seq_len) (2, 0): rows of a request without keys"),
        ),
        (
            {},
            {"requests": [(1, 0)]},
            snapshot("FLASHINFER: (query_len, seq_len) (1, 0): rows of a request without keys"),
        ),
    ],
)
def test_a_step_is_refused_when_it_is_built(
    library: Any, make_engine: Make, make_batch: Make, options: dict[str, Any], step: dict[str, Any], words: str
) -> None:
    engine, common = make_engine(**options), make_batch(**step)
    with pytest.raises(NotImplementedError) as refused:
        engine.build(common)
    assert str(refused.value) == words
    assert library.calls == []


def test_more_rows_than_keys_are_refused_before_anything_is_written(
    library: Any, make_engine: Make, make_batch: Make
) -> None:
    engine = make_engine()
    step = engine.build(make_batch([(3, 2)]))
    with pytest.raises(NotImplementedError) as refused:
        engine.forward(step)
    assert str(refused.value) == snapshot(
        "FLASHINFER: (query_len, seq_len) [(3, 2)]: more rows than keys is not supported"
    )
    assert engine.kv_cache.eq(0).all()
    assert library.of("run") == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_output_of_another_dtype_is_refused(make_engine: Make, make_batch: Make, dtype: torch.dtype) -> None:
    engine = make_engine()
    step = engine.build(make_batch([(1, 5)]))
    with pytest.raises(ValueError, match=f"output has dtype {dtype}, and query torch.float16"):
        engine.forward(step, output=torch.zeros(1, 4, 64, dtype=dtype))
    assert engine.kv_cache.eq(0).all()


def test_a_layer_that_was_planned_for_as_another_is_refused(make_engine: Make, make_batch: Make) -> None:
    planned, other = make_engine(sliding_window=3), make_engine(sliding_window=4)
    step = planned.build(make_batch([(1, 5)]))
    with pytest.raises(ValueError, match=r"window_left=2.*window_left=3"):
        other.forward(step)


def settings_of(**changes: Any) -> LayerSettings:
    values: dict[str, Any] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 64,
        "scale": 0.125,
        "window_left": -1,
        "logits_soft_cap": None,
        "dtype": torch.float16,
        "kv_dtype": torch.float16,
        "has_cache": True,
    }
    return LayerSettings(**values | changes)


@pytest.mark.parametrize("scale", [-1.0, 0.0, 0.0004])
def test_a_scale_that_the_kernels_cannot_do_is_refused(make_engine: Make, scale: float) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        make_engine(scale=scale)


def test_a_dtype_without_kernels_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"torch\.float32 is not supported; supported are torch\.float16"):
        settings_of(dtype=torch.float32, kv_dtype=torch.float32)


def test_a_small_scale_is_taken(make_engine: Make) -> None:
    make_engine(scale=0.0005)


def test_layers_of_a_group_that_differ_are_refused_by_name(make_engine: Make) -> None:
    first, second = make_engine(), make_engine(logits_soft_cap=30.0)
    layers = {"first": first.layer, "second": second.layer, "third": first.layer}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(dtype=torch.float16),
    )
    with pytest.raises(NotImplementedError, match=r"first.*second"):
        group_settings(config, ["first", "second"], FlashInferImpl)
    assert group_settings(config, ["first", "third"], FlashInferImpl) == settings_of(scale=0.25)


def test_a_layer_of_another_backend_is_refused_by_name(make_engine: Make) -> None:
    engine = make_engine()
    engine.layer.impl = SimpleNamespace()
    with pytest.raises(TypeError) as refused:
        group_settings(engine.config, ["layer.0"], FlashInferImpl)
    assert str(refused.value) == snapshot("FLASHINFER: layer.0 must have a FlashInferImpl, and has a SimpleNamespace")
    assert "layer.0" in str(refused.value)


def test_the_workspace_holds_what_the_scheduler_lays_out() -> None:
    recommended = 128 * 2**20
    assert workspace_bytes(settings_of(), 132, 0) == recommended
    # 64 heads over 8, of size 128: 33 parts a KV head (two an SM), each of a tile of 128 rows.
    wide = settings_of(num_heads=64, num_kv_heads=8, head_size=128)
    assert workspace_bytes(wide, 132, 0) >= 64 * 33 * 128 * 129 * 4
    # A graph of 512 requests has tiles of 16 rows: one a request, and as many as all rows fill.
    assert workspace_bytes(wide, 132, 512) >= 64 * (512 * 8 // 16 + 511) * 16 * 129 * 4


def test_the_workspace_is_sized_for_the_largest_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    own = settings_of(num_heads=64, num_kv_heads=8, head_size=128)
    found = FlashInferBuilder._workspace_bytes(own, torch.device("cuda"), 512)
    assert found == workspace_bytes(own, 132, 512) > workspace_bytes(own, 132, 0)
