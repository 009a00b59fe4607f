"""Reduce a failing case to a small one that fails alike."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from itertools import count
from typing import Any

from attncheck.cases.consistency import check_inputs, check_meaning, implied_path
from attncheck.cases.keys import DIFFERENT_KEYS
from attncheck.cases.model import Case
from attncheck.errors import SelectionError, SpecError
from attncheck.harness.fuzz.search import (
    SUITE,
    DrawnQuestion,
    Lengths,
    constants_of,
    declared_axes,
    few_and_small,
    questions,
)
from attncheck.harness.run.options import RunOptions
from attncheck.harness.run.run import Run
from attncheck.harness.run.selection import Selection
from attncheck.harness.workers.executor import Supervisor
from attncheck.harness.workers.pool import WorkerPool
from attncheck.harness.workers.process import WorkerError
from attncheck.harness.workers.worker import CaseServer
from attncheck.reference.spec import AttentionType, LayerSpec, modifiers_of_kind
from attncheck.reference.step_spec import BatchSpec, PaddingSpec, PathSpec, RequestSpec
from attncheck.reports.run_file.records import FALLEN_SHORT, Errored, Failed, Record

# Examines cases that no suite has with one backend in a process of its own. Loads no torch.
#
# A crash or a hang becomes a record, as in a run, and a fresh process examines the next cases.

_CASES_AT_ONCE = 256
"""Number of cases per request for declarations."""


@dataclass(frozen=True)
class ExaminedCase:
    """The result of one case. ``blind``: why it could not be examined; empty if it was."""

    records: tuple[Record, ...]
    blind: str = ""


class BackendProcess:
    """Examines drawn cases of the backend ``ref`` in a process of ``pool``, with the inputs of ``seed``.

    Raises:
        QuestionError: the backend cannot be loaded, or cannot run here, or the device is not there.
    """

    def __init__(self, ref: str, pool: WorkerPool, *, device: str | None, seed: int) -> None:
        nothing = Selection(suites=(), refs=(), cases=(), checks=None)
        options = RunOptions(backends=(ref,), device=device, seed=seed, cache=False)
        pool.start([ref])
        self.run = Run.open(nothing, options, pool)
        (self.backend,) = self.run.backends
        if not self.backend.is_loaded:
            raise SelectionError(f"backend {ref!r} cannot be examined: {self.backend.reason}")
        self._pool = pool
        self._supervisor = Supervisor(self.run.plan, self.run.backends, pool, self.run.environment)

    @property
    def device(self) -> str:
        """The device on which cases are examined."""
        return self.run.plan.device

    def examine(self, case: Case, checks: Sequence[str]) -> ExaminedCase:
        """Run ``checks`` on ``case``; its key must differ from those of all earlier cases."""
        blind = self._supervisor.blind
        known = len(blind)
        records = tuple(self._supervisor.examine_case(self.backend, case, tuple(checks), is_drawn=True))
        return ExaminedCase(records, str(blind[-1]) if len(blind) > known else "")

    def reasons_against(self, cases: Iterable[Case]) -> list[tuple[str, ...]]:
        """Return, for each of ``cases``, why the backend's declarations refuse it; empty if they accept it."""
        all_cases = tuple(cases)
        found = list[tuple[str, ...]]()
        for first in range(0, len(all_cases), _CASES_AT_ONCE):
            process = self._pool.process(self.backend.ref) or self._pool.restart(self.backend.ref)
            part = all_cases[first : first + _CASES_AT_ONCE]
            try:
                found += process.call(self._pool.limits.of_loading, CaseServer.reasons_against, part)
            except WorkerError as error:
                reason = f"backend {self.backend.ref!r} does not answer for its declarations: {error}"
                raise SelectionError(reason) from error
        return found


# Shrinks a failing case: fewest requests and heads, shortest lengths, and defaults wherever possible.
#
# A step is kept if the case still fails in the same way: same check, same outcome and same finding. Steps that are
# invalid, or that the backend does not declare, do not fail in that way, and are dropped.

_HEAD_SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 512)

_TOGETHER = frozenset({"num_heads", "num_kv_heads", "head_size", "mla"})
"""Fields that change together with others."""

_LENGTHS = frozenset({"seq_len", "encoder_len", "count"})
"""Fields of a request that are reduced, and not set to their defaults."""

_SAME = frozenset({"checks", "tolerance", "description", "notes", "origin"})
"""Fields of a case that never change."""

Fails = Callable[[Case], bool]
"""Function that returns whether a case fails in the way of the original failure."""


@dataclass(frozen=True)
class Shrunk:
    """The smallest case found, after ``tried`` steps and ``seconds``. ``is_finished``: no smaller step is left."""

    case: Case
    tried: int
    seconds: float
    is_finished: bool


def shrink(case: Case, fails: Fails, *, limit_s: float) -> Shrunk:
    """Return the smallest case that still ``fails``; ``limit_s``: seconds after which no step begins."""
    began, tried, known = time.monotonic(), 0, {case.hash}
    is_better = True
    while is_better:
        is_better = False
        for steps in (_fewer_requests, _defaults, _numbers):
            simpler = iter(steps(case))
            while (candidate := next(simpler, None)) is not None:
                if candidate.hash in known:
                    continue
                if time.monotonic() - began > limit_s:
                    return Shrunk(case, tried, time.monotonic() - began, False)
                known.add(candidate.hash)
                tried += 1
                if fails(candidate):
                    case, is_better = candidate, True
                    simpler = iter(steps(case))
    return Shrunk(case, tried, time.monotonic() - began, True)


def num_keys(case: Case) -> int:
    """Return the number of keys of all requests."""
    return sum(each.count * (each.encoder_len or max(each.total_len, 0)) for each in case.batch.requests)


def size_in_words(case: Case) -> str:
    """Return the size of a case, such as ``3 requests, 40 new tokens, 213 keys, 8 heads of 64, ...``.

    The last part is the number of fields that are not default.
    """
    layer, batch = case.layer, case.batch
    given = len(_given(layer)) + len(_given(case.cache)) + len(_given(batch.padding))
    given += batch.path.name != implied_path(layer).name
    return (
        f"{batch.num_requests} requests, {batch.num_tokens} new tokens, {num_keys(case)} keys, "
        f"{layer.num_heads} heads of {layer.head_size}, {given} fields that are not default"
    )


def _meaningful(case: Case, **changes: Any) -> Iterator[Case]:
    try:
        changed = replace(case, **changes)
        changed = replace(changed, layers=tuple(_beside(changed.layer, other) for other in changed.layers))
        room = replace(changed.cache, num_blocks=None)
        check_meaning(changed.layer, changed.cache, changed.batch)
        check_inputs(changed.layer, changed.cache, changed.inputs)
        for batch in changed.after:
            check_meaning(changed.layer, room, batch)
        for layer in changed.layers:
            check_meaning(layer, changed.cache, changed.batch)
    except (SpecError, ZeroDivisionError):
        return
    yield changed


def _beside(layer: LayerSpec, other: LayerSpec) -> LayerSpec:
    """Return ``layer`` with the fields of ``other`` in which layers of one step may differ."""
    return replace(layer, **{name: getattr(other, name) for name in DIFFERENT_KEYS})


def _fewer_requests(case: Case) -> Iterator[Case]:
    """Yield the case without half of the requests, a quarter, and so on; then one request alone with more rows."""
    requests = tuple(replace(each, count=1) for each in case.batch)
    part = len(requests) // 2
    while part:
        for first in range(0, len(requests), part):
            left = requests[:first] + requests[first + part :]
            if left:
                yield from _with_requests(case, left)
        part //= 2
    if len(requests) > 1:  # inputs change with the case, and more rows are more likely to show a fault
        for request in sorted(requests, key=lambda each: -each.total_len)[:3]:
            for rows in (2, 4):
                if rows <= request.total_len:
                    yield from _with_requests(case, (replace(request, query_len=rows, shared_prefix=0),))


def _with_requests(case: Case, requests: tuple[RequestSpec, ...]) -> Iterator[Case]:
    sharers = [each for each in requests if each.shared_prefix]
    if len(sharers) == 1:
        requests = tuple(replace(each, shared_prefix=0) for each in requests)
    try:
        batch = replace(case.batch, requests=requests)
    except SpecError:
        return
    yield from _meaningful(case, batch=batch)


def _defaults(case: Case) -> Iterator[Case]:
    """Yield the case with everything at its default, then with one field at its default."""
    layer = replace(case.layer, **_given(case.layer))
    cache = replace(case.cache, **_given(case.cache))
    batch = replace(case.batch, padding=PaddingSpec())
    yield from _meaningful(case, layer=layer, cache=cache, batch=_on_implied_path(batch, layer), inputs=None)
    yield from _as_decoder(case)
    yield from _meaningful(case, batch=_on_implied_path(case.batch, case.layer))
    yield from _meaningful(case, batch=batch)
    for key, default in {key: value for each in case.batch.requests for key, value in _given(each).items()}.items():
        if key not in _LENGTHS:
            requests = tuple(replace(each, **{key: default}) for each in case.batch.requests)
            yield from _meaningful(case, batch=replace(case.batch, requests=requests))
    for key, default in _given(case.batch).items():
        yield from _meaningful(case, batch=replace(case.batch, **{key: default}))
    for name in ("layer", "cache"):
        spec = getattr(case, name)
        for key, default in _given(spec).items():
            for value in (default, True) if isinstance(getattr(spec, key), tuple) else (default,):
                try:
                    changed = replace(spec, **{key: value})
                except SpecError:
                    continue
                if name == "layer" and implied_path(changed) != implied_path(spec):
                    continue
                yield from _meaningful(case, **{name: changed})
    for index in range(len(case.after)):
        yield from _meaningful(case, after=case.after[:index] + case.after[index + 1 :])
    for index in range(len(case.layers)):
        yield from _meaningful(case, layers=case.layers[:index] + case.layers[index + 1 :])
    for key, default in _given(case).items():
        if key not in _SAME:
            yield from _meaningful(case, **{key: default})


def _as_decoder(case: Case) -> Iterator[Case]:
    """Yield the case as a decoder layer, with as many keys of its own as the encoder had."""
    if case.layer.attn_type == AttentionType.DECODER:
        return
    layer = replace(case.layer, attn_type=AttentionType.DECODER, causal=None)
    requests = tuple(
        replace(each, encoder_len=None, seq_len=max(each.total_len, each.query_len, each.encoder_len or 0))
        for each in case.batch.requests
    )
    yield from _meaningful(case, layer=layer, batch=_on_implied_path(replace(case.batch, requests=requests), layer))


def _given(spec: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, each with its default."""
    return {
        each.name: each.default
        for each in fields(spec)
        if each.default is not MISSING and getattr(spec, each.name) != each.default
    }


def _on_implied_path(batch: BatchSpec, layer: LayerSpec) -> BatchSpec:
    return replace(batch, path=implied_path(layer))


def _numbers(case: Case) -> Iterator[Case]:
    """Yield the case with one number reduced: to its minimum, then half way, and so on."""
    yield from _with_heads(case)
    for shortened in (lambda _: (1, 0), lambda r: (1, r.total_len - 1), lambda r: (r.query_len, 0)):
        requests = tuple(one for each in case.batch.requests for one in _request(each, *shortened(each)))
        if len(requests) == len(case.batch.requests):
            yield from _with_requests(case, requests)
    for index, request in enumerate(case.batch.requests):
        for smaller in _smaller_requests(request):
            requests = (*case.batch.requests[:index], smaller, *case.batch.requests[index + 1 :])
            yield from _with_requests(case, requests)
    for name in ("layer", "cache"):
        for spec in _smaller_fields(getattr(case, name)):
            yield from _meaningful(case, **{name: spec})
    for padding in _smaller_fields(case.batch.padding):
        yield from _meaningful(case, batch=replace(case.batch, padding=padding))
    options = case.batch.path.options
    for smaller_options in _smaller_fields(options) if options is not None else ():
        path = PathSpec(name=case.batch.path.name, options=smaller_options)
        yield from _meaningful(case, batch=replace(case.batch, path=path))


def _with_heads(case: Case) -> Iterator[Case]:
    layer = case.layer
    group = layer.num_heads // layer.num_kv_heads
    for kv_heads in _smaller(layer.num_kv_heads, 1):
        yield from _with_layer(case, num_kv_heads=kv_heads, num_heads=kv_heads * group)
    for fewer in _smaller(group, 1):
        yield from _with_layer(case, num_heads=fewer * layer.num_kv_heads)
    if layer.mla is not None:
        for mla in _smaller_fields(layer.mla):
            yield from _with_layer(case, mla=mla, head_size=mla.kv_lora_rank + mla.qk_rope_head_dim)
    else:
        for size in (each for each in _HEAD_SIZES if each < layer.head_size):
            yield from _with_layer(case, head_size=size)
            if layer.head_size_v is not None:
                yield from _with_layer(case, head_size=size, head_size_v=size)


def _with_layer(case: Case, **changes: Any) -> Iterator[Case]:
    heads, kv_heads = changes.get("num_heads"), changes.get("num_kv_heads")
    changes |= {
        name: given[:heads]
        for name in modifiers_of_kind("per head")
        if heads and isinstance(given := getattr(case.layer, name), tuple)
    }
    scales: dict[str, Any] = {
        name: given[:kv_heads]
        for name in ("k_scale", "v_scale", "q_scale")
        if kv_heads and isinstance(given := getattr(case.cache, name), tuple)
    }
    try:
        layer = replace(case.layer, **changes)
        cache = replace(case.cache, **scales)
    except SpecError:
        return
    yield from _meaningful(case, layer=layer, cache=cache)


def _smaller_requests(request: RequestSpec) -> Iterator[RequestSpec]:
    context = request.context_len
    for fewer in _smaller(max(context, 0), 0):
        yield from _request(request, request.query_len, fewer)
    for fewer in _smaller(request.query_len, 1):
        yield from _request(request, fewer, request.total_len - fewer)
        yield from _request(request, fewer, max(context, -fewer))
    if request.encoder_len:
        for fewer in _smaller(request.encoder_len, 0):
            yield replace(request, encoder_len=fewer)


def _request(request: RequestSpec, query_len: int, context: int) -> Iterator[RequestSpec]:
    if request.shared_prefix <= max(context, 0):
        yield replace(request, query_len=query_len, seq_len=query_len + context)


def _smaller_fields(spec: Any) -> Iterator[Any]:
    """Yield the dataclass with one integer reduced, its own or one of a nested dataclass."""
    for each in fields(spec):
        value = getattr(spec, each.name)
        if each.name in _TOGETHER:
            continue
        if is_dataclass(value):
            changed: Iterator[Any] = _smaller_fields(value)
        elif isinstance(value, int) and not isinstance(value, bool) and value != each.default:
            changed = _smaller(value, each.metadata.get("ge", each.metadata.get("gt", -1) + 1))
        else:
            continue
        for number in changed:
            try:
                yield replace(spec, **{each.name: number})
            except SpecError:
                continue


def _smaller(number: int, least: int) -> Iterator[int]:
    """Yield ``least``, then the numbers half way, three quarters of the way, and so on up to ``number`` - 1."""
    step = number - least
    while step > 0:
        yield number - step
        step //= 2


_INTERPRETED_KEYS = 96
"""Maximum keys of a batch for interpreted kernels."""


@dataclass(frozen=True)
class Failure:
    """A case, and the first of its records that failed."""

    case: Case
    record: Record

    @property
    def way(self) -> tuple[str, str, str]:
        """How it failed; failures that have this in common count as the same fault."""
        record = self.record
        return record.check, record.outcome, getattr(record, "finding", "")


@dataclass(frozen=True)
class SmallFailure:
    """A failure after shrinking: ``first`` as found, ``small`` with the smallest case and its record.

    ``shrunk``: how it was reduced, or None if the case does not fail again by itself and is unchanged.
    """

    first: Failure
    small: Failure
    shrunk: Shrunk | None


def search_failures(
    process: BackendProcess,
    *,
    seed: int,
    ends: float,
    checks: tuple[str, ...] | None,
    most: int,
    see: Callable[[DrawnQuestion, ExaminedCase], None],
) -> Iterator[Failure]:
    """Draw cases until the ``time.monotonic()`` of ``ends`` and yield the first failure of each kind, at most ``most``.

    ``see`` is called with each case and its result.
    """
    constants = constants_of(process.backend.ref)
    axes, lengths = declared_axes(process.reasons_against, constants), Lengths(constants)
    if process.backend.default_suite == "interpreted":
        axes = replace(axes, declared=few_and_small(axes.declared))
        lengths = Lengths(tuple(each for each in constants if each <= _INTERPRETED_KEYS), _INTERPRETED_KEYS)
    ways = set[tuple[str, str, str]]()
    for question in questions(axes, process.reasons_against, lengths, seed, checks):
        if time.monotonic() > ends or len(ways) >= most:
            return
        examined = process.examine(question.case, question.checks)
        see(question, examined)
        short = next((record for record in examined.records if record.outcome in FALLEN_SHORT), None)
        if short is not None:
            failure = Failure(question.case, short)
            if failure.way not in ways:
                ways.add(failure.way)
                yield failure


class Shrinker:
    """Shrinks failures in one process."""

    def __init__(self, process: BackendProcess) -> None:
        self._process = process
        self._numbers = count(1)

    def make_small(self, failure: Failure, limit_s: float) -> SmallFailure:
        """Shrink the case of ``failure`` as long as it fails in the same way, running only that check.

        ``limit_s``: seconds after which no step begins.

        The finding of a wrong result may change in a smaller case. So a second pass compares only check and outcome.
        """
        check = failure.record.check
        alone = replace(failure.case, suite=SUITE, checks=(check,), description="", notes=())
        latest = self._again(alone, failure, is_same_cause=True)
        if latest is None:
            return SmallFailure(failure, failure, None)
        is_in_two = isinstance(failure.record, Failed)
        first_s = limit_s / 2 if is_in_two else limit_s
        first, latest = self._shrunk(alone, latest, failure, first_s, is_same_cause=True)
        second = first
        if is_in_two:
            second, latest = self._shrunk(first.case, latest, failure, limit_s / 2, is_same_cause=False)
            second = replace(second, tried=first.tried + second.tried, seconds=first.seconds + second.seconds)
        small = replace(second.case, id=f"{check}-{second.case.hash}", description=_summary(latest))
        return SmallFailure(failure, Failure(small, latest), second)

    def _shrunk(
        self, case: Case, record: Record, failure: Failure, limit_s: float, *, is_same_cause: bool
    ) -> tuple[Shrunk, Record]:
        latest = record

        def fails(candidate: Case) -> bool:
            nonlocal latest
            again = self._again(candidate, failure, is_same_cause=is_same_cause)
            latest = again or latest
            return again is not None

        return shrink(case, fails, limit_s=limit_s), latest

    def _again(self, case: Case, failure: Failure, *, is_same_cause: bool) -> Record | None:
        named = replace(case, id=f"shrink-{next(self._numbers)}")
        for record in self._process.examine(named, (failure.record.check,)).records:
            way = Failure(named, record).way
            if way == failure.way or (way[:2] == failure.way[:2] and not is_same_cause):
                return record
        return None


def _summary(record: Record) -> str:
    if isinstance(record, Failed):
        return record.summary
    if isinstance(record, Errored):
        return f"{record.error_type} in {record.stage}: {next(iter(record.message.splitlines()), '')}"
    return f"{record.outcome}: {getattr(record, 'cause', '')}"
