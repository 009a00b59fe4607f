"""Inputs of graphs: buffers for the largest step of a probe, and dummy inputs for capture."""

from collections.abc import Sequence
from dataclasses import replace
from math import nan

import torch
from torch import Tensor

from attncheck.harness.checks.cudagraph.probe import Bucket
from attncheck.harness.driver.forward_calls import ForwardCall, changed_inputs
from attncheck.harness.driver.persistent_inputs import PersistentInputs, map_tensors
from attncheck.harness.problem.problem import Problem
from attncheck.reference import CommonAttentionMetadata

_UNOWNED = 16
"""Columns of the fused tensor after the last slice, which belong to no input."""


class GraphInputs:
    """The persistent inputs of all calls of a step: one set for each micro-batch."""

    def __init__(self, buffers: Sequence[PersistentInputs]) -> None:
        self._buffers = tuple(buffers)

    @property
    def host_twins(self) -> tuple[Tensor, ...]:
        """The ``_cpu`` tensors, which are on the host by contract."""
        return tuple(twin for inputs in self._buffers for twin in inputs.host_twins)

    def load(self, fresh: Sequence[ForwardCall]) -> list[ForwardCall]:
        """Copy the contents of ``fresh`` into the buffers; return the calls over the buffers."""
        return [inputs.load(call) for inputs, call in zip(self._buffers, fresh, strict=True)]

    def copied(self, calls: Sequence[ForwardCall]) -> list[tuple[ForwardCall, ForwardCall]]:
        """Return copies of the calls and of the whole buffers, for a later comparison."""
        copies = (map_tensors(call, Tensor.clone) for call in calls)
        return [(copy, inputs.copy()) for inputs, copy in zip(self._buffers, copies, strict=True)]

    def changed(self, calls: Sequence[ForwardCall], copies: Sequence[tuple[ForwardCall, ForwardCall]]) -> set[str]:
        """Return the names of inputs that differ from ``copies``, in the calls' views or behind them in the buffers."""
        return {
            name
            for inputs, call, (lent, whole) in zip(self._buffers, calls, copies, strict=True)
            for name in (*changed_inputs(lent, call), *inputs.changed_behind(whole, call))
        }


def allocate_inputs(
    problem: Problem, num_reqs: int, num_tokens: int, max_model_len: int, device: torch.device
) -> PersistentInputs:
    """Return buffers for steps of up to ``num_tokens`` rows and ``num_reqs`` requests of up to ``max_model_len``."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32, on: torch.device = device) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=on)

    host = torch.device("cpu")
    query, key, value = _fused_rows(problem, num_tokens, device)
    largest = CommonAttentionMetadata(
        query_start_loc=zeros(num_reqs + 1),
        query_start_loc_cpu=zeros(num_reqs + 1, on=host),  # a separate tensor even if the device is the host
        seq_lens=zeros(num_reqs),
        seq_lens_cpu=zeros(num_reqs, on=host),
        num_computed_tokens_cpu=zeros(num_reqs, on=host),
        num_reqs=num_reqs,
        num_actual_tokens=num_tokens,
        max_query_len=num_tokens,
        max_seq_len=max_model_len,
        block_table_tensor=zeros(num_reqs, _num_pages(problem, max_model_len)),
        slot_mapping=zeros(num_tokens, dtype=torch.int64),
    )
    return PersistentInputs(_call(problem, largest, query, key, value))


def dummy_call(problem: Problem, bucket: Bucket, max_model_len: int, *, longest: bool) -> ForwardCall:
    """Return the call that a graph is captured with: NaN rows, slots of -1, and block tables full of the null page.

    As in vLLM's model runner, ``max_seq_len`` is ``max_model_len``, while later steps have their own maxima.
    ``longest``: use ``seq_lens`` of ``max_model_len`` tokens instead of the query lengths.
    """
    query_lens = torch.tensor(bucket.dummy_query_lens, dtype=torch.int32)
    seq_lens = torch.full_like(query_lens, max_model_len) if longest else query_lens
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), query_lens.cumsum(0).int()])
    dummy = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        seq_lens_cpu=seq_lens,
        num_computed_tokens_cpu=seq_lens - query_lens,
        num_reqs=bucket.num_reqs,
        num_actual_tokens=bucket.num_tokens,
        max_query_len=bucket.query_len or bucket.num_tokens,
        max_seq_len=max_model_len,
        block_table_tensor=torch.zeros(bucket.num_reqs, _num_pages(problem, max_model_len), dtype=torch.int32),
        slot_mapping=torch.full((bucket.num_tokens,), -1),
        causal=problem.layer.is_causal,
    )
    query, key, value = (
        torch.full((bucket.num_tokens, *rows.shape[1:]), nan, dtype=problem.dtype)
        for rows in (problem.query, problem.keys, problem.values)
    )
    return _call(problem, dummy, query, key, value)


def some_steps_earlier(call: ForwardCall, tokens: int, block_size: int | None = None) -> ForwardCall:
    """Return a call for the same requests in the same pages, up to ``tokens`` shorter, with slots of -1.

    ``block_size``: remove pages that the shorter requests do not need yet. If None, keep all pages, as for drafts.
    """
    common = call.common
    fewer = common.num_computed_tokens_cpu.clamp(min=0, max=tokens)
    seq_lens, table = common.seq_lens_cpu - fewer, common.block_table_tensor
    if block_size is not None:
        is_later = torch.arange(table.shape[1]) * block_size >= seq_lens[:, None]
        table = torch.where(is_later.to(table.device), table[:, -1:], table)
    return replace(
        call,
        common=replace(
            common,
            seq_lens=seq_lens.to(common.seq_lens),
            seq_lens_cpu=seq_lens,
            num_computed_tokens_cpu=common.num_computed_tokens_cpu - fewer,
            block_table_tensor=table,
            slot_mapping=torch.full_like(common.slot_mapping, -1),
        ),
    )


def _call(problem: Problem, common: CommonAttentionMetadata, query: Tensor, key: Tensor, value: Tensor) -> ForwardCall:
    """Return a call whose rows are all real. It has no keys and values if the layer shares another layer's cache."""
    index = torch.arange(len(query))
    has_keys = not problem.writes_nothing
    return ForwardCall(
        common=common,
        query=query,
        key=key if has_keys else None,
        value=value if has_keys else None,
        rows=index,
        nth=index,
        position=index,
        num_key_rows=len(query) if has_keys else 0,
    )


def _num_pages(problem: Problem, max_model_len: int) -> int:
    return -(-max_model_len // problem.cache.block_size)


def _fused_rows(problem: Problem, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value as slices of one fused tensor, as in a model's layer."""
    shapes = [tuple(rows.shape[1:]) for rows in (problem.query, problem.keys, problem.values)]
    widths = [heads * size for heads, size in shapes]
    fused = torch.zeros(num_tokens, sum(widths) + _UNOWNED, dtype=problem.dtype, device=device)
    slices = fused[:, : sum(widths)].split(widths, dim=1)
    query, key, value = (part.unflatten(1, shape) for part, shape in zip(slices, shapes, strict=True))
    return query, key, value
