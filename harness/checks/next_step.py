"""The second half of ``numerics``: a step after another batch must be as right as the first.

A model runner keeps an impl and a builder for as long as it lives, and feeds them batch after batch; metadata padded
for a captured graph carries maxima that are upper bounds. What a backend keeps from its first call, or takes from a
maximum, shows only then. Cannot see: state that returns to what it was. Needs further runs of the backend.
"""

from dataclasses import replace
from functools import partial

from attncheck.cases.model import Case
from attncheck.cases.paths import implied_path
from attncheck.harness.checks.findings import Broken, Finding
from attncheck.harness.checks.numerics import check_numerics as judge
from attncheck.harness.driver.foreign_code import declared_reasons
from attncheck.harness.driver.observation import Raised
from attncheck.harness.driver.session import Fill, Session
from attncheck.harness.problem.problem import Problem, build_problem
from attncheck.harness.truth.truth import Truth
from attncheck.reference.spec import PaddingSpec, RequestSpec

_FIXED_ROWS = ("spec_decode", "tree", "fast_prefill")
_CUT_BATCHES = ("cascade", "split_kv", "dcp", "micro_batch")


def check_next_step(problem: Problem, truth: Truth, session: Session, first: Finding) -> Finding:
    """``first`` if the next step is right as well, else what is wrong with it.

    A new impl and builder see other batches first, so that what they keep of them is not what they need.
    """
    others = [
        build_problem(other, problem.seed + 1 + number)
        for number, other in enumerate(other_batches(problem.case))
        if not declared_reasons(partial(session.backend.unsupported_reasons, other.layer, other.cache, other.batch))
    ]
    later = session
    if others:
        later = Session(session.backend, others[0], session.device, later=(*others[1:], problem))
    for number, other in enumerate(others):
        later = later.beside(other) if number else later
        moved_on = later.run(images=False)
        if isinstance(moved_on, Raised):
            return replace(moved_on, stage=f"{moved_on.stage} of another batch")
    later = later.beside(problem) if others else session
    wrong = _judge_again(problem, truth, later, Fill(loose_bounds=True))
    if wrong is None:
        return first
    if isinstance(wrong, Raised):
        return replace(wrong, stage=f"{wrong.stage} of a second step")
    exact = _judge_again(problem, truth, later, Fill())
    if exact is None:
        return Broken(
            f"with max_query_len and max_seq_len above the batch's: {wrong.summary}",
            wrong.figures,
            "the maxima of the metadata may be upper bounds; lengths are in query_start_loc and seq_lens",
            wrong.details,
        )
    return Broken(
        f"right as the first batch, wrong after others: {wrong.summary}",
        wrong.figures,
        "something is kept from an earlier call, or the backend is not deterministic",
        wrong.details,
    )


def other_batches(case: Case) -> tuple[Case, Case]:
    """Batches for the same layer: one of the same shape with other pages and lengths, and one of half the lengths.

    A path that fixes the number of rows keeps it; where a path is a way of cutting the batch, an ordinary step comes
    between, as in a model runner.
    """
    path = case.batch.path
    requests = list(case.batch)
    alike = [_resized(r, r.query_len, r.context_len - 1) for r in requests]
    rows = [r.query_len if path.name in _FIXED_ROWS else -(-r.query_len // 2) for r in requests]
    halves = zip(reversed(requests), reversed(rows), strict=True)
    smaller = [_resized(r, query_len, r.context_len // 2) for r, query_len in halves]
    smaller = [replace(r, encoder_len=None if r.encoder_len is None else r.encoder_len // 2) for r in smaller]
    cache = replace(case.cache, num_blocks=None)
    if path.name in _CUT_BATCHES:
        path = implied_path(case.layer)

    def variant(name: str, others: list[RequestSpec], padding: PaddingSpec) -> Case:
        batch = replace(case.batch, requests=tuple(others), padding=padding, path=path)
        return replace(case, id=f"{case.id}.{name}", batch=batch, cache=cache, tolerance=None)

    return variant("alike", alike, case.batch.padding), variant("smaller", smaller, PaddingSpec())


def _resized(request: RequestSpec, query_len: int, context_len: int) -> RequestSpec:
    """One such request, of other lengths, without a shared prefix; a context there was does not vanish."""
    least = 1 if request.context_len > 0 else 0
    seq_len = query_len + max(least, context_len)
    return RequestSpec(query_len=query_len, seq_len=seq_len, encoder_len=request.encoder_len)


def _judge_again(problem: Problem, truth: Truth, session: Session, fill: Fill) -> Broken | Raised | None:
    """What is wrong with one more step; None: nothing."""
    seen = session.run(fill, images=False)
    if isinstance(seen, Raised):
        return seen
    finding = judge(problem, truth, seen)
    return finding if isinstance(finding, Broken) else None
