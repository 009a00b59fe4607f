"""New inputs for every timed call, each as costly as the last and with a known right output.

From a problem and its truth, others are derived exactly:

- One signed permutation of the channels of queries and keys leaves every score unchanged. One of the channels of values
  permutes the output's channels in the same way.
- Keys that every row of their request sees may be in any order, if no modifier depends on positions.
- A latent cache allows less, because fixed weights lie between it and the heads. The rotated channels are permuted
  together with those of the query. The sign of a request's latent rows is flipped with the rest of its query and with
  its output.

Norms and largest elements do not change, so budgets do not either, and FP8 codes stay codes. Several problems with
other seeds and pages alternate, so that not even the scores of the last call are useful for the next. All randomness
comes from the system's entropy. Nothing repeats, and no right output is computed before the call.
"""

import os
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter

import torch
from torch import Tensor

from attncheck.errors import QuestionError
from attncheck.harness.problem.problem import Problem, build_problem
from attncheck.harness.truth.tolerance import Budget
from attncheck.harness.truth.truth import Truth, truth_of

MOST_BASES = 3
"""Most problems that alternate."""

_PATIENCE_S = 0.05
"""Seconds after which no problems beyond the required ones are created. The truth of long prompts takes a while."""


@dataclass(frozen=True)
class SignedOrder:
    """A signed permutation of the channels of each of ``G`` groups of heads: index int64, sign, both ``[G, size]``."""

    index: Tensor
    sign: Tensor

    def of(self, rows: Tensor) -> Tensor:
        """Return ``rows [n, H, size]`` with permuted and signed channels. 0 stays 0, never -0."""
        grouped = rows.unflatten(1, (len(self.index), -1))
        moved: Tensor = grouped.gather(3, self.index[:, None].expand(grouped.shape))
        return (moved * self.sign[:, None].to(rows.dtype) + 0.0).flatten(1, 2)

    def behind(self, width: int) -> "SignedOrder":
        """Return this permutation shifted by ``width`` leading channels that stay unchanged."""
        stay = torch.arange(width, device=self.index.device).expand(len(self.index), width)
        return SignedOrder(
            torch.cat([stay, self.index + width], dim=1), torch.cat([torch.ones_like(stay), self.sign], dim=1)
        )


@dataclass(frozen=True)
class ContentsTransform:
    """How a problem is transformed. ``key``, ``value``, ``output``: None if the channels stay unchanged.

    key_order: int64 ``[N]``. request_sign: ``[R]``, +1 or -1 for latent rows; None for other layers.
    """

    query: SignedOrder
    key: SignedOrder | None
    value: SignedOrder
    output: SignedOrder | None
    key_order: Tensor
    request_sign: Tensor | None


@dataclass(frozen=True)
class BaseProblem:
    """A problem with its tensors on the device, and its truth."""

    problem: Problem
    truth: Truth

    @cached_property
    def request_of_row(self) -> Tensor:
        """The request of each row, int64 ``[T]``."""
        return _owners([r.rows for r in self.problem.requests], self.problem.query.device)

    @cached_property
    def request_of_key(self) -> Tensor:
        """The request of each key, int64 ``[N]``."""
        return _owners([r.num_keys for r in self.problem.requests], self.problem.query.device)

    @cached_property
    def movable(self) -> tuple[range, ...]:
        """Ranges of keys of one request each that every row of the request sees, and so may be permuted."""
        problem, layer = self.problem, self.problem.layer
        if layer.position_modifiers:
            return ()
        found = []
        for request, spec in zip(problem.requests, problem.case.batch, strict=True):
            end = request.cached if problem.is_cross else min(request.cached, request.first_position)
            if end - spec.shared_prefix > 1:
                found.append(range(request.base + spec.shared_prefix, request.base + end))
        return tuple(found)


@dataclass(frozen=True)
class Contents:
    """One transformed problem: ``base`` with ``transform``."""

    base: BaseProblem
    transform: ContentsTransform

    def problem(self) -> Problem:
        """Return the transformed problem with its tensors on the device."""
        base, transform = self.base.problem, self.transform
        query, keys, values = (
            transform.query.of(base.query),
            base.keys[transform.key_order],
            base.values[transform.key_order],
        )
        if transform.key is not None:
            keys = transform.key.of(keys)
        if transform.request_sign is not None and base.layer.mla is not None:
            keys = keys * transform.request_sign[self.base.request_of_key][:, None, None].to(keys.dtype) + 0.0
            signs = transform.request_sign[self.base.request_of_row][:, None, None].to(query.dtype)
            nope = base.layer.mla.qk_nope_head_dim
            query = torch.cat([query[..., :nope] * signs + 0.0, query[..., nope:]], dim=-1)
        return replace(base, query=query, keys=keys, values=transform.value.of(values))

    def right(self, rows: Tensor) -> tuple[Tensor, Budget]:
        """Return the right output of ``rows`` (int64), float64 ``[n, H, Dv]``, and the budget around it."""
        truth, transform = self.base.truth, self.transform
        out = truth.out[rows]
        if transform.output is not None:
            out = transform.output.of(out)
        if transform.request_sign is not None:
            out = out * transform.request_sign[self.base.request_of_row[rows]][:, None, None]
        budget = truth.budget
        return out, Budget(budget.norm[rows], budget.peak[rows], budget.lse[rows])

    def lse(self, rows: Tensor) -> Tensor:
        """Return the right log-sum-exp of ``rows``, float64 ``[n, H]``."""
        return self.base.truth.lse[rows]


class FreshContents:
    """An endless supply of inputs; consecutive inputs come from different problems if there are several."""

    def __init__(self, problem: Problem, truth: Truth | None, device: torch.device, *, at_least: int = 2) -> None:
        """``truth``: that of the problem, if known. ``at_least``: create this many problems however long it takes.

        Raise QuestionError if the truth is not given and cannot be computed.
        """
        self._device = device
        self._random = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))
        began = perf_counter()
        if truth is None:
            truth = truth_of(problem, device, refuse_blindness=False)
        self.bases = [BaseProblem(_moved(problem, device), truth)]
        while len(self.bases) < MOST_BASES:
            if len(self.bases) >= at_least and perf_counter() - began > _PATIENCE_S:
                break
            try:
                self.bases.append(self._other_base())
            except QuestionError:  # honest kernels would overflow on these numbers
                break
        self._last = -1

    def next(self) -> Contents:
        """Return inputs that no call has seen."""
        choice = self._below(len(self.bases) - (self._last >= 0 and len(self.bases) > 1))
        self._last = choice + (len(self.bases) > 1 and 0 <= self._last <= choice)
        base = self.bases[self._last]
        return Contents(base, self._random_transform(base))

    def random_indices(self, count: int, limit: int) -> Tensor:
        """Return ``limit`` random indices below ``count`` (int64), ascending; all if ``count`` is not larger."""
        if count <= limit:
            return torch.arange(count, device=self._device)
        chosen = torch.randperm(count, generator=self._random)[:limit]
        return chosen.sort().values.to(self._device)

    def _other_base(self) -> BaseProblem:
        other = build_problem(self.bases[0].problem.case, self._below(2**31))
        return BaseProblem(_moved(other, self._device), truth_of(other, self._device, refuse_blindness=False))

    def _random_transform(self, base: BaseProblem) -> ContentsTransform:
        problem = base.problem
        order = torch.arange(len(problem.keys))
        for keys in base.movable:
            order[keys.start : keys.stop] = keys.start + torch.randperm(len(keys), generator=self._random)
        order = order.to(self._device)
        values = self._signed_order(problem.values)
        if problem.layer.mla is None:
            keys_too = self._signed_order(problem.keys)
            return ContentsTransform(keys_too, keys_too, values, values, order, None)
        shares = any(spec.shared_prefix for spec in problem.case.batch)
        signs = self._signs(1 if shares else len(problem.requests)).expand(len(problem.requests))
        query = values.behind(problem.layer.mla.qk_nope_head_dim)
        return ContentsTransform(query, None, values, None, order, signs.to(self._device))

    def _signed_order(self, rows: Tensor) -> SignedOrder:
        """Return a random signed permutation of the channels of ``rows [n, G, size]``."""
        groups, size = rows.shape[1:]
        index = torch.stack([torch.randperm(size, generator=self._random) for _ in range(groups)])
        return SignedOrder(index.to(self._device), self._signs(groups, size).to(self._device))

    def _signs(self, *shape: int) -> Tensor:
        return torch.randint(2, shape, generator=self._random) * 2 - 1

    def _below(self, end: int) -> int:
        return int(torch.randint(end, (), generator=self._random))


def _moved(problem: Problem, device: torch.device) -> Problem:
    rows = {name: getattr(problem, name).to(device) for name in ("query", "keys", "values")}
    return replace(problem, **rows)


def _owners(counts: list[int], device: torch.device) -> Tensor:
    return torch.arange(len(counts), device=device).repeat_interleave(torch.tensor(counts, device=device))
