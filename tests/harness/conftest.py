"""Small cases for the harness's own tests."""

from collections.abc import Callable
from typing import Any

import pytest

from attncheck.cases.model import Case
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec, PaddingSpec, PathSpec, RequestSpec

MIXED = ((1, 37), (5, 40), (33, 33), (1, 130))
"""(query_len, seq_len) of a decode, an extend, a prefill and a decode: 40 rows, 240 keys."""

CaseMaker = Callable[..., Case]


@pytest.fixture
def make_case() -> CaseMaker:
    """Return a function from (query_len, seq_len) pairs or RequestSpecs to a case; keywords are fields of the layer."""

    def make(
        *requests: tuple[int, int] | RequestSpec,
        name: str = "case",
        padding: tuple[int, int] = (0, 0),
        cache: dict[str, Any] | None = None,
        inputs: tuple[Any, ...] | None = None,
        path: str = "paged",
        options: Any = None,
        **layer: Any,
    ) -> Case:
        fields: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"} | layer
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
