"""Layers over another layer's cache are handed keys all the same; and inputs are looked at where no cache is."""

from typing import Any

import pytest
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.registry import LoadedBackend, load
from attncheck.cases.loader import load_suite
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.reference.spec import RequestSpec

SHARED = next(case for case in load_suite("smoke").cases if case.id == "shared-cache")


def with_impl(**members: Any) -> type[ReferenceBackend]:
    made = type("Impl", (ReferenceImpl,), members)
    return type("Mine", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: made)})


def examine(backend: Any, case: Any) -> Any:
    loaded = LoadedBackend(name="mine", ref="./x.py:Mine", backend=backend, version="", origin="test")
    (record,) = Examiner(RunPlan(cases=(case,), backends=(loaded,), checks=("cache_write",))).run()
    return record


@pytest.mark.parametrize("name", ["reference", "torch_sdpa", "flex_attention"])
def test_right_backends_leave_keys_alone(name: str) -> None:
    assert examine(load(name).backend, SHARED).outcome == "passed"


@pytest.mark.parametrize(("error", "outcome"), [(ValueError("no keys here"), "passed"), (KeyError("no"), "errored")])
def test_keys_may_be_refused_but_nothing_may_break(error: Exception, outcome: str) -> None:
    def forward(self: Any, layer: Any, query: Any, key: Any, *rest: Any, **more: Any) -> Any:
        if key is not None and rest[2] is not None:
            raise error
        return ReferenceImpl.forward(self, layer, query, key, *rest, **more)

    record = examine(with_impl(forward=forward), SHARED)
    assert record.outcome == outcome
    assert getattr(record, "stage", "") == ("forward with keys for a shared cache" if outcome == "errored" else "")


def test_changed_inputs_are_found_where_there_is_no_cache(make_case: Any) -> None:
    def attend(self: Any, layer: Any, query: Any, *rest: Any) -> None:
        ReferenceImpl.attend(self, layer, query, *rest)
        query.mul_(2)

    case = make_case(RequestSpec(query_len=7), attn_type="encoder_only", path="encoder_only")
    record = examine(with_impl(attend=attend), case)
    assert (record.outcome, record.summary) == ("failed", snapshot("inputs were changed: query"))
    assert examine(ReferenceBackend, case).outcome == "unsupported"
