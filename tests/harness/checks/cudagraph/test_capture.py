"""What a capture gets and leaves: buffers of a model runner, and traces of metadata."""

import gc
import weakref
from collections.abc import Mapping
from dataclasses import make_dataclass, replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from attncheck.cases.model import Case
from attncheck.harness.checks.cudagraph.capture import allocate_inputs, dummy_call, parts_of
from attncheck.harness.checks.cudagraph.capture import trace as trace_parts
from attncheck.harness.checks.cudagraph.probes import Bucket
from attncheck.harness.driver.step import forward_calls_of, make_step
from attncheck.harness.problem.problem import build_problem
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec, PaddingSpec, RequestSpec

CPU = torch.device("cpu")
LAYER = LayerSpec(num_heads=2, num_kv_heads=1, head_size=16, dtype="float32")


def problem_of(lengths, padding=(0, 0), layer=LAYER):
    batch = BatchSpec(
        requests=tuple(RequestSpec(query_len=q, seq_len=s) for q, s in lengths),
        padding=PaddingSpec(requests=padding[0], tokens=padding[1]),
    )
    cache = CacheSpec(block_size=4, num_blocks=40)
    return build_problem(Case(suite="s", id="c", layer=layer, cache=cache, batch=batch), 0)


def call_of(problem):
    (call,) = forward_calls_of(make_step(problem, CPU), frozenset())
    return call


def buffers_for(problem, max_model_len=32):
    return allocate_inputs(problem, num_reqs=4, num_tokens=8, max_model_len=max_model_len, device=CPU)


def dummy_of(problem, bucket, *, longest=False):
    return buffers_for(problem).load(dummy_call(problem, bucket, 32, longest=longest))


def test_a_later_step_has_other_values_at_the_same_addresses():
    first, second = problem_of([(1, 9), (1, 4), (1, 5)]), problem_of([(1, 2), (1, 13), (1, 6)])
    inputs = buffers_for(first)
    earlier = inputs.load(call_of(first))
    assert earlier.common.seq_lens.tolist() == [9, 4, 5]
    later = inputs.load(call_of(second))
    assert later.common.seq_lens.tolist() == later.common.seq_lens_cpu.tolist() == [2, 13, 6]
    for name in ("query_start_loc", "seq_lens", "seq_lens_cpu", "block_table_tensor", "slot_mapping"):
        assert getattr(earlier.common, name).data_ptr() == getattr(later.common, name).data_ptr()
    assert (earlier.query.data_ptr(), earlier.key.data_ptr()) == (later.query.data_ptr(), later.key.data_ptr())
    torch.testing.assert_close(later.query, call_of(second).query)
    on_host = {twin.untyped_storage().data_ptr() for twin in inputs.host_twins}
    assert later.common.seq_lens_cpu.untyped_storage().data_ptr() in on_host
    assert later.common.seq_lens.untyped_storage().data_ptr() not in on_host


def test_padding_is_an_engine_s_and_table_entries_behind_a_request_name_pages_it_does_not_own():
    problem = problem_of([(1, 9), (1, 4)], padding=(2, 2))
    call = buffers_for(problem, max_model_len=48).load(call_of(problem))
    common = call.common
    assert common.query_start_loc.tolist() == [0, 1, 2, 2, 2]
    assert common.seq_lens.tolist() == [9, 4, 0, 0]
    assert common.slot_mapping[2:].tolist() == [-1, -1]
    assert all(bool(torch.isnan(rows[2:]).all()) for rows in (call.query, call.key))
    for row, request in zip(common.block_table_tensor.tolist(), problem.requests, strict=False):
        assert tuple(row[: len(request.pages)]) == request.pages
        assert not set(row[len(request.pages) :]) & set(request.pages)
    assert not bool(common.block_table_tensor[2:].any())


@pytest.mark.parametrize(
    ("bucket", "longest", "starts", "lens", "max_query_len"),
    [
        (Bucket(3, 7, None), False, [0, 2, 4, 7], [2, 2, 3], 7),
        (Bucket(3, 7, None), True, [0, 2, 4, 7], [32, 32, 32], 7),
        (Bucket(2, 6, 3), False, [0, 3, 6], [3, 3], 3),  # a uniform graph gets its query length
    ],
)
def test_dummies_are_nan_and_write_nowhere(bucket, longest, starts, lens, max_query_len):
    problem = problem_of([(1, 9), (1, 4), (1, 5)])
    call = dummy_of(problem, bucket, longest=longest)
    common = call.common
    assert common.seq_lens.tolist() == common.seq_lens_cpu.tolist() == lens
    assert common.query_start_loc.tolist() == starts
    assert (common.max_query_len, common.max_seq_len) == (max_query_len, 32)
    assert common.slot_mapping.tolist() == [-1] * starts[-1]
    assert not bool(common.block_table_tensor.any())
    assert all(bool(torch.isnan(rows).all()) for rows in (call.query, call.key, call.value))


def test_a_layer_that_shares_another_s_cache_is_handed_no_keys():
    problem = problem_of([(1, 9)], layer=replace(LAYER, kv_sharing=True))
    for call in (buffers_for(problem).load(call_of(problem)), dummy_of(problem, Bucket(1, 1, 1))):
        assert (call.key, call.value) == (None, None)


def trace(metadata):
    return trace_parts(parts_of(metadata))


def test_tensors_in_new_memory_and_of_another_shape_are_distinguished_from_those_refilled_in_place():
    buffer = torch.arange(4)

    def metadata(lens=buffer, **others):
        return SimpleNamespace(lens=lens, parts={"decode": [buffer[:2], buffer.clone()]}, **others)

    held = metadata(plan=torch.zeros(2))  # so that no later tensor has its addresses
    first = trace(held)
    buffer.add_(1)
    assert first.moved(trace(metadata())) == ["metadata.parts['decode'][1]", "metadata.plan"]  # moved, and gone
    assert first.reshaped(trace(metadata())) == first.changed(trace(metadata())) == []
    assert first.reshaped(trace(metadata(buffer[:3]))) == ["metadata.lens"]
    assert first.reshaped(trace(metadata(buffer.clone()))) == []
    memory = buffer.untyped_storage()
    start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes()
    assert first.path_of(start, end) == "metadata.lens"
    assert trace(SimpleNamespace(lens=torch.arange(4))).path_of(start, end) is None


def test_numbers_of_the_backend_s_own_come_first_and_of_a_sequence_only_one():
    def metadata(longest, plan, bound):
        return SimpleNamespace(common=SimpleNamespace(max_seq_len=bound), plan=plan, longest=longest)

    first = trace(metadata(3, [1, 2, 3], 80))
    assert [text.partition(" was ")[0] for text in first.changed(trace(metadata(8, [1, 5, 6], 9)))] == [
        "metadata.plan[1]",
        "metadata.longest",
        "metadata.common.max_seq_len",
    ]
    assert trace(SimpleNamespace(size=7, kept=3)).changed(trace(SimpleNamespace(kept=8))) == [
        "metadata.size was 7 at capture and is gone now",
        "metadata.kept was 3 at capture and is 8 now",
    ]


def test_a_trace_keeps_no_tensor_alive():
    tensor = torch.zeros(3)
    gone = weakref.ref(tensor)
    kept = trace(SimpleNamespace(plan=tensor))
    del tensor
    gc.collect()
    assert gone() is None
    assert list(kept.places) == ["metadata.plan"]


class Closed:
    """Cannot be looked into."""

    def __getattribute__(self, name):
        raise ValueError(name)


class Endless(Mapping):
    """Numbers without end."""

    def __getitem__(self, key):
        return key

    def __len__(self):
        return 1

    def __iter__(self):
        return count()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_odd_is_followed_as_far_as_it_goes_and_a_trace_has_an_end():
    slotted = make_dataclass("Slotted", [("table", torch.Tensor), ("itself", object)], slots=True)
    metadata = slotted(torch.zeros(2), None)
    metadata.itself = metadata
    assert parts_of(metadata) == {"metadata.table": metadata.table}
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    closed = trace(SimpleNamespace(closed=Closed(), nested=nested, number=7))
    assert (closed.numbers, closed.places) == ({"metadata.number": 7}, {})
    found = trace(SimpleNamespace(endless=Endless(), library=torch, number=7))
    assert found.numbers["metadata.number"] == 7
    assert len(found.numbers) < 2_000
    assert found.places == {}
    hundred = range(100)
    assert 1_000 < len(trace([[[number] * 100 for number in hundred] for _ in hundred]).numbers) <= 10_000
