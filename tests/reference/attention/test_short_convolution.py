"""The short convolution of state-space layers, its rolling state, and what neither may depend on."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import Precision, causal_conv1d

BF16 = torch.bfloat16
CHANNELS = 3


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def offsets(lens):
    return torch.tensor([0, *lens]).cumsum(0)


def by_loops(x, weight, bias, states, lens, lines, flags, activation="silu", pad_id=-1):
    """(y, states): number by number, one list of past inputs a sequence and channel."""
    y, states, start, width = torch.zeros_like(x), states.clone(), 0, weight.shape[1]
    for length, line, flag in zip(lens, lines, flags, strict=True):
        for c in range(x.shape[1]):
            if line == pad_id or length == 0:
                break
            past = [float(states[line, c, k]) if flag else 0.0 for k in range(width - 1)]
            for t in range(start, start + length):
                past.append(float(x[t, c]))
                total = 0.0 if bias is None else float(bias[c])
                for back in range(width):  # `back` inputs ago meets the tap that far from the last
                    total += float(weight[c, width - 1 - back]) * past[-1 - back]
                y[t, c] = total / (1 + math.exp(-total)) if activation else total
            for k in range(width - 1):
                states[line, c, k] = past[len(past) - (width - 1) + k]
        start += length
    return y, states


def run(x, weight, bias, states, lens, lines, flags, **options):
    """(y, states after); the given states stay."""
    states = states.clone()
    places = (offsets(lens), torch.tensor(lines, dtype=torch.int32), torch.tensor(flags, dtype=torch.bool))
    return causal_conv1d(x, weight, bias, states, *places, **options), states


def same(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)


@st.composite
def questions(draw_from):
    """(x, weight, bias, states, lens, lines, flags): lines in any order, padded and empty sequences among them."""
    count, width = draw_from(st.integers(1, 4)), draw_from(st.integers(1, 5))
    lens = draw_from(st.lists(st.integers(0, 7), min_size=count, max_size=count))
    lines = draw_from(st.permutations(range(6)))[:count]
    lines = [-1 if draw_from(st.integers(0, 4)) == 0 else line for line in lines]
    flags = draw_from(st.lists(st.booleans(), min_size=count, max_size=count))
    bias = draw(CHANNELS, seed=3) if draw_from(st.booleans()) else None
    states = draw(6, CHANNELS, width - 1 + draw_from(st.integers(0, 2)), seed=1)
    return draw(sum(lens), CHANNELS, seed=2), draw(CHANNELS, width), bias, states, lens, lines, flags


@settings(max_examples=50)
@given(questions(), st.sampled_from((None, "silu", "swish")), st.sampled_from((-1, 0)))
def test_agrees_with_the_loops(question, activation, pad_id):
    options = {"activation": activation, "pad_id": pad_id}
    question = *question[:5], [pad_id if line == -1 else line for line in question[5]], question[6]
    same(run(*question, **options), by_loops(*question, **options))


def test_nothing_leaks():
    """NaN in another sequence, in rows of none, in padded rows, in other lines and in columns behind the state."""
    x, states = draw(9, CHANNELS), draw(4, CHANNELS, 5)
    clean = run(x[3:6], draw(CHANNELS, 4), None, states, [3], [2], [True])
    x[:3] = x[6:] = math.nan
    states[[0, 1, 3]] = math.nan
    states[..., 3:] = math.nan
    y, after = run(x, draw(CHANNELS, 4), None, states, [2, 1, 3, 2], [0, -1, 2, -1], [False] * 2 + [True] * 2)
    assert torch.equal(y[3:6], clean[0])
    assert torch.equal(after[2, :, :3], clean[1][2, :, :3])
    assert after[..., 3:].isnan().all()
    assert not y[6:].any()
    assert not y[2].any()


def test_dtypes_strides_and_roundings():
    """The state holds inputs in its own dtype in any precision of the sums; the result has the dtype of the sums."""
    x = torch.tensor([[1 + 2.0**-9], [1.0], [2.0**-9]])
    states = torch.zeros(1, 2, 1).transpose(1, 2)
    states = states.to(BF16)
    weight, places = torch.tensor([[0.0, 1.0, 1.0]]), (torch.tensor([0, 3]), torch.tensor([0]), torch.tensor([False]))
    y = causal_conv1d(x, weight, None, states, *places, activation=None)
    assert y.dtype == torch.float64
    assert y.flatten().tolist() == [1 + 2.0**-9, 2 + 2.0**-9, 1 + 2.0**-9]
    assert states.flatten().tolist() == [1.0, 2.0**-9]
    y = causal_conv1d(x, weight, None, states, *places, activation=None, precision=Precision.kernel(BF16))
    assert y.dtype == torch.float32
    assert y.flatten().tolist() == [1.0, 2.0, 1.0]
    single = torch.zeros(1, 1, 2)
    causal_conv1d(x, weight, None, single, *places, precision=Precision(compute=torch.float16))
    assert single.flatten().tolist() == [1.0, 2.0**-9]
    fine = x + 2.0**-20
    causal_conv1d(fine, weight, None, single, *places, precision=Precision(compute=torch.float16))
    assert torch.equal(single.flatten(), fine[1:, 0])


def test_an_index_without_rows_is_never_looked_at():
    y, _ = run(draw(2, 3), draw(3, 2), None, draw(2, 3, 1), [2, 0, 0], [1, 99, 1], [True] * 3)
    same((y,), run(draw(2, 3), draw(3, 2), None, draw(2, 3, 1), [2], [1], [True])[:1])
