"""Layers that run in a step together with a case's own, and their right outputs.

The mirror image of a layer negates queries, keys and values, so that scores stay the same and outputs are negated. It
needs no truth of its own, and shares no value with the case's layer.
"""

from dataclasses import dataclass, replace
from functools import partial

from attncheck.backends.contract import AttentionBackend
from attncheck.cases.keys import differences
from attncheck.cases.model import Case
from attncheck.harness.checks.invariance.right_rows import RightRows
from attncheck.harness.driver.foreign_code import StageError, declared_reasons
from attncheck.harness.driver.observation import Raised
from attncheck.harness.driver.session import Session
from attncheck.harness.driver.turn import OtherLayer
from attncheck.harness.problem.problem import Problem, build_problem, shares_cache
from attncheck.harness.truth.truth import truth_of
from attncheck.reference.spec import AttentionType, LayerSpec

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


def mirror_layer(rows: RightRows) -> LayerBeside:
    """Return a second layer of the same kind with its own cache."""
    return LayerBeside(OtherLayer(mirrored(rows.problem), _TWIN), mirrored_rows(rows), comes_after=True)


def sharing_layer(rows: RightRows, backend: type[AttentionBackend]) -> LayerBeside | None:
    """Return a layer that shares the cache of the case's layer, and that is passed keys of its own nevertheless.

    Its right outputs are those of the case's layer. Return None if the backend does not declare it.
    """
    problem, case = rows.problem, rows.problem.case
    if not case.layer.has_cache or shares_cache(case) or case.layer.attn_type != AttentionType.DECODER:
        return None
    if case.layer.mla is not None or not _supports(backend, replace(case, layer=replace(case.layer, kv_sharing=True))):
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
    if layer.mla is None and layer.attn_type == AttentionType.DECODER:
        window = replace(other, sliding_window=None if layer.sliding_window else _WINDOW)
        other = window if _supports(backend, replace(problem.case, layer=window)) else other
        cap = replace(other, logits_soft_cap=None if layer.logits_soft_cap else 2.0)
        other = cap if _supports(backend, replace(problem.case, layer=cap)) else other
    if not _supports(backend, replace(problem.case, layer=other)):
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
        if head_size % 8 == 0 and _supports(backend, replace(case, layer=other)):
            return LayerBeside(_layer(problem, other), None)
    return None


def named_layers(rows: RightRows, session: Session) -> tuple[LayerBeside, ...]:
    """Return the layers that the case names and the backend declares.

    Each is judged on the rows that it has right alone. Raise StageError if one raises alone.
    """
    problem, made = rows.problem, []
    for spec in problem.case.layers:
        if not _supports(session.backend, replace(problem.case, layer=spec)):
            continue
        beside = _layer(problem, replace(spec, kv_sharing=problem.layer.kv_sharing))
        alone = Session(session.backend, beside.problem, session.device)
        seen = alone.run(images=False)
        if isinstance(seen, Raised):
            raise StageError(replace(seen, stage=f"{seen.stage} of {beside.role}"))
        truth = truth_of(beside.problem, session.device, refuse_blindness=False)
        right = RightRows.of(beside.problem, truth, seen, rows.conventions)
        shares = spec.kv_sharing and not problem.writes_nothing
        if shares:
            # It reads the keys of the case's layer, and is passed the negated ones.
            negated, right = replace(beside.problem, query=-beside.problem.query), mirrored_rows(right)
            beside = replace(beside, problem=negated, role=f"{beside.role} that shares its cache", shares_cache=True)
        made.append(LayerBeside(beside, right, comes_after=shares))
    return tuple(made)


def _layer(problem: Problem, layer: LayerSpec) -> OtherLayer:
    """Return the mirror image of ``problem`` with another spec, or a new problem if the head sizes differ."""
    given = differences(layer, problem.layer).items()
    named = ", ".join(f"no {name}" if value in (None, False) else f"{name} {value}" for name, value in given)
    role, case = f"a layer with {named}" if named else _TWIN, replace(problem.case, layer=layer)
    if layer.head_size != problem.layer.head_size:
        drawn = build_problem(replace(case, id=f"{case.id}.group"), problem.seed)
        return OtherLayer(drawn, f"{role} in another group", has_own_group=True)
    return OtherLayer(replace(mirrored(problem), case=case), role)


def _supports(backend: type[AttentionBackend], case: Case) -> bool:
    return not declared_reasons(partial(backend.unsupported_reasons, case.layer, case.cache, case.batch))
