"""The causal depthwise convolution before a state-space layer, over packed sequences with a rolling state."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import (
    host_ints,
    host_offsets,
    require_float,
    require_same_device,
    require_shape,
)
from attncheck.reference.attention.params import Precision


@torch.no_grad()
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    *,
    activation: str | None = "silu",
    pad_id: int = -1,
    precision: Precision = Precision(),  # noqa: B008 (frozen)
) -> Tensor:
    """Return ``y [T, C]``: each channel of each sequence, convolved with its own ``K`` taps over its past.

    For a sequence with state line ``i = cache_indices[r]``, per channel, time on the rows::

        tape  = [ conv_states[i, :, :K-1] if has_initial_state[r] else zeros ; the rows of x ]
        y[t]  = act(bias + sum over k of weight[:, k] * tape[t + k])
        conv_states[i, :, :K-1] = the last K-1 entries of tape

    The last tap multiplies the row's own input. A sequence shorter than ``K - 1`` shifts its state.

    x: ``[T, C]``, ``T >= query_start_loc[-1]``; any float dtype but float8.
    weight, bias: ``[C, K]``, ``[C]`` or None.
    conv_states: ``[lines, C, >= K-1]``, of any strides, updated in place. Only the first ``K - 1`` columns of lines of
        sequences with rows are written, with inputs converted to its dtype. States are read in that dtype too.
    query_start_loc, cache_indices: ``[R + 1]``, ``[R]``, int32 or int64. No line twice among sequences that have rows.
    has_initial_state: bool ``[R]``.
    activation: ``None``, or ``"silu"`` (``z * sigmoid(z)``), also named ``"swish"``.
    pad_id: index of a padding sequence. Its rows of ``y`` are 0, and no line is read or written for it. A sequence
        without rows leaves its line unchanged, and its index is never read.
    precision: sums and ``y`` are in ``precision.compute``, ``y`` rounded to ``precision.out``.

    Rows of no sequence are 0.

    All arguments are checked before the first write. Raise :class:`~attncheck.errors.ReferenceArgumentError` if one is
    invalid.

    One channel, and a sequence of three rows whose state holds 5:

    >>> states = torch.tensor([[[0.0, 5.0]]])
    >>> y = causal_conv1d(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[100.0, 10.0, 1.0]]), None, states,
    ...                   torch.tensor([0, 3]), torch.tensor([0]), torch.tensor([True]), activation=None)
    >>> y.flatten().tolist(), states.flatten().tolist()
    ([51.0, 512.0, 123.0], [2.0, 3.0])
    """
    _check_tensors(x, weight, bias, conv_states)
    if activation not in (None, "silu", "swish"):
        raise ReferenceArgumentError("activation", activation, "None, silu or swish")
    starts = host_offsets("query_start_loc", query_start_loc, "x", len(x))
    lines = host_ints("cache_indices", cache_indices, len(starts) - 1)
    require_shape("has_initial_state", has_initial_state, len(lines), legend="one a sequence")
    if has_initial_state.dtype != torch.bool:
        raise ReferenceArgumentError("has_initial_state.dtype", has_initial_state.dtype, "bool")
    sequences = [
        (line, slice(start, end), remembers)
        for line, (start, end), remembers in zip(lines, pairwise(starts), has_initial_state.tolist(), strict=True)
        if start < end and line != pad_id
    ]
    _check_lines([line for line, _, _ in sequences], len(conv_states), pad_id)

    compute, past = precision.compute, weight.shape[1] - 1
    taps_KC = weight.to(compute).T
    y_TC = torch.zeros(x.shape, dtype=compute, device=x.device)
    for line, rows, remembers in sequences:
        state_PC = conv_states[line, :, :past].T
        before_PC = state_PC.clone() if remembers else torch.zeros_like(state_PC)
        tape = torch.cat([before_PC.to(compute), x[rows].to(compute)])
        y = y_TC[rows]
        for k, tap_C in enumerate(taps_KC):
            y.addcmul_(tape[k : k + len(y)], tap_C)
        # From x and the stored state, not from tape: the new state must not depend on the dtype of the sums.
        recent = x[max(rows.start, rows.stop - past) : rows.stop].to(conv_states.dtype)
        state_PC.copy_(torch.cat([before_PC, recent])[len(recent) :])
        if bias is not None:
            y.add_(bias.to(compute))
        y.copy_(precision.round_out(y if activation is None else silu(y)))
    return y_TC


def _check_tensors(x: Tensor, weight: Tensor, bias: Tensor | None, conv_states: Tensor) -> None:
    tensors = {"x": x, "weight": weight, "conv_states": conv_states} | ({} if bias is None else {"bias": bias})
    for name, tensor in tensors.items():
        require_float(name, tensor)
    require_shape("x", x, None, None, legend="rows, channels")
    channels = x.shape[1]
    require_shape("weight", weight, channels, None, legend="channels, taps")
    if weight.shape[1] == 0:
        raise ReferenceArgumentError("weight.shape", tuple(weight.shape), "at least one tap")
    if bias is not None:
        require_shape("bias", bias, channels, legend="channels")
    require_shape("conv_states", conv_states, None, channels, None, legend="lines, channels, state")
    if conv_states.shape[2] < weight.shape[1] - 1:
        raise ReferenceArgumentError(
            "conv_states.shape", tuple(conv_states.shape), f"at least {weight.shape[1] - 1} wide, the taps but one"
        )
    require_same_device("x", x, **tensors)


def _check_lines(lines: list[int], num_lines: int, pad_id: int) -> None:
    """Raise for lines that do not exist, or that two sequences would write."""
    seen: set[int] = set()
    for line in lines:
        if not 0 <= line < num_lines:
            raise ReferenceArgumentError("cache_indices", line, f"a line, 0 to {num_lines - 1}, or pad_id {pad_id}")
        if line in seen:
            raise ReferenceArgumentError("cache_indices", line, "a line named once: two writes have no order")
        seen.add(line)
