"""The backend around the latent kernel: examined as any other, what it declares, what it refuses."""

import pytest
import torch

from attncheck.backends.candidates.triton_mla.backend import TritonMLABackend
from attncheck.backends.contract import KVCacheSpec
from attncheck.harness.driver.construction import latent_keywords
from attncheck.harness.problem.storage import make_up_projections
from attncheck.reference import CommonAttentionMetadata
from attncheck.reference.spec import LayerSpec, MLASpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, RequestSpec

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DECODE = BatchSpec(requests=(RequestSpec(query_len=1),))


def layer_of(rank, rotary):
    sizes = MLASpec(kv_lora_rank=rank, qk_nope_head_dim=8, qk_rope_head_dim=rotary, v_head_dim=8)
    return LayerSpec(num_heads=2, num_kv_heads=1, head_size=rank + rotary, dtype="float32", mla=sizes)


def impl_of(rank, rotary):
    layer = layer_of(rank, rotary)
    weights = make_up_projections(layer, torch.float32)
    keywords = latent_keywords(layer.mla, weights, torch.device(DEVICE))
    return TritonMLABackend.get_impl_cls()(2, layer.head_size, 0.5, 1, **keywords)


def test_the_scratch_is_the_same_in_every_step():
    spec = KVCacheSpec(block_size=4, num_kv_heads=1, head_size=20, dtype=torch.float32)
    builder = TritonMLABackend.get_builder_cls()(spec, ["layer.0"], None, torch.device(DEVICE))
    common = CommonAttentionMetadata(
        *(torch.zeros(2, dtype=torch.int32) for _ in range(5)), 1, 0, 1, 1, torch.zeros(1, 1), torch.zeros(0)
    )
    first, second = (builder.build(0, common) for _ in range(2))
    assert first.scratch is not None
    assert first.scratch is second.scratch


def test_rows_that_fit_no_tile_are_not_supported_and_refused():
    assert TritonMLABackend.unsupported_reasons(layer_of(1024, 128), CacheSpec(), DECODE) == []
    assert impl_of(1024, 128).kv_lora_rank == 1024
    for rank, rotary, reason in (
        (1025, 64, "kv_lora_rank 1025: supported are sizes up to 1024"),
        (512, 129, "qk_rope_head_dim 129: supported are sizes up to 128"),
    ):
        assert TritonMLABackend.unsupported_reasons(layer_of(rank, rotary), CacheSpec(), DECODE) == [reason]
        with pytest.raises(ValueError, match=reason):
            impl_of(rank, rotary)


def test_a_scale_a_head_is_refused_before_anything_is_written():
    impl = impl_of(16, 4)
    cache = torch.zeros(2, 4, 20, device=DEVICE).to(torch.float8_e4m3fn)
    layer = type("Layer", (), {"_k_scale": torch.ones(3, device=DEVICE)})()
    rows = torch.ones(1, 16, device=DEVICE), torch.ones(1, 4, device=DEVICE)
    with pytest.raises(ValueError, match=r"k_scale has shape \(3,\): neither 1 element"):
        impl.write(layer, *rows, cache, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    assert not cache.float().any()
