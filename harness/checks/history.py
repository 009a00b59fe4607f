"""Invariance under earlier steps: other batches, other layers, and a decode loop before the case."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend
from attncheck.backends.dtypes import FP8_DTYPES
from attncheck.cases.consistency import implied_path
from attncheck.cases.keys import differences
from attncheck.cases.model import Case
from attncheck.cases.outline import batch_of
from attncheck.harness.checks.again import RightRows, Variation, least_failing
from attncheck.harness.checks.findings import Broken
from attncheck.harness.driver.foreign_code import StageError, stage_named, unsupported_reasons
from attncheck.harness.driver.observation import Raised
from attncheck.harness.driver.session import OtherLayer, Session, run_step
from attncheck.harness.problem.pages import PageLayout, Request
from attncheck.harness.problem.problem import Arrangement, Problem, arranged, build_problem, shares_cache
from attncheck.harness.truth.truth import truth_of
from attncheck.harness.truth.unpaged import Budget
from attncheck.reference.spec import MODIFIERS, AttentionType, LayerSpec, modifiers_of_kind
from attncheck.reference.step_spec import BatchSpec, PaddingSpec, RequestSpec

# Batches that a model runner may have passed to an impl and a builder before a case's own.
#
# Each is derived from the case's requests, for the same layer and cache. Their outputs are not judged.

_FIXED_ROWS = ("spec_decode", "tree", "fast_prefill")
_CUT_BATCHES = ("cascade", "split_kv", "dcp", "pcp", "micro_batch")

_MANY_KEYS = 600
"""Keys of one request with few rows. Kernels split the keys of such a step among their thread blocks."""

_EARLIER_PROMPT, _EARLIER_CONTEXT = 64, 128
"""Tokens of the longest prompt, and of the longest context if there are many requests."""

Lengths = list[tuple[RequestSpec, int, int]]
"""(request, query length, context length): requests with replaced lengths."""


@dataclass(frozen=True)
class EarlierBatch:
    """A batch before a case's own. ``kind``: how it differs, in words."""

    kind: str
    case: Case

    @property
    def in_words(self) -> str:
        """The batch in words, for a message."""
        return f"{self.kind} ({batch_of(self.case.batch)})"


def same_shape(case: Case) -> EarlierBatch:
    """Return one of two batches of the case's query lengths; the case's hash selects whether lengths are equal."""
    return alike(case) if _chosen(case, among=8) < 4 and rearranged(case) is not None else shifted(case)


def alike(case: Case) -> EarlierBatch:
    """Return a batch of equal lengths, with other pages."""
    lengths = [(r, r.query_len, r.context_len) for r in case.batch]
    return _of_lengths(case, "a batch of the same shape", lengths, padding=case.batch.padding)


def shifted(case: Case) -> EarlierBatch:
    """Return a batch of the same query lengths, with other pages and other contexts.

    One token of context moves between two requests, so that totals and maxima stay those of the case. If no two
    requests allow this, each context is one token shorter.
    """
    contexts = _moved_token(case) or [r.context_len - 1 for r in case.batch]
    lengths = [(r, r.query_len, context_len) for r, context_len in zip(case.batch, contexts, strict=True)]
    return _of_lengths(case, "a batch of the same query lengths", lengths, padding=case.batch.padding)


def _moved_token(case: Case) -> list[int] | None:
    """Return the contexts with one token moved between two requests, neither the longest, or None without such two."""
    requests = list(case.batch)
    contexts = [r.context_len for r in requests]
    longest = max(range(len(requests)), key=lambda i: requests[i].total_len)
    shorter = [i for i, context_len in enumerate(contexts) if context_len > 0 and i != longest]
    for giver, taker in permutations(shorter, 2):
        if contexts[giver] > 1 and requests[taker].total_len < requests[longest].total_len:
            contexts[giver] -= 1
            contexts[taker] += 1
            return contexts
    return None


def rearranged(case: Case) -> EarlierBatch | None:
    """Return a batch of the same requests in another order, or None if all are alike.

    Number of requests, totals and maxima are those of the case; a plan that is kept for them is wrong in the case.
    """
    lengths = [(r, r.query_len, r.context_len) for r in case.batch]
    if len({(query_len, context_len, r.encoder_len) for r, query_len, context_len in lengths}) == 1:
        return None
    padding = case.batch.padding
    return _of_lengths(
        case, "a batch of the same requests in another order", lengths[1:] + lengths[:1], padding=padding
    )


def half(case: Case) -> EarlierBatch:
    """Return a batch of half the lengths, in reverse order."""
    lengths = [(r, _rows(case, -(-r.query_len // 2), r), r.context_len // 2) for r in case.batch]
    return _of_lengths(case, "a batch of half the lengths", lengths[::-1], encoder_factor=0.5)


def fewer(case: Case) -> EarlierBatch | None:
    """Return a batch of the last request alone, or None if there is no other."""
    lengths = [(r, r.query_len, r.context_len - 2) for r in case.batch][-1:]
    return None if case.batch.num_requests == 1 else _of_lengths(case, "a batch of fewer requests", lengths)


def decodes(case: Case) -> EarlierBatch | None:
    """Return a batch with one new token per request, or None if the case is one or its path fixes the rows."""
    if case.batch.max_query_len == 1 or _has_fixed_rows(case):
        return None
    return _of_lengths(case, "a batch of decodes", [(r, 1, r.context_len) for r in case.batch])


def longer(case: Case) -> EarlierBatch | None:
    """Return a batch with longer contexts, up to twice as long plus a page; for encoder layers, with more rows."""
    if case.layer.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
        lengths = [(r, r.query_len + min(r.query_len, _EARLIER_PROMPT), 0) for r in case.batch]
    else:
        size = case.cache.block_size
        lengths = [
            (r, r.query_len, r.context_len + min(max(0, r.context_len), _EARLIER_PROMPT) + size) for r in case.batch
        ]
    return _of_lengths(case, "a batch of longer requests", lengths, encoder_factor=2)


def more(case: Case) -> EarlierBatch | None:
    """Return a batch of twice as many requests plus one."""
    requests = [*case.batch, *reversed(list(case.batch)), *list(case.batch)[:1]]
    lengths = [(r, r.query_len, min(r.context_len - 1, _EARLIER_CONTEXT)) for r in requests]
    return _of_lengths(case, "a batch of more requests", lengths)


def prompts(case: Case) -> EarlierBatch | None:
    """Return a batch of prompts, or None if the case is one or its path fixes the rows."""
    if all(r.context_len <= 0 for r in case.batch) or _has_fixed_rows(case):
        return None
    fresh = [
        RequestSpec(query_len=max(1, min(r.total_len, _EARLIER_PROMPT)), encoder_len=r.encoder_len) for r in case.batch
    ]
    lengths = [(r, r.query_len, 0) for r in fresh]
    return _of_lengths(case, "a batch of prompts", lengths)


def many_keys(case: Case) -> EarlierBatch | None:
    """Return a batch of one request with many keys and few rows.

    Return None if the layer has no cache, or if every request has more than ``_PROMPT`` rows.
    """
    request = min(case.batch, key=lambda r: r.query_len)
    if not case.layer.has_cache or request.query_len > _EARLIER_PROMPT:
        return None
    lengths = [(request, _rows(case, 1, request), _MANY_KEYS)]
    encoder_factor = _MANY_KEYS / max(1, request.encoder_len or 1)
    return _of_lengths(case, "a batch of one request with many keys", lengths, encoder_factor=encoder_factor)


LARGER: tuple[Callable[[Case], EarlierBatch | None], ...] = (longer, more, prompts, many_keys)
SMALLER: tuple[Callable[[Case], EarlierBatch | None], ...] = (same_shape, rearranged, half, fewer, decodes)


def earlier_batches(case: Case) -> tuple[EarlierBatch, EarlierBatch]:
    """Return two earlier batches, one larger and one smaller. The case's hash selects them and their order."""
    number = int(case.hash, 16)
    large = [batch for make in LARGER if (batch := make(case)) is not None]
    small = [batch for make in SMALLER if (batch := make(case)) is not None]
    first = large[number % len(large)]
    second = small[number // 16 % len(small)]
    return (first, second) if number // 256 % 2 else (second, first)


def named_batches(case: Case) -> tuple[EarlierBatch, ...]:
    """Return the batches that the case itself names."""
    named = (f"after-{number}" for number in range(len(case.after)))
    return tuple(
        EarlierBatch("the batch", _with(case, name, batch)) for name, batch in zip(named, case.after, strict=True)
    )


def _has_fixed_rows(case: Case) -> bool:
    return case.batch.path.name in _FIXED_ROWS


def _rows(case: Case, query_len: int, request: RequestSpec) -> int:
    return request.query_len if _has_fixed_rows(case) else query_len


def _of_lengths(
    case: Case,
    kind: str,
    lengths: Lengths,
    *,
    padding: PaddingSpec = PaddingSpec(),  # noqa: B008 (frozen)
    encoder_factor: float = 1,
) -> EarlierBatch:
    """Return a batch of these requests without shared prefixes.

    A request with a context keeps at least one token of it. Paths that only cut a batch in parts are replaced by an
    ordinary step, as in a model runner.
    """
    requests = []
    for request, query_len, context_len in lengths:
        least = 1 if request.context_len > 0 else 0
        seq_len = query_len + max(least, context_len)
        encoder_len = None if request.encoder_len is None else int(request.encoder_len * encoder_factor)
        requests.append(RequestSpec(query_len=query_len, seq_len=seq_len, encoder_len=encoder_len))
    batch = replace(case.batch, requests=tuple(requests), padding=padding)
    return EarlierBatch(kind, _with(case, kind.removeprefix("a batch of ").replace(" ", "-"), batch))


def _with(case: Case, name: str, batch: BatchSpec) -> Case:
    path = implied_path(case.layer) if batch.path.name in _CUT_BATCHES else batch.path
    cache = case.cache.unplaced
    return replace(case, id=f"{case.id}.{name}", batch=replace(batch, path=path), cache=cache, tolerance=None)


# Layers that run in a step together with a case's own, and their right outputs.
#
# The mirror image of a layer negates queries, keys and values, so that scores stay the same and outputs are negated. It
# needs no truth of its own, and shares no value with the case's layer.

_TWIN = "a second layer of the same kind"

_WINDOW = 3
"""Sliding window, in keys, of a layer that runs with a layer without one."""


@dataclass(frozen=True)
class LayerBeside:
    """A layer that runs before or after the case's own. ``rows``: its right rows, or None if it is not judged."""

    layer: OtherLayer
    rows: RightRows | None
    comes_after: bool = False


def mirrored(problem: Problem) -> Problem:
    """Return the problem of a layer over the same batch with all values negated."""
    return replace(problem, query=-problem.query, keys=-problem.keys, values=-problem.values)


def mirrored_rows(rows: RightRows) -> RightRows:
    """Return the right rows for the mirror image of a problem. Its bits are not compared."""
    conventions = replace(rows.conventions, batch_invariant=False)
    return replace(rows, truth=replace(rows.truth, out=-rows.truth.out), conventions=conventions)


def mirror_layer(rows: RightRows, *, comes_after: bool = True) -> LayerBeside:
    """Return a second layer of equal sizes, with its own cache and other weights.

    It is the mirror image of the case's layer with its heads in reverse order. So a head has the slope, sink,
    up-projection and scale of another one. An FP8 cache has scales twice as large, and a query scale half as large, so
    that all codes are those of the mirror image.
    """
    problem, mirror = mirrored(rows.problem), mirrored_rows(rows)
    layer, cache, weights = problem.layer, problem.cache, problem.up_projections
    per_head = {name: getattr(layer, MODIFIERS[name].resolved) for name in modifiers_of_kind("per head")}
    given: dict[str, Any] = {name: values[::-1] for name, values in per_head.items() if values is not None}
    factor = 2.0 if cache.kv_cache_dtype in FP8_DTYPES and layer.output_quant is None else 1.0
    mirrored_cache = replace(
        cache,
        k_scale=_reversed(cache.k_scale, factor),
        v_scale=_reversed(cache.v_scale, factor),
        q_scale=_reversed(cache.q_scale, 1 / factor),
    )
    problem = replace(
        problem,
        case=replace(problem.case, layer=replace(layer, **given), cache=mirrored_cache),
        query=problem.query.flip(1) / factor,
        keys=problem.keys.flip(1) * factor,
        values=problem.values.flip(1) * factor,
        up_projections=weights and replace(weights, w_uk=weights.w_uk.flip(1), w_uv=weights.w_uv.flip(1)),
    )
    truth = mirror.truth
    budget = Budget(*(allowed.flip(1) for allowed in (truth.budget.norm, truth.budget.peak, truth.budget.lse)))
    budget = replace(budget, norm=budget.norm * factor, peak=budget.peak * factor)
    right = replace(
        mirror,
        problem=problem,
        truth=replace(truth, out=truth.out.flip(1) * factor, lse=truth.lse.flip(1), budget=budget),
        is_right=rows.is_right.flip(1),
        lse_is_right=rows.lse_is_right.flip(1),
    )
    return LayerBeside(OtherLayer(problem, _TWIN), right, comes_after)


def _reversed(scale: float | tuple[float, ...], factor: float) -> float | tuple[float, ...]:
    """Return a scale times ``factor``; one for each head in reverse order."""
    return tuple(one * factor for one in reversed(scale)) if isinstance(scale, tuple) else scale * factor


def sharing_layer(rows: RightRows, backend: type[AttentionBackend]) -> LayerBeside | None:
    """Return a layer that shares the cache of the case's layer, and that is passed keys of its own nevertheless.

    Its right outputs are those of the case's layer. Return None if the backend does not declare it.
    """
    problem, case = rows.problem, rows.problem.case
    if not case.layer.has_cache or shares_cache(case) or case.layer.attn_type != AttentionType.DECODER:
        return None
    sharing = replace(case, layer=replace(case.layer, kv_sharing=True))
    if case.layer.mla is not None or unsupported_reasons(backend, sharing):
        return None
    negated = replace(problem, keys=-problem.keys, values=-problem.values)
    return LayerBeside(OtherLayer(negated, "a layer that shares its cache", shares_cache=True), rows, comes_after=True)


def other_kind_of_layer(problem: Problem, backend: type[AttentionBackend]) -> LayerBeside | None:
    """Return a layer with another window, soft cap and scale, as far as the backend declares them, else None.

    If the case's layer has a window, the other has none and vice versa, because a vLLM group has at most one window
    size.
    """
    layer = problem.layer
    other = replace(layer, scale=(layer.softmax_scale or 1.0) / 2)
    has_own_mask = layer.rswa_window is not None or layer.index_topk is not None
    if layer.mla is None and layer.attn_type == AttentionType.DECODER and not has_own_mask:
        window = replace(other, sliding_window=None if layer.sliding_window else _WINDOW)
        other = other if unsupported_reasons(backend, replace(problem.case, layer=window)) else window
        cap = replace(other, logits_soft_cap=None if layer.logits_soft_cap else 2.0)
        other = other if unsupported_reasons(backend, replace(problem.case, layer=cap)) else cap
    if unsupported_reasons(backend, replace(problem.case, layer=other)):
        return None
    return LayerBeside(_layer(problem, other), None)


def layer_of_another_group(problem: Problem, backend: type[AttentionBackend]) -> LayerBeside | None:
    """Return a layer of another head size, with pages of its own, or None if the backend declares none.

    Layers whose caches differ in shape form separate groups, each with its own builder, block table and slots.
    """
    layer, case = problem.layer, problem.case
    if layer.mla is not None or not layer.has_cache:
        return None
    for head_size in (layer.head_size // 2, layer.head_size * 2):
        other = replace(layer, head_size=head_size)
        if head_size % 8 == 0 and not unsupported_reasons(backend, replace(case, layer=other)):
            return LayerBeside(_layer(problem, other), None)
    return None


def layer_of_other_pages(rows: RightRows, backend: type[AttentionBackend]) -> LayerBeside | None:
    """Return a second layer of the same kind over pages of another size, or None if the backend declares none."""
    case, own = rows.problem.case, rows.problem.cache
    is_fixed = case.batch.path.name in _CUT_BATCHES or any(spec.shared_prefix for spec in case.batch)
    if is_fixed or not case.layer.has_cache:  # the sizes of parts and of prefixes are multiples of the page size
        return None
    for block_size in (2 * own.block_size, own.block_size // 2 or 1):
        cache = replace(own.unplaced, block_size=block_size, manager_block_size=None)
        if block_size != own.block_size and not unsupported_reasons(backend, replace(case, cache=cache)):
            other = arranged(mirrored(rows.problem), Arrangement.of_all(rows.problem, cache))
            role = f"a layer with block_size {block_size} in another group"
            return LayerBeside(OtherLayer(other, role, has_own_group=True), mirrored_rows(rows))
    return None


def named_layers(rows: RightRows, session: Session) -> tuple[LayerBeside, ...]:
    """Return the layers that the case names and the backend declares.

    Each is judged on the rows that it has right alone. Raise StageError if one raises alone.
    """
    problem, made = rows.problem, []
    for spec in problem.case.layers:
        if unsupported_reasons(session.backend, replace(problem.case, layer=spec)):
            continue
        beside = _layer(problem, replace(spec, kv_sharing=problem.layer.kv_sharing))
        alone = Session(session.backend, beside.problem, session.device)
        with stage_named(f"of {beside.role}"):
            seen = alone.run(images=False)
        truth = truth_of(beside.problem, session.device, refuse_blindness=False)
        right = RightRows.of(beside.problem, truth, seen, rows.conventions)
        shares = spec.kv_sharing and not problem.writes_nothing
        if shares:
            # It reads the keys of the case's layer, and is passed the negated ones.
            negated = replace(beside.problem, query=-beside.problem.query)
            right = mirrored_rows(right)
            beside = replace(beside, problem=negated, role=f"{beside.role} that shares its cache", shares_cache=True)
        made.append(LayerBeside(beside, right, comes_after=shares))
    return tuple(made)


def _layer(problem: Problem, layer: LayerSpec) -> OtherLayer:
    """Return the mirror image of ``problem`` with another spec, or a new problem if the head sizes differ."""
    given = differences(layer, problem.layer).items()
    named = ", ".join(f"no {name}" if value in (None, False) else f"{name} {value}" for name, value in given)
    role = f"a layer with {named}" if named else _TWIN
    case = replace(problem.case, layer=layer)
    if layer.head_size != problem.layer.head_size:
        drawn = build_problem(replace(case, id=f"{case.id}.group"), problem.seed)
        return OtherLayer(drawn, f"{role} in another group", has_own_group=True)
    return OtherLayer(replace(mirrored(problem), case=case), role)


# A decode loop: a case's requests start some steps earlier and gain rows, keys and pages in each step.
#
# The cache is filled once; the backend writes every later key in the step that adds it. A row sees the same keys as in
# the case, so the case's truth applies.

_PATHS = ("paged", "mla", "local", "spec_decode", "micro_batch")
"""Paths whose truth has the budget of a single call that sees all keys."""

_FIRST_ROWS, _LONGEST = 8, 64
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


def check_decode_loop(rows: RightRows, session: Session) -> Broken | None:
    """Return what is wrong with a step of the loop. Return None if all are right, or if the case allows no loop.

    Raise StageError if a step raises.
    """
    steps = loop_steps(rows.problem)
    if len(steps) < 2 or any(unsupported_reasons(session.backend, step.problem.case) for step in steps):
        return None
    first, *later = (step.problem for step in steps)
    with stage_named("of a decode loop"):
        going = Session(session.backend, first, session.device, tuple(later), pool=session.pool)
        for number, step in enumerate(steps):
            going = going.following(step.problem) if number else going
            with stage_named(f"of step {number + 1}"):
                seen = going.run(images=False)
            wrong = _judged(rows, step).wrong_in(seen)
            if wrong is not None:
                return _as_finding(wrong, steps, number)
    return None


def loop_steps(problem: Problem) -> tuple[LoopStep, ...]:
    """Return up to three steps that build up the case's requests; empty if rows would see other keys.

    The first ends at the edge of a page, the second begins a page, and the third has the case's last rows.
    """
    if not takes_several_steps(problem):
        return ()
    cuts = [_cuts(request, problem.cache.block_size) for request in problem.requests]
    spans = ([(i, own[n], own[n + 1]) for i, own in enumerate(cuts) if own[n] < own[n + 1]] for n in range(3))
    return tuple(step_of_spans(problem, number, own) for number, own in enumerate(spans) if own)


def takes_several_steps(problem: Problem) -> bool:
    """Return whether several steps may compute the rows of a case: each row then sees the keys that it sees in one."""
    case, layer = problem.case, problem.layer
    is_plain = layer.attn_type == AttentionType.DECODER and layer.is_causal and not problem.writes_nothing
    is_plain = is_plain and not any(spec.mm_req_doc_ranges for spec in case.batch)
    has_contexts = all(spec.context_len >= 0 and not spec.shared_prefix for spec in case.batch)
    return is_plain and has_contexts and case.batch.path.name in _PATHS


def _cuts(request: Request, block_size: int) -> tuple[int, int, int, int]:
    """Return the positions at which a request's three steps start, and at which the last one ends."""
    first, end = request.first_position, request.num_keys
    last = end - max(1, request.rows // 2)
    page = max((last - 1) // block_size * block_size, last - _LONGEST, 0)
    return min(first, max(0, page - _FIRST_ROWS)), page, last, end


def step_of_spans(problem: Problem, number: int, spans: list[tuple[int, int, int]]) -> LoopStep:
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
        topk_indices=_chosen_in(problem, of_case),
    )
    return LoopStep(step, of_case)


def _chosen_in(problem: Problem, of_case: Tensor) -> Tensor | None:
    """Return the keys of each row of a step, int32 ``[T, K]``: of a row that the case does not have, key 0 alone."""
    if problem.topk_indices is None:
        return None
    indices = problem.topk_indices[of_case % len(problem.query)].clone()
    indices[of_case < 0] = -1
    indices[of_case < 0, 0] = 0
    return indices


def _judged(rows: RightRows, step: LoopStep) -> RightRows:
    """Return the right rows of a step, without rows that the case does not have. Bits are not compared."""
    truth, index = rows.truth, step.rows.clamp(min=0).to(rows.truth.out.device)
    is_known = (step.rows >= 0).to(index.device)[:, None]
    return replace(
        rows,
        problem=step.problem,
        conventions=replace(rows.conventions, batch_invariant=False),
        truth=truth.of_rows(index),
        is_right=rows.is_right[index] & is_known,
        lse_is_right=rows.lse_is_right[index] & is_known,
    )


def _as_finding(wrong: Broken, steps: tuple[LoopStep, ...], number: int) -> Broken:
    done = [f"step {n} of the loop: {step.in_words}" for n, step in enumerate(steps[: number + 1], start=1)]
    return replace(
        wrong,
        summary=f"right in one step, wrong in step {number + 1} of a decode loop: {wrong.summary}",
        meaning="something of an earlier step is kept, or what it wrote is not read, when requests gain rows and pages",
        details=(*wrong.details, *done),
    )


# Earlier batches, and other layers and micro-batches of a step, which must not change a case's outputs.
#
# A model runner uses one impl and one builder for batch after batch, and every layer of a group receives the metadata
# of its builder. So the case's batch runs again after other batches, in a step of several layers. If the result is
# wrong, it runs again with fewer of these, to find what makes the difference.

_LARGE_POOL = 2**22
"""Largest cache in bytes for which other layers run beside the case's. Each of them allocates as much again."""

_SINGLE_CALLS = ("paged", "mla", "local", "encoder_only", "cross", "spec_decode")
"""Paths with one call per step, so that another micro-batch can be built before the case's has run."""


@dataclass(frozen=True)
class History:
    """What an impl and builder run before a case's batch, and in its step.

    ``layers``: the other layers of its step; with a micro-batch, all run before the case's layer. ``micro_batch``:
    another one that is built before the case's has run.
    """

    before: tuple[EarlierBatch, ...] = ()
    layers: tuple[LayerBeside, ...] = ()
    micro_batch: EarlierBatch | None = None

    @property
    def in_words(self) -> str:
        """The history in words, for a message."""
        beside = [beside.layer.role for beside in self.layers]
        beside += [f"{self.micro_batch.in_words} as another micro-batch"] if self.micro_batch else []
        parts = [f"after {' and '.join(batch.in_words for batch in self.before)}"] if self.before else []
        parts += [f"in a step with {' and '.join(beside)}"] if beside else []
        return ", ".join(parts) or "when the step is repeated"

    def parts(self) -> Iterator["History"]:
        """Yield each element alone."""
        yield from (History(before=(batch,)) for batch in self.before)
        yield from (History(layers=(beside,)) for beside in self.layers)
        if self.micro_batch is not None:
            yield History(micro_batch=self.micro_batch)

    @classmethod
    def joined(cls, parts: Sequence["History"]) -> "History":
        """Return the history of all elements of ``parts``."""
        before = tuple(batch for part in parts for batch in part.before)
        layers = tuple(beside for part in parts for beside in part.layers)
        return cls(before, layers, next((part.micro_batch for part in parts if part.micro_batch is not None), None))


def repetitions(rows: RightRows, session: Session) -> Iterator[Variation]:
    """Yield the case's step with a history, and in most cases a decode loop. Raise StageError."""
    history = history_of(rows, session)
    yield Variation(history.in_words, partial(check_step, rows, session, history))
    steps = loop_steps(rows.problem)
    if len(steps) > 1 and _chosen(rows.problem.case, among=3) < 2:
        yield Variation(f"a decode loop of {len(steps)} steps", partial(check_decode_loop, rows, session))


def history_of(rows: RightRows, session: Session) -> History:
    """Return the history that the case names, or else one chosen by its hash, limited to what the backend declares.

    The hash chooses an earlier batch, and layers of the step. A third of the cases, and every case with a large cache,
    gets two earlier batches and no layers.
    """
    problem, backend, case = rows.problem, session.backend, rows.problem.case
    named = case.after or case.layers
    batches = named_batches(case) if named else earlier_batches(case)
    before = tuple(batch for batch in batches if not unsupported_reasons(backend, batch.case))
    if named:
        return History(before, named_layers(rows, session))
    kind = _chosen(case, among=6)
    if kind < 2 or (session.pool is not None and len(session.pool.bytes()) > _LARGE_POOL):
        return History(before)
    # If it runs first, the case's layer runs before it and after it, since a batch comes before.
    mirror, before = mirror_layer(rows, comes_after=_chosen(case, among=4) < 2), before[:1]
    if kind == 2 and case.batch.path.name in _SINGLE_CALLS:
        micro_batch = half(case) if _chosen(case, among=2) == 0 else rearranged(case) or shifted(case)
        if not unsupported_reasons(backend, micro_batch.case):
            return History(before, (mirror,), micro_batch=micro_batch)
    group = None
    if kind == 3:
        by_pages = _chosen(case, among=2)
        group = layer_of_other_pages(rows, backend) if by_pages else layer_of_another_group(problem, backend)
    others = (mirror, sharing_layer(rows, backend), group or other_kind_of_layer(problem, backend))
    return History(before, tuple(beside for beside in others if beside is not None))


def _chosen(case: Case, among: int) -> int:
    """Return a number below ``among`` that depends only on the case's hash and ``among``."""
    return int(hashlib.sha256(f"{case.hash} {among}".encode()).hexdigest(), 16) % among


def check_step(rows: RightRows, session: Session, history: History) -> Broken | None:
    """Return what is wrong with the case's step under ``history``, naming the part that suffices for it.

    Raise StageError if a step raises.
    """

    def run(backwards: Sequence[History]) -> Broken | None:
        return _wrong_under(rows, session, History.joined(backwards[::-1]))

    # The last part is left out first, so that the first of several that suffice is named.
    found = least_failing(tuple(history.parts())[::-1], run)
    if found is None:
        return None
    wrong, needed = found
    least = History.joined(needed[::-1])
    if isinstance(wrong, Raised):
        raise StageError(replace(wrong, stage=f"{wrong.stage}, {least.in_words}"))
    changes: list[str] = []
    with suppress(StageError):  # what the metadata hold may not be comparable; the finding stands
        wrong = _wrong_under(rows, session, least, changes) or wrong
    beside = bool(least.layers or least.micro_batch)
    return replace(
        wrong,
        summary=f"right in a first step, wrong {least.in_words}: {wrong.summary}",
        meaning=_meaning(least, changes),
        details=(*wrong.details, *dict.fromkeys(changes)) if beside else wrong.details,
    )


def _meaning(least: History, changes: list[str]) -> str:
    if least == History():
        return "the same step is wrong when it is repeated: the backend keeps state, or is not deterministic"
    if changes and least.layers:
        return "a layer changes the metadata, which all layers of the group share"
    if least.micro_batch is not None:
        return "two micro-batches share memory: what is built for one is overwritten by the other"
    if [beside for beside in least.layers if beside.layer.shares_cache] == list(least.layers) != []:
        return (
            "a layer writes to a cache that it shares, or to something else that belongs to another layer of the step"
        )
    if least.layers:
        return "layers share what each must have for itself: something is kept from another layer of the step"
    return "something is kept from an earlier call"


def _wrong_under(
    rows: RightRows, session: Session, history: History, changes: list[str] | None = None
) -> Broken | None:
    """Return what is wrong with the step on a new impl and builder.

    The backend may refuse some of its layers, also those in pages of another size: the check ``refusals`` reports a
    refusal that the backend does not declare.
    """
    try:
        return _run_under(rows, session, history, changes)
    except StageError as failure:
        size = rows.problem.cache.block_size
        kept = tuple(
            beside
            for beside in history.layers
            if beside.rows is not None
            and not beside.layer.shares_cache
            and beside.layer.problem.cache.block_size == size
        )
        less = replace(history, layers=kept)
        if failure.raised.is_refusal and less != history:
            return _wrong_under(rows, session, less, changes)
        raise


def _run_under(rows: RightRows, session: Session, history: History, changes: list[str] | None) -> Broken | None:
    problem, backend, device = rows.problem, session.backend, session.device
    drawn = [
        build_problem(other.case, problem.seed + 1 + number, rows_of=problem)
        for number, other in enumerate((*history.before, *([history.micro_batch] if history.micro_batch else [])))
    ]
    before = drawn[: len(history.before)]
    in_group = [beside for beside in history.layers if not beside.layer.has_own_group]
    layers = [beside.layer for beside in in_group]
    own = Session(backend, problem, device, tuple(drawn), pool=session.pool, layers=layers).with_persistent_inputs()
    for batch, other in zip(before, history.before, strict=True):
        earlier_step = own.beside(batch)
        with stage_named(f"of {other.in_words}"):
            earlier_step.run(images=False)
    earlier: list[_JudgedLayer] = []
    later: list[_JudgedLayer] = []
    for beside, layer in zip(in_group, own.layers, strict=True):
        is_later = beside.comes_after and history.micro_batch is None
        (later if is_later else earlier).append((layer, beside.rows))
    layers_in_order = [*earlier, (own, rows), *later]
    if history.micro_batch is not None:
        layers_in_order = list(_with_micro_batch(own, layers_in_order, drawn[-1], history.micro_batch.in_words))
    for beside in history.layers:
        if beside.layer.has_own_group:
            other_group = Session(backend, beside.layer.problem, device, role=beside.layer.role)
            layers_in_order.insert(0, (other_group, beside.rows))
    observations = run_step([layer for layer, _ in layers_in_order], changes)
    for seen, (layer, judge) in zip(observations, layers_in_order, strict=True):
        wrong = None if judge is None else judge.wrong_in(seen)
        if wrong is not None:
            return replace(wrong, summary=f"{layer.role}: {wrong.summary}") if layer.role else wrong
    return None


_JudgedLayer = tuple[Session, RightRows | None]
"""A layer of a step, and its right rows; None if it is not judged."""


def _with_micro_batch(own: Session, layers: list[_JudgedLayer], other: Problem, role: str) -> Iterator[_JudgedLayer]:
    """Yield each layer with the case's micro-batch, then with the other one, which a second builder serves."""
    second = own.with_second_builder(other, role)
    for layer, judge in layers:
        yield layer, judge
        yield second if layer is own else layer.with_second_builder(mirrored(other), role, second), None
