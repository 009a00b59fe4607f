"""The loop over tokens against the parallel forms of the papers, for every rule."""

import math

import pytest
import torch
from parallel_forms import gated_delta_matrix, kda_matrix, linear_matrix, scan_matrix_mamba1, ssd_matrix

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.attention.recurrence import (
    RecurrentRows,
    delta_inputs,
    linear_inputs,
    mamba1_inputs,
    mamba2_inputs,
    recurrence,
    recurrent_rows,
    step_sizes,
)

ROWS, HEADS, GROUPS, KEYS, VALUES = 23, 4, 2, 6, 3


@pytest.fixture
def draw():
    """Return a function to float64 normal numbers."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return normal


def agrees(rows, state, right):
    last = len(rows.query) - 1
    out, states = recurrence(rows, state, keep=[last])
    torch.testing.assert_close(out, right[0].view_as(out), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(states[last], right[1].view(rows.state_shape), rtol=1e-10, atol=1e-10)


def test_mamba(draw):
    x, dt, a = draw(ROWS, 5), draw(ROWS, 5).exp(), -draw(5, KEYS).exp()
    b, c, state = draw(ROWS, KEYS), draw(ROWS, KEYS), draw(5, KEYS)
    agrees(mamba1_inputs(x, dt, a, b, c), state[:, None], scan_matrix_mamba1(x, dt, a, b, c, state))


def test_mamba2_and_its_groups(draw):
    x, dt, a = draw(ROWS, HEADS, VALUES), draw(ROWS, HEADS).exp(), -draw(HEADS).exp()
    b, c, state = draw(ROWS, GROUPS, KEYS), draw(ROWS, GROUPS, KEYS), draw(HEADS, VALUES, KEYS)
    agrees(mamba2_inputs(x, dt, a, b, c), state, ssd_matrix(x, dt, a, b, c, state))


def test_linear_attention(draw):
    q, k, v = draw(ROWS, HEADS, KEYS), draw(ROWS, HEADS, KEYS), draw(ROWS, HEADS, VALUES)
    slopes, state = draw(HEADS).abs(), draw(HEADS, VALUES, KEYS)
    agrees(linear_inputs(q, k, v, slopes, scale=0.5), state, linear_matrix(q / 2, k, v, -slopes, state))
    default = linear_inputs(q, k, v, slopes)
    agrees(default, state, linear_matrix(q / math.sqrt(KEYS), k, v, -slopes, state))


@pytest.mark.parametrize("channels", [(), (KEYS,)], ids=["gdn", "kda"])
def test_delta_rules(draw, channels):
    q, k = draw(ROWS, GROUPS, KEYS), draw(ROWS, GROUPS, KEYS)
    v, g, beta = draw(ROWS, HEADS, VALUES), -draw(ROWS, HEADS, *channels).exp(), draw(ROWS, HEADS).sigmoid()
    state = draw(HEADS, VALUES, KEYS)
    matrix = kda_matrix if channels else gated_delta_matrix
    unit_q, unit_k = (torch.nn.functional.normalize(x, dim=-1).repeat_interleave(2, dim=1) for x in (q, k))
    right = matrix(unit_q / math.sqrt(KEYS), unit_k, v, g, beta, state)
    agrees(delta_inputs(q, k, v, g, beta, eps=0.0), state, right)
    given = delta_inputs(unit_q[:, ::2], unit_k[:, ::2], v, g, beta, qk_l2norm=False)
    agrees(given, state, right)


@pytest.mark.parametrize("rule", ["mamba1", "mamba2", "gdn", "kda", "linear"])
def test_the_rows_of_a_rule_by_name_are_those_of_its_function(draw, rule):
    q, k, v = draw(ROWS, HEADS, KEYS), draw(ROWS, HEADS, KEYS), draw(ROWS, HEADS, VALUES)
    g, beta, dt = -draw(ROWS, HEADS).exp(), draw(ROWS, HEADS).sigmoid(), draw(ROWS, HEADS)
    channels, a, bias = -draw(ROWS, HEADS, KEYS).exp(), -draw(HEADS).exp(), draw(HEADS)
    b, c, matrix = draw(ROWS, KEYS), draw(ROWS, KEYS), -draw(HEADS, KEYS).exp()
    sizes = torch.log1p((dt + bias).exp())
    given = {
        "mamba1": ({"x": dt, "dt": dt, "B": b, "C": c}, {"A": matrix, "dt_bias": bias}),
        "mamba2": ({"x": v, "dt": dt, "B": k, "C": q}, {"A": a, "dt_bias": bias}),
        "gdn": ({"query": q, "key": k, "value": v, "g": g, "beta": beta}, {}),
        "kda": ({"query": q, "key": k, "value": v, "g": channels, "beta": beta}, {}),
        "linear": ({"query": q, "key": k, "value": v}, {"slopes": -a}),
    }[rule]
    right = {
        "mamba1": lambda: mamba1_inputs(dt, sizes, matrix, b, c),
        "mamba2": lambda: mamba2_inputs(v, sizes, a, k, q),
        "gdn": lambda: delta_inputs(q, k, v, g, beta, scale=0.25, qk_l2norm=False),
        "kda": lambda: delta_inputs(q, k, v, channels, beta, scale=0.25, qk_l2norm=False),
        "linear": lambda: linear_inputs(q, k, v, -a, scale=0.25),
    }[rule]()
    rows = recurrent_rows(rule, *given, scale=0.25, qk_l2norm=False)
    for name in ("query", "key", "value", "log_decay", "beta"):
        torch.testing.assert_close(getattr(rows, name), getattr(right, name))


def test_a_sequence_in_two_pieces_is_the_whole(draw):
    q, k, v, g = (draw(ROWS, HEADS, size) for size in (KEYS, KEYS, VALUES, 1))
    rows = RecurrentRows(q, k, v, -g.exp(), draw(ROWS, HEADS).sigmoid() / KEYS)
    state = draw(HEADS, VALUES, KEYS)
    out, states = recurrence(rows, state, keep=[-1, 8, ROWS - 1])
    assert torch.equal(states[-1], state)
    rest = RecurrentRows(q[9:], k[9:], v[9:], rows.log_decay[9:], rows.beta[9:])
    later, ends = recurrence(rest, states[8], keep=[ROWS - 10])
    assert torch.equal(later, out[9:])
    assert torch.equal(ends[ROWS - 10], states[ROWS - 1])


def test_step_sizes_have_limits():
    dt = torch.tensor([[-3.0, 0.0, 5.0]])
    assert step_sizes(dt, None, dt_softplus=False, dt_limit=(0.0, 2.0)).tolist() == [[0.0, 0.0, 2.0]]
    assert step_sizes(dt, torch.ones(3), dt_softplus=False).tolist() == [[0.0, 1.0, 6.0]]
    assert step_sizes(dt, None, dt_softplus=True)[0, 1] == pytest.approx(math.log(2))


def test_rows_that_do_not_fit_are_refused(draw):
    q, v = draw(ROWS, HEADS, KEYS), draw(ROWS, HEADS, VALUES)
    none = torch.zeros(ROWS, HEADS, 1, dtype=torch.float64)
    with pytest.raises(ReferenceArgumentError, match=r"key\.shape"):
        RecurrentRows(q, q[:, :2], v, none)
    with pytest.raises(ReferenceArgumentError, match="a state does not grow"):
        RecurrentRows(q, q, v, none + 0.5)
    with pytest.raises(ReferenceArgumentError, match=r"beta\.shape"):
        RecurrentRows(q, q, v, none, none)
    with pytest.raises(ReferenceArgumentError, match=r"state\.shape"):
        recurrence(RecurrentRows(q, q, v, none), draw(HEADS, KEYS, VALUES))
