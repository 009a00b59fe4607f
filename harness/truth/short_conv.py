"""Short convolutions of layers with a state: their exact result, and the error budget of a convolution.

An output is a sum of few products, and a state consists of inputs as they are. So no error is carried from row to row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.harness.problem.recurrent import RecurrentProblem, StateRequest
from attncheck.harness.truth.unpaged import Budget, allowed_errors, float32_bracket
from attncheck.reference import Precision, causal_conv1d

_SILU_SLOPE = 1.1


@dataclass(frozen=True)
class ConvolutionRuns:
    """The rows of a convolution, computed in several ways, float64 ``[T, C]`` each.

    right: the exact rows. low: in float32, rounded once. sums: without activation. weighted, squares: the sums of the
    magnitudes of all summands, and of their squares.
    """

    right: Tensor
    low: Tensor
    sums: Tensor
    weighted: Tensor
    squares: Tensor


def convolution_budget(runs: ConvolutionRuns, activation: str | None, taps: int, dtype: torch.dtype) -> Budget:
    """Return the error that a right kernel may have; all channels of a row are judged together.

    It computes in float32 and rounds once. Or it rounds every product, every partial sum, and each result of
    ``s / (1 + exp(-s))`` to the dtype. These errors come together, so that they are one loss. With ``u`` half the
    epsilon of the dtype, the products lose ``u sqrt(squares)``. Each of the ``taps`` partial sums is about
    ``sqrt(squares)``, since summands are of either sign, and loses ``u`` times that. The activation multiplies all this
    by its slope, and adds the loss of its steps on the rounded sum.
    """
    slope = 1.0 if activation is None else _SILU_SLOPE
    reach = torch.zeros_like(runs.right[:, :1])
    if activation is not None:
        reach = runs.sums.abs().amax(dim=1, keepdim=True)
    of_sums = slope * torch.finfo(dtype).eps / 2 * ((1 + taps) * runs.squares).sqrt()
    rounded = runs.sums.to(dtype)
    activated = rounded if activation is None else rounded / (1 + (-rounded).exp())  # torch rounds each result
    together = (of_sums.square() + (activated.double() - runs.right).square()).sqrt()
    losses = [(runs.low - runs.right)[:, None], together[:, None]]
    bracket = float32_bracket(reach, taps)
    norm, peak = allowed_errors(losses, runs.right[:, None], bracket, slope * runs.weighted[:, None], dtype)
    return Budget(norm, peak, torch.zeros_like(norm))


def convolved(problem: RecurrentProblem, contents: Sequence[Tensor | None], **changes: object) -> Tensor:
    """Return the outputs of all requests, float64 ``[T, C]``.

    contents: what the slot of each request holds, ``[C, 1, columns]``; None for zeros. changes: arguments of
    :func:`causal_conv1d` to replace.
    """
    requests = problem.requests
    past = problem.layer.head_size - 1
    states = torch.zeros(len(requests), problem.layer.num_heads, past, dtype=torch.float64)
    for line, (request, content) in enumerate(zip(requests, contents, strict=True)):
        if content is not None:
            states[line] = content[:, 0, request.columns_read].double()
    bias = problem.weights.get("bias")
    arguments: dict[str, object] = {
        "x": torch.cat([request.inputs["x"] for request in requests]).double(),
        "weight": problem.weights["weight"].double(),
        "bias": None if bias is None else bias.double(),
        "conv_states": states,
        "query_start_loc": torch.tensor([0, *(request.num_rows for request in requests)]).cumsum(0),
        "cache_indices": torch.arange(len(requests)),
        "has_initial_state": torch.tensor([content is not None for content in contents]),
        "activation": problem.options.activation,
    }
    rows: Tensor = causal_conv1d(**{**arguments, **changes})  # type: ignore[arg-type]
    return rows.double()


def runs_of(problem: RecurrentProblem, contents: Sequence[Tensor | None]) -> ConvolutionRuns:
    """Return the rows of all requests, computed in the ways of the budget."""

    def sizes(power: int) -> Tensor:
        rows = torch.cat([request.inputs["x"] for request in problem.requests])
        of_weights = {name: problem.weights[name].double().abs() ** power for name in problem.weights}
        powers = [None if content is None else content.double().abs() ** power for content in contents]
        return convolved(problem, powers, x=rows.double().abs() ** power, activation=None, **of_weights)

    return ConvolutionRuns(
        right=convolved(problem, contents),
        low=convolved(problem, contents, precision=Precision(torch.float32, None, problem.dtype)),
        sums=convolved(problem, contents, activation=None),
        weighted=sizes(1),
        squares=sizes(2),
    )


def stored_inputs(request: StateRequest, content: Tensor | None, row: int, columns: int) -> Tensor:
    """Return what a step stores in a slot after ``row`` of a request, float64 ``[C, 1, columns]``: the latest inputs.

    Columns that it leaves alone are 0. content: as of :func:`convolved`.
    """
    past_and_new = _past_and_new(request, content)
    # A decode stores the states after all its rows, one column apart. Those after the first row come first.
    first = row + 2 - request.num_rows if request.is_decode else row + 1
    inputs = past_and_new[:, first : row + 1 + request.past]
    stored = torch.zeros(len(inputs), 1, columns, dtype=torch.float64)
    stored[:, 0, : inputs.shape[1]] = inputs
    return stored


def only_state(problem: RecurrentProblem, request: StateRequest, content: Tensor | None, row: int) -> Tensor:
    """Return what a decode leaves in the columns that it writes, if it stores the state after ``row`` alone."""
    stored = problem.pool()[request.slots[0]].double()
    stored[:, :, request.columns_written.stop :] = 0
    stored[:, 0, : request.past] = _past_and_new(request, content)[:, row + 1 : row + 1 + request.past]
    return stored


def _past_and_new(request: StateRequest, content: Tensor | None) -> Tensor:
    """Return the inputs before the first row and those of all rows, float64 ``[C, past + rows]``."""
    new = request.inputs["x"].double().t()
    before = torch.zeros(len(new), request.past, dtype=torch.float64)
    if content is not None:
        before = content[:, 0, request.columns_read].double()
    return torch.cat([before, new], dim=1)
