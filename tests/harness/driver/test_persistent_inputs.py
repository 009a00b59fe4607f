"""Memory that is lent again and again: the addresses stay, the contents are the step's."""

import torch

from attncheck.harness.driver.step import (
    PersistentInputs,
    changed_inputs,
    copied_calls,
    forward_calls_of,
    make_step,
    span,
)
from attncheck.harness.problem.problem import build_problem
from attncheck.reference.spec import SplitKVOptions

CPU = torch.device("cpu")


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
