"""Backends that differ from the reference in a few members, and their records."""

import pytest

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.registry import LoadedBackend
from attncheck.harness.run.evaluate import Examiner, RunPlan


@pytest.fixture
def variant():
    """``variant(name=member)``: the reference backend with these members in place of its own."""

    def variant(**members):
        return type("Variant", (ReferenceBackend,), members)

    return variant


@pytest.fixture
def with_impl(variant):
    """``with_impl(name=member)``: the reference backend whose impl has these members in place of its own."""

    def with_impl(**members):
        impl = type("Impl", (ReferenceImpl,), members)
        return variant(get_impl_cls=staticmethod(lambda: impl))

    return with_impl


@pytest.fixture
def loaded():
    """``loaded(backend, name)``: the backend as a run has it."""

    def loaded(backend, name="candidate"):
        return LoadedBackend(name=name, ref=f"./x.py:{name}", backend=backend, version="", origin="test")

    return loaded


@pytest.fixture
def examine(loaded):
    """``examine(backend, *cases, **plan)``: the records by check; no case is blind."""

    def examine(backend, *cases, **plan):
        examiner = Examiner(RunPlan(cases=cases, backends=(loaded(backend),), **plan))
        records = list(examiner.run())
        assert examiner.blind == []
        return {record.check: record for record in records}

    return examine
