"""Small cases for the harness's own tests."""

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.model import Case
from attncheck.harness.checks.case_checks import find_check
from attncheck.harness.checks.findings import FindingError
from attncheck.harness.checks.interface import CheckedCase, SharedByChecks
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec, PaddingSpec, PathSpec, RequestSpec

MIXED = ((1, 37), (5, 40), (33, 33), (1, 130))
"""(query_len, seq_len) of a decode, an extend, a prefill and a decode: 40 rows, 240 keys."""


@pytest.fixture
def make_case():
    """Return a function from (query_len, seq_len) pairs or RequestSpecs to a case; keywords are fields of the layer."""

    def make(*requests, name="case", padding=(0, 0), cache=None, inputs=None, path="paged", options=None, **layer):
        fields = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"} | layer
        specs = tuple(
            r if isinstance(r, RequestSpec) else RequestSpec(query_len=r[0], seq_len=r[1]) for r in requests or MIXED
        )
        return Case(
            suite="made",
            id=name,
            layer=LayerSpec(**fields),
            cache=CacheSpec(**(cache or {})),
            batch=BatchSpec(
                requests=specs,
                padding=PaddingSpec(requests=padding[0], tokens=padding[1]),
                path=PathSpec(name=path, options=options),
            ),
            inputs=inputs,
        )

    return make


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
