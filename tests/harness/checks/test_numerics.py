"""What a finding of ``numerics`` carries beside the verdict."""

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.harness.checks.findings import Broken


@pytest.fixture
def judged(judge, backend_of, make_case):
    """Return a function from ``change(output, output before)`` to the finding about the reference with this change."""

    def run(change):
        class Impl(ReferenceImpl):
            def attend(self, *args):
                before = args[6].clone()
                super().attend(*args)
                change(args[6], before)

        found = judge("numerics", backend_of(Impl), make_case((1, 9), (6, 20)))
        assert isinstance(found, Broken)
        return found

    return run


@pytest.mark.parametrize("spoils", [False, True])
def test_finite_numbers_are_judged_apart_from_those_that_are_not(judged, spoils):
    def change(output, _before):
        output[0, 1] = torch.nan
        output[4, :2] = torch.inf
        if spoils:
            output[2:4, 3] *= 1.5

    found = judged(change)
    assert found.summary.startswith("4 of 7 rows" if spoils else "2 of 7 rows")
    assert {name: n for name, n in found.figures.items() if name.startswith(("rows_", "heads_"))} == {
        "rows_wrong": 4 if spoils else 2,
        "heads_wrong": 3 if spoils else 2,
        "rows_nan": 1,
        "rows_inf": 1,
        **({"rows_finite_wrong": 2} if spoils else {}),
    }
    assert (found.figures["finite_budget_share"] > 1) is spoils
    apart = "; among the finite values: 2 of 7 rows are wrong, the first is row 2 (request 1, position 15), in head 3; "
    assert (apart in found.summary) is spoils
    assert found.summary.endswith("all finite values are right") is not spoils
    assert ("the right one times 1.5" in str(found.meaning)) is spoils


def test_rows_that_were_never_written_do_not_hide_wrong_ones(plain, judged):
    def change(output, before):
        output[1] = before[1]
        output[3] *= 2

    found = judged(change)
    assert plain(found.summary) == snapshot(
        "1 of 7 rows were never written, or only added to, the first is row 1 (request 1, position 14); among the others: 1 of 7 rows is wrong, the first is row 3 (request 1, position 16), in all heads; the largest error is ..."
    )
    assert (found.figures["rows_unwritten"], found.figures["rows_finite_wrong"]) == (1, 1)


@pytest.mark.parametrize(
    ("heads", "channels", "where"),
    [
        (slice(None), slice(48, None), "in channels 48 to 63"),
        (slice(5, 6), slice(None), "in head 5"),
        (slice(0, 4), slice(0, 1), "in channel 0 of heads 0 to 3"),
    ],
)
def test_rows_that_were_written_in_part_are_not_called_unwritten(judged, heads, channels, where):
    def change(output, before):
        output[:, heads, channels] = before[:, heads, channels]

    start = f"7 of 7 rows were never written {where}, or only added to, the first is row 0"
    assert judged(change).summary.startswith(start)
