"""Batches in vLLM's words from query and sequence lengths, and a watch over what must not change."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from attncheck.reference import CommonAttentionMetadata


def _common(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    /,
    *,
    table: Sequence[Sequence[int]] | None = None,
    extra_tokens: int = 0,
    dtype: torch.dtype = torch.int32,
    one_object: bool = False,
    **others: Any,
) -> CommonAttentionMetadata:
    """Blocks ``10 * r + page`` and slots from 100 on; ``one_object``: device tensors are their host twins."""
    starts = torch.tensor([sum(query_lens[:i]) for i in range(len(query_lens) + 1)], dtype=dtype)
    lens = torch.tensor(list(seq_lens), dtype=dtype)
    rows = [[10 * r + page for page in range(4)] for r in range(len(query_lens))] if table is None else table
    tokens = sum(query_lens) + extra_tokens
    slots = list(range(100, 100 + sum(query_lens))) + [-1] * extra_tokens
    given: dict[str, Any] = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts if one_object else starts.clone(),
        "seq_lens": lens,
        "seq_lens_cpu": lens if one_object else lens.clone(),
        "num_computed_tokens_cpu": torch.tensor(
            [s - q for q, s in zip(query_lens, seq_lens, strict=True)], dtype=dtype
        ),
        "num_reqs": len(query_lens),
        "num_actual_tokens": tokens,
        "max_query_len": max(query_lens, default=0),
        "max_seq_len": max(seq_lens, default=0),
        "block_table_tensor": torch.tensor(rows, dtype=dtype),
        "slot_mapping": torch.tensor(slots, dtype=torch.int64),
    }
    return CommonAttentionMetadata(**{**given, **others})


@contextmanager
def _unchanged(*objects: Any) -> Iterator[None]:
    """Every tensor in the objects (dataclasses of fields, tensors, lists) is the same object with the same bits."""
    before = [(thing, _parts(thing), copy.deepcopy(_parts(thing))) for thing in objects]
    yield
    for thing, parts, values in before:
        now = _parts(thing)
        assert list(now) == list(parts)
        for name, value in now.items():
            assert value is parts[name], name
            assert _equal(value, values[name]), name


def _parts(thing: Any) -> dict[str, Any]:
    return {f.name: getattr(thing, f.name) for f in fields(thing)} if is_dataclass(thing) else {"itself": thing}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    return bool(a == b)


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@pytest.fixture(scope="session")
def common() -> Callable[..., CommonAttentionMetadata]:
    """``(query_lens, seq_lens, *, table, extra_tokens, dtype, one_object, **fields) -> metadata``."""
    return _common


@pytest.fixture(scope="session")
def unchanged() -> Callable[..., AbstractContextManager[None]]:
    """``with unchanged(*objects)``: their tensors are the same objects with the same bits afterwards."""
    return _unchanged


@pytest.fixture(scope="session")
def same_storage() -> Callable[[Tensor, Tensor], bool]:
    """Whether two tensors share memory."""
    return _same_storage


@pytest.fixture(scope="session")
def plain() -> Callable[[Any], dict[str, Any]]:
    """A metadata object (or a tensor) as a dictionary of lists, integers and None."""

    def flatten(metadata: Any) -> dict[str, Any]:
        return {k: v.tolist() if isinstance(v, Tensor) else v for k, v in _parts(metadata).items()}

    return flatten


@pytest.fixture
def batch_a() -> CommonAttentionMetadata:
    """Three requests: q 3, 4, 5 of s 8, 4, 15."""
    return _common([3, 4, 5], [8, 4, 15])


@pytest.fixture
def batch_p() -> CommonAttentionMetadata:
    """Two requests of q 2, 3 and s 5, 9, two padding requests, three padding tokens."""
    return _common([2, 3, 0, 0], [5, 9, 0, 0], extra_tokens=3)
