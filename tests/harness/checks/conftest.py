"""Cases of the paths that examine functions."""

from dataclasses import replace
from typing import Any

import pytest

from attncheck.cases.model import Case
from attncheck.reference.spec import CausalConv1dOptions, PathSpec

Requests = tuple[tuple[int, int], ...]


@pytest.fixture
def merge_case(make_case: Any) -> Any:
    """A case of the path ``merge`` from (query_len, seq_len) pairs."""

    def make(*requests: tuple[int, int], **given: Any) -> Case:
        case: Case = make_case(*requests, **given)
        return replace(case, batch=replace(case.batch, path=PathSpec(name="merge")))

    return make


@pytest.fixture
def conv_case(make_case: Any) -> Any:
    """A case of the path ``causal_conv1d`` from (query_len, seq_len) pairs; ``options`` are the path's."""

    def make(*requests: tuple[int, int], options: dict[str, Any] | None = None, **given: Any) -> Case:
        case: Case = make_case(*requests, **given)
        path = PathSpec(name="causal_conv1d", options=CausalConv1dOptions(**(options or {})))
        return replace(case, batch=replace(case.batch, path=path))

    return make
