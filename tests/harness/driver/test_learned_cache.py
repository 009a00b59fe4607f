"""A backend without a codec: ``cache_write`` is judged by the layout learned from its writer."""

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl
from attncheck.backends.candidates.torch_mla import TorchMLABackend
from attncheck.harness.checks.findings import Broken, Holds
from attncheck.harness.driver.construction import LayerStub
from attncheck.reference.spec import MLASpec
from attncheck.reference.step_spec import CacheSpec

SCALED = {"kv_cache_dtype": "fp8_e4m3", "k_scale": (0.375, 1.75), "v_scale": 0.3}


class Apart(ReferenceImpl):
    """Writes outside ``forward``."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slots):
        super().write(layer, key, value, *self._cache_views(kv_cache), slots)

    def write(self, *args):
        """Not in ``forward``."""


def without_codec(impl, *, apart=True):
    """The reference backend with another impl, and without a codec."""
    members = {
        "get_impl_cls": staticmethod(lambda: impl),
        "kv_cache_codec": classmethod(lambda *_: None),
        "forward_includes_kv_cache_update": not apart,
    }
    return type("Untold", (ReferenceBackend,), members)


@pytest.fixture
def judged(judge):
    """Return a function from a backend's class and a case to the finding of ``cache_write``."""
    return lambda backend, case: judge("cache_write", backend, case)


@pytest.mark.parametrize(
    ("apart", "cache"), [(True, SCALED), (False, SCALED), (True, {"layout": "HND", "block_size": 32})]
)
def test_a_right_writer_is_judged_by_what_it_taught(judged, make_case, cache, apart):
    case = make_case(cache=cache, padding=(1, 2))
    finding = judged(without_codec(Apart if apart else ReferenceImpl, apart=apart), case)
    assert isinstance(finding, Holds)
    assert finding.figures == judged(ReferenceBackend, case).figures
    assert finding.notes == ("how the cache is laid out was learned from the backend's own writer",)


def test_a_latent_cache_is_learned_as_well(judged, make_case):
    mla = MLASpec(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24)
    case = make_case((1, 20), (5, 40), path="mla", num_kv_heads=1, head_size=80, mla=mla)
    backend = type("Untold", (TorchMLABackend,), {"kv_cache_codec": classmethod(lambda *_: None)})
    finding = judged(backend, case)
    assert isinstance(finding, Holds)
    assert finding.notes


class Wrapping(Apart):
    """Writes padding to the last slot."""

    def do_kv_cache_update(self, layer, key, value, kv_cache, slots):
        keys, values = self._cache_views(kv_cache)
        for cache, rows in ((keys, key), (values, value)):
            cache[slots // cache.shape[1], slots % cache.shape[1]] = rows[: len(slots)]


class Unscaled(Apart):
    def do_kv_cache_update(self, layer, *args):
        super().do_kv_cache_update(LayerStub(CacheSpec(), torch.device("cpu")), *args)


@pytest.mark.parametrize(
    ("impl", "case", "meaning"),
    [
        (
            Wrapping,
            {"padding": (1, 2)},
            "slot -1 (padding) was used as an index: the last slot of the pool was overwritten",
        ),
        (Unscaled, {"cache": SCALED}, "k_scale and v_scale are left out"),
    ],
)
def test_faults_of_a_writer_are_seen_by_its_own_layout(judged, make_case, impl, case, meaning):
    finding = judged(without_codec(impl), make_case(**case))
    assert finding.meaning == meaning
    assert finding.details[-1] == "how the cache is laid out was learned from the backend's own writer"


def test_a_writer_that_shows_no_layout_is_not_examined_and_the_reason_is_stated(judged, make_case):
    class Forgetful(Apart):
        def do_kv_cache_update(self, layer, key, value, kv_cache, slots):
            key = key.clone()
            key[:, 1] = 0
            super().do_kv_cache_update(layer, key, value, kv_cache, slots)

    finding = judged(without_codec(Forgetful), make_case())
    assert finding.by == "backend"
    assert finding.reasons[0].startswith("the backend brings no cache codec, and its writer shows none: ")
    assert "the first is element 0 of the key of head 1 (page 0, offset 0)" in finding.reasons[0]


def test_a_builder_prepares_the_layer_whose_writer_the_layout_is_learned_from(judged, make_case):
    class PreparingBuilder(ReferenceBuilder):
        def __init__(self, spec, names, config, device):
            super().__init__(spec, names, config, device)
            for layer in config.compilation_config.static_forward_context.values():
                layer.impl.is_prepared = True

    class Prepared(Apart):
        is_prepared = False

        def do_kv_cache_update(self, *args):
            if not self.is_prepared:
                raise RuntimeError("no builder was made for this layer")
            super().do_kv_cache_update(*args)

    backend = without_codec(Prepared)
    backend.get_builder_cls = staticmethod(lambda: PreparingBuilder)
    assert isinstance(judged(backend, make_case()), Holds)


def test_a_wrong_slot_is_named_with_whose_k_and_v_it_holds(judged, make_case):
    class Late(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slots):
            super().write(layer, key, value, key_cache, value_cache, slots + 1)

    backend = type("Wrong", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Late)})
    finding = judged(backend, make_case((6, 6)))
    assert isinstance(finding, Broken)
    assert "holds K and V of request 0, position 0, KV head 0" in finding.details[0]
    assert finding.details[2].endswith("; and 3 more slots are wrong")
