"""``features``: a modifier removed or changed on another layer of the process changes the output as it does the truth.

A model has layers with several windows, caps and head counts in one process. The check constructs another impl and
builder for the same rows with one layer field changed, judges them by that layer's truth, then runs the first impl
again. ``numerics`` runs each layer alone and misses values that the first layer of a process fixes for all others.
Cannot see: state kept between layers that differ in other fields.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from attncheck.cases.consistency import check_meaning
from attncheck.errors import BlindCaseError, SpecError
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.checks.interface import Check, CheckedCase
from attncheck.harness.checks.numerics import check_numerics, output_shares
from attncheck.harness.driver.foreign_code import StageError, declared_reasons
from attncheck.harness.driver.observation import Observation, Raised
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.page_layout import layout_of_layer
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.truth import Truth, truth_of
from attncheck.reference.spec import AttentionType, LayerSpec
from attncheck.reports.run_file.causes import ALTERNATIVE

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
        yield _turned(list(_unmodified(layer)), number)
        return
    name = modifiers[number % len(modifiers)]
    yield (ChangedLayer(f"without {name}", _with(layer, name, False if name in ("alibi", "sinks") else None)),)
    yield _turned(list(_moved(layer, name)), number // len(modifiers))


def _turned(layers: list[ChangedLayer], number: int) -> tuple[ChangedLayer, ...]:
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
    if layer.attn_type == AttentionType.DECODER and layer.mla is None:
        causal = not layer.is_causal
        yield ChangedLayer(f"with causal {causal}", replace(layer, causal=causal), name="" if causal else "causal")


def _with(layer: LayerSpec, name: str, value: object) -> LayerSpec:
    changed: dict[str, Any] = {name: value}
    return replace(layer, **changed)


def _moved(layer: LayerSpec, name: str) -> Iterator[ChangedLayer]:
    def moved(value: object, words: str = "") -> ChangedLayer:
        description = words or f"{name} {value} instead of {getattr(layer, name)}"
        return ChangedLayer(f"with {description}", _with(layer, name, value))

    size = getattr(layer, name)
    if name in ("sliding_window", "attn_chunk_size"):
        yield moved(size + 1)
        if size > 1:
            yield moved(size - 1)
    elif name == "logits_soft_cap":
        yield moved(size * 1.5)
    else:
        values = layer.alibi_slopes if name == "alibi" else layer.sink_logits
        yield moved(tuple(reversed(values or ())), f"{name} in reverse order")


def check_features(case: CheckedCase) -> Finding:
    """Judge a step of each changed layer, and the first layer's step again after each."""
    problem, (session, first) = case.problem, case.first_step()
    scores = sum(request.rows * request.num_keys for request in problem.requests) * problem.layer.num_heads
    if scores > _MOST_SCORES:
        return NotExamined(
            (f"{scores} scores: truths of other layers are computed of {_MOST_SCORES} at most",), "attncheck"
        )
    right = (output_shares(case.truth, first) <= 1).all(dim=1)
    done: list[str] = []
    for others in other_layers(problem.layer, int(problem.case.hash, 16)):
        possible = ((other, changed) for other in others if (changed := _changed_problem(case, other)) is not None)
        other, changed = next(possible, (None, None))
        if other is None or changed is None:
            continue
        wrong = _judge(case, other, *changed, first if bool(right.all()) else None)
        if wrong is not None:
            return wrong
        done.append(other.what)
        again = session.run(images=False)
        if isinstance(again, Raised):
            return replace(again, stage=f"{again.stage} after a layer {other.what}")
        count = int(((output_shares(case.truth, again) > 1).any(dim=1) & right).sum())
        if count:
            what = f"right at first, wrong after a layer {other.what} was run: {count} of {len(right)} rows are wrong"
            return Broken(what, {"rows_wrong": count}, _KEPT)
    if not done:
        return NotExamined(("the backend declares no layer that differs in one thing",))
    return Holds({"rows": len(right), "layers": len(done)}, tuple(f"a layer {what} in between" for what in done))


def _may_see_more(layer: LayerSpec, own: LayerSpec) -> bool:
    """Return whether ``layer`` may see keys on pages that no row of ``own`` can see any more."""
    is_wider = layer.window[0] < 0 or layer.window[0] > own.window[0]
    return is_wider or layer.attn_chunk_size != own.attn_chunk_size


def _changed_problem(case: CheckedCase, other: ChangedLayer) -> tuple[Problem, Truth] | None:
    """Return the problem of another layer and its truth, or None if it is invalid, undeclared or cannot be judged."""
    problem = case.problem
    given = other.layer, problem.cache, problem.case.batch
    try:
        check_meaning(*given)
    except SpecError:
        return None
    if problem.case.batch.block_table.null_pages and _may_see_more(other.layer, problem.layer):
        return None
    if declared_reasons(partial(case.backend.unsupported_reasons, *given)):
        return None
    query = problem.query[:, list(other.heads)] if other.heads else problem.query
    changed_case = replace(problem.case, layer=other.layer)
    changed = replace(problem, case=changed_case, query=query, layout=layout_of_layer(problem.layout, changed_case))
    try:
        return changed, truth_of(changed, case.device, refuse_blindness=False)
    except BlindCaseError:
        return None


def _judge(
    case: CheckedCase, other: ChangedLayer, problem: Problem, truth: Truth, first: Observation | None
) -> Broken | Raised | None:
    """Return what is wrong with the step of another layer, or None if it is right.

    ``first``: the step of the first layer. None if it is wrong, because equality with it then proves nothing.
    """
    try:
        seen = Session(case.backend, problem, case.device).run(images=False)
    except StageError as failure:
        seen = failure.raised
    if isinstance(seen, Raised):
        return replace(seen, stage=f"{seen.stage} of a layer {other.what}")
    finding = check_numerics(problem, truth, seen, explains=False)
    if isinstance(finding, Holds):
        return None
    rows = len(truth.out)
    is_first = (
        first is not None
        and not other.heads
        and torch.allclose(seen.output[:rows].double(), first.output[:rows].double(), equal_nan=True)
    )
    kept = f"{other.name} of the layer is ignored{ALTERNATIVE}{_KEPT}" if other.name else _KEPT
    return replace(
        finding,
        summary=f"a layer {other.what}, in the same process: {finding.summary}",
        meaning=kept if is_first else None,
        details=("it has the output of the first layer", *finding.details) if is_first else finding.details,
    )


CHECK = Check(check_features)
