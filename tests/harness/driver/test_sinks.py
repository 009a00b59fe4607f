"""Sinks reach the impl in the layer's dtype or in float32, and the truth uses the numbers that this dtype holds."""

import math

import pytest
import torch

import attncheck
from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.errors import SpecError
from attncheck.harness.driver.construction import construct_impl
from attncheck.harness.problem.problem import build_problem
from attncheck.reference import layer_params
from attncheck.reference.spec import LayerSpec

GIVEN = (0.7001, -4.013, 300.3, 65519.0)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@pytest.mark.parametrize(("dtype", "sinks_dtype"), [("float16", None), ("bfloat16", None), ("bfloat16", "float32")])
def test_the_impl_gets_the_numbers_of_the_truth(backend_of, make_case, dtype, sinks_dtype):
    case = make_case(num_heads=4, num_kv_heads=1, dtype=dtype, sinks=GIVEN, sinks_dtype=sinks_dtype)
    given = []

    class Impl(ReferenceImpl):
        def __init__(self, *args, sinks, **keywords):
            given.append(sinks)
            super().__init__(*args, sinks=sinks, **keywords)

    construct_impl(backend_of(Impl), build_problem(case, 0), torch.device("cpu"))
    expected = torch.tensor(GIVEN, dtype=DTYPES[sinks_dtype or dtype])
    assert given[0].dtype == expected.dtype
    assert torch.equal(given[0], expected)
    assert layer_params(case.layer).sinks == tuple(expected.double().tolist())


def test_rounding_is_that_of_torch():
    numbers = torch.cat([torch.linspace(-9, 9, 4001), 1 + torch.arange(64) / 512, torch.tensor([1e-7, 3e-8])])
    for dtype in ("float16", "bfloat16"):
        layer = LayerSpec(
            num_heads=len(numbers), num_kv_heads=1, head_size=8, dtype=dtype, sinks=tuple(numbers.tolist())
        )
        assert layer.sink_logits == tuple(numbers.to(DTYPES[dtype]).tolist())


@pytest.mark.parametrize(("dtype", "sink"), [("float16", 65520.0), ("float16", -7e4), ("bfloat16", 3.4e38)])
def test_sinks_beyond_the_range_of_their_dtype_are_refused(dtype, sink):
    sizes = {"num_heads": 1, "num_kv_heads": 1, "head_size": 8, "dtype": dtype}
    with pytest.raises(SpecError, match="the dtype of the sinks cannot hold them"):
        LayerSpec(**sizes, sinks=(sink,))
    assert LayerSpec(**sizes, sinks=(sink,), sinks_dtype="float32").sink_logits is not None
    assert LayerSpec(**sizes, sinks=(-math.inf,)).sink_logits == (-math.inf,)


def test_a_backend_that_takes_one_dtype_of_sinks_is_not_given_another():
    class Strict(ReferenceBackend):
        supported_sinks_dtypes = ("bfloat16",)

    seen = attncheck.examine(Strict, "sinks", cases="digits*", checks="numerics", device="cpu")
    outcomes = [(record.case_id, record.outcome) for record in seen.records]
    assert [name for name, outcome in outcomes if outcome == "passed"] == ["digits.bfloat16-null"]
    assert {outcome for _, outcome in outcomes} == {"passed", "unsupported"}
