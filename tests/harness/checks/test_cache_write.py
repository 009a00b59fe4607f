"""``cache_write``: functions on pages, keys for a layer over another layer's cache, and inputs without a cache."""

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite
from attncheck.harness.checks.cache_write import check_block_moves
from attncheck.harness.checks.findings import Broken, Holds, NotExamined
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.problem.problem import build_problem
from attncheck.reference import copy_blocks, reshape_and_cache, swap_blocks
from attncheck.reference.step_spec import RequestSpec

FIRST = Holds({"slots_written": 3})
RIGHT = {"reshape_and_cache": reshape_and_cache, "copy_blocks": copy_blocks, "swap_blocks": swap_blocks}


def moved(case, first=FIRST, **functions):
    backend = type("Mine", (ReferenceBackend,), {"functions": staticmethod(lambda: functions)})
    return check_block_moves(build_problem(case, 0), backend, torch.device("cpu"), first)


@pytest.mark.parametrize(
    ("cache", "layer"),
    [
        ({"layout": "NHD"}, {"dtype": "float16"}),
        ({"layout": "HND", "block_size": 1}, {"dtype": "float32"}),
        ({"block_size": 2}, {"num_kv_heads": 1}),
        ({"kv_cache_dtype": "fp8_e5m2", "k_scale": 0.3}, {}),
    ],
)
def test_the_reference_is_right(make_case, cache, layer):
    assert moved(make_case(cache=cache, head_size_v=32, **layer), **RIGHT) is FIRST


def test_what_was_found_before_stays(make_case):
    skipped = NotExamined(("no writer",))
    assert moved(make_case(), skipped, **RIGHT) is skipped


def test_functions_get_arguments_that_reveal_faults(make_case):
    seen = {}

    def copy(caches, mapping):
        seen["copy"] = ([cache.clone() for cache in caches], mapping.tolist(), caches[0].is_contiguous())
        copy_blocks(caches, mapping)

    def write(key, value, key_cache, value_cache, slots, **scales):
        seen["write"] = (key.shape, key_cache.stride(), slots.tolist(), scales)
        reshape_and_cache(key, value, key_cache, value_cache, slots, **scales)

    assert moved(make_case(head_size_v=32), copy_blocks=copy, reshape_and_cache=write) is FIRST
    (key_cache, value_cache), pairs, _ = seen["copy"]
    assert key_cache.shape[1:] == (16, 2, 64)
    assert value_cache.shape[1:] == (16, 2, 32)
    sources, destinations = [s for s, _ in pairs], [d for _, d in pairs]
    assert len(set(sources)) < len(sources)
    assert len(set(destinations)) == len(destinations)
    assert not set(sources) & set(destinations)
    rows, strides, slots, scales = seen["write"]
    assert rows[0] > len(slots) > slots.count(-1) > 1
    assert strides[0] > 16 * 2 * 64  # space between pages
    assert scales["k_scale"] != scales["v_scale"]
    moved(make_case(inputs=("needles",)), copy_blocks=copy)
    assert seen["copy"][2]  # without views, pages lie side by side


def test_wrong_functions_are_found(make_case):
    def without_scales(key, value, key_cache, value_cache, slots, **scales):
        assert key_cache.dtype == torch.float8_e5m2
        reshape_and_cache(key, value, key_cache, value_cache, slots)

    def between_pages(caches, mapping):
        copy_blocks(caches, mapping)
        page = caches[0][0].numel()
        caches[0].as_strided((1,), (1,), page).fill_(9)

    def changes_source(src, dst, mapping):
        swap_blocks(src, dst, mapping)
        src[0] = 0

    scaled = make_case(cache={"kv_cache_dtype": "fp8_e5m2", "k_scale": 0.3})
    found = moved(scaled, reshape_and_cache=without_scales)
    assert found.summary == "reshape_and_cache: 10 of 13 pages of key_cache are wrong, the first is page 0"
    case = make_case()
    assert moved(case, copy_blocks=between_pages) == Broken("copy_blocks wrote between the pages of key_cache")
    assert moved(case, swap_blocks=changes_source) == Broken("swap_blocks changed its argument src")
    found = moved(case, swap_blocks=lambda src, dst, mapping: None)
    assert found.summary == "swap_blocks: 5 of 13 pages of dst are wrong, the first is page 3"
    assert found.meaning == "no page was written as block_mapping requires"


SHARED = next(case for case in load_suite("smoke").cases if case.id == "shared-cache")


@pytest.mark.parametrize("name", ["reference", "torch_sdpa"])
def test_right_backends_leave_keys_for_a_shared_cache_alone(judge, name):
    assert isinstance(judge("cache_write", load(name).backend, SHARED), Holds)


def test_a_layer_that_writes_to_a_shared_cache_is_named_as_such(judge, backend_of):
    """The metadata hold the slots of its tokens, so slot_mapping contains what it writes."""

    class Impl(ReferenceImpl):
        def forward(self, layer, query, key, value, kv_cache, metadata, *rest, **more):
            out = super().forward(layer, query, key, value, kv_cache, metadata, *rest, **more)
            if self.kv_sharing_target_layer_name is not None and metadata is not None:
                for slot in metadata.common.slot_mapping.tolist():
                    kv_cache[:, slot // 16, slot % 16] = 0
            return out

    found = judge("cache_write", backend_of(Impl), SHARED)
    assert found.meaning.startswith("a layer writes to a cache that it shares")
    assert found.summary.startswith("27 slots are wrong")
    assert found.summary.endswith("was overwritten, although the layer only reads this cache")
    assert "slot_mapping" not in " ".join([found.meaning, found.summary, *found.details])


@pytest.mark.parametrize("error", [ValueError("no keys here"), KeyError("no")])
def test_keys_for_a_shared_cache_may_be_refused_but_nothing_may_break(judge, backend_of, error):
    class Impl(ReferenceImpl):
        def forward(self, layer, query, key, *rest, **more):
            if key is not None and rest[2] is not None:
                raise error
            return super().forward(layer, query, key, *rest, **more)

    if isinstance(error, ValueError):
        assert isinstance(judge("cache_write", backend_of(Impl), SHARED), Holds)
        return
    with pytest.raises(StageError) as failure:
        judge("cache_write", backend_of(Impl), SHARED)
    assert failure.value.raised.stage == "forward with keys for a shared cache"


def test_changed_inputs_are_found_where_there_is_no_cache(judge, backend_of, make_case):
    class Impl(ReferenceImpl):
        def attend(self, layer, query, *rest):
            super().attend(layer, query, *rest)
            query.mul_(2)

    case = make_case(RequestSpec(query_len=7), attn_type="encoder_only", path="encoder_only")
    assert judge("cache_write", backend_of(Impl), case).summary == "inputs were changed: query"
    assert isinstance(judge("cache_write", ReferenceBackend, case), NotExamined)
