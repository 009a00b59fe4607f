"""What is written as source is the same value again: bits, strides, shared memory."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attncheck.harness.fuzz.stand_alone_process import MOST_NUMBERS, NotExpressibleError, SourceWriter
from attncheck.reference import AttentionParams


def again(*values: Any) -> list[Any]:
    """The values as a file would have them."""
    writer = SourceWriter()
    expressions = [writer.source(value) for value in values]
    names: dict[str, Any] = {"torch": torch, "dataclass": dataclass, "SimpleNamespace": SimpleNamespace}
    names |= {"nan": math.nan, "inf": math.inf}
    exec("\n".join([*writer.classes.values(), *writer.definitions]), names)
    return [eval(expression, names) for expression in expressions]


def bits(tensor: torch.Tensor) -> list[int]:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    numbers: list[int] = tensor.contiguous().view(whole).flatten().tolist()
    return numbers


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int32, torch.int64, torch.uint8]
)
def test_a_tensor_keeps_its_bits(dtype: torch.dtype) -> None:
    numbers = torch.linspace(-3 if dtype.is_signed else 0, 100, 97).to(dtype)
    (found,) = again(numbers)
    assert found.dtype == dtype
    assert bits(found) == bits(numbers)


def test_numbers_that_are_none_are_kept() -> None:
    (found,) = again(torch.tensor([math.nan, math.inf, -math.inf, 0.1, 1e-40, 3.0e38]))
    assert torch.equal(found.isnan(), torch.tensor([True] + 5 * [False]))
    assert found[1:].tolist() == torch.tensor([math.inf, -math.inf, 0.1, 1e-40, 3.0e38]).tolist()


def test_strides_and_shared_memory_are_kept() -> None:
    fused = torch.arange(60, dtype=torch.float32).view(3, 20)
    query, key = fused[:, :8].unflatten(1, (2, 4)), fused[:, 8:16].unflatten(1, (2, 4))
    first, second = again(query, key)
    assert (first.stride(), second.stride()) == (query.stride(), key.stride())
    assert torch.equal(first, query)
    assert torch.equal(second, key)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_what_is_mostly_one_number_takes_few() -> None:
    pool = torch.zeros(4096)
    pool[100:110], pool[3000] = 1.5, 2.5
    writer = SourceWriter()
    writer.source(pool)
    assert sum(map(len, writer.definitions)) < 400
    assert torch.equal(again(pool)[0], pool)


def test_codes_and_their_bytes_share_memory() -> None:
    codes = torch.arange(80, dtype=torch.uint8)
    plain, numbers = again(codes.view(4, 20), codes.view(torch.float8_e4m3fn))
    assert torch.equal(plain, codes.view(4, 20))
    assert bits(numbers) == codes.tolist()


def test_objects_become_plain_ones_with_their_properties() -> None:
    params = AttentionParams(num_heads=4, num_kv_heads=2, head_size=64, window=(3, 0))
    (found,) = again(params)
    assert (found.group_size, found.softmax_scale, found.window) == (2, 0.125, (3, 0))


def test_a_method_that_gives_a_number_gives_it() -> None:
    (found,) = again(SimpleNamespace(get_head_size=lambda: 64, inner=SimpleNamespace(dtype=torch.float16)))
    assert found.get_head_size() == 64
    assert found.inner.dtype == torch.float16


def test_too_many_numbers_are_refused() -> None:
    with pytest.raises(NotExpressibleError, match=f"more than {MOST_NUMBERS} numbers"):
        SourceWriter().source(torch.rand(MOST_NUMBERS + 10))
