"""Batches in vLLM's words from query and sequence lengths, a watch over what must not change, and refusals."""

from contextlib import contextmanager
from dataclasses import is_dataclass

import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import CommonAttentionMetadata


def common_metadata(
    query_lens, seq_lens, /, *, table=None, extra_tokens=0, dtype=torch.int32, one_object=False, **others
):
    """Blocks ``10 * r + page`` and slots from 100 on; ``one_object``: device tensors are their host twins."""
    starts = torch.tensor([sum(query_lens[:i]) for i in range(len(query_lens) + 1)], dtype=dtype)
    lens = torch.tensor(list(seq_lens), dtype=dtype)
    computed = [s - q for q, s in zip(query_lens, seq_lens, strict=True)]
    rows = [[10 * r + page for page in range(4)] for r in range(len(query_lens))] if table is None else table
    slots = list(range(100, 100 + sum(query_lens))) + [-1] * extra_tokens
    given = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts if one_object else starts.clone(),
        "seq_lens": lens,
        "seq_lens_cpu": lens if one_object else lens.clone(),
        "num_computed_tokens_cpu": torch.tensor(computed, dtype=dtype),
        "num_reqs": len(query_lens),
        "num_actual_tokens": len(slots),
        "max_query_len": max(query_lens, default=0),
        "max_seq_len": max(seq_lens, default=0),
        "block_table_tensor": torch.tensor(rows, dtype=dtype),
        "slot_mapping": torch.tensor(slots, dtype=torch.int64),
    }
    return CommonAttentionMetadata(**{**given, **others})


@contextmanager
def unchanged(*objects):
    """Every value of the objects (metadata, tensors) is the same object, and no tensor is written to."""
    before = [dict(_parts(thing)) for thing in objects]
    versions = [value._version for parts in before for value in parts.values() if isinstance(value, Tensor)]
    yield
    for thing, parts in zip(objects, before, strict=True):
        assert all(_parts(thing)[name] is value for name, value in parts.items())
    assert [x._version for parts in before for x in parts.values() if isinstance(x, Tensor)] == versions


def _parts(thing):
    return vars(thing) if is_dataclass(thing) else {"itself": thing}


def refused(function, *arguments):
    """Return the argument that the refusal names, or None without one; nothing is changed."""
    with unchanged(*arguments):
        try:
            function(*arguments)
        except ReferenceArgumentError as refusal:
            return refusal.argument
    return None


def same_storage(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def plain_values(metadata):
    """Metadata as a dictionary of lists, integers and None; every number is a Python integer."""
    values = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in vars(metadata).items()}
    assert all(type(v) is int for k, v in values.items() if k.startswith(("num_reqs", "num_actual", "max")))
    return values
