"""Small cases for the harness's own tests."""

import made_cases
import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.backends.registry import LoadedBackend
from attncheck.harness.checks.case_checks import find_check
from attncheck.harness.checks.findings import FindingError
from attncheck.harness.checks.interface import CheckedCase, SharedByChecks
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of


@pytest.fixture
def make_case():
    """Return the function of that name of ``builders/made_cases.py``."""
    return made_cases.make_case


@pytest.fixture
def checked():
    """Return a function from a backend's class and a case to what each check gets."""

    def make(backend, case):
        problem, device = build_problem(case, 0), torch.device("cpu")
        loaded = LoadedBackend(name="candidate", ref="./x.py:X", backend=backend, version="", origin="test")
        truth = truth_of(problem, device, refuse_blindness=False)
        return CheckedCase(loaded, problem, truth, device, (), SharedByChecks())

    return make


@pytest.fixture
def judge(checked):
    """Return a function from the name of a check, a backend's class and a case to the finding."""

    def run(check, backend, case):
        try:
            return find_check(check).run(checked(backend, case))
        except FindingError as ended:
            return ended.finding

    return run


@pytest.fixture
def backend_of():
    """Return a function from an impl's class to the reference backend with that impl; keywords are further members."""
    return lambda impl, **members: type(
        "Tried", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: impl)} | members
    )
