"""The checks ``determinism`` and ``invariance``: whether an output depends on something that must not matter."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import torch
from torch import Tensor

from attncheck.harness.checks.again import Change, RightRows, Variation, changed_step, later_fault
from attncheck.harness.checks.findings import Broken, Finding, Holds
from attncheck.harness.checks.geometry import other_geometry
from attncheck.harness.checks.history import repetitions
from attncheck.harness.checks.interface import Check, CheckedCase
from attncheck.harness.checks.numerics import differing_rows, lse_shares, rows_in_words
from attncheck.harness.driver.foreign_code import StageError, unsupported_reasons
from attncheck.harness.driver.observation import Observation
from attncheck.harness.driver.session import Fill, Session
from attncheck.harness.driver.step import HOST_LENS, forward_calls_of, strides_of
from attncheck.harness.problem.problem import Arrangement, Problem, arranged
from attncheck.harness.problem.storage import output_values
from attncheck.harness.truth.unpaged import share_of_budget
from attncheck.reference.step_spec import PaddingSpec, StrideForm, StridesSpec
from attncheck.reports.run_file.causes import UNKNOWN

# Ways of passing one step that must not matter: strides of operands, and lengths that are only upper bounds.
#
# Only one maximum is raised at a time, because `max_query_len` above 1 takes a batch of decodes off a backend's decode
# path. No engine transposes heads, so a backend may raise for that, and then gets strides that keep the heads of a row
# together. A wrong output is a failure in any case.

_BOUNDS = (
    "a maximum is taken for a length: the maxima of the metadata may be upper bounds; "
    "lengths are in query_start_loc and seq_lens"
)

_HOST_BOUNDS = (
    "a length on the host is taken for exact: seq_lens_cpu and num_computed_tokens_cpu of a decode may be upper "
    'bounds; read seq_lens, or declare host_lens="exact"'
)

_FORMS: tuple[tuple[StrideForm, ...], ...] = (
    ("transposed", "transposed", "contiguous", "padded"),
    ("contiguous", "contiguous", "transposed", "transposed"),
    ("transposed", "transposed", "padded", "offset"),
    ("padded", "padded", "transposed", "transposed"),
)
"""Forms of query, key, value and output. Each two consecutive rows transpose every operand once."""

_ROW_FORMS: tuple[tuple[StrideForm, ...], ...] = (
    ("padded", "contiguous", "offset"),
    ("contiguous", "offset", "padded"),
    ("offset", "padded", "contiguous"),
)
"""Forms of query, key and value in which the heads of a row are contiguous."""


def same_step(rows: RightRows, session: Session) -> Iterator[Variation]:
    """Yield two variations, with different strides: one raises ``max_seq_len``, the other ``max_query_len``.

    The first one also raises lengths on the host, if the backend takes upper bounds and the step has any.
    """
    number = int(rows.problem.case.hash, 16)

    def judge(fill: Fill) -> Broken | None:
        return rows.wrong_in(session.run(fill))

    for index, maximum in enumerate(("max_seq_len", "max_query_len"), start=number):
        loosened = [Change(f"{maximum} above the batch's", _BOUNDS, partial(_loosened, maximum))]
        if maximum == "max_seq_len" and _may_have_host_bounds(session):
            what = "seq_lens_cpu and num_computed_tokens_cpu of decodes above those of the device"
            # It raises `max_seq_len`, too. So it is left out first, to be named only if the maximum alone does no harm.
            loosened.insert(0, Change(what, _HOST_BOUNDS, partial(_loosened, HOST_LENS)))
        by_rows = changed_step(Fill(), (*_stride_changes(rows, _ROW_FORMS, index), *loosened), judge)
        if rows.conventions.operand_strides == "rows":
            yield by_rows
        else:
            yield changed_step(Fill(), (*_stride_changes(rows, _FORMS, index), *loosened), judge, instead=by_rows)


def _may_have_host_bounds(session: Session) -> bool:
    if session.backend.conventions.host_lens == "exact":
        return False
    step = replace(session.prepared().step, loose=(HOST_LENS,))
    calls = forward_calls_of(step, session.backend.features, session.threshold)
    return any(not torch.equal(call.common.seq_lens_cpu, call.common.seq_lens.cpu()) for call in calls)


def _loosened(name: str, fill: Fill) -> Fill:
    return replace(fill, loose=(*fill.loose, name))


def _stride_changes(rows: RightRows, known: Sequence[tuple[StrideForm, ...]], number: int) -> Iterator[Change[Fill]]:
    problem, plain = rows.problem, strides_of(rows.problem)
    forms = known[number % len(known)]
    heads = {"query": problem.query, "key": problem.keys, "value": problem.values}
    for name, usual in zip(("query", "key", "value", "output"), forms, strict=False):
        if name in ("key", "value") and problem.writes_nothing:
            continue
        form = usual
        if form == "contiguous" and name in heads and 1 in heads[name].shape[:2]:
            form = "odd"
        elif form == "transposed" and name == "output" and problem.layer.mla is not None:
            form = "padded"  # the output of a latent layer is ``[T, H * V]``
        if form != getattr(plain, name):
            meaning = f"a stride of {name} is taken for granted"
            yield Change(
                f"strides.{name}: {form}", meaning, partial(_with_strides, replace(plain, **{name: form}), name)
            )


def _with_strides(wanted: StridesSpec, name: str, fill: Fill) -> Fill:
    return replace(fill, strides=replace(fill.strides or wanted, **{name: getattr(wanted, name)}))


# Rearranged batches, which must not change outputs: order, pages and neighbours of requests, and unused room.

_ROWS = "the output of a row depends on what is beside it in the batch"
_PAGES = "pages are not found through the block table alone"
_ROOM = "the output depends on room that the batch does not use: the width of the block table, or padding"

_COLUMNS, _PADDING = 5, PaddingSpec(requests=2, tokens=3)

UNCUT = ("paged", "encoder_only", "cross", "mla", "local", "spec_decode", "tree", "fast_prefill")
"""Paths whose requests are independent, so that any subset of them makes a batch."""

_UNPADDED = ("encoder_only", "cross", "micro_batch", "pcp")


def same_requests(rows: RightRows, session: Session) -> Iterator[Variation]:
    """Yield variations of the batch's arrangement."""
    problem = rows.problem
    plain = Arrangement(tuple(range(len(problem.requests))))
    for group in _alone(problem):  # within the builder's bounds, on an impl that has seen the batch
        afresh = partial(_judge_afresh, rows, session)
        yield changed_step(plain, group, partial(_judge, rows, session), afresh=afresh)
    changes = tuple(_recomposed(problem, padding_for(session)))
    if changes:
        largest = plain
        for change in changes:
            largest = change.alter(largest)
        bounds = tuple(arranged(problem, how) for how in (largest, replace(largest, which=plain.which)))
        made = Session(session.backend, problem, session.device, bounds, pool=session.pool)
        yield changed_step(plain, changes, partial(_judge, rows, made))


def _judge(rows: RightRows, session: Session, how: Arrangement) -> Broken | None:
    problem = arranged(rows.problem, how)
    return rows.wrong_in(session.beside(problem, is_judged=True).run(images=False), how)


def _judge_afresh(rows: RightRows, session: Session, how: Arrangement) -> Broken | None:
    made = Session(session.backend, rows.problem, session.device, pool=session.pool)
    return _judge(rows, made, how)


def _alone(problem: Problem) -> Iterator[tuple[Change[Arrangement], ...]]:
    """Yield groups of changes to apply one after another: other pages for all requests; one request without the others.

    Half of the cases have another order in other pages. Their totals and maxima are equal, so a plan that is kept for
    equal totals and maxima is wrong.
    """
    count = len(problem.requests)
    elsewhere = Change[Arrangement]("the requests in other pages of a pool", _PAGES, partial(replace, elsewhere=True))
    turned = [_ordered((*range(1, count), 0))] if int(problem.case.hash, 16) // 2 % 2 and count > 1 else []
    if problem.has_pool:
        yield (*(turned if problem.case.batch.path.name != "micro_batch" else ()), elsewhere)
    one = int(problem.case.hash, 16) % len(problem.requests)
    if problem.case.batch.path.name in UNCUT and count > 1 and problem.requests[one].num_keys:
        yield (Change(f"request {one} alone", _ROWS, partial(_of, (one,))),)


def _recomposed(problem: Problem, padding: PaddingSpec | None) -> Iterator[Change[Arrangement]]:
    """Yield the changes of one step: other neighbours and another order, a wider block table, and padding."""
    path = problem.case.batch.path.name
    count = len(problem.requests)
    number = int(problem.case.hash, 16)
    backwards = tuple(reversed(range(count)))
    one = number // 3 % count
    if path in UNCUT and number % 3 == 0:
        more = (*backwards, one)
        what = f"the requests {_listed(more)}, in this order and other pages"
        yield Change(what, _ROWS, lambda how: replace(how, which=more, elsewhere=True))
    elif path in UNCUT and number % 3 == 1 and count > 2:
        yield _ordered(tuple(i for i in backwards if i != one))
    elif path != "micro_batch" and count > 1:
        yield _ordered(backwards if number % 2 else (*range(1, count), 0))
    if problem.has_pool and not problem.parts:
        what = f"{_COLUMNS} more columns of null pages in the block table"
        yield Change(what, _ROOM, lambda how: replace(how, spare_columns=_COLUMNS))
    if padding is not None:
        what = f"{padding.requests} padding requests and {padding.tokens} padding tokens"
        yield Change(what, _ROOM, lambda how: replace(how, padding=padding))


def padding_for(session: Session) -> PaddingSpec | None:
    """Return padding that the batch lacks and the backend accepts with such a batch, or None if there is none."""
    case = session.problem.case
    if case.batch.path.name in _UNPADDED or case.batch.padding.requests or case.batch.padding.tokens:
        return None
    uniform = PaddingSpec(requests=_PADDING.requests, tokens=_PADDING.requests * case.batch.max_query_len)
    for padding in (_PADDING, uniform):
        padded = replace(case, batch=replace(case.batch, padding=padding))
        if not unsupported_reasons(session.backend, padded):
            return padding
    return None


def _ordered(which: tuple[int, ...]) -> Change[Arrangement]:
    return Change(f"the requests {_listed(which)}, in this order", _ROWS, partial(_of, which))


def _of(which: tuple[int, ...], how: Arrangement) -> Arrangement:
    return replace(how, which=which)


def _listed(which: tuple[int, ...]) -> str:
    return ", ".join(map(str, which))


# `determinism`: the same input gives the same bits of output, LSE and cache, on the same impl and on a new one.
#
# A backend that declares `deterministic=False` must stay within the budget instead. Cannot see: differences between
# processes or machines, and randomness that happens to repeat in these steps.

_ROUNDING = (
    "equal inputs give different bits: probably the order of sums varies; a race, or memory that is read before it is "
    "written, can do the same; declare deterministic=False only if the difference is intended"
)
_BEYOND_ROUNDING = (
    "equal inputs give different outputs: memory is read before it is written, a call leaves state behind, or threads "
    "race"
)


def check_determinism(case: CheckedCase) -> Finding:
    """Compare two more steps with the first: one on the same impl, one on a new impl and builder."""
    session, first = case.first_step()
    rows = RightRows.of(case.problem, case.truth, first, case.backend.conventions)
    exact = rows.conventions.deterministic
    for how, again in _same_again(case.problem, session):
        fault = _other_bits(rows, again, how) if exact else None
        if fault is not None:
            return fault
        wrong = rows.wrong_in(again)
        if wrong is not None:
            return later_fault(wrong, how, _BEYOND_ROUNDING)
    notes = () if exact else ("compared within the allowed error: the backend declares deterministic=False",)
    return Holds({"rows": len(case.truth.out), "repeats": 2, "bitwise": int(exact)}, notes)


def _same_again(problem: Problem, session: Session) -> Iterator[tuple[str, Observation]]:
    yield "when the step is repeated on the same impl", session.run()
    new = Session(session.backend, problem, session.device, pool=session.pool)
    yield "when the step is repeated on a new impl and builder", new.run()


def _other_bits(rows: RightRows, again: Observation, how: str) -> Broken | None:
    for name, moved, changes in _moved_rows(rows, again):
        if not bool(moved.any()):
            continue
        size = float(changes[moved].max())
        named_rows = rows_in_words(rows.problem, moved, f" of the {name} have other bits")
        amount = "NaN or infinite" if size == math.inf else f"{size:.3g} times the allowed error"
        return Broken(
            f"{named_rows}, {how}; the largest difference is {amount}",
            {"rows_moved": int(moved.sum())},
            _BEYOND_ROUNDING if size > 1 else _ROUNDING,
        )
    return None


def _moved_rows(rows: RightRows, again: Observation) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, changed rows bool ``[T]``, changes ``[T, H]`` in budgets) of output and LSE."""
    truth = rows.truth
    first = rows.first
    moved = rows.compare(again).moved
    was, now = (output_values(seen.output[: len(moved)], truth.codes) for seen in (first, again))
    yield "output", moved, share_of_budget(_change(was, now), truth.budget)
    if first.lse is not None and again.lse is not None:
        was = first.lse[: len(moved)].double()
        now = again.lse[: len(moved)].double()
        change = _change(was, now) * (math.log(2) if rows.conventions.lse_base == "2" else 1.0)
        yield "LSE", differing_rows(was, now), lse_shares(change, torch.zeros_like(change), truth.budget.lse)


def _change(was: Tensor, now: Tensor) -> Tensor:
    """Return ``now`` minus ``was``, with 0 where both are the same infinity or NaN."""
    return (now - was).masked_fill((now == was) | (torch.isnan(now) & torch.isnan(was)), 0.0)


# `invariance`: an output does not depend on anything that must not matter.
#
# The same step runs again in other ways, and the rows that were right in the first step must be right again. If several
# things change at once, a finding names the smallest set that makes the difference. Cannot see: variations that this
# case does not use, and rows that are wrong in the first step.


def check_invariance(case: CheckedCase) -> Finding:
    """Run the case in further steps, until one is wrong in rows that were right in the first."""
    session, seen = case.first_step()
    rows = RightRows.of(case.problem, case.truth, seen, case.backend.conventions)
    done: list[str] = []
    others = repetitions(rows, session)
    # State kept from other steps disturbs every variation, so run one repetition first, which reports it as such.
    variations = same_step(rows, session), same_requests(rows, session), other_geometry(rows, session), others
    for variation in chain(islice(others, 1), *variations):
        what = variation.what
        try:
            wrong = variation.wrong()
        except StageError as failure:
            if failure.raised.may_end_the_device or variation.instead is None:
                raise
            done.append(f"not held against the backend: {failure.raised.in_words}")
            wrong, what = variation.instead.wrong(), variation.instead.what
        if wrong is not None and not bool(rows.is_right.all() and rows.lse_is_right.all()):
            return replace(wrong, meaning=f"{UNKNOWN}the first step has wrong rows, too")
        if wrong is not None:
            return wrong
        done.append(what)
    return Holds({"rows": int(rows.is_right.all(dim=1).sum()), "variations": len(done)}, tuple(done))


CHECKS = {"determinism": Check(check_determinism), "invariance": Check(check_invariance)}
