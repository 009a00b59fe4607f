"""Batches that are timed in addition to the case's own, and the comparison of their times.

These are the decodes and the prefills of a mixed batch alone, and neighbours of nearly the same shape. Neighbours
reveal a batch that is fast only because the backend special-cases its shape. Cannot see: a special case that is less
than :data:`TOO_FAST` times as fast, or that covers the neighbours as well.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from attncheck.cases.model import Case
from attncheck.errors import QuestionError
from attncheck.harness.checks.timing.sampling import median_interval
from attncheck.harness.problem.problem import Problem, build_problem
from attncheck.reference.spec import PaddingSpec, RequestSpec
from attncheck.reports.run_file.timings import StepPart

DISTANCES = (1, 8)
"""Numbers of tokens by which neighbours are shorter. One token breaks all alignment, which slows honest kernels too."""

TOO_FAST = 2.0
"""Ratio that all neighbours' times must exceed for the batch to count as special-cased."""

NOTABLE = 1.25
"""Ratio above which a note is added."""

FEW_SAMPLES, MORE_SAMPLES = 3, 10
"""Samples of each side: few to see that there is no difference, more to confirm one."""

Take = Callable[[], int]


def parts_of(problem: Problem) -> dict[StepPart, Problem]:
    """Return the decodes and the prefills of a mixed batch, each without padding. Empty for any other batch."""
    requests = problem.case.batch.requests
    decodes = tuple(request for request in requests if request.query_len == 1)
    prefills = tuple(request for request in requests if request.query_len > 1)
    if not decodes or not prefills or not problem.has_pool:
        return {}
    found: dict[StepPart, Problem] = {}
    parts: tuple[tuple[StepPart, tuple[RequestSpec, ...]], ...] = (("decode", decodes), ("prefill", prefills))
    for name, own in parts:
        part = _build(problem, name, own, PaddingSpec())
        if part is not None:
            found[name] = part
    return found


def neighbour_of(problem: Problem, distance: int) -> Problem | None:
    """Return the batch with every context ``distance`` tokens shorter, or every query if no request has a context.

    Return None if no request is long enough, or if the path allows no other query lengths. Query lengths of batches
    with a context stay the same.
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
    return _build(problem, f"{distance}-shorter", shorter, batch.padding)


def _shorter(request: RequestSpec, distance: int) -> RequestSpec:
    left = request.context_len - distance
    if left < max(1, request.shared_prefix):
        return request
    encoder_len = request.encoder_len
    if encoder_len is not None and encoder_len > distance:
        encoder_len -= distance
    return replace(request, seq_len=request.total_len - distance, encoder_len=encoder_len)


def _build(problem: Problem, name: str, requests: tuple[RequestSpec, ...], padding: PaddingSpec) -> Problem | None:
    """Return such a batch over the problem's cache, or None if no problem can be built from it."""
    case = problem.case
    try:
        batch = replace(case.batch, requests=requests, padding=padding)
        cache = replace(case.cache, num_blocks=problem.num_blocks) if problem.has_pool else case.cache
        changed: Case = replace(case, id=f"{case.id}.{name}", batch=batch, cache=cache)
        return build_problem(changed, problem.seed)
    except QuestionError:
        return None


@dataclass(frozen=True)
class Neighbour:
    """The time of a neighbour relative to the batch: the ratio of medians, and a lower bound of the ratio."""

    distance: int
    ratio: float
    least: float

    @property
    def is_notable(self) -> bool:
        """Whether a note reports the neighbour."""
        return self.least > NOTABLE

    @property
    def is_suspect(self) -> bool:
        """Whether the batch is faster than its shape explains."""
        return self.least > TOO_FAST


def compare(distance: int, own: Take, neighbour: Take) -> Neighbour:
    """Compare alternating samples of both, which must be warmed up. Take more samples only if the first ones differ."""
    owns, others = _in_turns(own, neighbour, FEW_SAMPLES)
    if median(others) <= NOTABLE * median(owns):
        return Neighbour(distance, median(others) / max(1.0, median(owns)), 0.0)
    owns, others = _in_turns(own, neighbour, MORE_SAMPLES)
    least = median_interval(others)[0] / max(1.0, median_interval(owns)[1])
    return Neighbour(distance, median(others) / max(1.0, median(owns)), least)


def _in_turns(own: Take, neighbour: Take, count: int) -> tuple[list[int], list[int]]:
    pairs = [(own(), neighbour()) for _ in range(count)]
    return [mine for mine, _ in pairs], [theirs for _, theirs in pairs]
