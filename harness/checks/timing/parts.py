"""Which batches are timed beside the case's own: its decodes and its prefills alone, and neighbours of its shape.

All are of the same layer and fit the same cache. Must not know: backends, clocks.
"""

from dataclasses import replace

from attncheck.cases.model import Case
from attncheck.errors import QuestionError
from attncheck.harness.problem.problem import Problem, build_problem
from attncheck.reference.spec import PaddingSpec, RequestSpec
from attncheck.reports.run_file.timings import StepPart

DISTANCES = (1, 8)
"""How many tokens a neighbour is shorter. At 1 nothing is aligned any more, which costs honest kernels something."""


def parts_of(problem: Problem) -> dict[StepPart, Problem]:
    """The decodes and the prefills of a mixed batch, each without padding; empty for any other batch."""
    requests = problem.case.batch.requests
    decodes = tuple(request for request in requests if request.query_len == 1)
    prefills = tuple(request for request in requests if request.query_len > 1)
    if not decodes or not prefills or not problem.has_pool:
        return {}
    found: dict[StepPart, Problem] = {}
    parts: tuple[tuple[StepPart, tuple[RequestSpec, ...]], ...] = (("decode", decodes), ("prefill", prefills))
    for name, own in parts:
        part = _asked(problem, name, own, PaddingSpec())
        if part is not None:
            found[name] = part
    return found


def neighbour_of(problem: Problem, distance: int) -> Problem | None:
    """The batch with every context so many tokens shorter; with every query, where there is no such context.

    None: no request is long enough. Query lengths of batches with a context are the same.
    """
    batch = problem.case.batch
    shorter = tuple(_shorter(request, distance) for request in batch.requests)
    if shorter == batch.requests and all(r.query_len > distance and not r.context_len for r in batch.requests):
        if batch.path.name not in ("paged", "mla", "encoder_only", "local"):
            return None
        shorter = tuple(
            replace(r, query_len=r.query_len - distance, seq_len=r.total_len - distance) for r in batch.requests
        )
    if shorter == batch.requests:
        return None
    return _asked(problem, f"{distance}-shorter", shorter, batch.padding)


def _shorter(request: RequestSpec, distance: int) -> RequestSpec:
    left = request.context_len - distance
    if left < max(1, request.shared_prefix):
        return request
    encoder_len = request.encoder_len
    if encoder_len is not None and encoder_len > distance:
        encoder_len -= distance
    return replace(request, seq_len=request.total_len - distance, encoder_len=encoder_len)


def _asked(problem: Problem, name: str, requests: tuple[RequestSpec, ...], padding: PaddingSpec) -> Problem | None:
    """Such a batch over the problem's cache; None: it is no question."""
    case = problem.case
    try:
        batch = replace(case.batch, requests=requests, padding=padding)
        cache = replace(case.cache, num_blocks=problem.num_blocks) if problem.has_pool else case.cache
        asked: Case = replace(case, id=f"{case.id}.{name}", batch=batch, cache=cache)
        return build_problem(asked, problem.seed)
    except QuestionError:
        return None
