import math

import pytest
import torch
from inline_snapshot import snapshot
from torch import Tensor

pytest.importorskip("triton")

from attncheck.backends.candidates.triton_unified.merging import merge_attn_states
from attncheck.reference import merge_attn_states as right

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, HEADS, SIZE = 9, 3, 40
INF = math.inf


def state(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(TOKENS, HEADS, SIZE, generator=generator)
    return out.to(DEVICE, dtype), (torch.randn(TOKENS, HEADS, generator=generator) * 3).to(DEVICE)


def one(lse_a: float, lse_b: float, out_a: float = 3.0, out_b: float = -1.0) -> tuple[float, float]:
    """Of states of a single number."""
    outs = [torch.tensor([[[out]]], device=DEVICE) for out in (out_a, out_b)]
    lses = [torch.tensor([[lse]], device=DEVICE) for lse in (lse_a, lse_b)]
    out, lse = merge_attn_states(outs[0], lses[0], outs[1], lses[1])
    return out.item(), lse.item()


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str
)
def test_merged_equals_the_reference(dtype: torch.dtype, allowed: float) -> None:
    (out_a, lse_a), (out_b, lse_b) = state(1, dtype), state(2, dtype)
    out, lse = merge_attn_states(out_a, lse_a, out_b, lse_b)
    expected, expected_lse = right(out_a, lse_a, out_b, lse_b)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=allowed)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-6)


def test_any_strides_are_read() -> None:
    (out_a, lse_a), (out_b, lse_b) = state(1), state(2)
    a = out_a.new_empty(HEADS, TOKENS, 2 * SIZE)[..., ::2].transpose(0, 1).copy_(out_a)
    b = out_a.new_empty(TOKENS, HEADS + 2, SIZE + 5)[:, 1:-1, 3:-2].copy_(out_b)
    log_a = lse_a.new_empty(HEADS, TOKENS).T.copy_(lse_a)
    log_b = lse_a.new_empty(2 * TOKENS, 3 * HEADS)[::2, ::3].copy_(lse_b)
    plain = merge_attn_states(out_a, lse_a, out_b, lse_b)
    strided = merge_attn_states(a, log_a, b, log_b)
    # Strides choose between kernels, which a compiler may let round differently.
    torch.testing.assert_close(strided, plain, rtol=0, atol=5e-7)


def test_equal_states_are_averaged() -> None:
    assert one(2.0, 2.0) == pytest.approx((1.0, 2.0 + math.log(2)), abs=1e-6)


@pytest.mark.parametrize("base", [-5000.0, -100.0, 0.0, 100.0, 5000.0])
def test_logarithms_of_any_size_are_merged_by_their_difference(base: float) -> None:
    weight = 1 / (1 + math.exp(-1.5))
    assert one(base + 1.5, base) == pytest.approx((4 * weight - 1, base - math.log(weight) + 1.5), abs=1e-3)


@pytest.mark.parametrize(("lse_a", "lse_b", "out"), [(200.0, -200.0, 3.0), (-200.0, 200.0, -1.0)])
def test_a_state_far_below_counts_for_nothing(lse_a: float, lse_b: float, out: float) -> None:
    assert one(lse_a, lse_b) == (out, 200.0)


@pytest.mark.parametrize("empty", [-INF, INF])
@pytest.mark.parametrize("rubbish", [math.nan, INF, 3e38])
def test_what_an_empty_state_holds_counts_for_nothing(empty: float, rubbish: float) -> None:
    assert one(empty, 0.5, out_a=rubbish) == (-1.0, 0.5)
    assert one(0.5, empty, out_b=rubbish) == (3.0, 0.5)
    assert one(empty, empty, rubbish, rubbish) == (0.0, -INF)
    assert one(empty, -empty, rubbish, rubbish) == (0.0, -INF)


def test_a_logarithm_that_is_nan_is_no_mark() -> None:
    for lses in ((math.nan, 0.0), (0.0, math.nan), (math.nan, -INF)):
        assert all(math.isnan(x) for x in one(*lses))


def test_more_rows_than_one_program_takes() -> None:
    out = torch.arange(700.0, device=DEVICE).view(700, 1, 1)
    lse = torch.zeros(700, 1, device=DEVICE)
    merged, log = merge_attn_states(out, lse, torch.full_like(out, torch.nan), torch.full_like(lse, -INF))
    assert torch.equal(merged, out)
    assert torch.equal(log, lse)


def test_no_rows_are_no_rows() -> None:
    out, lse = merge_attn_states(*(x[:0] for x in (*state(1), *state(2))))
    assert (out.shape, lse.shape) == ((0, HEADS, SIZE), (0, HEADS))


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (
            0,
            torch.zeros(2, 3),
            snapshot(
                "merge_attn_states: out_a has shape (2, 3), not [T, H, Dv]; lse_a has shape (9, 3), not (2, 3); out_b has shape (9, 3, 40), not (2, 3); lse_b has shape (9, 3), not (2, 3)"
            ),
        ),
        (1, torch.zeros(TOKENS, 1), snapshot("merge_attn_states: lse_a has shape (9, 1), not (9, 3)")),
        (2, torch.zeros(TOKENS, HEADS, 1), snapshot("merge_attn_states: out_b has shape (9, 3, 1), not (9, 3, 40)")),
        (3, torch.zeros(TOKENS, HEADS, dtype=torch.int32), snapshot("merge_attn_states: lse_b has dtype torch.int32")),
    ],
)
def test_what_does_not_fit_is_refused(place: int, wrong: Tensor, message: str) -> None:
    given = [*state(1), *state(2)]
    given[place] = wrong
    with pytest.raises(ValueError) as refused:
        merge_attn_states(*given)
    assert str(refused.value) == message


def test_fake_tensors_have_the_shapes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        out, lse = torch.zeros(4, 2, 8, dtype=torch.float16), torch.zeros(4, 2)
        merged, log = merge_attn_states(out, lse, out, lse)
    assert (merged.shape, merged.dtype, log.shape, log.dtype) == ((4, 2, 8), torch.float16, (4, 2), torch.float32)
