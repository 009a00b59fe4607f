"""Batches that are timed beside a case's own, and their comparison, by samples made by hand."""

from itertools import cycle

import pytest

from attncheck.harness.checks.timing.check import FEW_SAMPLES, MORE_SAMPLES, compare, neighbour_of, parts_of
from attncheck.harness.problem.problem import build_problem
from attncheck.reference.spec import AttentionType, RequestSpec


def compared(own, neighbour):
    """The comparison, and how many samples each side gave."""
    sides = [cycle(own), cycle(neighbour)]
    taken = [0, 0]

    def taker(side):
        def take():
            taken[side] += 1
            return next(sides[side])

        return take

    found = compare(1, taker(0), taker(1))
    assert taken[0] == taken[1]
    return found, taken[0]


@pytest.mark.parametrize(
    ("own", "neighbour", "is_confirmed", "is_notable", "is_suspect"),
    [
        *(([1000], neighbour, False, False, False) for neighbour in ([500], [1000], [1200], [900, 1100])),
        ([1000, 1050, 980], [4000, 4100, 3900], True, True, True),
        ([1000, 1010], [1500, 1510], True, True, False),
        ([1000, 1000, 4000, 4000, 1000], [4500, 900, 4500, 4500, 1000], True, False, False),  # noise may have made it
    ],
)
def test_a_batch_that_is_much_faster_than_its_neighbour_is_suspect(
    own, neighbour, is_confirmed, is_notable, is_suspect
):
    found, taken = compared(own, neighbour)
    assert taken == FEW_SAMPLES + is_confirmed * MORE_SAMPLES
    assert (found.is_notable, found.is_suspect) == (is_notable, is_suspect)
    if is_suspect:
        assert found.ratio == pytest.approx(4, rel=0.1)


def lengths(problem):
    return [(request.query_len, request.num_keys) for request in problem.requests]


ENCODER = {"attn_type": AttentionType.ENCODER_ONLY, "causal": False}
PARTS = {"decode": [(1, 37), (1, 130)], "prefill": [(5, 40), (33, 33)]}


@pytest.mark.parametrize(
    ("requests", "layer", "expected"),
    [
        (((1, 37), (5, 40), (33, 33), (1, 130)), {"padding": (2, 3)}, PARTS),
        (((1, 37), (1, 130)), {}, {}),
        (((5, 40), (33, 33)), {}, {}),
        (((1, 1), (5, 5)), ENCODER, {}),  # no cache, so no decodes
    ],
)
def test_a_mixed_batch_is_taken_apart(requests, layer, expected, make_case):
    problem = build_problem(make_case(*requests, **layer), 0)
    parts = parts_of(problem)
    assert {name: lengths(part) for name, part in parts.items()} == expected
    for part in parts.values():
        assert (part.num_blocks, part.case.batch.padding.tokens) == (problem.num_blocks, 0)


SHARED = tuple(RequestSpec(query_len=1, seq_len=length, shared_prefix=32) for length in (33, 40))


@pytest.mark.parametrize(
    ("requests", "distance", "expected"),
    [
        (((1, 37), (5, 40)), 1, [(1, 36), (5, 39)]),
        (((1, 37), (5, 40)), 8, [(1, 29), (5, 32)]),
        (((1, 37), (5, 6)), 1, [(1, 36), (5, 6)]),  # a context there is does not vanish
        (((1, 37), (33, 33)), 1, [(1, 36), (33, 33)]),
        (((20, 20), (33, 33)), 1, [(19, 19), (32, 32)]),
        (((1, 1), (33, 33)), 1, None),
        (((1, 2),), 1, None),
        (((4, 4),), 8, None),
        (SHARED, 1, [(1, 33), (1, 39)]),  # a prefix that is shared stays whole
    ],
)
def test_a_neighbour_is_shorter(requests, distance, expected, make_case):
    neighbour = neighbour_of(build_problem(make_case(*requests), 0), distance)
    assert (None if neighbour is None else lengths(neighbour)) == expected


def test_encoder_rows_are_shortened_with_the_context(make_case):
    request = RequestSpec(query_len=2, seq_len=10, encoder_len=30)
    case = make_case(request, attn_type=AttentionType.ENCODER_DECODER, causal=False, path="cross")
    neighbour = neighbour_of(build_problem(case, 0), 1)
    assert [(one.total_len, one.encoder_len) for one in neighbour.case.batch] == [(9, 29)]
