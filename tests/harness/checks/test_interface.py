"""What checks share: one first step of a case, one object of a class in a run."""

from typing import Any

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.registry import LoadedBackend
from attncheck.harness.checks.interface import CheckedCase, SharedByChecks
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of

CPU = torch.device("cpu")


def checked(case: Any, impl: Any) -> CheckedCase:
    problem = build_problem(case, 0)
    backend = type("Candidate", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: impl)})
    loaded = LoadedBackend(name="candidate", ref="./x.py:Candidate", backend=backend, version="", origin="test")
    return CheckedCase(loaded, problem, truth_of(problem, CPU), CPU, (), SharedByChecks())


def test_the_first_step_is_made_once_and_when_it_is_needed(make_case: Any) -> None:
    calls = []

    class Counting(ReferenceImpl):
        def forward(self, *args: Any, **keywords: Any) -> Any:
            calls.append(1)
            return super().forward(*args, **keywords)

    case = checked(make_case(), Counting)
    assert (case.seen, calls) == (None, [])
    session, seen = case.first_step()
    assert case.first_step() == (session, seen)
    assert case.seen is seen
    assert calls == [1]


@pytest.mark.parametrize("stage", ["__init__", "forward"])
def test_what_the_backend_raises_ends_a_check_that_needs_the_step(make_case: Any, stage: str) -> None:
    def broken(*_args: Any, **_keywords: Any) -> None:
        raise RuntimeError("no such kernel")

    case = checked(make_case(), type("Broken", (ReferenceImpl,), {stage: broken}))
    raised = []
    for _ in range(2):
        with pytest.raises(StageError) as failure:
            case.first_step()
        raised.append(failure.value.raised)
    assert raised[0] is raised[1]  # the backend is not entered again
    assert raised[0].message == snapshot("no such kernel")
    assert case.seen is None


def test_a_run_has_one_object_of_a_class() -> None:
    given: list[int] = [1]
    shared = SharedByChecks(given)
    assert shared.get(list, lambda: [2]) is given
    made = shared.get(dict, dict)
    assert shared.get(dict, dict) is made
