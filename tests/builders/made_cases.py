"""Small cases."""

from attncheck.cases.model import Case
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, PaddingSpec, PathSpec, RequestSpec

MIXED = ((1, 37), (5, 40), (33, 33), (1, 130))
"""(query_len, seq_len) of a decode, an extend, a prefill and a decode: 40 rows, 240 keys."""


def make_case(
    *requests, name="case", layer=None, padding=(0, 0), cache=None, inputs=None, path="paged", options=None, **fields
):
    """Return a case of (query_len, seq_len) pairs or RequestSpecs. ``fields`` are those of its layer, if it has none."""
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"}
    specs = tuple(
        r if isinstance(r, RequestSpec) else RequestSpec(query_len=r[0], seq_len=r[1]) for r in requests or MIXED
    )
    return Case(
        suite="made",
        id=name,
        layer=layer or LayerSpec(**(sizes | fields)),
        cache=CacheSpec(**(cache or {})),
        batch=BatchSpec(
            requests=specs,
            padding=PaddingSpec(requests=padding[0], tokens=padding[1]),
            path=PathSpec(name=path, options=options),
        ),
        inputs=inputs,
    )
