"""Cases whose keys an indexer chose: what is drawn, the truth, and what must be noticed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from dense_sparse import dense_sparse_attention
from made_cases import make_case

from attncheck.errors import BlindCaseError
from attncheck.harness.problem.chosen_keys import loose_form
from attncheck.harness.problem.problem import Arrangement, arranged, build_problem, foreign_slots, unchosen_slots
from attncheck.harness.truth.faults import attend_named, keys_seen, toggles
from attncheck.harness.truth.truth import params_of, rows_of, truth_of
from attncheck.reference.spec import LayerSpec, MLASpec

CPU = torch.device("cpu")
BATCH = ((40, 40), (1, 64), (20, 90), (1, 7))
CASE = make_case(*BATCH, index_topk=9)
SIZES = MLASpec(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=8)
LATENT = LayerSpec(num_heads=4, num_kv_heads=1, head_size=48, dtype="bfloat16", mla=SIZES, index_topk=9)


def rows_of_requests(problem):
    """(request, row, position) of every row."""
    return [
        (request, request.first_row + n, request.first_position + n)
        for request in problem.requests
        for n in range(request.rows)
    ]


@pytest.mark.parametrize("fields", [{"index_topk": 9}, {"layer": LATENT, "path": "mla"}], ids=["heads", "latent"])
def test_the_truth_is_a_product_with_a_matrix_of_the_chosen_keys(fields):
    problem = build_problem(make_case(*BATCH, inputs=("needles",), **fields), 0)  # no score is too large for exp
    truth, rows = truth_of(problem, CPU), rows_of(problem, CPU)
    group = truth.params.group_size
    for request in problem.requests:
        own = slice(request.first_row, request.first_row + request.rows)
        keys, values = (
            each[request.base : request.base + request.num_keys].double().repeat_interleave(group, dim=1).numpy()
            for each in (rows.keys, rows.values)
        )
        query, chosen = rows.query[own].double().numpy(), problem.topk_indices[own]
        want = dense_sparse_attention(query, keys, values, chosen.tolist(), truth.params.softmax_scale)
        assert np.allclose(truth.out[own].numpy(), want)
        assert keys_seen(rows, truth.params)[own].tolist() == [len(set(row) - {-1}) for row in chosen.tolist()]


def test_rows_name_as_many_keys_as_an_indexer_in_every_way():
    kinds = set()
    for seed in range(4):
        problem = build_problem(CASE, seed)
        assert problem.topk_indices.dtype == torch.int32
        for _, row, position in rows_of_requests(problem):
            entries = problem.topk_indices[row].tolist()
            count = min(9, position + 1)
            named = entries[:count]
            assert entries[count:] == [-1] * (9 - count)
            assert 0 <= min(named) <= max(named) <= position
            assert len(set(named)) == count
            kinds |= {
                ("unsorted", named != sorted(named)),
                ("every key", set(named) == set(range(position + 1)) and position > 2),
                ("full", -1 not in entries),
                ("key 0", 0 in named),
                ("own key", position in named),
                ("first of a page", any(key % 16 == 0 < key for key in named)),
                ("last of a page", any(key % 16 == 15 for key in named)),
            }
    assert {kind for kind, holds in kinds if holds} == {kind for kind, holds in kinds if not holds}
    assert len(kinds) == 14
    assert not torch.equal(build_problem(CASE, 0).topk_indices, build_problem(CASE, 1).topk_indices)


def test_rows_keep_their_keys_in_another_order():
    problem = build_problem(CASE, 0)
    other = arranged(problem, Arrangement((2, 0)))
    assert torch.equal(other.topk_indices, problem.topk_indices[[*range(41, 61), *range(40)]])


def test_another_form_names_the_same_keys_with_repetitions_and_gaps():
    problem = build_problem(CASE, 0)
    loose = loose_form(problem.topk_indices)
    kinds = set()
    for front, entries in zip(problem.topk_indices.tolist(), loose.tolist(), strict=True):
        assert set(entries) - {-1} == set(front) - {-1}
        named = [entry for entry in entries if entry >= 0]
        gap = entries.index(-1) if -1 in entries else len(entries)
        kinds |= {
            ("repetition", len(set(named)) < len(named)),
            ("gap before a key", any(entry >= 0 for entry in entries[gap:])),
            ("as before", entries == front),
        }
    assert len(kinds) == 6
    nothing = torch.full((2, 5), -1)
    assert torch.equal(loose_form(nothing), nothing)


@pytest.mark.parametrize(("form", "subjects"), [(lambda own: own, ["-1"]), (loose_form, ["-1", "repetitions"])])
def test_every_change_of_the_mask_changes_the_truth(form, subjects):
    problem = build_problem(CASE, 0)
    params, rows = params_of(problem), rows_of(problem, CPU)
    rows = replace(rows, topk_indices=form(rows.topk_indices))
    out, _ = rows.attend(params)
    changes = [each for each in toggles(params, rows) if bool(each.acts.any())]
    assert [each.subject for each in changes] == ["index_topk", *(f"topk_indices: {subject}" for subject in subjects)]
    for each in changes:
        moved = (each.hypothesis.compute()[0] - out).abs().amax(dim=(1, 2)) > 1e-6
        assert bool(moved[each.acts].any())
        assert not bool(moved[~each.acts].any())


def test_entries_summed_one_by_one_without_repetitions_are_the_truth():
    problem = build_problem(make_case(*BATCH, index_topk=9, sinks=True, logits_soft_cap=20.0), 0)
    params, rows = params_of(problem), rows_of(problem, CPU)
    for mine, right in zip(attend_named(rows, params, rows.topk_indices), rows.attend(params), strict=True):
        assert torch.allclose(mine, right)


def test_a_case_whose_rows_see_every_key_is_blind():
    with pytest.raises(BlindCaseError, match="lengthen a request"):
        truth_of(build_problem(make_case((1, 1), (1, 1), index_topk=9), 0), CPU)


def test_old_keys_that_no_row_names_are_poisoned_and_no_others():
    problem = build_problem(CASE, 0)
    (slots,) = unchosen_slots(problem).values()
    named = {
        int(problem.key_slots[request.base + entry])
        for request, row, _ in rows_of_requests(problem)
        for entry in problem.topk_indices[row].tolist()
        if entry >= 0
    }
    old = set(problem.key_slots[problem.old_keys].tolist())
    assert set(slots.tolist()) == old - named
    assert 0 < len(slots) < len(old)
    assert not set(slots.tolist()) & {slot for region in foreign_slots(problem).values() for slot in region.tolist()}
    assert unchosen_slots(build_problem(make_case(*BATCH), 0)) == {}
