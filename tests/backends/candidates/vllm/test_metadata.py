"""The common metadata as vLLM's dataclass, in every version of it: stand-ins have the fields of each."""

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pytest
import torch

from attncheck.backends.candidates.vllm.builder import fill_positions, step_fields, their_fields
from attncheck.reference.utilities.metadata import CommonAttentionMetadata

POSITIONS = torch.arange(4)


@dataclass
class Today:
    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    num_reqs: int
    num_actual_tokens: int
    causal: Any = True
    encoder_seq_lens: Any = None
    encoder_seq_lens_cpu: Any = None
    positions: Any = None
    is_prefilling: Any = None
    seq_lens_cpu_upper_bound: Any = None
    max_logits_per_req: int | None = None
    something_new: Any = None


@dataclass
class Before:
    query_start_loc: Any
    seq_lens: Any
    seq_lens_cpu: Any
    num_computed_tokens_cpu: Any
    encoder_seq_lens: Any = None


@dataclass
class Between:
    seq_lens: Any
    _seq_lens_cpu: Any = field(default=None)
    _num_computed_tokens_cpu: Any = field(default=None)


def batch(query_lens, seq_lens, *, tokens=None, **more):
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    count = int(starts[-1]) if tokens is None else tokens
    given = {
        "query_start_loc": starts.clone(),
        "query_start_loc_cpu": starts,
        "seq_lens": lens.clone(),
        "seq_lens_cpu": lens,
        "num_computed_tokens_cpu": lens - starts.diff(),
        "num_reqs": len(lens),
        "num_actual_tokens": count,
        "max_query_len": max(query_lens),
        "max_seq_len": max(seq_lens),
        "block_table_tensor": torch.zeros(len(lens), 1, dtype=torch.int32),
        "slot_mapping": torch.full((count,), -1),
    }
    return CommonAttentionMetadata(**(given | more))


def test_fields_of_one_name_are_handed_over_as_they_are():
    ours = batch([1, 3], [5, 3])
    metadata = Today(**their_fields(ours, Today))
    assert metadata.query_start_loc is ours.query_start_loc
    assert metadata.seq_lens is ours.seq_lens
    assert (metadata.num_reqs, metadata.num_actual_tokens, metadata.causal) == (2, 4, True)
    assert metadata.seq_lens_cpu_upper_bound is ours.seq_lens_cpu
    assert metadata.something_new is None


@pytest.mark.parametrize("theirs", [Today, Before, Between])
def test_nothing_is_given_that_a_version_does_not_have(theirs):
    given = step_fields(batch([1, 3], [5, 3]), theirs, positions=POSITIONS)
    assert set(given) <= {field.name for field in fields(theirs)}
    theirs(**given)


def test_host_lengths_go_by_the_name_a_version_has_for_them():
    ours = batch([1, 3], [5, 3])
    metadata = Between(**step_fields(ours, Between, positions=POSITIONS))
    assert metadata._seq_lens_cpu is ours.seq_lens_cpu
    assert metadata._num_computed_tokens_cpu is ours.num_computed_tokens_cpu


def test_encoder_lengths_are_on_the_device_and_on_the_host_where_a_version_has_both():
    lens = np.array([7, 0], dtype=np.int32)
    ours = batch([1, 1], [7, 0], encoder_seq_lens=lens)
    metadata = Today(**step_fields(ours, Today, positions=POSITIONS))
    assert metadata.encoder_seq_lens.tolist() == [7, 0]
    assert metadata.encoder_seq_lens.dtype == torch.int32
    assert metadata.encoder_seq_lens_cpu is lens
    assert Before(**step_fields(ours, Before, positions=POSITIONS)).encoder_seq_lens is lens


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "drafts", "expected"),
    [
        ([1, 1], [9, 1], 0, [False, True]),  # a decode; the first token of all
        ([3, 5], [9, 5], 0, [True, True]),  # a later piece of a prompt; a whole one
        ([3, 4], [9, 9], 2, [False, True]),  # two drafts behind the last token; one row too many
        ([1, 0], [9, 0], 0, [False, False]),  # padding
    ],
)
def test_who_is_still_reading_a_prompt(query_lens, seq_lens, drafts, expected):
    ours = batch(query_lens, seq_lens)
    metadata = Today(**step_fields(ours, Today, positions=POSITIONS, num_drafts=drafts))
    assert metadata.is_prefilling.tolist() == expected


def test_positions_follow_the_context_and_are_written_in_place():
    buffer = torch.full((10,), -5, dtype=torch.int64)
    seen = fill_positions(batch([1, 3, 0], [9, 5, 0], tokens=6), buffer)
    assert seen.tolist() == [8, 2, 3, 4, 0, 0]
    assert seen.data_ptr() == buffer.data_ptr()
    assert buffer[6:].tolist() == [-5] * 4


def test_positions_over_an_encoder_shorter_than_the_query_are_not_negative():
    assert fill_positions(batch([3], [1]), torch.zeros(3, dtype=torch.int64)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("indices", "real", "expected"), [([0, 1, 2, 0], 3, 2), ([2, 0, 0, 0], 1, 1), ([0, 0], 0, 0), ([0, 1], 2, 1)]
)
def test_the_most_logits_of_one_request(indices, real, expected):
    ours = batch([1, 3], [5, 3], logits_indices_padded=torch.tensor(indices), num_logits_indices=real)
    assert their_fields(ours, Today)["max_logits_per_req"] == expected


def test_a_batch_that_is_not_armed_has_no_logits():
    assert their_fields(batch([1], [1]), Today)["max_logits_per_req"] is None
