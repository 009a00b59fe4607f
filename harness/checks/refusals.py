"""The checks ``refusals`` and ``features``: what a backend does with layers and caches, declared or not."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, assert_never, get_args

import torch

from attncheck.backends.contract import AttentionBackend
from attncheck.backends.declarations import is_merged, required_features
from attncheck.cases.consistency import check_meaning, implied_path
from attncheck.cases.model import Case
from attncheck.cases.outline import shape_of
from attncheck.errors import BackendUnavailableError, BlindCaseError, QuestionError, SpecError
from attncheck.harness.checks.again import RightRows, later_fault
from attncheck.harness.checks.findings import Broken, Finding, FindingError, Holds, NotExamined
from attncheck.harness.checks.interface import Check, CheckedCase, SelectedCases
from attncheck.harness.checks.numerics import (
    EarlierCauses,
    causes_of,
    check_numerics,
    output_shares,
    summarize,
    wrong_figures,
)
from attncheck.harness.driver.foreign_code import (
    StageError,
    stage_named,
    unavailable_case_reasons,
    unsupported_reasons,
)
from attncheck.harness.driver.observation import Observation, Raised
from attncheck.harness.driver.pool import same_bytes
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.pages import layout_of_layer
from attncheck.harness.problem.problem import Problem, build_problem
from attncheck.harness.problem.storage import output_values
from attncheck.harness.truth.truth import Truth
from attncheck.reference.spec import MODIFIERS, AttentionType, LayerSpec, OutputQuantSpec, modifiers_of_kind
from attncheck.reference.step_spec import BatchSpec, CacheSpec, Layout, RequestSpec
from attncheck.reports.analysis.support import ANSWERED, REFUSED, UNCLEAR
from attncheck.reports.run_file.causes import ALTERNATIVE, cause_of_error

# Forms of a declared case that differ from it in one field.
#
# Suite cases combine features, so a backend that refuses one feature of a case never runs the others. Here each dtype,
# size, layout, attention type and modifier that the backend does not declare is tried alone, on a small batch. So are
# declared sizes that few kernels divide evenly, and scales of heads.

Changes = Mapping[str, Any]

_DECODER = tuple(RequestSpec(query_len=rows, seq_len=keys) for rows, keys in ((1, 40), (5, 21), (9, 9)))
"""One decode request, one that extends a prefix, and one prompt."""

_ENCODER = (RequestSpec(query_len=11), RequestSpec(query_len=20))
_CROSS = (RequestSpec(query_len=4, encoder_len=23), RequestSpec(query_len=1, seq_len=9, encoder_len=17))
_REQUESTS = {AttentionType.DECODER: _DECODER, AttentionType.ENCODER_DECODER: _CROSS}

_SCALES = {"k_scale": 0.3, "v_scale": 0.07}
_CODES = ("fp8", "fp8_e5m2")


@dataclass(frozen=True)
class TriedForm:
    """A case of a form: the change in words, and the declared reasons against it; none if it is declared."""

    changes: str
    case: Case
    reasons: tuple[str, ...]


def is_plain(case: Case) -> bool:
    """Return whether the case is a causal decoder layer on the path ``paged`` or ``mla`` with nothing added.

    That would be modifiers, a shared cache, R-SWA, an indexer, or a quantised query or output.
    """
    layer = case.layer
    others = (layer.kv_sharing, layer.output_quant, layer.query_quant, layer.rswa_window, layer.index_topk)
    is_decoder = case.batch.path.name in ("paged", "mla") and layer.is_causal
    return is_decoder and not layer.modifiers and not any(others)


def undeclared_forms(backend: type[AttentionBackend], case: Case, device: str) -> Iterator[TriedForm]:
    """Yield ``case``, on a small batch, in each form that ``backend`` does not declare.

    Yield nothing if the backend does not declare the small batch itself. Raise StageError if a declaration raises.
    """
    changes = (*_layers(case.layer), *_caches(case.layer, case.cache))
    return (form for form in _forms(backend, case, device, changes) if form.reasons)


def declared_forms(backend: type[AttentionBackend], case: Case, device: str) -> Iterator[TriedForm]:
    """Yield the same for uneven sizes and scales of heads, if ``backend`` declares them."""
    changes = [({}, {"block_size": case.cache.block_size + 8}), *_scaled_heads(case.layer)]
    if case.layer.mla is None:
        changes.append(({"head_size": case.layer.head_size + 4}, {}))
    return (form for form in _forms(backend, case, device, changes) if not form.reasons)


def _forms(
    backend: type[AttentionBackend], case: Case, device: str, changes: Iterable[tuple[Changes, Changes]]
) -> Iterator[TriedForm]:
    if unsupported_reasons(backend, _with_fields(case, {}, {})):
        return
    for layer, cache in changes:
        try:
            changed = _with_fields(case, layer, cache)
            check_meaning(changed.layer, changed.cache, changed.batch)
        except SpecError:  # the layer cannot have this form
            continue
        reasons = unsupported_reasons(backend, changed)
        if not unavailable_case_reasons(backend, changed, device):
            words = ", ".join(f"{name} {value}" for name, value in {**layer, **cache}.items() if value is not None)
            yield TriedForm(words, changed, reasons)


def _with_fields(case: Case, layer: Changes, cache: Changes) -> Case:
    """Return the case with these fields of layer and cache, on a few short requests. Raise SpecError if invalid."""
    changed = replace(case.layer, **layer)
    return replace(
        case,
        id=f"{case.id}.form",
        layer=changed,
        cache=replace(case.cache.unplaced, **cache),
        batch=BatchSpec(requests=_REQUESTS.get(changed.attn_type, _ENCODER), path=implied_path(changed)),
        tolerance=None,
        inputs=None,
    )


def _layers(layer: LayerSpec) -> Iterator[tuple[Changes, Changes]]:
    for dtype in ("float16", "bfloat16", "float32"):
        yield {"dtype": dtype}, {}
    if layer.mla is not None:
        return
    for head_size in (layer.head_size + 8, *(number * layer.head_size for number in (2, 3, 4)), 272):
        yield {"head_size": head_size}, {}
    for attn_type in AttentionType:
        yield {"attn_type": attn_type, "causal": None}, {}
    modifiers = {name: modifier.ordinary for name, modifier in MODIFIERS.items() if modifier.argument is not None}
    others = {"causal": False, "head_size_v": 2 * layer.head_size, "output_quant": OutputQuantSpec(scale=0.005)}
    for name, value in {**modifiers, **others, "kv_sharing": True}.items():
        yield {name: value}, {}


def _caches(layer: LayerSpec, cache: CacheSpec) -> Iterator[tuple[Changes, Changes]]:
    for layout in get_args(Layout):
        yield {}, {"layout": layout}
    multiples = (number * cache.block_size for number in (2, 3, 4))
    for block_size in (1, max(1, cache.block_size // 2), cache.block_size + 8, *multiples):
        yield {}, {"block_size": block_size}
    for codes in _CODES:
        yield {}, {"kv_cache_dtype": codes, **_SCALES}
    yield {"query_quant": True}, {"kv_cache_dtype": "fp8", **_SCALES, "q_scale": 1.7}
    yield from _scaled_heads(layer)


def _scaled_heads(layer: LayerSpec) -> Iterator[tuple[Changes, Changes]]:
    per_head = {
        name: tuple(scale * (1 + head) for head in range(layer.num_kv_heads)) for name, scale in _SCALES.items()
    }
    for codes in _CODES:
        yield {}, {"kv_cache_dtype": codes, **per_head}


# `refusals`: a declared case runs; an undeclared case is refused or answered correctly.
#
# Fails a backend that accepts an undeclared case and computes a wrong result, as when it silently ignores a feature.
# `numerics` judges wrong results of declared cases. Cannot see: declarations that no case of the run uses.

NOT_REFUSABLE = frozenset({"short_keys"})
"""Features whose absence a backend can notice only by reading lengths on the host. Compared only if declared."""


def check_profiling_call(session: Session) -> Finding:
    """Judge the profiling call of a declared case, which is ``forward`` without metadata."""
    pool_before = None if session.pool is None else session.pool.bytes().clone()
    try:
        idle = session.run_without_metadata()
    except StageError as failure:
        raised = failure.raised
        return Broken(
            f"forward without metadata (the profiling call) raised {raised.error_type}: {raised.message}",
            details=(raised.trace,),
        )
    if not bool(torch.isfinite(idle.double()).all()):
        return Broken("forward without metadata (the profiling call) left NaN or Inf in the output")
    if session.pool is not None and pool_before is not None and not same_bytes(pool_before, session.pool.bytes()):
        return Broken("forward without metadata (the profiling call) changed a cache it was not given")
    return Holds()


def failure_of_declared(raised: Raised) -> Broken:
    """Return the failure of a declared case that the backend refused or that raised."""
    verb = "refused" if raised.is_refusal else "raised"
    return Broken(
        f"declared, but {verb} at {raised.stage}: {raised.error_type}: {raised.message}",
        details=(raised.trace,),
        finding=_cause(raised),  # of the checks that raised as well
    )


def check_declared(run: Callable[[], object]) -> Finding:
    """Judge whether a declared case runs. Other checks judge its result."""
    try:
        run()
    except StageError as failure:
        return failure_of_declared(failure.raised)
    except FindingError:
        pass
    return Holds()


def _cause(raised: Raised) -> str:
    return cause_of_error(raised.error_type, raised.stage, raised.message, raised.trace)


def check_refusal(raised: Raised, reasons: tuple[str, ...]) -> Holds | Broken:
    """Judge an exception on a case that the declarations exclude for ``reasons``. A refusal is right."""
    if raised.is_refusal:
        return Holds(notes=(f"{REFUSED} {raised.stage}: {raised.message}",))
    after = f" after changing {' and '.join(raised.touched)}" if raised.touched else ""
    return Broken(
        f"{UNCLEAR}: {raised.error_type} at {raised.stage}{after}: {raised.message}",
        meaning="the backend does not refuse the case clearly: a refusal is a ValueError, NotImplementedError or "
        "TypeError that the backend raises itself",
        details=(*reasons, raised.trace),
        finding=f"{UNCLEAR}: {_cause(raised)}",
    )


def check_answer(
    problem: Problem, truth: Truth, attempt: Observation, reasons: tuple[str, ...], causes: EarlierCauses | None = None
) -> Holds | Broken:
    """Judge the output for a case that the declarations exclude for ``reasons``. A correct output is right."""
    shares = output_shares(truth, attempt)
    if bool(attempt.unwritten.any()) or bool((shares > 1).any()):
        declared = f"does not declare the case ({'; '.join(reasons)})" if reasons else "declares the case"
        return Broken(
            f"the backend {declared}, accepts it without an error, "
            f"and its output is wrong: {summarize(problem, shares)}",
            wrong_figures(shares, output_values(attempt.output[: len(shares)], truth.codes), attempt.unwritten),
            (causes or EarlierCauses()).explain(problem, truth, attempt.output[: len(shares)], shares)[0],
        )
    return Holds(notes=(f"{ANSWERED}: {'; '.join(reasons)}",))


def not_tried(problem: Problem, features: frozenset[str]) -> NotExamined | None:
    """Return why an undeclared case is not run on the backend, or None if it is run."""
    case = problem.case
    needs = required_features(case.layer, case.cache, case.batch, features) - features
    if is_merged(case.batch, features) and needs & {"lse", "cascade"}:
        name = case.batch.path.name
        return NotExamined((f"path {name}: the backend does not declare the path, and it cannot be run over forward",))
    missing = needs & NOT_REFUSABLE
    if not missing:
        return None
    names = ", ".join(sorted(missing))
    return NotExamined((f"{names}: compared only where declared, since refusing it needs the lengths on the host",))


def _check(case: CheckedCase) -> Finding:
    if case.undeclared:
        return _check_undeclared_case(case)
    try:
        session, _ = case.first_step()
    except StageError as failure:
        return failure_of_declared(failure.raised)
    finding = check_profiling_call(session)
    if not _is_first_plain(case):
        return finding
    forms = check_forms(case)
    if isinstance(finding, Broken) and isinstance(forms, Broken):
        return replace(forms, details=(*forms.details, finding.summary))
    return finding if isinstance(finding, Broken) else forms


def check_forms(case: CheckedCase) -> Finding:
    """Run the case with one other form at a time. Each must be answered correctly; an undeclared one may be refused."""
    answered, wrong = [], []
    of_backend = case.backend, case.problem.case, str(case.device)
    forms = (*undeclared_forms(*of_backend), *declared_forms(*of_backend))
    num_tried = {"undeclared_tried": 0, "declared_tried": 0}
    for form in forms:
        finding = _judge_form(case, form)
        if finding is not None:
            num_tried["undeclared_tried" if form.reasons else "declared_tried"] += 1
        if isinstance(finding, Broken):
            summary = f"tried {'undeclared ' if form.reasons else ''}with {form.changes}: {finding.summary}"
            details = (shape_of(form.case), *finding.details)
            wrong.append(replace(finding, summary=summary, details=details))
        elif finding is not None and form.reasons and finding.notes[0].startswith(ANSWERED):
            answered.append(form.changes)
    if wrong:
        first, *others = sorted(wrong, key=lambda each: UNCLEAR in each.summary)  # a wrong answer is worse
        return replace(first, details=(*first.details, *(other.summary for other in others)))
    notes = (f"tried undeclared, and {ANSWERED}: {'; '.join(answered)}",) if answered else ()
    return Holds(num_tried, notes)


def _judge_form(case: CheckedCase, form: TriedForm) -> Holds | Broken | None:
    """Judge the step of one form. Return None if attncheck cannot build or judge it."""
    try:
        problem = build_problem(form.case, case.problem.seed)
        seen = Session(case.backend, problem, case.device).run()
        truth = case.truths.truth_of(problem, refuse_blindness=False)
        return check_answer(problem, truth, seen, form.reasons, causes_of(case))
    except StageError as failure:
        if form.reasons:
            return check_refusal(failure.raised, form.reasons)
        right = _right_declaration(case.backend, case.problem.case, form.case)
        meaning = f"the refusal is clear, but {right}" if failure.raised.is_refusal else right
        return replace(failure_of_declared(failure.raised), meaning=meaning)
    except (QuestionError, BackendUnavailableError):
        return None


def _right_declaration(backend: type[AttentionBackend], own: Case, form: Case) -> str:
    """Return in words how ``form``, which differs from ``own``, is declared, and what would exclude it."""
    head_size, block_size = form.layer.head_size, form.cache.block_size
    if head_size != own.layer.head_size:
        declared = (
            f"head_size {head_size} is listed" if backend.get_supported_head_sizes() else "no head size is excluded"
        )
        return f"{declared}: list those that run in get_supported_head_sizes (of a function: supported_head_sizes)"
    if block_size != own.cache.block_size:
        sizes = ", ".join(map(str, backend.get_supported_kernel_block_sizes()))
        return (
            f"block_size {block_size} is among the declared {sizes}: "
            "list those that run in get_supported_kernel_block_sizes (of a function: supported_block_sizes)"
        )
    return "'fp8_per_head' is declared: leave it out of features if scales per head do not run"


def _is_first_plain(case: CheckedCase) -> bool:
    """Return whether the case is the first plain, declared one of the run, so that forms run once per backend."""
    own, backend = case.problem.case, case.backend
    selected = case.shared.get(SelectedCases, SelectedCases).cases_with(case.loaded.ref, "refusals") or (own,)

    def is_declared(each: Case) -> bool:
        return not unsupported_reasons(backend, each)

    return is_plain(own) and next((each for each in selected if is_plain(each) and is_declared(each)), None) == own


def _check_undeclared_case(case: CheckedCase) -> Finding:
    if case.problem.cache.pool_order not in case.backend.conventions.pool_orders:
        return NotExamined(_reasons_with_order(case))
    skipped = not_tried(case.problem, case.backend.features)
    if skipped is not None:
        return skipped
    try:
        _, seen = case.first_step()
    except StageError as failure:
        return check_refusal(failure.raised, case.undeclared)
    return check_answer(case.problem, case.truth, seen, case.undeclared, causes_of(case))


def _reasons_with_order(case: CheckedCase) -> tuple[str, ...]:
    """Return the reasons against a case whose ``pool_order`` is not declared, with what becomes of that order."""
    order, strides = case.problem.cache.pool_order, case.backend.conventions.cache_strides
    note = f"pool_order {order}: compared only where declared"
    if strides == "undeclared":
        note += "; invariance tries such orders"
    others = (reason for reason in case.undeclared if not reason.startswith("pool_order "))
    return (note, *others)


# `features`: a modifier removed or changed on another layer of the process changes the output as it does the truth.
#
# A model has layers with several windows, caps and head counts in one process. The check constructs another impl and
# builder for the same rows with one layer field changed, judges them by that layer's truth, then runs the first impl
# again. `numerics` runs each layer alone and misses values that the first layer of a process fixes for all others.
# Cannot see: state kept between layers that differ in other fields.

_MOST_SCORES = 2**22
"""Most scores, over all heads, for which the truth of another layer is computed. More would take too long."""

_KEPT = "a value of another layer of the process is used: it was fixed at a first call, or a cache has no key for it"


@dataclass(frozen=True)
class ChangedLayer:
    """The layer with one thing changed. ``what``: the change in words. ``heads``: the query heads it keeps.

    ``name``: the changed field if the first layer has its default there, so that a backend that ignores the field is
    right on the first layer. Otherwise empty.
    """

    what: str
    layer: LayerSpec
    heads: tuple[int, ...] = ()
    name: str = ""


def other_layers(layer: LayerSpec, number: int) -> Iterator[tuple[ChangedLayer, ...]]:
    """Yield groups of alternatives; the caller uses the first layer of each group that the backend declares.

    A layer with modifiers yields one group without a modifier and one with it changed. A layer without modifiers yields
    one group with another scale, head group or mask. ``number`` selects the modifier and the order within a group.
    """
    modifiers = layer.modifiers if layer.mla is None else ()
    if not modifiers:
        yield _rotated(list(_unmodified(layer)), number)
        return
    name = modifiers[number % len(modifiers)]
    default = next(field.default for field in fields(layer) if field.name == name)
    yield (ChangedLayer(f"without {name}", _with_layer_field(layer, name, default)),)
    others = [ChangedLayer(f"with {what}", other) for what, other in moved(layer, name)]
    yield _rotated(others, number // len(modifiers))


def _rotated(layers: list[ChangedLayer], number: int) -> tuple[ChangedLayer, ...]:
    first = number % len(layers)
    return (*layers[first:], *layers[:first])


def _unmodified(layer: LayerSpec) -> Iterator[ChangedLayer]:
    scale = 0.75 * layer.softmax_scale
    what = f"with scale {scale:.4g} instead of {layer.softmax_scale:.4g}"
    yield ChangedLayer(what, replace(layer, scale=scale), name="scale" if layer.scale is None else "")
    group = layer.num_heads // layer.num_kv_heads
    if group > 1 and layer.mla is None:
        heads = tuple(range(0, layer.num_heads, group))
        what = f"with one query head per KV head instead of {group}"
        yield ChangedLayer(what, replace(layer, num_heads=layer.num_kv_heads), heads)
    has_own_mask = layer.rswa_window is not None or layer.index_topk is not None
    if layer.attn_type == AttentionType.DECODER and layer.mla is None and not has_own_mask:
        causal = not layer.is_causal
        yield ChangedLayer(f"with causal {causal}", replace(layer, causal=causal), name="" if causal else "causal")


def _with_layer_field(layer: LayerSpec, name: str, value: object) -> LayerSpec:
    changed: dict[str, Any] = {name: value}
    return replace(layer, **changed)


def moved(layer: LayerSpec, name: str) -> Iterator[tuple[str, LayerSpec]]:
    """Yield the layer with another value of the modifier, which is on, and the change in words."""
    modifier, own = MODIFIERS[name], getattr(layer, name)
    others: dict[str, Any]
    match modifier.kind:
        case "keys":
            others = {f"{name} {keys} instead of {own}": keys for keys in (own + 1, own - 1) if keys}
        case "number":
            others = {f"{name} {own * 1.5} instead of {own}": own * 1.5}
        case "per head":
            others = {f"{name} in reverse order": tuple(reversed(getattr(layer, modifier.resolved)))}
        case _:
            assert_never(modifier.kind)
    for what, value in others.items():
        yield what, _with_layer_field(layer, name, value)


def check_features(case: CheckedCase) -> Finding:
    """Judge a step of each changed layer, and the first layer's step again after each."""
    problem, (session, first) = case.problem, case.first_step()
    scores = sum(request.rows * request.num_keys for request in problem.requests) * problem.layer.num_heads
    if scores > _MOST_SCORES:
        return NotExamined(
            (f"{scores} scores: truths of other layers are computed of {_MOST_SCORES} at most",), "attncheck"
        )
    rows = RightRows.of(problem, case.truth, first, case.backend.conventions)
    is_right = bool(rows.is_right.all())
    done: list[str] = []
    for others in other_layers(problem.layer, int(problem.case.hash, 16)):
        possible = ((other, changed) for other in others if (changed := _changed_problem(case, other)) is not None)
        other, changed = next(possible, (None, None))
        if other is None or changed is None:
            continue
        wrong = _judge(case, other, *changed, first if is_right else None)
        if wrong is not None:
            return wrong
        done.append(other.what)
        with stage_named(f"after a layer {other.what}"):
            again = session.run(images=False)
        wrong = rows.wrong_in(again)
        if wrong is not None:
            return later_fault(wrong, f"after a layer {other.what} was run", _KEPT)
    if not done:
        return NotExamined(("the backend declares no layer that differs in one thing",))
    return Holds(
        {"rows": len(case.truth.out), "layers": len(done)}, tuple(f"a layer {what} in between" for what in done)
    )


def _may_see_more(layer: LayerSpec, own: LayerSpec) -> bool:
    """Return whether ``layer`` may see keys on pages that no row of ``own`` can see any more."""
    if layer.window[0] < 0 or layer.window[0] > own.window[0]:
        return True
    # The end of a chunk moves with its size, so that even a smaller one has keys that the other hides.
    limits = set(modifiers_of_kind("keys")) - {"sliding_window"}
    return any(getattr(layer, name) != getattr(own, name) for name in limits)


def _changed_problem(case: CheckedCase, other: ChangedLayer) -> tuple[Problem, Truth] | None:
    """Return the problem of another layer and its truth, or None if it is invalid, undeclared or cannot be judged."""
    problem = case.problem
    changed_case = replace(problem.case, layer=other.layer)
    try:
        check_meaning(changed_case.layer, changed_case.cache, changed_case.batch)
    except SpecError:
        return None
    if problem.case.batch.block_table.null_pages and _may_see_more(other.layer, problem.layer):
        return None
    if unsupported_reasons(case.backend, changed_case):
        return None
    query = problem.query[:, list(other.heads)] if other.heads else problem.query
    changed = replace(problem, case=changed_case, query=query, layout=layout_of_layer(problem.layout, changed_case))
    try:
        return changed, case.truths.truth_of(changed, refuse_blindness=False)
    except BlindCaseError:
        return None


def _judge(
    case: CheckedCase, other: ChangedLayer, problem: Problem, truth: Truth, first: Observation | None
) -> Broken | None:
    """Return what is wrong with the step of another layer, or None if it is right. Raise StageError if it raises.

    ``first``: the step of the first layer. None if it is wrong, because equality with it then proves nothing.
    """
    with stage_named(f"of a layer {other.what}"):
        seen = Session(case.backend, problem, case.device).run(images=False)
    finding = check_numerics(problem, truth, seen, explains=False)
    if isinstance(finding, Holds):
        return None
    output = seen.output[: len(truth.out)].double()
    is_first = (
        first is not None
        and not other.heads
        and torch.allclose(output, first.output[: len(output)].to(output), equal_nan=True)
    )
    kept = f"{other.name} of the layer is ignored{ALTERNATIVE}{_KEPT}" if other.name else _KEPT
    return replace(
        finding,
        summary=f"a layer {other.what}, in the same process: {finding.summary}",
        meaning=kept if is_first else None,
        details=("it has the output of the first layer", *finding.details) if is_first else finding.details,
    )


CHECKS = {
    "refusals": Check(_check, tries_undeclared=True),
    "features": Check(check_features),
}
