"""A decode loop: a case's requests start some steps earlier and gain rows, keys and pages in each step.

The cache is filled once; the backend writes every later key in the step that adds it. A row sees the same keys as in
the case, so the case's truth applies.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend
from attncheck.cases.consistency import implied_path
from attncheck.harness.checks.findings import Broken
from attncheck.harness.checks.invariance.right_rows import RightRows
from attncheck.harness.driver.foreign_code import StageError, declared_reasons
from attncheck.harness.driver.observation import Raised
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.page_layout import PageLayout
from attncheck.harness.problem.problem import Problem, Request
from attncheck.harness.truth.tolerance import Budget
from attncheck.reference.spec import AttentionType, RequestSpec

_PATHS = ("paged", "mla", "local", "spec_decode", "micro_batch")
"""Paths whose truth has the budget of a single call that sees all keys."""

_CONTEXT, _LONGEST = 8, 64
"""Most rows of the first and of the second step that are not rows of the case."""


@dataclass(frozen=True)
class LoopStep:
    """One step. ``rows``: int64, the case's row for each row of the step, or -1 if the case has no such row."""

    problem: Problem
    rows: Tensor

    @property
    def in_words(self) -> str:
        """The step in words, for a message."""
        lens = ", ".join(f"{r.query_len} of {r.num_keys}" for r in self.problem.requests[:4])
        more = "" if len(self.problem.requests) <= 4 else f", ... ({len(self.problem.requests)} requests)"
        return f"new tokens {lens}{more}"


def check_decode_loop(rows: RightRows, session: Session) -> Broken | Raised | None:
    """Return what is wrong with a step of the loop. Return None if all are right, or if the case allows no loop."""
    steps = loop_steps(rows.problem)
    if len(steps) < 2 or not all(_is_declared(session.backend, step.problem) for step in steps):
        return None
    try:
        going = Session(
            session.backend,
            steps[0].problem,
            session.device,
            tuple(step.problem for step in steps[1:]),
            pool=session.pool,
        )
        for number, step in enumerate(steps):
            going = going.following(step.problem) if number else going
            wrong = _judged(rows, step).wrong_in(going.run(images=False))
            if isinstance(wrong, Raised):
                return replace(wrong, stage=f"{wrong.stage} of step {number + 1} of a decode loop")
            if wrong is not None:
                return _as_finding(wrong, steps, number)
    except StageError as failure:
        return replace(failure.raised, stage=f"{failure.raised.stage} of a decode loop")
    return None


def loop_steps(problem: Problem) -> tuple[LoopStep, ...]:
    """Return up to three steps that build up the case's requests; empty if rows would see other keys.

    The first ends at the edge of a page, the second begins a page, and the third has the case's last rows.
    """
    case, layer = problem.case, problem.layer
    is_plain = layer.attn_type == AttentionType.DECODER and layer.is_causal and not problem.writes_nothing
    has_contexts = all(spec.context_len >= 0 and not spec.shared_prefix for spec in case.batch)
    if not is_plain or not has_contexts or case.batch.path.name not in _PATHS:
        return ()
    cuts = [_cuts(request, problem.cache.block_size) for request in problem.requests]
    spans = ([(i, own[n], own[n + 1]) for i, own in enumerate(cuts) if own[n] < own[n + 1]] for n in range(3))
    return tuple(_step(problem, number, own) for number, own in enumerate(spans) if own)


def _cuts(request: Request, block_size: int) -> tuple[int, int, int, int]:
    """Return the positions at which a request's three steps start, and at which the last one ends."""
    first, end = request.first_position, request.num_keys
    last = end - max(1, request.rows // 2)
    page = max((last - 1) // block_size * block_size, last - _LONGEST, 0)
    return min(first, max(0, page - _CONTEXT)), page, last, end


def _step(problem: Problem, number: int, spans: list[tuple[int, int, int]]) -> LoopStep:
    """Return step ``number``, in which request ``i`` of each span ``(i, start, end)`` adds these positions."""
    case, size = problem.case, problem.cache.block_size
    path = case.batch.path if case.batch.path.name == "local" else implied_path(problem.layer)
    specs = tuple(RequestSpec(query_len=end - start, seq_len=end) for _, start, end in spans)
    batch = replace(case.batch, requests=specs, path=path, padding=type(case.batch.padding)())
    requests, rows, tables = [], list[Tensor](), []
    for index, start, end in spans:
        whole = problem.requests[index]
        pages = -(-end // size)
        requests.append(
            replace(
                whole,
                rows=end - start,
                query_len=end - start,
                num_keys=end,
                cached=start,
                first_row=sum(len(own) for own in rows),
                pages=whole.pages[:pages],
            )
        )
        positions = torch.arange(start, end)
        of_case = positions - whole.first_position + whole.first_row
        rows.append(torch.where(positions >= whole.first_position, of_case, -1))
        # The columns after a request's pages name pages of other requests, as the table's last column does.
        table = problem.block_table[index].clone()
        table[pages:] = table[-1]
        tables.append(table)
    of_case = torch.cat(rows)
    layout = PageLayout(
        tuple(request.pages for request in requests), torch.stack(tables), problem.key_slots, problem.num_blocks
    )
    step = replace(
        problem,
        case=replace(case, id=f"{case.id}.loop-{number}", batch=batch, tolerance=None),
        requests=tuple(requests),
        query=problem.query[of_case % len(problem.query)],
        layout=layout,
    )
    return LoopStep(step, of_case)


def _judged(rows: RightRows, step: LoopStep) -> RightRows:
    """Return the right rows of a step, without rows that the case does not have. Bits are not compared."""
    truth, index = rows.truth, step.rows.clamp(min=0).to(rows.truth.out.device)
    own = Budget(truth.budget.norm[index], truth.budget.peak[index], truth.budget.lse[index])
    is_known = (step.rows >= 0).to(index.device)[:, None]
    return replace(
        rows,
        problem=step.problem,
        conventions=replace(rows.conventions, batch_invariant=False),
        truth=replace(truth, out=truth.out[index], lse=truth.lse[index], budget=own),
        is_right=rows.is_right[index] & is_known,
        lse_is_right=rows.lse_is_right[index] & is_known,
    )


def _is_declared(backend: type[AttentionBackend], problem: Problem) -> bool:
    case = problem.case
    return not declared_reasons(partial(backend.unsupported_reasons, case.layer, case.cache, case.batch))


def _as_finding(wrong: Broken, steps: tuple[LoopStep, ...], number: int) -> Broken:
    played = [f"step {n} of the loop: {step.in_words}" for n, step in enumerate(steps[: number + 1], start=1)]
    return replace(
        wrong,
        summary=f"right in one step, wrong in step {number + 1} of a decode loop: {wrong.summary}",
        meaning="something of an earlier step is kept, or what it wrote is not read, when requests gain rows and pages",
        details=(*wrong.details, *played),
    )
