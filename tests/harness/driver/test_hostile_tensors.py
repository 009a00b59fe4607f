"""Tensors that a backend hands back or changes in place: its records alone show it, with a true sentence."""

import warnings
from typing import Any

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.registry import LoadedBackend
from attncheck.harness.run.evaluate import Examiner
from attncheck.harness.run.outcomes import OURSELVES
from attncheck.harness.run.selection import RunPlan

CHECKS = ("numerics", "lse", "cache_write", "determinism")


class Hostile(torch.Tensor):
    """A tensor that no function of torch takes."""

    @classmethod
    def __torch_function__(cls, *_, **__):
        raise RuntimeError("hands off")


class Harmless(torch.Tensor):
    """A tensor in every operation."""


class HostileDict(dict[str, Any]):
    def __contains__(self, _):
        raise RuntimeError("hands off")


def backend_of(deed=None, **members):
    """Return the reference with ``deed(returned, query, cache, lse)``, which replaces what ``forward`` returns."""

    class Impl(ReferenceImpl):
        def forward(self, layer, query, key, value, cache, *args, **named):
            returned = super().forward(layer, query, key, value, cache, *args, **named)
            return returned if deed is None or args[0] is None else deed(returned, query, cache, named["output_lse"])

    made = type("Tried", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl), **members})
    return LoadedBackend("TRIED", "tried", made, "", "a test")


def resized(tensor, returned):
    tensor.untyped_storage().resize_(0)
    return returned


def enlarged(tensor, returned):
    storage = tensor.untyped_storage()
    storage.resize_(2 * storage.nbytes())
    return returned


def nested(tensor):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return torch.nested.nested_tensor(list(tensor))


def changed_class(tensor, returned):
    tensor.__class__ = Hostile
    return returned


def with_attributes(tensor, returned):
    for name in ("numel", "data_ptr", "stride", "detach", "storage_offset", "untyped_storage"):
        setattr(tensor, name, None)
    return returned


def examined(backend, make_case):
    case = make_case((13, 13), dtype="float32")
    plan = RunPlan((case,), (backend,), CHECKS)
    return {record.check: record for record in Examiner(plan).run()}


def assert_fails(records, checks, words):
    """Check that these checks and no others fail by the backend, with ``words``."""
    fallen = {check: record for check, record in records.items() if record.outcome != "passed"}
    assert fallen.keys() == checks
    for record in fallen.values():
        text = record.summary if record.outcome == "failed" else f"{record.stage}: {record.message}"
        assert words in text
        assert OURSELVES not in text


DEEDS = [
    ("query resized", lambda out, query, cache, lse: resized(query, out), {*CHECKS}, "query has 0 of its"),
    ("output resized", lambda out, query, cache, lse: resized(out, out), {*CHECKS}, "output has 0 of its"),
    ("LSE resized", lambda out, query, cache, lse: resized(lse, out), {*CHECKS}, "output_lse has 0 of its"),
    ("cache resized", lambda out, query, cache, lse: resized(cache, out), {*CHECKS}, "kv_cache has 0 of its"),
    ("cache enlarged", lambda out, query, cache, lse: enlarged(cache, out), set(), ""),
    ("nested", lambda out, *_: nested(out), {"numerics"}, "forward returned a nested tensor; the contract requires a"),
    ("subclass", lambda out, *_: out.as_subclass(Hostile), {"numerics"}, "forward returned a Hostile; the contract"),
    ("tuple", lambda out, *_: (out, None), {"numerics"}, "forward returned a tuple"),
    ("device", lambda out, *_: out.to("meta"), {"numerics"}, "forward returned a tensor of device meta"),
    ("class of query", lambda out, query, *_: changed_class(query, out), {"cache_write"}, "inputs were changed: query"),
    ("axes", lambda out, *_: out.transpose_(0, 1), {"numerics"}, "returned the output in the shape [8, 13, 64]"),
    ("harmless subclass", lambda out, *_: out.as_subclass(Harmless), set(), ""),
    ("parameter", lambda out, *_: torch.nn.Parameter(out), set(), ""),
    ("attributes", lambda out, query, *_: with_attributes(query, with_attributes(out, out)), set(), ""),
]


@pytest.mark.parametrize(("deed", "checks", "words"), [pytest.param(*row, id=name) for name, *row in DEEDS])
def test_a_tensor_that_is_spoilt_costs_the_backend_its_checks(make_case, deed, checks, words):
    assert_fails(examined(backend_of(deed), make_case), checks, words)


def test_an_object_whose_code_raises_where_it_is_read_is_the_backends(make_case):
    records = examined(backend_of(functions=staticmethod(HostileDict)), make_case)
    assert_fails(records, {"cache_write"}, "check cache_write: hands off")


def test_an_extent_that_is_no_integer_is_named(make_case):
    def shape(num_blocks, block_size, num_kv_heads, head_size):
        return (2.0, num_blocks, block_size, num_kv_heads, head_size)

    records = examined(backend_of(get_kv_cache_shape=staticmethod(shape)), make_case)
    assert_fails(records, {*CHECKS}, "every extent must be an integer")
