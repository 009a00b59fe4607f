"""``builder``: building metadata changes no shared object, and the metadata stay valid when other builders build too.

All builders of a step receive one CommonAttentionMetadata. Builders of other layer groups and of other micro-batches
build before any layer runs. So nothing in that object may change, on the device or on the host, and the metadata of
all builders must give right outputs. A builder may reuse its own buffers in its next step; the check allows this. A
line of ``build`` that waits for the device adds a note, or fails the check if ``sync_free_build`` is declared. Cannot
see: changes outside the common metadata.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from attncheck.backends.contract import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from attncheck.harness.checks.builder.in_flight import new_builder, step_of, wrong_beside_others, wrong_draft
from attncheck.harness.checks.builder.waits import WaitFinder
from attncheck.harness.checks.cudagraph.graph_inputs import allocate_inputs, dummy_call
from attncheck.harness.checks.cudagraph.measurement import level_for
from attncheck.harness.checks.cudagraph.probe import Bucket
from attncheck.harness.checks.cudagraph.recorder import Violation
from attncheck.harness.checks.findings import Broken, Finding, Holds
from attncheck.harness.checks.interface import Check, CheckedCase
from attncheck.harness.checks.numerics import output_shares
from attncheck.harness.driver.construction import max_model_len
from attncheck.harness.driver.foreign_code import call_backend
from attncheck.harness.driver.forward_calls import ForwardCall, changed_inputs, num_builders
from attncheck.harness.driver.observation import Observation, Raised
from attncheck.harness.driver.persistent_inputs import copied_calls
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import Problem
from attncheck.reference.spec import FastPrefillOptions

Build = Callable[[CommonAttentionMetadata], object]

_SHARED = "shared metadata are changed: all builders and layers of a step read one CommonAttentionMetadata"

_PLAIN = ("paged", "mla")
"""Paths whose steps are captured in graphs and used for drafts."""

_NUM_SMS = 132
"""``num_sms`` (streaming multiprocessors) passed to ``use_cascade_attention``. Any bool it returns is accepted."""

_UNSEEN = "where build waits for the device is unknown: it does not run while torch's modes watch it"


def _check(case: CheckedCase) -> Finding:
    session, seen = case.first_step()
    notes: list[str] = []
    fault = next((fault for fault in _faults(case, session, seen, notes) if fault is not None), None)
    return Holds(notes=tuple(dict.fromkeys(notes))) if fault is None else fault


def _faults(
    case: CheckedCase, session: Session, seen: Observation, notes: list[str]
) -> Iterator[Broken | Raised | None]:
    """Yield faults, or None, one after another; append to ``notes``."""
    finder = WaitFinder(case.device)
    builders = [finder.construct(partial(new_builder, session)) for _ in range(num_builders(case.problem))]
    _, calls = step_of(session, session.order)
    for call in calls:
        (lent,) = copied_calls((call,))
        waits = waits_while_building(finder, builders[call.builder], lent)
        yield metadata_fault("build", call, lent)
        yield _waiting_fault(session, waits, notes)
    for name, call, build in builds_of(session.backend, case.problem, builders[0], calls[0], case.device):
        (lent,) = copied_calls((call,))
        call_backend(name, partial(build, lent.common))
        yield metadata_fault(name, call, lent)
    changed = [name for name in seen.changed if name.startswith("metadata.")]
    yield Broken(f"forward changed {', '.join(changed)}", meaning=_SHARED) if changed else None
    yield _cascade_fault(session, builders[0], calls[0])
    if not bool(seen.unwritten.any()) and not bool((output_shares(case.truth, seen) > 1).any()):
        yield wrong_beside_others(session, case.truth)
        yield wrong_draft(session, case.truth) if _is_draft(case.problem, builders[0]) else None


def waits_while_building(finder: WaitFinder, builder: Any, lent: ForwardCall) -> tuple[Violation, ...] | None:
    """Build from ``lent`` and return where that waits for the device, or None if ``build`` raises under watch.

    A build that waits may have been aborted, so it is repeated without watch.
    """
    build = partial(builder.build, common_prefix_len=lent.common_prefix_len, common_attn_metadata=lent.common)
    waits = finder.waits_of(build, lent.common)
    if waits != ():
        call_backend("build", build)
    return waits


def builds_of(
    backend: type[AttentionBackend], problem: Problem, builder: Any, call: ForwardCall, device: torch.device
) -> Iterator[tuple[str, ForwardCall, Build]]:
    """Yield (name, call, function that builds from its metadata) for builder methods that are overridden.

    For a graph, the call has dummy inputs. Drafts apply only if each request has one row.
    """
    batch = problem.case.batch
    if batch.path.name not in _PLAIN:
        return
    if (
        _overrides(builder, "build_for_cudagraph_capture")
        and level_for(backend, problem) is not AttentionCGSupport.NEVER
    ):
        size, room = batch.num_requests, max_model_len(backend, [problem])
        inputs = allocate_inputs(problem, size, size, room, device)
        dummy = inputs.load(dummy_call(problem, Bucket(size, size, query_len=1), room, longest=True))
        yield "build_for_cudagraph_capture", dummy, builder.build_for_cudagraph_capture
    if _is_draft(problem, builder):
        yield "build_for_drafting", call, partial(builder.build_for_drafting, draft_index=0)


def _is_draft(problem: Problem, builder: Any) -> bool:
    """Return whether the step can be a draft step and the builder overrides ``build_for_drafting``."""
    batch = problem.case.batch
    return batch.path.name in _PLAIN and batch.max_query_len == 1 and _overrides(builder, "build_for_drafting")


def _overrides(builder: Any, method: str) -> bool:
    """Return whether the builder overrides ``method``, or has its own if it is another library's class."""
    own = getattr(type(builder), method, None)
    return own is not None and own is not getattr(AttentionMetadataBuilder, method)


def metadata_fault(name: str, call: ForwardCall, lent: ForwardCall) -> Broken | None:
    """Return what ``name`` changed in the metadata ``lent``, compared with ``call``, or None."""
    changed = [field for field in changed_inputs(call, lent) if field.startswith("metadata.")]
    if not changed:
        return None
    fields = [field.removeprefix("metadata.") for field in changed]
    details = [f"{field} was {getattr(call.common, field)}, and is {getattr(lent.common, field)}" for field in fields]
    return Broken(f"{name} changed {', '.join(changed)}", meaning=_SHARED, details=tuple(details))


def _waiting_fault(session: Session, waits: tuple[Violation, ...] | None, notes: list[str]) -> Broken | None:
    """Return the fault of a build that waits if it must not; otherwise add notes and return None.

    Does not apply to fast prefill, whose wrapper around the builder reads the device, as in vLLM.
    """
    if isinstance(session.problem.case.batch.path.options, FastPrefillOptions):
        return None
    if waits is None:
        notes.append(_UNSEEN)
    elif waits and session.backend.conventions.sync_free_build:
        return Broken(
            f"build waits for the device, although sync_free_build is declared: {waits[0]}",
            {"waits": len(waits)},
            details=tuple(map(str, waits[1:])),
        )
    else:
        notes += [f"build waits for the device: {wait}" for wait in waits]
    return None


def _cascade_fault(session: Session, builder: Any, call: ForwardCall) -> Broken | None:
    """Return what is wrong with ``use_cascade_attention``, which a model runner calls before a step, or None."""
    layer, path = session.problem.layer, session.problem.case.batch.path.name
    if path != "cascade" or not _overrides(builder, "use_cascade_attention"):
        return None
    query_lens = call.common.query_start_loc_cpu.diff().numpy().copy()
    passed_lens = query_lens.copy()
    answer: object = call_backend(
        "use_cascade_attention",
        lambda: builder.use_cascade_attention(
            common_prefix_len=call.common_prefix_len,
            query_lens=passed_lens,
            num_query_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            use_alibi=layer.alibi_slopes is not None,
            use_sliding_window=layer.sliding_window is not None,
            use_local_attention=layer.attn_chunk_size is not None,
            num_sms=_NUM_SMS,
        ),
    )
    if not np.array_equal(passed_lens, query_lens):
        return Broken(f"use_cascade_attention changed query_lens from {query_lens} to {passed_lens}")
    return (
        None
        if isinstance(answer, bool | np.bool_)
        else Broken(f"use_cascade_attention answered {answer!r}, expected a bool")
    )


CHECK = Check(_check)
