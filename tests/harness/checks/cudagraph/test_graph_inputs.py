"""Buffers of a model runner: refilled in place, padded as an engine pads, with harmless dummies."""

from dataclasses import replace

import pytest
import torch

from attncheck.cases.model import Case
from attncheck.harness.checks.cudagraph.capture import allocate_inputs, dummy_call
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
    seen = earlier.common.seq_lens.tolist()
    later = inputs.load(call_of(second))
    assert seen == [9, 4, 5]
    assert later.common.seq_lens.tolist() == later.common.seq_lens_cpu.tolist() == [2, 13, 6]
    for name in ("query_start_loc", "seq_lens", "seq_lens_cpu", "block_table_tensor", "slot_mapping"):
        assert getattr(earlier.common, name).data_ptr() == getattr(later.common, name).data_ptr()
    assert (earlier.query.data_ptr(), earlier.key.data_ptr()) == (later.query.data_ptr(), later.key.data_ptr())
    torch.testing.assert_close(later.query, call_of(second).query)


def test_padding_is_an_engine_s():
    problem = problem_of([(1, 9), (1, 4)], padding=(2, 2))
    call = buffers_for(problem).load(call_of(problem))
    common = call.common
    assert common.query_start_loc.tolist() == [0, 1, 2, 2, 2]
    assert common.seq_lens.tolist() == [9, 4, 0, 0]
    assert common.slot_mapping[2:].tolist() == [-1, -1]
    assert bool(torch.isnan(call.query[2:]).all())
    assert bool(torch.isnan(call.key[2:]).all())
    assert not bool(common.block_table_tensor[2:].any())


def test_entries_behind_a_request_name_pages_it_does_not_own():
    problem = problem_of([(1, 9), (1, 4), (1, 5)])
    table = buffers_for(problem, max_model_len=48).load(call_of(problem)).common.block_table_tensor
    for row, request in zip(table.tolist(), problem.requests, strict=True):
        assert tuple(row[: len(request.pages)]) == request.pages
        assert not set(row[len(request.pages) :]) & set(request.pages)


@pytest.mark.parametrize(("longest", "lens"), [(False, [2, 2, 3]), (True, [32, 32, 32])])
def test_dummies_are_nan_and_write_nowhere(longest, lens):
    problem = problem_of([(1, 9), (1, 4), (1, 5)])
    call = dummy_of(problem, Bucket(3, 7, None), longest=longest)
    assert call.common.seq_lens.tolist() == call.common.seq_lens_cpu.tolist() == lens
    assert call.common.query_start_loc.tolist() == [0, 2, 4, 7]
    assert (call.common.max_query_len, call.common.max_seq_len) == (7, 32)
    assert call.common.slot_mapping.tolist() == [-1] * 7
    assert not bool(call.common.block_table_tensor.any())
    assert all(bool(torch.isnan(rows).all()) for rows in (call.query, call.key, call.value))


def test_a_uniform_graph_gets_its_query_length():
    problem = problem_of([(1, 9)])
    assert dummy_of(problem, Bucket(2, 6, 3)).common.max_query_len == 3


def test_a_layer_that_shares_another_s_cache_is_handed_no_keys():
    problem = problem_of([(1, 9)], layer=replace(LAYER, kv_sharing=True))
    for call in (buffers_for(problem).load(call_of(problem)), dummy_of(problem, Bucket(1, 1, 1))):
        assert call.key is None
        assert call.value is None


def test_host_twins_are_apart_from_what_lies_on_the_device():
    problem = problem_of([(1, 9)])
    inputs = buffers_for(problem)
    common = inputs.load(call_of(problem)).common
    on_host = {twin.untyped_storage().data_ptr() for twin in inputs.host_twins}
    assert common.seq_lens_cpu.untyped_storage().data_ptr() in on_host
    assert common.seq_lens.untyped_storage().data_ptr() not in on_host
