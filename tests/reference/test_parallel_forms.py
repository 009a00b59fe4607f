"""The parallel forms of layers with a state: numbers worked out on paper, definitions and invariances."""

import math

import pytest
import torch
from parallel_forms import gated_delta_matrix, kda_matrix, linear_matrix, scan_matrix_mamba1, ssd_matrix

LOG_HALF = -math.log(2)
RULES = {
    "mamba1": scan_matrix_mamba1,
    "mamba2": ssd_matrix,
    "linear": linear_matrix,
    "gdn": gated_delta_matrix,
    "kda": kda_matrix,
}


def array(values):
    return torch.tensor(values, dtype=torch.float64)


def same(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def draw(rule, rows=7, seed=0):
    """The arguments of one rule by name: 4 heads of 2 groups, or 3 channels."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def unit(*shape):
        return torch.nn.functional.normalize(normal(*shape), dim=-1)

    def positive(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    if rule == "mamba1":
        return {
            "x": normal(rows, 3),
            "dt": positive(rows, 3),
            "A": -positive(3, 5),
            "B": normal(rows, 5),
            "C": normal(rows, 5),
            "state": normal(3, 5),
        }
    if rule == "mamba2":
        return {
            "x": normal(rows, 4, 3),
            "dt": positive(rows, 4),
            "A": -positive(4),
            "B": normal(rows, 2, 5),
            "C": normal(rows, 2, 5),
            "state": normal(4, 3, 5),
        }
    given = {
        "q": normal(rows, 4, 5),
        "k": unit(rows, 4, 5),
        "v": normal(rows, 4, 3),
        "state": normal(4, 3, 5),
    }
    if rule == "linear":
        return given | {"log_decay": -positive(4)}
    log_decay = -positive(rows, 4, 5) if rule == "kda" else -positive(rows, 4)
    return given | {"log_decay": log_decay, "beta": positive(rows, 4)}


def part(rule, given, rows):
    """The same arguments for some of the rows."""
    without_rows = {"A", "state", "log_decay"} if rule == "linear" else {"A", "state"}
    return {name: value if name in without_rows else value[rows] for name, value in given.items()}


def one_row(rule, before, row):
    """The state after one row, by the definition of the rule."""
    if rule == "mamba1":
        change = (row["dt"] * row["A"].T).T.exp()
        return change * before + torch.outer(row["dt"] * row["x"], row["B"])
    if rule == "mamba2":
        after = torch.empty_like(before)
        for head in range(4):
            entering = row["dt"][head] * torch.outer(row["x"][head], row["B"][head // 2])
            after[head] = math.exp(row["dt"][head] * row["A"][head]) * before[head] + entering
        return after
    after = torch.empty_like(before)
    for head in range(4):
        key, value, decay = row["k"][head], row["v"][head], row["log_decay"][head].exp()
        if rule == "linear":
            after[head] = decay * before[head] + torch.outer(value, key)
            continue
        diagonal = torch.diag(decay) if rule == "kda" else decay * torch.eye(5, dtype=torch.float64)
        beta = row["beta"][head]
        erase = torch.eye(5, dtype=torch.float64) - beta * torch.outer(key, key)
        after[head] = before[head] @ diagonal @ erase + beta * torch.outer(value, key)
    return after


def read(rule, state, row):
    """The output of one row from the state after it."""
    if rule == "mamba1":
        return state @ row["C"]
    queries = row["C"].repeat_interleave(2, 0) if rule == "mamba2" else row["q"]
    return (state @ queries[..., None])[..., 0]


def test_mamba1_on_paper():
    # Factors of channel 0: 1/2, 1/4, then 1/4, 1/16; of channel 1: 1/16, 1/4, then 1/4, 1/2.
    # Channel 0: h = (4 + 3, 4 + 6), then (7/4 + 30, 10/16 - 10).
    # Channel 1: h = (1 + 2, 1 + 4), then (3/4 - 6, 5/2 + 2).
    y, state = scan_matrix_mamba1(
        x=array([[3, 1], [5, -2]]),
        dt=array([[1, 2], [2, 1]]),
        A=LOG_HALF * array([[1, 2], [2, 1]]),
        B=array([[1, 2], [3, -1]]),
        C=array([[1, 1], [2, -1]]),
        state=array([[8, 16], [16, 4]]),
    )
    same(y, array([[17, 8], [72.875, -15]]))
    same(state, array([[31.75, -9.375], [-5.25, 4.5]]))


def test_mamba2_on_paper():
    # The factors are 1/2 and 1/4: h = (2 + 2, -1 + 4), then (1 + 6, 3/4 - 2).
    y, state = ssd_matrix(
        x=array([[[1, 2]], [[3, -1]]]),
        dt=array([[1], [2]]),
        A=array([LOG_HALF]),
        B=array([[[2]], [[1]]]),
        C=array([[[3]], [[-1]]]),
        state=array([[[4], [-2]]]),
    )
    same(y, array([[[12, 9]], [[-7, 1.25]]]))
    same(state, array([[[7], [-1.25]]]))


def test_heads_of_mamba2_that_follow_each_other_share_a_group():
    ones = torch.ones(1, 4, 1, dtype=torch.float64)
    B, C = array([[[1], [10]]]), array([[[2], [3]]])
    y, _ = ssd_matrix(ones, ones[..., 0], -ones[0, :, 0], B, C, torch.zeros_like(ones[0, ..., None]))
    assert y.flatten().tolist() == [2, 2, 30, 30]


def test_linear_on_paper():
    # Head 0 keeps half: S = (2 + 3, 4 + 6), then (5/2, 5 - 1).
    # Head 1 keeps a quarter: S = (1 + 3, 2 + 6), then (1, 2 - 1).
    o, state = linear_matrix(
        q=array([[[1, -1]] * 2, [[2, 1]] * 2]),
        k=array([[[1, 2]] * 2, [[0, 1]] * 2]),
        v=array([[[3]] * 2, [[-1]] * 2]),
        log_decay=LOG_HALF * array([1, 2]),
        state=array([[[4, 8]]] * 2),
    )
    same(o, array([[[-5], [-4]], [[9], [3]]]))
    same(state, array([[[2.5, 4]], [[1, 1]]]))


def test_gated_delta_on_paper():
    # Row 1: S decays to (1, 3) and returns 1 for k = (1, 0), so u = (4 - 1) / 2 and S = (5/2, 3).
    # Row 2: S decays to (5/4, 3/2) and returns 39/20 for k = (3/5, 4/5).
    # So u = 61/20 and S = (77/25, 197/50).
    o, state = gated_delta_matrix(
        q=array([[[2, 1]], [[1, 1]]]),
        k=array([[[1, 0]], [[0.6, 0.8]]]),
        v=array([[[4]], [[5]]]),
        log_decay=LOG_HALF * array([[1], [1]]),
        beta=array([[0.5], [1]]),
        state=array([[[2, 6]]]),
    )
    same(o, array([[[8]], [[7.02]]]))
    same(state, array([[[3.08, 3.94]]]))


def test_kda_on_paper():
    # Row 1: S decays to (1, 6) and returns 1 for k = (1, 0), so u = 3/2 and S = (5/2, 6).
    # Row 2: S decays to (5/2, 3/2) and returns 27/10 for k = (3/5, 4/5).
    # So u = 23/10 and S = (97/25, 167/50).
    o, state = kda_matrix(
        q=array([[[2, 1]], [[1, 1]]]),
        k=array([[[1, 0]], [[0.6, 0.8]]]),
        v=array([[[4]], [[5]]]),
        log_decay=LOG_HALF * array([[[1, 0]], [[0, 2]]]),
        beta=array([[0.5], [1]]),
        state=array([[[2, 6]]]),
    )
    same(o, array([[[11]], [[7.22]]]))
    same(state, array([[[3.88, 3.34]]]))


@pytest.mark.parametrize("rule", RULES)
def test_the_state_after_each_row_follows_from_the_one_before(rule):
    given = draw(rule)
    outputs, _ = RULES[rule](**given)
    states = [RULES[rule](**part(rule, given, slice(rows)))[1] for rows in range(8)]
    for row in range(7):
        of_row = part(rule, given, row)
        same(states[row + 1], one_row(rule, states[row], of_row))
        same(outputs[row], read(rule, states[row + 1], of_row))


@pytest.mark.parametrize("rule", RULES)
def test_no_rows_leave_the_state(rule):
    given = draw(rule, rows=0)
    outputs, state = RULES[rule](**given)
    assert outputs.shape[0] == 0
    assert torch.equal(state, given["state"])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cut", [1, 4])
def test_two_parts_give_the_whole(rule, cut):
    given = draw(rule)
    whole, state = RULES[rule](**given)
    first, between = RULES[rule](**part(rule, given, slice(cut)))
    second, last = RULES[rule](**part(rule, given, slice(cut, None)) | {"state": between})
    same(torch.cat([first, second]), whole)
    same(last, state)


@pytest.mark.parametrize("rule", RULES)
def test_outputs_are_proportional_to_the_values_and_the_state(rule):
    given = draw(rule)
    values = "x" if rule.startswith("mamba") else "v"
    larger = given | {name: 1000 * given[name] for name in (values, "state")}
    for one, thousandfold in zip(RULES[rule](**given), RULES[rule](**larger), strict=True):
        same(thousandfold / 1000, one)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("strength", [-1e6, -torch.inf])
def test_total_decay_leaves_each_row_alone(rule, strength):
    given = draw(rule)
    name = "A" if rule.startswith("mamba") else "log_decay"
    outputs, _ = RULES[rule](**given | {name: torch.full_like(given[name], strength)})
    gentle = given | {"state": torch.zeros_like(given["state"])}
    alone = [RULES[rule](**part(rule, gentle, slice(row, row + 1)))[0] for row in range(7)]
    same(outputs, torch.cat(alone))


def test_weak_decay_after_a_strong_one_keeps_its_digits():
    ones = torch.ones(3, 1, 1, dtype=torch.float64)
    only_first = array([1, 0, 0]).view(3, 1)
    log_decay = array([-1e12, -1e-3, -1e-3]).view(3, 1)
    o, _ = gated_delta_matrix(ones, ones, only_first[..., None], log_decay, only_first, ones[0, :, None])
    same(o.flatten(), array([1, math.exp(-1e-3), math.exp(-2e-3)]))


@pytest.mark.parametrize("rule", ["gdn", "kda"])
def test_orthogonal_keys_return_their_values(rule):
    given = draw(rule, rows=5)
    keys = torch.eye(5, dtype=torch.float64)[:, None].expand(5, 4, 5)
    kept = {"log_decay": torch.zeros_like(given["log_decay"]), "beta": torch.ones(5, 4, dtype=torch.float64)}
    _, state = RULES[rule](**given | kept | {"k": keys})
    same(state, given["v"].permute(1, 2, 0))


@pytest.mark.parametrize("rule", ["gdn", "kda"])
def test_a_key_that_comes_again_replaces_its_value(rule):
    given = draw(rule)
    given["k"] = given["k"][:1].expand(7, 4, 5)
    given["beta"] = torch.ones(7, 4, dtype=torch.float64)
    _, state = RULES[rule](**given)
    same(torch.einsum("hvk,hk->hv", state, given["k"][-1]), given["v"][-1])


def test_mamba1_with_one_decay_for_all_is_a_head_of_mamba2():
    given = draw("mamba1") | {"A": torch.full((3, 5), -0.7, dtype=torch.float64)}
    given["dt"] = given["dt"][:, :1].expand(7, 3)
    y, state = scan_matrix_mamba1(**given)
    one_head = {name: given[name][:, None] for name in ("x", "B", "C")}
    dt, before = given["dt"][:, :1], given["state"][None]
    y_of_head, state_of_head = ssd_matrix(**one_head, dt=dt, A=array([-0.7]), state=before)
    same(y_of_head[:, 0], y)
    same(state_of_head[0], state)
