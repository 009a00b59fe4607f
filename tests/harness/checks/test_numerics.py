"""What a finding of ``numerics`` carries beside the verdict."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.registry import load
from attncheck.harness.checks.findings import Broken
from attncheck.harness.checks.interface import CheckedCase, SharedByChecks
from attncheck.harness.checks.numerics import CHECKS, check_numerics
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of


@pytest.mark.parametrize(
    ("ref", "kernels"), [("torch_sdpa", ("flash",)), ("torch_sdpa:math", ("math",)), ("reference", ())]
)
def test_the_finding_names_the_kernels_that_a_library_chose(ref: str, kernels: tuple[str, ...], make_case: Any) -> None:
    problem = build_problem(make_case((1, 9), (3, 20)), 0)
    truth = truth_of(problem, torch.device("cpu"))
    found = CHECKS["numerics"].run(CheckedCase(load(ref), problem, truth, torch.device("cpu"), (), SharedByChecks()))
    assert found.chosen_kernels == kernels  # type: ignore[union-attr]


def judged(case: Any, change: Any) -> Broken:
    """The finding about the reference, after ``change`` has written to the rows of its output."""

    class Impl(ReferenceImpl):
        def attend(self, *args: Any) -> None:
            super().attend(*args)
            change(args[6])

    problem = build_problem(case, 0)
    backend = type("Wrong", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl)})
    seen = Session(backend, problem, torch.device("cpu")).run()
    found = check_numerics(problem, truth_of(problem, torch.device("cpu")), seen)
    assert isinstance(found, Broken)
    return found


@pytest.mark.parametrize("spoils", [False, True])
def test_finite_numbers_are_judged_apart_from_those_that_are_not(make_case: Any, spoils: bool) -> None:
    def change(output: torch.Tensor) -> None:
        output[0, 1] = torch.nan
        output[4, :2] = torch.inf
        if spoils:
            output[2:4, 3] *= 1.5

    found = judged(make_case((1, 9), (6, 20)), change)
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


def test_rows_that_were_never_written_do_not_hide_wrong_ones(plain: Callable[[str], str], make_case: Any) -> None:
    class Impl(ReferenceImpl):
        def attend(self, *args: Any) -> None:
            before = args[6][1].clone()
            super().attend(*args)
            args[6][1] = before
            args[6][3] *= 2

    problem = build_problem(make_case((1, 9), (6, 20)), 0)
    backend = type("Wrong", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl)})
    seen = Session(backend, problem, torch.device("cpu")).run()
    found = check_numerics(problem, truth_of(problem, torch.device("cpu")), seen)
    assert isinstance(found, Broken)
    assert plain(found.summary) == snapshot(
        "1 of 7 rows were never written, or only added to, the first is row 1 (request 1, position 14); among the others: 1 of 7 rows is wrong, the first is row 3 (request 1, position 16), in all heads; the largest error is ..."
    )
    assert "1 of 7" in found.summary
    assert "14" in found.summary
    assert (found.figures["rows_unwritten"], found.figures["rows_finite_wrong"]) == (1, 1)


@pytest.mark.parametrize(
    ("heads", "channels", "where"),
    [
        (slice(None), slice(48, None), "in channels 48 to 63"),
        (slice(5, 6), slice(None), "in head 5"),
        (slice(0, 4), slice(0, 1), "in channel 0 of heads 0 to 3"),
    ],
)
def test_rows_that_were_written_in_part_are_not_called_unwritten(
    make_case: Any, heads: slice, channels: slice, where: str
) -> None:
    def attend(self: Any, *args: Any) -> None:
        before = args[6].clone()
        ReferenceImpl.attend(self, *args)
        args[6][:, heads, channels] = before[:, heads, channels]

    problem = build_problem(make_case((1, 9), (6, 20)), 0)
    impl = type("Impl", (ReferenceImpl,), {"attend": attend})
    backend = type("Wrong", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: impl)})
    seen = Session(backend, problem, torch.device("cpu")).run()
    found = check_numerics(problem, truth_of(problem, torch.device("cpu")), seen)
    assert isinstance(found, Broken)
    assert found.summary.startswith(f"7 of 7 rows were never written {where}, or only added to, the first is row 0")
