"""The batches that come between: of the same shape, and smaller; neither asks what its layer cannot answer."""

from typing import Any

import pytest
import torch

from attncheck.backends.registry import load
from attncheck.harness.checks.interface import CheckedCase, SharedByChecks
from attncheck.harness.checks.numerics import CHECK, other_batches
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of
from attncheck.reference.spec import AttentionType, RequestSpec


def lengths(case: Any) -> list[tuple[int, int]]:
    return [(r.query_len, r.total_len) for r in case.batch]


def test_one_is_alike_and_one_is_smaller(make_case: Any) -> None:
    alike, smaller = other_batches(make_case((1, 37), (5, 40), (33, 33), padding=(1, 2)))
    assert lengths(alike) == [(1, 36), (5, 39), (33, 33)]
    assert alike.batch.padding.tokens == 2
    assert lengths(smaller) == [(17, 17), (3, 20), (1, 19)]


def test_pages_differ_where_lengths_cannot(make_case: Any) -> None:
    case = make_case((33, 33), (1, 1))
    alike, _ = other_batches(case)
    assert lengths(alike) == lengths(case)
    assert build_problem(alike, 1).block_table.tolist() != build_problem(case, 0).block_table.tolist()


@pytest.mark.parametrize("attn_type", [AttentionType.ENCODER_ONLY, AttentionType.ENCODER])
def test_encoders_keep_as_many_keys_as_rows(make_case: Any, attn_type: str) -> None:
    for other in other_batches(make_case((9, 9), (1, 1), attn_type=attn_type)):
        assert all(query_len == seq_len for query_len, seq_len in lengths(other))
        build_problem(other, 0)


def test_cross_attention_stays_on_its_step(make_case: Any) -> None:
    first = RequestSpec(query_len=4, seq_len=4, encoder_len=30)
    later = RequestSpec(query_len=1, seq_len=2, encoder_len=21)
    alike, smaller = other_batches(make_case(first, later, attn_type=AttentionType.ENCODER_DECODER))
    assert [(r.context_len > 0, r.encoder_len) for r in alike.batch] == [(False, 30), (True, 21)]
    assert [(r.context_len > 0, r.encoder_len) for r in smaller.batch] == [(True, 10), (False, 15)]


@pytest.mark.parametrize(
    ("ref", "kernels"), [("torch_sdpa", ("flash",)), ("torch_sdpa:math", ("math",)), ("reference", ())]
)
def test_the_finding_names_the_kernels_that_a_library_chose(ref: str, kernels: tuple[str, ...], make_case: Any) -> None:
    problem = build_problem(make_case((1, 9), (3, 20)), 0)
    truth = truth_of(problem, torch.device("cpu"))
    found = CHECK.run(CheckedCase(load(ref), problem, truth, torch.device("cpu"), (), SharedByChecks()))
    assert found.chosen_kernels == kernels  # type: ignore[union-attr]
