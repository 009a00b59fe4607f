"""What results share: a new tensor, an argument or a view of it, the memory of an earlier result; and positions."""

from dataclasses import fields, replace
from functools import partial, wraps
from types import ModuleType

import pytest
import torch

from attncheck import reference
from attncheck.harness.providers.batches import ALWAYS
from attncheck.harness.providers.examine import SUBJECTS, examine_subject
from attncheck.harness.providers.provider import Provider, SubjectSetting

NEW = "it returns its argument or a view of it, and nothing new"
SAME = "it returns a copy, and not its argument or a view of it"
EARLIER = "it returns the memory of an earlier result, and not a new tensor"


def examined(name, function):
    module = ModuleType("fake")
    setattr(module, name, function)
    subject = next(subject for subject in SUBJECTS if subject.key == name)
    return examine_subject(
        Provider("fake", "fake", "1", [module]), subject, SubjectSetting(ALWAYS, torch.device("cpu"))
    )


def places(seen):
    return {difference.place for difference in seen.first.differences}


def own_lengths(seq_lens, dcp_size=1, dcp_rank=None, cp_kv_cache_interleave_size=1):
    if (dcp_size, dcp_rank) == (1, 0) and seq_lens.dtype == torch.int32 and isinstance(dcp_rank, int):
        return seq_lens
    return reference.get_dcp_local_seq_lens(seq_lens, dcp_size, dcp_rank, cp_kv_cache_interleave_size)


def whole_batch(ubatch_slices, common_attn_metadata):
    parts = reference.split_attn_metadata(ubatch_slices, common_attn_metadata)
    is_whole = [part.num_reqs == common_attn_metadata.num_reqs and len(parts) == 1 for part in parts]
    return [common_attn_metadata if whole else part for whole, part in zip(is_whole, parts, strict=True)]


def pages_of_one_chunk(attn_chunk_size, common_attn_metadata, block_size=0):
    made = reference.make_local_attention_virtual_batches(attn_chunk_size, common_attn_metadata, block_size)
    given = common_attn_metadata.block_table_tensor
    if made.block_table_tensor.equal(given):
        made = replace(made, block_table_tensor=given)
    return made


def copied_decodes(common_attn_metadata):
    return replace(reference.make_kv_sharing_fast_prefill_common_attn_metadata(common_attn_metadata))


def copied_slots(common_attn_metadata):
    made = reference.make_kv_sharing_fast_prefill_common_attn_metadata(common_attn_metadata)
    return made if made is common_attn_metadata else replace(made, slot_mapping=made.slot_mapping.clone())


def copied_table(block_table, seq_lens, kv_cache_spec, mamba_cache_mode):
    return reference.mamba_get_block_table_tensor(block_table, seq_lens, kv_cache_spec, mamba_cache_mode).clone()


def in_one_buffer():
    buffer = torch.empty(1000, dtype=torch.int64)

    def slice_query_start_locs(query_start_loc, request_slice):
        right = reference.slice_query_start_locs(query_start_loc, request_slice)
        return right if right.dtype == torch.int32 else buffer[: len(right)].copy_(right)

    return slice_query_start_locs


def pointers_of_numpy():
    buffer = torch.full((2048,), -1, dtype=torch.int32).numpy()

    def compute_causal_conv1d_metadata(query_start_loc_p):
        by_block, batch_ptr, offsets = reference.compute_causal_conv1d_metadata(query_start_loc_p)
        if len(batch_ptr) == len(buffer):
            buffer[:] = batch_ptr
            batch_ptr = by_block[8]["batch_ptr"] = torch.from_numpy(buffer)
        return by_block, batch_ptr, offsets

    return compute_causal_conv1d_metadata


def offsets_in_the_pointers():
    def compute_causal_conv1d_metadata(query_start_loc_p):
        by_block, batch_ptr, offsets = reference.compute_causal_conv1d_metadata(query_start_loc_p)
        by_block[8]["offsetlist"] = offsets[: by_block[8]["tot"]]
        return by_block, batch_ptr, offsets

    return compute_causal_conv1d_metadata


WRONG = {
    "get_dcp_local_seq_lens": (own_lengths, "returned.memory", NEW),
    "split_attn_metadata": (whole_batch, "returned[0].memory", NEW),
    "make_local_attention_virtual_batches": (pages_of_one_chunk, "returned.metadata.block_table_tensor.memory", NEW),
    "mamba_get_block_table_tensor": (copied_table, "returned.memory", SAME),
    "slice_query_start_locs": (in_one_buffer(), "returned.memory", EARLIER),
    "compute_causal_conv1d_metadata": (pointers_of_numpy(), "returned.programs.8.batch_ptr.memory", EARLIER),
}


@pytest.mark.parametrize("name", WRONG)
def test_right_values_in_wrong_memory_are_wrong(name):
    function, place, cause = WRONG[name]
    seen = examined(name, function)
    assert place in places(seen)
    assert 0 < seen.counts["differs"] < seen.questions
    assert seen.cause == cause


@pytest.mark.parametrize(
    ("function", "place"), [(copied_decodes, "returned.memory"), (copied_slots, "returned.slot_mapping.memory")]
)
def test_a_captured_graph_needs_the_buffers_of_the_batch(function, place):
    seen = examined("make_kv_sharing_fast_prefill_common_attn_metadata", function)
    assert (places(seen), seen.cause) == ({place}, SAME)


def test_two_tensors_of_a_result_do_not_share_memory():
    seen = examined("compute_causal_conv1d_metadata", offsets_in_the_pointers())
    assert seen.cause == "two tensors of the result share memory"
    assert all(place.endswith(".memory") for place in places(seen))


def cut_from_one_tensor(query_start_loc_p, *, dim):
    """Both results are slices of one new tensor: one after the other, or interleaved."""
    by_block, *made = reference.compute_causal_conv1d_metadata(query_start_loc_p)
    batch_ptr, offsets = torch.stack(made, dim).unbind(dim)
    return {8: by_block[8] | {"batch_ptr": batch_ptr, "token_chunk_offset_ptr": offsets}}, batch_ptr, offsets


@pytest.mark.parametrize("dim", [0, 1])
def test_slices_of_one_new_tensor_that_do_not_overlap_share_nothing(dim):
    assert examined("compute_causal_conv1d_metadata", partial(cut_from_one_tensor, dim=dim)).first is None


def test_an_overlap_of_one_element_is_shared_memory():
    def cut(query_start_loc_p):
        by_block, *made = reference.compute_causal_conv1d_metadata(query_start_loc_p)
        batch_ptr, offsets = made
        both = torch.cat([batch_ptr, offsets[1:]])
        if both[len(batch_ptr) - 1] == offsets[0]:
            batch_ptr, offsets = both[: len(batch_ptr)], both[len(batch_ptr) - 1 :]
        return {8: by_block[8] | {"batch_ptr": batch_ptr, "token_chunk_offset_ptr": offsets}}, batch_ptr, offsets

    assert examined("compute_causal_conv1d_metadata", cut).cause == "two tensors of the result share memory"


def copied_lengths(common_attn_metadata):
    made = reference.make_kv_sharing_fast_prefill_common_attn_metadata(common_attn_metadata)
    return made if made is common_attn_metadata else replace(made, seq_lens=made.seq_lens.clone())


def test_lengths_may_be_copies_where_the_reference_returns_its_argument():
    assert examined("make_kv_sharing_fast_prefill_common_attn_metadata", copied_lengths).first is None


def views_of_lengths(ubatch_slice, attn_metadata):
    """Where nothing is cut, lengths may be views, and they may be copies."""
    made = reference._make_metadata_with_slice(ubatch_slice, attn_metadata)
    own = attn_metadata.seq_lens_cpu[ubatch_slice.request_slice]
    shared = own if own.equal(made.seq_lens_cpu) else made.seq_lens_cpu
    return replace(made, seq_lens_cpu=shared, seq_lens=made.seq_lens.clone())


def test_lengths_may_be_views_or_copies():
    assert examined("_make_metadata_with_slice", views_of_lengths).first is None


@wraps(reference.is_last_ubatch_empty)
def other_order(padded_num_tokens, orig_num_tokens, num_ubatches):
    return reference.is_last_ubatch_empty(orig_num_tokens, padded_num_tokens, num_ubatches)


def test_arguments_are_passed_by_position_too():
    seen = examined("is_last_ubatch_empty", other_order)
    assert 0 < seen.counts["differs"] <= seen.questions // 2
    assert seen.first.question.endswith(", by position")


COMPARED = [each.name for each in fields(reference.PerLayerParameters) if each.compare]


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize("kept", [slice(None), slice(1)], ids=["of all", "of the first two"])
def test_layers_that_differ_in_one_field_are_not_all_equal(name, kept):
    """A field that is not compared, or not of every layer."""

    def infer(per_layer_params):
        right = reference.infer_global_hyperparameters(per_layer_params)
        first, *others = [replace(each) for each in per_layer_params.values()]
        for number, each in enumerate(others):
            if kept == slice(None) or number >= 1:
                setattr(each, name, getattr(first, name))
        return replace(right, has_same_all_params=all(each == first for each in others))

    seen = examined("infer_global_hyperparameters", infer)
    assert places(seen) == {"returned.has_same_all_params"}


def test_layers_are_in_the_order_of_the_names():
    def reordered(vllm_config, layer_names, cls_):
        return dict(reversed(reference.get_per_layer_parameters(vllm_config, layer_names, cls_).items()))

    assert places(examined("get_per_layer_parameters", reordered)) >= {"returned.in order[0]"}


def test_a_class_takes_its_fields_by_keyword():
    class Swapped(reference.UBatchSlice):
        def __init__(self, *given, token_slice=None, request_slice=None):
            super().__init__(*given or (token_slice, request_slice))

    assert "returned.by keyword.request_slice.stop" in places(examined("UBatchSlice", Swapped))
