"""The common metadata as vLLM's dataclass, in every version of it: stand-ins have the fields of each."""

from dataclasses import dataclass, make_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from common_batches import common_metadata

from attncheck.backends.candidates.vllm.builder import fill_positions, step_fields, their_fields


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


Before = make_dataclass("Before", ["query_start_loc", "seq_lens", "seq_lens_cpu", "encoder_seq_lens"])
Between = make_dataclass("Between", ["seq_lens", "_seq_lens_cpu", "_num_computed_tokens_cpu"])


def batch(query_lens, seq_lens, *, tokens=None, **more):
    count = sum(query_lens) if tokens is None else tokens
    fields = {"num_actual_tokens": count, "slot_mapping": torch.full((count,), -1)}
    return common_metadata(query_lens, seq_lens, table=[[0]] * len(seq_lens), **fields | more)


def theirs(cls, ours, **options):
    return cls(**step_fields(ours, cls, positions=torch.arange(4), **options))


def test_fields_go_by_the_names_that_a_version_has_for_them():
    lens = np.array([7, 0], dtype=np.int32)
    ours = batch([1, 3], [5, 3], encoder_seq_lens=lens)
    today, before, between = (theirs(cls, ours) for cls in (Today, Before, Between))
    assert today.query_start_loc is ours.query_start_loc
    assert today.seq_lens is before.seq_lens is between.seq_lens is ours.seq_lens
    assert (today.num_reqs, today.num_actual_tokens, today.causal) == (2, 4, True)
    assert before.seq_lens_cpu.tolist() == between._seq_lens_cpu.tolist() == [5, 3]
    assert today.seq_lens_cpu_upper_bound.tolist() == [5, 3]
    assert between._num_computed_tokens_cpu.tolist() == [4, 0]
    assert today.something_new is None
    # Encoder lengths are on the device, and on the host where a version has both.
    assert today.encoder_seq_lens.tolist() == [7, 0]
    assert today.encoder_seq_lens.dtype == torch.int32
    assert today.encoder_seq_lens_cpu is before.encoder_seq_lens is lens


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
    assert theirs(Today, batch(query_lens, seq_lens), num_drafts=drafts).is_prefilling.tolist() == expected


def test_positions_follow_the_context_and_are_written_in_place():
    buffer = torch.full((10,), -5, dtype=torch.int64)
    seen = fill_positions(batch([1, 3, 0], [9, 5, 0], tokens=6), buffer)
    assert seen.tolist() == [8, 2, 3, 4, 0, 0]
    assert seen.data_ptr() == buffer.data_ptr()
    assert buffer[6:].tolist() == [-5] * 4
    # Over an encoder shorter than the query they are not negative.
    assert fill_positions(batch([3], [1]), torch.zeros(3, dtype=torch.int64)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("version", [Today, Before, Between])
def test_host_tensors_are_copies_in_every_version(version):
    ours = batch([1, 3], [5, 3])
    made = vars(theirs(version, ours))
    before = {name: value.tolist() for name, value in made.items() if isinstance(value, torch.Tensor)}
    for name in ("query_start_loc_cpu", "seq_lens_cpu", "num_computed_tokens_cpu"):
        getattr(ours, name).fill_(-7)
    device = {"query_start_loc", "seq_lens"}
    assert all(made[name].tolist() == before[name] for name in before.keys() - device)


def test_lengths_on_the_host_are_passed_as_upper_bounds_only():
    both = make_dataclass("Both", ["_seq_lens_cpu", "seq_lens_cpu_upper_bound"])
    ours = batch([1, 3], [5, 3])
    ours.seq_lens_cpu = torch.tensor([8, 3], dtype=torch.int32)
    ours.num_computed_tokens_cpu = torch.tensor([7, 0], dtype=torch.int32)
    made = step_fields(ours, both, positions=torch.arange(4))
    assert {name: lens.tolist() for name, lens in made.items()} == {"seq_lens_cpu_upper_bound": [8, 3]}
    assert fill_positions(ours, torch.zeros(4, dtype=torch.int64)).tolist() == [4, 0, 1, 2]


def test_the_most_logits_of_one_request():
    assert their_fields(batch([1], [1]), Today)["max_logits_per_req"] is None
    for indices, real, most in (([0, 1, 2, 0], 3, 2), ([2, 0, 0, 0], 1, 1), ([0, 0], 0, 0), ([0, 1], 2, 1)):
        ours = batch([1, 3], [5, 3], logits_indices_padded=torch.tensor(indices), num_logits_indices=real)
        assert their_fields(ours, Today)["max_logits_per_req"] == most
