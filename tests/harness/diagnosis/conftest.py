"""Wrong outputs and LSEs, and what the diagnosis makes of them."""

from typing import NamedTuple

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.harness.checks import numerics
from attncheck.harness.diagnosis.explain import explain
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import Problem, build_problem
from attncheck.harness.truth.truth import Truth, truth_of
from attncheck.harness.truth.unpaged import share_of_budget

CPU = torch.device("cpu")


class Asked(NamedTuple):
    """A problem and its truth."""

    problem: Problem
    truth: Truth

    def explained(self, output):
        """The explanation of an output that is wrong; "" for none."""
        shares = share_of_budget(output - self.truth.out, self.truth.budget)
        assert bool((shares > 1).any())
        return explain(self.problem, self.truth, output, shares) or ""


@pytest.fixture
def ask(make_case):
    """Return a function from the arguments of ``make_case`` to a problem and its truth."""

    def asked(*requests, **fields):
        problem = build_problem(make_case(*requests, **fields), 0)
        return Asked(problem, truth_of(problem, CPU))

    return asked


@pytest.fixture
def finding_of():
    """Return a function from a case, and members of an impl that replace those of ``base``, to a check's finding."""

    def found(case, check="numerics", features=None, base=ReferenceImpl, **members):
        impl = type("Impl", (base,), members)
        own = {"get_impl_cls": staticmethod(lambda: impl)} | ({} if features is None else {"features": features})
        backend = type("Wrong", (ReferenceBackend,), own)
        impl.backend = backend
        problem = build_problem(case, 0)
        truth, seen = truth_of(problem, CPU), Session(backend, problem, CPU).run()
        if check == "lse":
            return numerics.check_lse(problem, truth, seen, backend.conventions)
        return numerics.check_numerics(problem, truth, seen)

    return found
