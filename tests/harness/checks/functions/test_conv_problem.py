"""The problem of a convolution: the truth by hand, rubbish in unread elements, a budget that holds honest kernels."""

import math
from typing import Any

import pytest
import torch

from attncheck.harness.checks.functions import PAD_ID, build_conv, conv_truth
from attncheck.harness.truth.unpaged import share_of_budget

CPU = torch.device("cpu")


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("activation", ["silu", None])
def test_the_truth_by_hand(conv_case: Any, width: int, activation: str | None) -> None:
    options = {"width": width, "channels": 3, "activation": activation}
    problem = build_conv(conv_case((2, 9), (5, 5), (1, 4), dtype="float32", options=options), 0)
    truth = conv_truth(problem, CPU)
    assert problem.bias is not None
    x, weight, bias = problem.x.tolist(), problem.weight.tolist(), problem.bias.tolist()
    first = 0
    for request, (length, remembers) in enumerate([(2, True), (5, False), (1, True)]):
        line = problem.lines[request]
        for channel in range(3):
            past = problem.states[line, channel, : width - 1].tolist() if remembers else [0.0] * (width - 1)
            tape = past + [x[first + i][channel] for i in range(length)]
            for i in range(length):
                z = bias[channel] + sum(weight[channel][k] * tape[i + k] for k in range(width))
                y = z if activation is None else z / (1 + math.exp(-z))
                assert float(truth.y[first + i, 0, channel]) == pytest.approx(y, abs=1e-12)
            assert truth.states[line, channel, : width - 1].tolist() == tape[len(tape) - (width - 1) :]
        first += length


def test_lines_are_distinct_and_neither_the_first_nor_the_last(conv_case: Any) -> None:
    problem = build_conv(conv_case(*[(1, 5)] * 30), 0)
    assert len(set(problem.lines)) == 30
    assert 0 not in problem.lines
    assert len(problem.states) - 1 not in problem.lines
    assert problem.lines != sorted(problem.lines)


def test_padding_sequences_get_a_row_each_while_there_are_tokens(conv_case: Any) -> None:
    problem = build_conv(conv_case((3, 9), (1, 1), padding=(3, 5)), 0)
    assert problem.query_start_loc.tolist() == [0, 3, 4, 5, 6, 7]
    assert len(problem.x) == 9
    assert problem.cache_indices.tolist()[2:] == [PAD_ID] * 3
    assert problem.has_initial_state.tolist() == [True, False, False, True, False]
    few = build_conv(conv_case((3, 9), padding=(3, 1)), 0)
    assert few.query_start_loc.tolist() == [0, 3, 4, 4, 4]


def test_regions_are_all_that_no_answer_looks_at(conv_case: Any) -> None:
    problem = build_conv(conv_case((3, 9), (2, 2), options={"channels": 5}), 0)
    first, second = problem.lines
    poisoned = problem.arguments(CPU, math.nan)["conv_states"]
    assert poisoned is not None
    clean = ~torch.isnan(poisoned).any(dim=1)
    assert clean.nonzero().tolist() == [[first, 0], [first, 1], [first, 2]]
    (line,) = (
        problem.arguments(CPU, math.nan, ("lines of sequences without a state",))["conv_states"]
        .isnan()
        .any(dim=(1, 2))
        .nonzero()
        .flatten()
        .tolist()
    )
    assert line == second
    everywhere = sum(mask.expand(-1, 5, -1).long() for mask in problem.regions().values())
    assert int(everywhere.max()) == 1  # disjoint


def test_another_seed_is_another_problem_and_the_same_is_the_same(conv_case: Any) -> None:
    case = conv_case((3, 9))
    assert torch.equal(build_conv(case, 0).x, build_conv(case, 0).x)
    assert not torch.equal(build_conv(case, 0).x, build_conv(case, 1).x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rounds", ["products", "sums"])
def test_a_kernel_that_rounds_on_its_way_is_within_the_budget(conv_case: Any, dtype: str, rounds: str) -> None:
    problem = build_conv(conv_case((60, 60), (7, 30), (1, 9), dtype=dtype, options={"width": 4}), 0)
    truth = conv_truth(problem, CPU)
    starts = problem.query_start_loc.tolist()
    y = torch.empty(68, 1, 64, dtype=torch.float64)
    for request, line in enumerate(problem.lines):
        first, last = starts[request], starts[request + 1]
        past = problem.states[line, :, :3].T * problem.has_initial_state[request]
        tape = torch.cat([past, problem.x[first:last]])
        carried = problem.dtype if rounds == "products" else torch.float32
        terms = [tape[k : k + last - first].to(carried) * problem.weight[:, k].to(carried) for k in range(4)]
        z = problem.bias.float() + sum(term.float() for term in terms)
        z = z.to(problem.dtype).float() if rounds == "sums" else z
        y[first:last, 0] = torch.nn.functional.silu(z).to(problem.dtype).double()
    assert float(share_of_budget(y - truth.y, truth.budget).max()) < 0.8


def test_dropping_the_smallest_tap_is_far_outside(conv_case: Any) -> None:
    problem = build_conv(conv_case((40, 40)), 0)
    truth = conv_truth(problem, CPU)
    tap = problem.weight.double()[:, 0] * torch.cat([torch.zeros(3, 64), problem.x[:37]]).double()
    assert float(share_of_budget(0.5 * tap[:, None], truth.budget)[3:].min()) > 10
