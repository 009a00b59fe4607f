"""``builder``: building metadata changes nothing that builders share, and what one builds stays right beside others.

All builders of a step are fed from one CommonAttentionMetadata. Those of other groups of layers, and of other
micro-batches, build before any layer runs. So nothing of that object may change, on the device or on the host, and
metadata of several builders must all answer right. A builder may use its own buffers again at its next step: that is
not asked. A line of ``build`` that waits for the device is a note; where ``sync_free_build`` is declared, it is a
failure. Cannot see: what a builder changes outside of the common metadata.
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
from attncheck.harness.driver.foreign_code import call_backend
from attncheck.harness.driver.forward_calls import ForwardCall, changed_inputs, num_builders
from attncheck.harness.driver.observation import Observation, Raised
from attncheck.harness.driver.persistent_inputs import copied_calls
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import Problem
from attncheck.reference.spec import FastPrefillOptions

Build = Callable[[CommonAttentionMetadata], object]

_SHARED = "all builders and layers of a step share one CommonAttentionMetadata, and none of them may write to it"

_PLAIN = ("paged", "mla")
"""Paths of which graphs are captured, and drafts are made."""

_NUM_SMS = 132
"""Streaming multiprocessors of the GPU that a builder is told of; what it answers is its own choice."""

_UNSEEN = "where build waits for the device is unknown: it does not run while torch's modes watch it"


def _check(case: CheckedCase) -> Finding:
    session, seen = case.first_step()
    notes: list[str] = []
    fault = next((fault for fault in _faults(case, session, seen, notes) if fault is not None), None)
    return Holds(notes=tuple(dict.fromkeys(notes))) if fault is None else fault


def _faults(
    case: CheckedCase, session: Session, seen: Observation, notes: list[str]
) -> Iterator[Broken | Raised | None]:
    """What is wrong, in turn; ``notes`` are added to."""
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
    """Build from ``lent`` and return where that waits; None: unknown, since it raises while it is watched.

    A build that waits may have been broken off there, and is made once more.
    """
    build = partial(builder.build, common_prefix_len=lent.common_prefix_len, common_attn_metadata=lent.common)
    waits = finder.waits_of(build, lent.common)
    if waits != ():
        call_backend("build", build)
    return waits


def builds_of(
    backend: type[AttentionBackend], problem: Problem, builder: Any, call: ForwardCall, device: torch.device
) -> Iterator[tuple[str, ForwardCall, Build]]:
    """(name, call, what builds from its metadata) of methods that the builder overrides.

    A graph is captured with dummies. Of a draft each request has one row.
    """
    batch, width = problem.case.batch, problem.block_table.shape[1]
    if batch.path.name not in _PLAIN:
        return
    if (
        _overrides(builder, "build_for_cudagraph_capture")
        and level_for(backend, problem) is not AttentionCGSupport.NEVER
    ):
        size = batch.num_requests
        inputs = allocate_inputs(problem, size, size, width, device)
        dummy = inputs.load(dummy_call(problem, Bucket(size, size, query_len=1), width, longest=True))
        yield "build_for_cudagraph_capture", dummy, builder.build_for_cudagraph_capture
    if _is_draft(problem, builder):
        yield "build_for_drafting", call, partial(builder.build_for_drafting, draft_index=0)


def _is_draft(problem: Problem, builder: Any) -> bool:
    """Whether the step can be one of drafting, for which the builder has a method of its own."""
    batch = problem.case.batch
    return batch.path.name in _PLAIN and batch.max_query_len == 1 and _overrides(builder, "build_for_drafting")


def _overrides(builder: Any, method: str) -> bool:
    """Whether the builder does not leave ``method`` as it is, or is of another library."""
    own = getattr(type(builder), method, None)
    return own is not None and own is not getattr(AttentionMetadataBuilder, method)


def metadata_fault(name: str, call: ForwardCall, lent: ForwardCall) -> Broken | None:
    """What ``name`` changed of the metadata ``lent``, which held what ``call`` holds."""
    changed = [field for field in changed_inputs(call, lent) if field.startswith("metadata.")]
    if not changed:
        return None
    fields = [field.removeprefix("metadata.") for field in changed]
    details = [f"{field} was {getattr(call.common, field)}, and is {getattr(lent.common, field)}" for field in fields]
    return Broken(f"{name} changed {', '.join(changed)}", meaning=_SHARED, details=tuple(details))


def _waiting_fault(session: Session, waits: tuple[Violation, ...] | None, notes: list[str]) -> Broken | None:
    """What is wrong with a build that waits; where nothing is, it becomes a note.

    Of fast prefill the builder is wrapped in one that reads the device, as in vLLM.
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
    """What is wrong with the answer whether a prefix is treated on its own, which a model runner asks before a step."""
    layer, path = session.problem.layer, session.problem.case.batch.path.name
    if path != "cascade" or not _overrides(builder, "use_cascade_attention"):
        return None
    query_lens = call.common.query_start_loc_cpu.diff().numpy().copy()
    asked = query_lens.copy()
    answer: object = call_backend(
        "use_cascade_attention",
        lambda: builder.use_cascade_attention(
            common_prefix_len=call.common_prefix_len,
            query_lens=asked,
            num_query_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            use_alibi=layer.alibi_slopes is not None,
            use_sliding_window=layer.sliding_window is not None,
            use_local_attention=layer.attn_chunk_size is not None,
            num_sms=_NUM_SMS,
        ),
    )
    if not np.array_equal(asked, query_lens):
        return Broken(f"use_cascade_attention changed query_lens: it was {query_lens}, and is {asked}")
    return (
        None if isinstance(answer, bool | np.bool_) else Broken(f"use_cascade_attention answered {answer!r}, no bool")
    )


CHECK = Check(_check)
