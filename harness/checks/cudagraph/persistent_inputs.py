"""The buffers a model runner keeps for its graphs: allocated once at the largest size, refilled in place every step.

Smaller graphs are given the front of each. Must not know: backends, recorders, what is judged.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from math import nan
from typing import Any

import torch
from torch import Tensor

from attncheck.harness.checks.cudagraph.probes import Bucket
from attncheck.harness.driver.forward_calls import ForwardCall
from attncheck.harness.problem.problem import Problem
from attncheck.reference import CommonAttentionMetadata

_UNOWNED = 16
"""Columns of the fused tensor behind the last slice, which nobody owns."""


class PersistentInputs:
    """Query, key, value and metadata of steps of up to so many requests and tokens, tables of ``width`` pages."""

    def __init__(
        self, problems: Sequence[Problem], num_reqs: int, num_tokens: int, width: int, device: torch.device
    ) -> None:
        problem = problems[0]
        self._size, self._width, self._causal = problem.cache.block_size, width, problem.layer.is_causal
        self._has_keys = not problem.writes_nothing
        self._query, self._key, self._value = _rows(problem, num_tokens, device)
        self._starts, self._starts_cpu = _twins(num_reqs + 1, device)
        self._lens, self._lens_cpu = _twins(num_reqs, device)
        self._computed_cpu = torch.zeros(num_reqs, dtype=torch.int32)
        self._table = torch.zeros(num_reqs, width, dtype=torch.int32, device=device)
        self._slots = torch.zeros(num_tokens, dtype=torch.int64, device=device)

    @property
    def host_twins(self) -> tuple[Tensor, ...]:
        """What lies on the host by the contract."""
        return self._starts_cpu, self._lens_cpu, self._computed_cpu

    def load(self, call: ForwardCall) -> ForwardCall:
        """The call of a step, its contents in these buffers."""
        common = call.common
        own = self._metadata(common, len(common.seq_lens), len(call.query))
        for name in ("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu", "num_computed_tokens_cpu"):
            getattr(own, name).copy_(getattr(common, name))
        own.slot_mapping.copy_(common.slot_mapping)
        table = common.block_table_tensor
        own.block_table_tensor[:, : table.shape[1]] = table
        own.block_table_tensor[:, table.shape[1] :] = table[:, -1:]  # pages nobody here owns, as behind every request
        query, key, value = self._front(len(call.query))
        query.copy_(call.query)
        if key is not None and value is not None and call.key is not None and call.value is not None:
            key.copy_(call.key)
            value.copy_(call.value)
        return replace(call, common=own, query=query, key=key, value=value)

    def load_dummies(self, bucket: Bucket, *, longest: bool) -> ForwardCall:
        """The call a graph is captured with: NaN rows, slots of -1, the null page in every entry of the table.

        ``longest``: the lengths are as long as the table has room for.
        """
        query_lens = torch.tensor(bucket.dummy_query_lens, dtype=torch.int32)
        room = self._width * self._size
        seq_lens = torch.full_like(query_lens, room) if longest else query_lens
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
            max_seq_len=room,
            block_table_tensor=torch.zeros(bucket.num_reqs, self._width, dtype=torch.int32),
            slot_mapping=torch.full((bucket.num_tokens,), -1),
            causal=self._causal,
        )
        query, key, value = self._front(bucket.num_tokens)
        index = torch.arange(bucket.num_tokens)
        return self.load(
            ForwardCall(
                common=dummy,
                query=torch.full_like(query, nan),
                key=None if key is None else torch.full_like(key, nan),
                value=None if value is None else torch.full_like(value, nan),
                rows=index,
                nth=index,
                position=index,
                num_key_rows=bucket.num_tokens if self._has_keys else 0,
            )
        )

    def _front(self, num_tokens: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if not self._has_keys:
            return self._query[:num_tokens], None, None
        return self._query[:num_tokens], self._key[:num_tokens], self._value[:num_tokens]

    def _metadata(self, common: CommonAttentionMetadata, num_reqs: int, num_tokens: int) -> CommonAttentionMetadata:
        return replace(
            common,
            query_start_loc=self._starts[: num_reqs + 1],
            query_start_loc_cpu=self._starts_cpu[: num_reqs + 1],
            seq_lens=self._lens[:num_reqs],
            seq_lens_cpu=self._lens_cpu[:num_reqs],
            num_computed_tokens_cpu=self._computed_cpu[:num_reqs],
            block_table_tensor=self._table[:num_reqs],
            slot_mapping=self._slots[:num_tokens],
        )


def _rows(problem: Problem, num_tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as slices of one fused tensor, as a model's layer hands them."""
    shapes = [tuple(rows.shape[1:]) for rows in (problem.query, problem.keys, problem.values)]
    widths = [heads * size for heads, size in shapes]
    fused = torch.zeros(num_tokens, sum(widths) + _UNOWNED, dtype=problem.dtype, device=device)
    slices = fused[:, : sum(widths)].split(widths, dim=1)
    query, key, value = (part.unflatten(1, shape) for part, shape in zip(slices, shapes, strict=True))
    return query, key, value


def _twins(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A buffer on the device and one on the host, apart even where the device is the host."""
    return torch.zeros(length, dtype=torch.int32, device=device), torch.zeros(length, dtype=torch.int32)


def a_step_earlier(call: ForwardCall) -> ForwardCall:
    """The same requests in the same pages, a token shorter; nothing is written."""
    common = call.common
    return replace(
        call,
        common=replace(
            common,
            seq_lens=(common.seq_lens - 1).clamp(min=0),
            seq_lens_cpu=(common.seq_lens_cpu - 1).clamp(min=0),
            num_computed_tokens_cpu=(common.num_computed_tokens_cpu - 1).clamp(min=0),
            slot_mapping=torch.full_like(common.slot_mapping, -1),
        ),
    )


def each_of(call: ForwardCall, change: Callable[[Tensor], Tensor]) -> ForwardCall:
    """The call with other tensors: copies, to see later what became of those that were lent, or aliases to lend."""
    common: dict[str, Any] = {
        field.name: change(value)
        for field in fields(call.common)
        if isinstance(value := getattr(call.common, field.name), Tensor)
    }
    rows: dict[str, Any] = {name: getattr(call, name) for name in ("query", "key", "value")}
    rows = {name: None if x is None else change(x) for name, x in rows.items()}
    return replace(call, common=replace(call.common, **common), **rows)
