"""Backends that differ from the reference in a few members, and their records."""

from collections.abc import Callable
from typing import Any

import pytest

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.registry import LoadedBackend
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.reports.run_file.records import Record


@pytest.fixture
def variant() -> Callable[..., Any]:
    """``variant(name=member)``: the reference backend with these members in place of its own."""

    def variant(**members: Any) -> Any:
        return type("Variant", (ReferenceBackend,), members)

    return variant


@pytest.fixture
def with_impl(variant: Callable[..., Any]) -> Callable[..., Any]:
    """``with_impl(name=member)``: the reference backend whose impl has these members in place of its own."""

    def with_impl(**members: Any) -> Any:
        impl = type("Impl", (ReferenceImpl,), members)
        return variant(get_impl_cls=staticmethod(lambda: impl))

    return with_impl


@pytest.fixture
def loaded() -> Callable[..., LoadedBackend]:
    """``loaded(backend, name)``: the backend as a run has it."""

    def loaded(backend: Any, name: str = "candidate") -> LoadedBackend:
        return LoadedBackend(name=name, ref=f"./x.py:{name}", backend=backend, version="", origin="test")

    return loaded


@pytest.fixture
def examine(loaded: Callable[..., LoadedBackend]) -> Callable[..., dict[str, Record]]:
    """``examine(backend, *cases, **plan)``: the records by check; no case is blind."""

    def examine(backend: Any, *cases: Any, **plan: Any) -> dict[str, Record]:
        examiner = Examiner(RunPlan(cases=cases, backends=(loaded(backend),), **plan))
        records = list(examiner.run())
        assert examiner.blind == []
        return {record.check: record for record in records}

    return examine
