"""Rearranged batches, which must not change outputs: order, pages and neighbours of requests, and unused room."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from attncheck.harness.checks.findings import Broken
from attncheck.harness.checks.invariance.changes import Change, Variation
from attncheck.harness.checks.invariance.right_rows import RightRows
from attncheck.harness.driver.foreign_code import declared_reasons
from attncheck.harness.driver.observation import Raised
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.arrangement import Arrangement, arranged
from attncheck.harness.problem.problem import Problem
from attncheck.reference.spec import PaddingSpec

_ROWS = "the output of a row depends on what is beside it in the batch"
_PAGES = "pages are not found through the block table alone"
_ROOM = "the output depends on room that the batch does not use: the width of the block table, or padding"

_COLUMNS, _PADDING = 5, PaddingSpec(requests=2, tokens=3)

_UNCUT = ("paged", "encoder_only", "cross", "mla", "local", "spec_decode", "tree", "fast_prefill")
"""Paths whose requests are independent, so that any subset of them makes a batch."""

_UNPADDED = ("encoder_only", "cross", "micro_batch")


def same_requests(rows: RightRows, session: Session) -> Iterator[Variation[Arrangement]]:
    """Yield variations of the batch's arrangement."""
    problem = rows.problem
    plain = Arrangement(tuple(range(len(problem.requests))))
    for change in _alone(problem):  # within the builder's bounds, on an impl that has seen the batch
        yield Variation(plain, (change,), partial(_judge, rows, session), afresh=partial(_judge_afresh, rows, session))
    changes = tuple(_recomposed(problem, _padding_for(session)))
    if changes:
        largest = plain
        for change in changes:
            largest = change.alter(largest)
        bounds = tuple(arranged(problem, how) for how in (largest, replace(largest, which=plain.which)))
        made = Session(session.backend, problem, session.device, bounds, pool=session.pool)
        yield Variation(plain, changes, partial(_judge, rows, made))


def _judge(rows: RightRows, session: Session, how: Arrangement) -> Broken | Raised | None:
    problem = arranged(rows.problem, how)
    return rows.wrong_in(session.beside(problem, is_judged=True).run(images=False), how)


def _judge_afresh(rows: RightRows, session: Session, how: Arrangement) -> Broken | Raised | None:
    made = Session(session.backend, rows.problem, session.device, pool=session.pool)
    return _judge(rows, made, how)


def _alone(problem: Problem) -> Iterator[Change[Arrangement]]:
    """Yield changes to apply one at a time: other pages for all requests, and one request without the others."""
    if problem.has_pool:
        yield Change("the requests in other pages of a pool", _PAGES, partial(replace, elsewhere=True))
    count, one = len(problem.requests), int(problem.case.hash, 16) % len(problem.requests)
    if problem.case.batch.path.name in _UNCUT and count > 1 and problem.requests[one].num_keys:
        yield Change(f"request {one} alone", _ROWS, partial(_of, (one,)))


def _recomposed(problem: Problem, padding: PaddingSpec | None) -> Iterator[Change[Arrangement]]:
    """Yield the changes of one step: other neighbours and another order, a wider block table, and padding."""
    path = problem.case.batch.path.name
    count, number = len(problem.requests), int(problem.case.hash, 16)
    backwards, one = tuple(reversed(range(count))), number // 3 % count
    if path in _UNCUT and number % 3 == 0:
        more = (*backwards, one)
        what = f"the requests {_listed(more)}, in this order and other pages"
        yield Change(what, _ROWS, lambda how: replace(how, which=more, elsewhere=True))
    elif path in _UNCUT and number % 3 == 1 and count > 2:
        yield _ordered(tuple(i for i in backwards if i != one))
    elif path != "micro_batch" and count > 1:
        yield _ordered(backwards if number % 2 else (*range(1, count), 0))
    if problem.has_pool and not problem.parts:
        what = f"{_COLUMNS} more columns of null pages in the block table"
        yield Change(what, _ROOM, lambda how: replace(how, spare_columns=_COLUMNS))
    if padding is not None:
        what = f"{padding.requests} padding requests and {padding.tokens} padding tokens"
        yield Change(what, _ROOM, lambda how: replace(how, padding=padding))


def _padding_for(session: Session) -> PaddingSpec | None:
    """Return padding that the batch lacks and the backend accepts with such a batch, or None if there is none."""
    case = session.problem.case
    if case.batch.path.name in _UNPADDED or case.batch.padding.requests or case.batch.padding.tokens:
        return None
    uniform = PaddingSpec(requests=_PADDING.requests, tokens=_PADDING.requests * case.batch.max_query_len)
    for padding in (_PADDING, uniform):
        specs = (case.layer, case.cache, replace(case.batch, padding=padding))
        if not declared_reasons(partial(session.backend.unsupported_reasons, *specs)):
            return padding
    return None


def _ordered(which: tuple[int, ...]) -> Change[Arrangement]:
    return Change(f"the requests {_listed(which)}, in this order", _ROWS, partial(_of, which))


def _of(which: tuple[int, ...], how: Arrangement) -> Arrangement:
    return replace(how, which=which)


def _listed(which: tuple[int, ...]) -> str:
    return ", ".join(map(str, which))
