"""The check ``bitwise``: the first change of a step that changes a bit of its rows, as a measured level.

A step runs again with one change at a time, on one impl and builder, and its output is compared bit for bit with that
of the first run. No truth is used: a row may be wrong, and have equal bits. Equal are also two NaN, and 0 and -0.

Cannot see: changes that the case does not allow, other processes and machines, and the LSE.
"""

import base64
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attncheck.harness.checks.cudagraph.check import level_for, unexamined_reasons
from attncheck.harness.checks.cudagraph.probes import Bucket, Probe, ProbeStep
from attncheck.harness.checks.cudagraph.recorder import recorder_for
from attncheck.harness.checks.cudagraph.replay import (
    CapturedBucket,
    GraphSession,
    ProbedBackend,
    ProbeProblems,
    refused_batches,
)
from attncheck.harness.checks.findings import Broken, Finding, Holds
from attncheck.harness.checks.history import LoopStep, step_of_spans, takes_several_steps
from attncheck.harness.checks.interface import Check, CheckedCase
from attncheck.harness.checks.invariance import UNCUT, padding_for
from attncheck.harness.driver.foreign_code import StageError, stage_named, unsupported_reasons
from attncheck.harness.driver.observation import Observation
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.pages import Request
from attncheck.harness.problem.problem import Arrangement, Problem, arranged
from attncheck.reference.spec import AttentionCGSupport
from attncheck.reference.step_spec import PaddingSpec
from attncheck.reports.run_file.bits import CLAIMED, RUNGS, Bits, Rung, RungResult

_MOST_ROWS = 1024
"""Most rows of a case whose record has a digest of each."""

_LONGEST_VERIFIED = 8
"""Most tokens of each request in a graph of uniform batches."""


_Steps = tuple[LoopStep, ...] | str
"""The steps of a rung, or why the case has none."""


def _in_other_pages(case: CheckedCase) -> _Steps:
    return (_arranged(case.problem, elsewhere=True),) if case.problem.has_pool else "the layer has no pages"


def _in_other_order(case: CheckedCase) -> _Steps:
    count = len(case.problem.requests)
    if case.problem.case.batch.path.name == "micro_batch":
        return "another order changes which requests are in a micro-batch"
    return (_arranged(case.problem, *reversed(range(count))),) if count > 1 else "the batch has one request"


def _beside_others(case: CheckedCase) -> _Steps:
    """Return steps of the first and of the last request alone, and one of all requests twice."""
    problem = case.problem
    path, count = problem.case.batch.path.name, len(problem.requests)
    if path not in UNCUT:
        return f"path {path} cuts the batch in parts"
    ends = [one for one in dict.fromkeys((0, count - 1)) if count > 1 and problem.requests[one].num_keys]
    twice = _arranged(problem, *range(count), *range(count), elsewhere=True)
    return (*(_arranged(problem, one) for one in ends), twice)


def _padded(case: CheckedCase) -> _Steps:
    """Return the step with padding requests and tokens, or without them if the case has some."""
    own = case.problem.case.batch.padding
    padding = PaddingSpec() if own.requests or own.tokens else padding_for(case.first_step()[0])
    return "no padding is possible" if padding is None else (_arranged(case.problem, padding=padding),)


def _arranged(problem: Problem, *which: int, elsewhere: bool = False, padding: PaddingSpec | None = None) -> LoopStep:
    """Return the step of these requests, or of all if none is given."""
    how = Arrangement(which or tuple(range(len(problem.requests))), elsewhere=elsewhere, padding=padding)
    return LoopStep(arranged(problem, how), how.rows_of(problem))


def _in_chunks(case: CheckedCase) -> _Steps:
    """Return two steps: the first halves of the requests' rows, and the rest after more cached tokens."""
    halves = [(i, each, each.first_position + each.rows // 2) for i, each in _several_rows(case.problem)]
    first = [(i, each.first_position, half) for i, each, half in halves]
    return _cut(case.problem, first, [(i, half, each.num_keys) for i, each, half in halves])


def _as_decodes(case: CheckedCase) -> _Steps:
    """Return a step of the last row of each request that has several."""
    return _cut(case.problem, [(i, each.num_keys - 1, each.num_keys) for i, each in _several_rows(case.problem)])


def _several_rows(problem: Problem) -> list[tuple[int, Request]]:
    return [(i, request) for i, request in enumerate(problem.requests) if request.rows > 1]


def _cut(problem: Problem, *steps: list[tuple[int, int, int]]) -> _Steps:
    """Return a step for each list of spans: a request's index, and the first position and the end of its rows."""
    if not takes_several_steps(problem):
        return "several steps would change which keys a row sees"
    if not all(steps):
        return "every request has one row"
    return tuple(step_of_spans(problem, number, spans) for number, spans in enumerate(steps))


_STEPS: dict[Rung, Callable[[CheckedCase], _Steps]] = {
    "repetition": lambda case: (LoopStep(case.problem, torch.arange(len(case.problem.query))),),
    "pages": _in_other_pages,
    "order": _in_other_order,
    "neighbours": _beside_others,
    "padding": _padded,
    "chunks": _in_chunks,
    "decode": _as_decodes,
    "splits": lambda _case: "no member of vLLM's contract sets the number of splits",
}
"""By rung. The rung ``graph`` has a session of its own."""


def check_bitwise(case: CheckedCase) -> Finding:
    """Measure all rungs. Fail if the backend declares ``batch_invariant``, and a rung breaks that this promises."""
    _, first = case.first_step()
    values = _output_of(first, case.problem)
    bits = Bits(rungs=tuple(_measured(case)), **_digests(values))
    broken = bits.first_broken
    figures = {"rows": len(values), "rungs_equal": sum(rung.outcome == "equal" for rung in bits.rungs)}
    unexamined = ", ".join(rung.name for rung in bits.rungs if rung.outcome == "not examined")
    notes = (f"equal bits up to {bits.level}", f"not examined: {unexamined}")
    if broken is None:
        return Holds(figures, notes, bits=bits)
    figures |= {"rows_moved": broken.rows_moved} | ({} if broken.ulps is None else {"ulps": broken.ulps})
    what = f"bits depend on {broken.name}"
    size = "NaN in one of them" if broken.ulps is None else f"{broken.ulps} units in the last place"
    where = (
        f"{broken.rows_moved} of {broken.rows} compared rows have other bits; the largest difference is {size}, "
        f"at row {broken.row}, head {broken.head} ({case.problem.row_name(broken.row)})"
    )
    conventions = case.backend.conventions
    is_promised = conventions.batch_invariant and conventions.deterministic and broken.name in CLAIMED
    if not is_promised:
        return Holds(figures, (*notes, f"{what}: {where}"), bits=bits)
    finding = f"{what}; the backend declares batch_invariant"
    return Broken(f"{what}: {where}; the backend declares batch_invariant", figures, finding=finding, bits=bits)


def _measured(case: CheckedCase) -> Iterator[RungResult]:
    """Yield the result of each rung. All steps but those of a graph share an impl, a builder, and its maxima."""
    steps = {name: _supported(case, steps_of(case)) for name, steps_of in _STEPS.items()}
    problems = [step.problem for some in steps.values() if not isinstance(some, str) for step in some]
    own = Session(case.backend, case.problem, case.device, tuple(problems), pool=case.first_step()[0].pool)
    base = _output_of(own.run(images=False), case.problem)
    for name in RUNGS:
        try:
            with stage_named(f"of the rung {name}"):
                yield _by_graph(case) if name == "graph" else _by_steps(name, base, own, steps[name])
        except StageError as failure:
            # The check `cudagraph` reports what a backend raises in a capture.
            is_due = name != "graph" and not failure.raised.is_refusal
            if is_due or failure.raised.may_end_the_device:
                raise
            yield _unknown(name, failure.raised.in_words)


def _supported(case: CheckedCase, steps: _Steps) -> _Steps:
    if isinstance(steps, str):
        return steps
    reasons = [reason for step in steps for reason in unsupported_reasons(case.backend, step.problem.case)]
    return f"not declared: {'; '.join(dict.fromkeys(reasons))}" if reasons else steps


def _by_steps(name: Rung, base: Tensor, own: Session, steps: _Steps) -> RungResult:
    if isinstance(steps, str):
        return _unknown(name, steps)
    seen = [own.beside(step.problem, is_judged=True).run(images=False) for step in steps]
    outputs = [_output_of(each, step.problem) for each, step in zip(seen, steps, strict=True)]
    return _result(name, base, torch.cat([step.rows for step in steps]), torch.cat(outputs))


def _unknown(name: Rung, reason: str) -> RungResult:
    return RungResult(name=name, outcome="not examined", reason=reason)


# The rung `graph`: a uniform batch by a graph that was captured for twice as many requests.


def _by_graph(case: CheckedCase) -> RungResult:
    problem, unknown = case.problem, partial(_unknown, "graph")
    lengths = {request.rows for request in problem.requests}
    query_len = max(lengths)
    if reasons := unexamined_reasons(problem.case):
        return unknown("; ".join(reasons))
    if len(lengths) > 1 or query_len > _LONGEST_VERIFIED:
        return unknown("no uniform batch of short requests")
    needed = AttentionCGSupport.UNIFORM_BATCH if query_len > 1 else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    if (declared := level_for(case.backend, problem)).value < needed.value:
        return unknown(f"the builder declares {declared.name}")
    count = len(problem.requests)
    bucket = Bucket(2 * count, 2 * count * query_len, query_len)
    step = ProbeStep(tuple((request.rows, request.num_keys) for request in problem.requests))
    probe = Probe("bitwise", needed, "", (bucket,), (step,), drafts=query_len - 1)
    problems = ProbeProblems(problem.case, problem.seed, case.device)
    if refused := refused_batches(case.backend, probe, problems):
        return unknown(f"not declared: {refused}")
    session = GraphSession(ProbedBackend(case.backend, problems, case.device, recorder_for(case.device)), probe)
    captured = session.capture(bucket)
    if not isinstance(captured, CapturedBucket):
        return unknown(str(captured))
    padded = session.problem(step)
    plain = _arranged(padded, padding=PaddingSpec()).problem
    (eager,) = session.run(replace(step, bucket=None), plain)
    (replayed,) = session.run(step, padded, captured.graphs)
    base, by_graph = (_output_of(each.seen, plain) for each in (eager, replayed))
    return _result("graph", base, torch.arange(len(base)), by_graph)


# Bits of an output, compared and as digests.


def _output_of(seen: Observation, problem: Problem) -> Tensor:
    """Return the real rows ``[T, H, Dv]`` in the layer's dtype, or as the codes of a quantised output, on the host."""
    output = seen.output[: len(problem.query)].cpu()
    return output if output.itemsize == 1 else output.to(problem.dtype)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_BESIDE_NAN = torch.iinfo(torch.int64).max
"""The difference between NaN and a number."""


def _numbered(values: Tensor) -> Tensor:
    """Return int64: numbers that grow by one from each value of the dtype to the next larger one. NaN has no order."""
    codes = values.contiguous().view(_INTEGERS[values.itemsize])
    lowest = torch.iinfo(codes.dtype).min
    numbers = codes.long()
    return torch.where(numbers < 0, lowest - numbers, numbers)


def _result(name: Rung, base: Tensor, rows: Tensor, now: Tensor) -> RungResult:
    """Return how ``now [t, H, Dv]`` differs from the ``rows`` of ``base``, int64 ``[t]``."""
    was = base[rows]
    nan_before, nan_now = torch.isnan(was), torch.isnan(now)
    apart = (_numbered(was) - _numbered(now)).abs().masked_fill(nan_before & nan_now, 0)
    apart = apart.masked_fill(nan_before ^ nan_now, _BESIDE_NAN).amax(dim=-1)
    place, head = divmod(int(apart.argmax()), apart.shape[1])
    if not (largest := int(apart[place, head])):
        return RungResult(name=name, outcome="equal", rows=len(rows))
    return RungResult(
        name=name,
        outcome="differs",
        rows=len(rows),
        rows_moved=int(apart.any(dim=1).sum()),
        ulps=None if largest == _BESIDE_NAN else largest,
        row=int(rows[place]),
        head=head,
    )


def _digests(values: Tensor) -> dict[str, str]:
    """Return the fields ``digest`` and ``row_digests`` of a record, which are equal for equal bits."""
    numbers = _numbered(values).masked_fill(torch.isnan(values), _BESIDE_NAN)
    rows = [row.tobytes() for row in numbers.flatten(1).numpy()]
    whole = hashlib.blake2b(b"".join(rows), digest_size=8).hexdigest()
    if len(rows) > _MOST_ROWS:
        return {"digest": whole}
    each = [base64.b64encode(hashlib.blake2b(row, digest_size=3).digest()).decode() for row in rows]
    return {"digest": whole, "row_digests": "".join(each)}


CHECKS = {"bitwise": Check(check_bitwise)}
