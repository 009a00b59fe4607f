"""Memory of a step: pages of a pool, images of them, and inputs that keep their addresses."""

import pytest
import torch

import attncheck
from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.candidates.torch_sdpa import SDPABackend
from attncheck.backends.impl import get_current_vllm_config
from attncheck.harness.checks.findings import Holds
from attncheck.harness.driver.lending import PersistentInputs, changed_inputs, copied_calls, lend_in_place, span
from attncheck.harness.driver.pool import PoolMemory
from attncheck.harness.driver.step import forward_calls_of, make_step
from attncheck.harness.host import own_memory
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.problem.sizes import needed_bytes, shortage
from attncheck.reference.step_spec import SplitKVOptions
from attncheck.reports.run_file.records import FALLEN_SHORT

SUITE = """\
suite: pools
description: batches whose checks use several pools
defaults:
  layer: {num_heads: 2, num_kv_heads: 1, head_size: 16, dtype: float32}
cases:
  - {id: padded, batch: {requests: q1s20_q1s35, padding: {requests: 1, tokens: 2}}}
  - {id: window, batch: q5s37_q1s40, layer: {sliding_window: 20}}
  - {id: plain, batch: q1s40_q1s7_q20, matrix: {layer.scale: [0.1, 0.2]}}
  - {id: full, batch: q1s40_q1s7_q20, cache: {num_blocks: 7}}
  - {id: large, batch: q1s40_q20, cache: {num_blocks: 60}}
  - {id: far, batch: q1s40, cache: {first_block: 70000, block_size: 8}}
  - {id: layers, batch: q1s40_q20, layers: [{sliding_window: 8}]}
  - {id: after, batch: q1s20, after: [3q1s200]}
  - {id: encoder, batch: q20, layer: {attn_type: encoder_only, causal: false}}
  - {id: shared, batch: q1s20_q20, layer: {kv_sharing: true}}
  - {id: micro, batch: 2q1s20_2q9s12, path: {micro_batch: {cuts: [8]}}}
  - {id: ranks, batch: 2q1s40, path: {dcp: {size: 2}}}
  - {id: chunks, batch: q5s37, layer: {attn_chunk_size: 16}, path: local}
"""


def sized(base, *, has_codec=True):
    """Return ``base`` with a ``forward`` that refuses a pool of another size than its metadata's builder was given."""

    class Builder(base.get_builder_cls()):
        def build(self, *args, **keywords):
            made = super().build(*args, **keywords)
            made.num_gpu_blocks = self.vllm_config.cache_config.num_gpu_blocks
            return made

    class Impl(base.get_impl_cls()):
        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            assert get_current_vllm_config().cache_config.num_gpu_blocks is None

        def forward(self, layer, query, key, value, cache, metadata, **more):
            if metadata is not None:
                axis = 1 if base.packing == "split_first" and cache.numel() else 0
                pages = cache.shape[axis] or 1  # 1 without a cache
                assert metadata.num_gpu_blocks == pages, f"{metadata.num_gpu_blocks} of {tuple(cache.shape)}"
            return super().forward(layer, query, key, value, cache, metadata, **more)

    class Sized(base):
        get_builder_cls = staticmethod(lambda: Builder)
        get_impl_cls = staticmethod(lambda: Impl)

        @classmethod
        def kv_cache_codec(cls, layer, cache):
            return super().kv_cache_codec(layer, cache) if has_codec else None

    return Sized


@pytest.mark.parametrize(
    ("backend", "cases", "checks"),
    [
        (sized(ReferenceBackend), "*", "numerics,containment,invariance"),
        (sized(ReferenceBackend), "window", "cache_write,features,determinism,builder"),
        (sized(ReferenceBackend, has_codec=False), "plain*", "cache_write,invariance"),
        (sized(SDPABackend), "padded", "cudagraph"),  # its graphs are replayed
    ],
)
def test_every_pool_has_the_pages_that_its_builder_was_given(backend, cases, checks, tmp_path):
    suite = tmp_path / "pools.yaml"
    suite.write_text(SUITE)
    seen = attncheck.examine(backend, str(suite), cases=cases, checks=checks, device="cpu")
    assert not [record for record in seen.records if record.outcome in FALLEN_SHORT]
    assert {record.check for record in seen.records if record.outcome == "passed"} == set(checks.split(","))


CPU = torch.device("cpu")
FAR = {"block_size": 16, "first_block": 8388600}
"""Pages at 2**31 elements of one head of size 16, keys and values each: a pool of 8 GiB."""


@pytest.fixture
def far_case(make_case):
    """A small batch far up in a pool; keywords are of the cache."""
    return lambda **cache: make_case(
        (1, 40), (3, 21), (12, 12), cache=FAR | cache, num_heads=1, num_kv_heads=1, head_size=16, dtype="float16"
    )


@pytest.mark.parametrize(("axis", "swapped"), [(0, False), (1, True)])
def test_an_image_of_some_pages_has_what_the_cache_has(axis, swapped):
    num_blocks, size = 2**19, 16  # an image of all of it would be too large
    shape = (num_blocks, 2, size, 3) if axis == 0 else (2, num_blocks, size, 3)
    cache = torch.zeros(shape, dtype=torch.int8)
    if swapped:
        cache = cache.transpose(2, 3).contiguous().transpose(2, 3)
    pages = torch.tensor([3, 70000, num_blocks - 1])
    cache.index_copy_(axis, pages, torch.randint(-99, 99, (*shape[:axis], 3, *shape[axis + 1 :]), dtype=torch.int8))
    memory = PoolMemory(cache, num_blocks, size, torch.tensor([num_blocks * size - 1, 70000 * size, 3 * size + 5]))
    image = memory.bytes()
    assert image.numel() == 3 * 2 * size * 3
    assert torch.equal(memory.view(image), cache.index_select(axis, pages))
    assert memory.view(image).stride()[2:] == cache.stride()[2:]
    slots = torch.tensor([70000 * size + 7, 3 * size, num_blocks * size - 1])
    assert memory.slots_in_image(slots).tolist() == [size + 7, 0, 3 * size - 1]
    before = cache.index_select(axis, pages)
    cache.zero_()
    memory.restore(image)
    assert torch.equal(cache.index_select(axis, pages), before)


def test_a_very_large_cache_without_an_axis_of_pages_is_not_copied():
    cache = torch.zeros(1, dtype=torch.int8).expand(2**26, 16, 2)
    with pytest.raises(MemoryError, match=r"no single axis of 67108863 pages"):
        PoolMemory(cache, 2**26 - 1, 16, torch.tensor([0]))


@pytest.mark.parametrize(
    ("backend", "cache"),
    [
        (SDPABackend, {"layout": "HND"}),
        (ReferenceBackend, {"kv_cache_dtype": "fp8_e5m2", "k_scale": 0.3, "first_block": 16777210}),
    ],
)
def test_a_right_backend_is_right_beyond_two_to_the_31_elements(judge, far_case, backend, cache):
    case = far_case(**cache)
    held = own_memory().resident
    for check in ("numerics", "cache_write", "containment"):
        assert isinstance(judge(check, backend, case), Holds)
    assert own_memory().resident - held < 2**28
    assert shortage(case, CPU) is None
    assert needed_bytes(case) > 2**32 > needed_bytes(case, reserves=True)
    # A pool too large even to be reserved counts as memory.
    assert needed_bytes(far_case(num_blocks=2**31), reserves=True) > 2**40


def test_a_stray_write_beside_the_pages_of_the_batch_is_found(judge, backend_of, far_case):
    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slots):
            super().write(layer, key, value, key_cache, value_cache, slots)
            real = slots[slots >= 0]
            free = int(real.max()) // key_cache.shape[1] + 1
            key_cache[free, 3] = key[0]

    finding = judge("cache_write", backend_of(Impl), far_case())
    assert "(page 8388604, offset 3; owned by no request) was overwritten" in finding.summary


def call_of(case, seed=0):
    (call,) = forward_calls_of(make_step(build_problem(case, seed), CPU), frozenset())
    return call


def addresses(call):
    tensors = (call.query, call.key, call.value, call.common.seq_lens, call.common.block_table_tensor)
    return [tensor.data_ptr() for tensor in tensors]


def test_a_step_is_lent_in_the_memory_of_the_first(make_case):
    first, second = call_of(make_case(), 0), call_of(make_case(), 1)
    where = addresses(first)
    lent = PersistentInputs(first)
    call = lent.load_metadata(second)
    assert addresses(call) == where
    assert set(changed_inputs(second, call)) == {"query", "key", "value"}  # the rows come when the layer runs
    lent.load_rows(second)
    assert list(changed_inputs(second, call)) == []
    assert call.query.stride() == first.query.stride()


def test_a_smaller_step_has_the_front_of_it_and_a_larger_one_keeps_its_own(make_case):
    small_case = make_case((3, 40), (1, 20))
    large, small = call_of(make_case((4, 130), (1, 60))), call_of(small_case)
    where, width = addresses(large), large.common.block_table_tensor.shape[1]
    lent = PersistentInputs(large)
    call = lent.load_metadata(small)
    lent.load_rows(small)
    assert addresses(call) == where
    assert torch.equal(call.query, small.query)
    table, own = call.common.block_table_tensor, small.common.block_table_tensor
    assert table.shape == (2, width)
    assert torch.equal(table[:, : own.shape[1]], own)
    assert torch.equal(table[:, own.shape[1] :], own[:, -1:].expand(2, width - own.shape[1]))
    assert torch.equal(call.common.seq_lens, small.common.seq_lens)

    large = call_of(make_case((4, 130), (1, 60)))
    lent = PersistentInputs(small)
    call = lent.load_metadata(large)
    lent.load_rows(large)
    assert list(changed_inputs(large, call)) == []
    assert torch.equal(small.query, call_of(small_case).query)


def test_memory_behind_a_smaller_step_is_compared_by_bytes(make_case):
    """There -0 is a change of 0; in the step's own rows it is none."""
    large, small = call_of(make_case((4, 130), (1, 60))), call_of(make_case((3, 40), (1, 20)))
    small.query[0] = large.query[4] = 0.0
    lent = lend_in_place([PersistentInputs(large)], [small])
    assert lent.changed() == []
    large.query[0] = -0.0
    assert lent.changed() == []
    large.query[4] = -0.0
    assert lent.changed() == ["query"]


def test_copies_share_memory_among_themselves_as_the_originals_do(make_case):
    case = make_case((1, 40), (5, 60), path="split_kv", options=SplitKVOptions(parts=2))
    originals = forward_calls_of(make_step(build_problem(case, 0), CPU), frozenset({"lse"}))
    copies = copied_calls(originals)
    for original, copy in zip(originals, copies, strict=True):
        assert list(changed_inputs(original, copy)) == []
        assert copy.query.stride() == original.query.stride()
        assert not set(addresses(copy)) & set(addresses(original))
    first, second = copies
    assert first.query.data_ptr() == second.query.data_ptr()
    assert first.query.untyped_storage().data_ptr() == first.value.untyped_storage().data_ptr()
    assert first.common.seq_lens.data_ptr() != second.common.seq_lens.data_ptr()


def test_spans_cover_what_is_lent(make_case):
    call = call_of(make_case())
    spans = PersistentInputs(call).spans()
    assert spans["query"] == spans["key"] == spans["value"]  # slices of one tensor
    start, end = spans["query"]
    assert start <= call.value.data_ptr() < end
    assert end - start == call.query.untyped_storage().nbytes()
    assert {"metadata.seq_lens", "metadata.slot_mapping", "metadata.block_table_tensor"} <= spans.keys()
    whole = torch.zeros(4)
    assert span(whole[2:]) == (whole.data_ptr(), whole.data_ptr() + 16)


def test_metadata_whose_memory_a_backend_released_are_lent_anew(make_case):
    first, second = call_of(make_case(), 0), call_of(make_case(), 1)
    first.common.slot_mapping.untyped_storage().resize_(0)
    call = PersistentInputs(first).load_metadata(second)
    assert torch.equal(call.common.slot_mapping, second.common.slot_mapping)
