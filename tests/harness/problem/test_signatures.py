"""Signatures: what is signed can be read back, and looks like noise."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from attncheck.harness.problem.queries import CHANNELS, Coordinate, decode, sign


@given(
    kind=st.sampled_from(["key", "value"]),
    request=st.integers(0, 1023),
    position=st.integers(0, 131071),
    heads=st.integers(1, 32),
)
def test_a_signature_reads_back(kind: str, request: int, position: int, heads: int) -> None:
    rows = 0.3 * torch.ones(1, heads, 64, dtype=torch.float64)
    sign(rows, kind, torch.tensor([request]), torch.tensor([position]))
    for head in range(heads):
        assert Coordinate(kind, request, position, head) in decode(rows[0, head])


def test_no_channel_is_constant_and_no_row_repeats() -> None:
    rows = 0.3 * torch.ones(512, 2, CHANNELS, dtype=torch.float64)
    sign(rows, "value", torch.arange(512) // 128, torch.arange(512) % 128)
    assert rows.flatten(0, 1).unique(dim=0).shape[0] == 1024
    assert float(rows.sign().mean(dim=(0, 1)).abs().max()) < 0.25


def test_magnitudes_stay_and_short_rows_carry_nothing() -> None:
    rows = torch.linspace(-2, 2, CHANNELS, dtype=torch.float64).reshape(1, 1, -1)
    before = rows.clone()
    sign(rows, "key", torch.tensor([1]), torch.tensor([2]))
    assert torch.equal(rows.abs(), before.abs())
    assert decode(torch.ones(CHANNELS - 1)) == ()
