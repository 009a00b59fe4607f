"""Our candidates for latent attention: what they declare, and what they refuse."""

from types import SimpleNamespace

import pytest
import torch
from common_batches import common_metadata

from attncheck.backends.caches.packings import allocate_kv_cache, detect_packing, stride_order
from attncheck.backends.candidates.reference_mla import ReferenceMLABackend
from attncheck.backends.candidates.torch_mla import TorchMLABackend
from attncheck.backends.candidates.torch_sdpa import SDPABackend
from attncheck.backends.contract import KVCacheSpec
from attncheck.backends.latent import LatentBackend
from attncheck.backends.verification import contract_problems
from attncheck.harness.driver.construction import latent_keywords
from attncheck.harness.problem.storage import make_up_projections
from attncheck.reference.spec import LayerSpec, MLASpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, RequestSpec

SIZES = MLASpec(kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10)
LAYER = LayerSpec(num_heads=3, num_kv_heads=1, head_size=16, dtype="float32", scale=0.5, mla=SIZES)
CPU = torch.device("cpu")
ARGUMENTS = {"num_heads": 3, "head_size": 16, "scale": 0.5, "num_kv_heads": 1}
BLOCK_SIZE = 4
SCALES = SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1), _q_scale=torch.ones(1))

each_candidate = pytest.mark.parametrize("backend", [ReferenceMLABackend, TorchMLABackend])


def keywords(**changes):
    return latent_keywords(SIZES, make_up_projections(LAYER, torch.float32), CPU) | changes


@each_candidate
def test_what_is_declared(backend):
    assert contract_problems(backend) == []
    assert backend.is_mla()
    batch = BatchSpec(requests=(RequestSpec(query_len=1),))
    assert backend.unsupported_reasons(LAYER, CacheSpec(), batch) == []
    plain = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, sliding_window=9)
    assert backend.unsupported_reasons(plain, CacheSpec(), batch) == ["the layer has no latent cache"]
    undeclared = "the layer has a latent cache: feature 'mla' is not declared"
    assert SDPABackend.unsupported_reasons(LAYER, CacheSpec(), batch) == [undeclared]
    for layout in ("NHD", "HND"):
        cache = CacheSpec(block_size=BLOCK_SIZE, layout=layout)
        assert detect_packing(backend, LAYER, cache) == "latent"
        assert stride_order(backend, LAYER, cache) == (0, 1, 2)
        assert allocate_kv_cache(backend, LAYER, cache, 5, "cpu").shape == (5, BLOCK_SIZE, 16)
    with pytest.raises(ValueError, match="num_kv_heads 2: a latent cache has one"):
        backend.get_kv_cache_shape(5, 4, 2, 16)


def test_a_class_derived_from_the_base_declares_its_own_strides():
    assert type("Own", (LatentBackend,), {}).conventions.cache_strides == "undeclared"


@each_candidate
@pytest.mark.parametrize(
    ("error", "message", "arguments", "own"),
    [
        (ValueError, "num_kv_heads 3, head_size 16: a latent cache has 1 and 16", {"num_kv_heads": 3}, {}),
        (ValueError, "num_kv_heads 1, head_size 20: a latent cache has 1 and 16", {"head_size": 20}, {}),
        (NotImplementedError, "sliding_window is not supported", {"sliding_window": 9}, {}),
        (ValueError, r"qk_head_dim 12 is not 6 \+ 4", {}, {"qk_head_dim": 12}),
        (ValueError, r"kv_b_proj.weight has shape \(48, 12\), not \(51, 12\)", {}, {"v_head_dim": 11}),
    ],
)
def test_what_the_constructor_refuses(backend, error, message, arguments, own):
    with pytest.raises(error, match=message):
        backend.get_impl_cls()(**ARGUMENTS | arguments, **keywords(**own))


def test_keywords_of_latent_layers_go_with_a_declaration():
    with pytest.raises(TypeError, match="missing 7 required keyword-only arguments"):
        TorchMLABackend.get_impl_cls()(**ARGUMENTS)
    with pytest.raises(TypeError, match="q_lora_rank"):
        SDPABackend.get_impl_cls()(**ARGUMENTS, **keywords())
    careless = type("Careless", (SDPABackend,), {"features": SDPABackend.features | {"mla"}})
    (problem,) = contract_problems(careless)
    assert "SDPAImpl.__init__" in problem
    assert "v_head_dim=, kv_b_proj=): got an unexpected keyword argument 'q_lora_rank'" in problem


@each_candidate
def test_what_forward_refuses(backend):
    """A request of 3 rows and one of 1; output and cache are left as they were."""
    table = torch.arange(24, dtype=torch.int32).view(2, 12) + 1
    slots = torch.tensor([10, 11, 12, 56])
    common = common_metadata([3, 1], [9, 5], block_table_tensor=table, slot_mapping=slots)
    spec = KVCacheSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=16, dtype=torch.float32)
    given = {
        "query": torch.zeros(4, 3, 10),
        "kv_c_normed": torch.zeros(4, 12),
        "k_pe": torch.zeros(4, 1, 4),
        "kv_cache": torch.full((30, BLOCK_SIZE, 16), 7.0),
        "attn_metadata": backend.get_builder_cls()(spec, ["layer.0"], None, CPU).build(0, common),
        "output": torch.zeros(4, 30),
    }
    impl = backend.get_impl_cls()(**ARGUMENTS, **keywords())
    with pytest.raises(RuntimeError, match="before process_weights_after_loading"):
        impl.forward(SCALES, *given.values())
    impl.process_weights_after_loading(torch.float32)
    for error, message, changes in (
        (ValueError, "output is None", {"output": None}),
        (ValueError, r"query has shape \(3, 3, 10\), not \[4\+, 3, 10\]", {"query": given["query"][:3]}),
        (ValueError, r"output has shape \(4, 3, 10\), not \[4\+, 30\]", {"output": torch.zeros(4, 3, 10)}),
        (ValueError, "one of kv_c_normed and k_pe is None", {"k_pe": None}),
        (ValueError, "kv_cache has shape", {"kv_cache": torch.zeros(0)}),
        (TypeError, "attn_metadata is a str", {"attn_metadata": "metadata"}),
        (NotImplementedError, "output_scale", {"output_scale": torch.ones(1)}),
    ):
        with pytest.raises(error, match=message):
            impl.forward(SCALES, *(given | changes).values())
    assert not given["output"].any()
    assert (given["kv_cache"] == 7.0).all()
