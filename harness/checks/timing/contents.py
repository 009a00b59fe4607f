"""Fresh contents of each timed step, and the judgement of its output."""

import math
import os
from collections import deque
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter, sleep

import torch
from torch import Tensor

from attncheck.backends.conventions import Conventions
from attncheck.errors import QuestionError
from attncheck.harness.checks.findings import Broken, FindingError
from attncheck.harness.checks.numerics import lse_shares, summarize
from attncheck.harness.driver.foreign_code import as_plain
from attncheck.harness.driver.lending import span
from attncheck.harness.driver.outputs import GuardedBuffer, read_result, still_unwritten
from attncheck.harness.driver.pool import KVPool
from attncheck.harness.problem.problem import Problem, build_problem
from attncheck.harness.problem.storage import output_codes, output_error
from attncheck.harness.truth.truth import Truth, truth_of
from attncheck.harness.truth.unpaged import Budget, share_of_budget

# New inputs for every timed call, each as costly as the last and with a known right output.
#
# From a problem and its truth, others are derived exactly:
#
# - One signed permutation of the channels of queries and keys leaves every score unchanged. One of the channels of
#   values permutes the output's channels in the same way.
# - Keys that every row of their request sees may be in any order, if no modifier depends on positions.
# - A latent cache allows less, because fixed weights lie between it and the heads. The rotated channels are permuted
#   together with those of the query. The sign of a request's latent rows is flipped with the rest of its query and with
#   its output.
#
# Norms and largest elements do not change, so budgets do not either, and FP8 codes stay codes. Several problems with
# other seeds and pages alternate, so that not even the scores of the last call are useful for the next. All randomness
# comes from the system's entropy. Nothing repeats, and no right output is computed before the call.

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
        if layer.position_modifiers or problem.topk_indices is not None:
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
        return out, truth.budget.of_rows(rows)

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
        self.bases = [BaseProblem(_moved(problem, device), truth.to(device))]
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
        truth = truth_of(other, self._device, refuse_blindness=False)
        return BaseProblem(_moved(other, self._device), truth.to(self._device))

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


# Judge an output produced under the clock: valid in form, right for these inputs, and final.
#
# A finding names the trick that it indicates. Some kernels, above all generated ones, leave work to a stream or a
# thread, return tensors that are evaluated on access, or return stored outputs.

JUDGED_ELEMENTS = 1 << 18
"""Most output elements that are judged after a call, in random rows. The first and last outputs are judged in full."""

_REMEMBERED = 64
"""Number of earlier calls whose right outputs are compared with a wrong output."""

_LATE_S = 0.2
"""Seconds for which a wrong output is observed for later changes."""

CHECKED_ROWS = 64
"""Number of new rows that are read back from the cache after a call. They are chosen at random."""

_NEAR = 0.1
"""Relative error up to which a wrong row counts as inexact, and a stored row as the one that was passed.

Codes in a cache are coarser than rows.
"""


@dataclass(frozen=True)
class TimedAnswer:
    """The output of a call at the moment the clock stopped: copies, and the memory they were copied from.

    ``output [n, H, Dv]`` and ``lse [n, H]``: of the real rows. ``fault``: how the output violates the contract.
    """

    output: Tensor
    lse: Tensor | None
    live: Tensor
    fault: str | None = None
    meaning: str | None = None

    def has_changed(self) -> bool:
        """Return whether the memory differs from the copy."""
        return not torch.equal(_bits(self.live), _bits(self.output))


def copy_answer(
    returned: object,
    out: GuardedBuffer,
    lse: GuardedBuffer | None,
    num_rows: int,
    spans: dict[str, tuple[int, int]],
    *,
    must_be_buffer: bool,
) -> TimedAnswer:
    """Copy the output in ``returned``, or in the buffers. ``spans``: address ranges of memory given for reading.

    The copies are issued first, so that they directly follow the call in the stream's order.
    """
    meaning = None
    own = other = out.rows.clone()
    whole_lse = None if lse is None else lse.rows.clone()
    plain = as_plain(returned)
    if plain is not None and not must_be_buffer:
        other = plain.clone()
    rows, protocol = read_result(returned, out, must_be_buffer=must_be_buffer)
    fault = next(iter(protocol), None)
    if plain is None and issubclass(type(returned), Tensor):
        meaning = "a subclass may be computed when it is looked at, after the clock has stopped"
    if fault is None and rows is not out.rows:
        start, end = span(rows)
        for name, (first, last) in spans.items():
            if start < last and first < end:
                fault = f"forward returned memory of {name}, which it was lent to read"
                meaning = "an input is handed back as output"
    copied = own if rows is out.rows else other.reshape(rows.shape)
    held = None if whole_lse is None else whole_lse[:num_rows]
    return TimedAnswer(copied[:num_rows], held, rows[:num_rows], fault, meaning)


class AnswerJudge:
    """Judges the outputs of one batch in sequence. ``name``: name of the batch in messages."""

    def __init__(self, name: str, contents: FreshContents, conventions: Conventions) -> None:
        self.name, self._source, self._conventions = name, contents, conventions
        self._earlier: deque[Contents] = deque(maxlen=_REMEMBERED)
        self._latest: tuple[Contents, Tensor, TimedAnswer] | None = None
        self.num_judged = 0
        self.notes: tuple[str, ...] = ()
        self.worst = 0.0
        """The largest error so far, in budgets."""

    def judge(self, contents: Contents, rows: Tensor, answer: TimedAnswer) -> None:
        """Raise FindingError if an output is wrong. ``rows``: int64, the problem's row of each output row."""
        self.num_judged += 1
        if answer.fault is not None:
            raise FindingError(Broken(answer.fault, {"calls": self.num_judged}, answer.meaning))
        layer = contents.base.problem.layer
        limit = max(1, JUDGED_ELEMENTS // answer.output[0].numel()) if len(rows) else 0
        if limit >= len(rows):
            self.notes = ()
        else:
            judged = f"{limit} of {len(rows)} rows were judged after each call, chosen at random"
            self.notes = (f"{self.name}: {judged}; all after the first and last",)
        which = self._source.random_indices(len(rows), len(rows) if self._latest is None else limit)
        self._latest = (contents, rows, answer)
        share = float(_shares(contents, rows[which], answer.output[which]).max()) if len(which) else 0.0
        self.worst = max(self.worst, share)
        if share > 1:
            raise FindingError(self._wrong(contents, rows, answer))
        shifts_lse = layer.alibi_slopes is not None and self._conventions.alibi_reference != "query"
        if answer.lse is not None and not shifts_lse:
            self._judge_lse(contents, rows[which], answer.lse[which])
        self._earlier.append(contents)

    def require_unchanged(self) -> None:
        """Raise FindingError if the latest output has changed since its call."""
        if self._latest is not None and self._latest[2].has_changed():
            raise FindingError(
                Broken(
                    f"{self.name}: the output changed after the clock had stopped",
                    {"calls": self.num_judged},
                    "work is left to a thread, or to another stream",
                )
            )

    def finish(self) -> None:
        """Judge the last output in full. Raise FindingError if it is wrong."""
        if self._latest is not None:
            contents, rows, answer = self._latest
            if len(rows) and float(_shares(contents, rows, answer.output).max()) > 1:
                raise FindingError(self._wrong(contents, rows, answer))

    def _wrong(self, contents: Contents, rows: Tensor, answer: TimedAnswer) -> Broken:
        problem = contents.base.problem
        shares = torch.zeros(len(contents.base.truth.out), answer.output.shape[1], dtype=torch.float64)
        shares[rows.cpu()] = _shares(contents, rows, answer.output).cpu()
        figures = {
            "calls": self.num_judged,
            "budget_share": float(shares.max()),
            "rows_wrong": int((shares > 1).any(dim=1).sum()),
        }
        what = f"{self.name}: the output of call {self.num_judged} is wrong: {summarize(problem, shares)}"
        inputs = f"inputs of seed {problem.seed}, channels permuted and signs turned, as at every timed call"
        return Broken(what, figures, self._meaning(contents, rows, answer), (inputs,))

    def _meaning(self, contents: Contents, rows: Tensor, answer: TimedAnswer) -> str | None:
        for _ in range(20):
            if answer.has_changed():
                return "the output was written after the clock had stopped: work is left to a thread, or another stream"
            sleep(_LATE_S / 20)
        if bool(still_unwritten(answer.output).all()):
            return "nothing was written: the earlier contents of the buffer would have counted as the answer"
        for back, earlier in enumerate(reversed(self._earlier), start=1):
            if bool((_shares(earlier, rows, answer.output) <= 1).all()):
                calls = "the call before" if back == 1 else f"{back} calls before"
                return (
                    f"it is the right answer to the contents of {calls}: results are kept, and found again by address "
                    "or by a fingerprint of the inputs"
                )
        if _are_near(contents, rows, answer.output):
            return "it is near the right answer: under the clock a lower precision than the layer's, or a shortcut"
        return None

    def _judge_lse(self, contents: Contents, rows: Tensor, lse: Tensor) -> None:
        unit = math.log(2) if self._conventions.lse_base == "2" else 1.0
        shares = lse_shares(lse.double() * unit, contents.lse(rows), contents.right(rows)[1].lse)
        if bool((shares > 1).any()):
            summary = f"{self.name}: call {self.num_judged} left a wrong LSE: {int((shares > 1).any(dim=1).sum())} rows"
            raise FindingError(Broken(summary, {"calls": self.num_judged, "budget_share": float(shares.max())}))


def require_stored(name: str, pool: KVPool, problem: Problem, contents: FreshContents) -> None:
    """Raise FindingError if new rows of ``problem`` are not in the cache. Do nothing without a codec.

    Omitting the write saves time, and the output does not show it. Cannot see: single wrong elements, which
    ``cache_write`` detects; or a codec of the backend that writes or invents missing rows when it reads.
    """
    if pool.codec is None:
        return
    new = problem.new_keys[problem.new_keys >= 0]
    new = new[contents.random_indices(len(new), CHECKED_ROWS).cpu()]
    if not len(new):
        return
    slots = problem.key_slots[new]
    missing = torch.zeros(len(new), dtype=torch.bool)
    for found, given in zip(pool.read_image(pool.bytes(), slots), (problem.keys, problem.values), strict=True):
        wanted = given[new].double().flatten(1)
        error = (found.double().flatten(1) - wanted).norm(dim=1)
        missing |= ~(error <= _NEAR * wanted.norm(dim=1)).cpu()
    if bool(missing.any()):
        slot = int(slots[missing][0])
        raise FindingError(
            Broken(
                f"{name}: {int(missing.sum())} of {len(new)} examined new rows are not in the cache, the first is "
                f"{problem.slot_name(slot)}",
                meaning="the cache write is left out under the clock, or left to later",
            )
        )


def _shares(contents: Contents, rows: Tensor, output: Tensor) -> Tensor:
    """Return the error of each row and head in budgets, float64 ``[n, H]``."""
    right, budget = contents.right(rows)
    return share_of_budget(output_error(output, right, output_codes(contents.base.problem.layer)), budget)


def _are_near(contents: Contents, rows: Tensor, output: Tensor) -> bool:
    """Return whether most wrong rows are merely inexact. An inexact score may make a row prefer another key."""
    right, budget = contents.right(rows)
    error = output_error(output, right, output_codes(contents.base.problem.layer))
    relative = error.norm(dim=-1) / right.norm(dim=-1)
    return bool((relative[share_of_budget(error, budget) > 1] <= _NEAR).double().mean() > 0.5)


def _bits(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)
