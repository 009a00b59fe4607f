"""Checks of a backend whose metadata builder is the only part that can be driven, such as for layers with a state.

``builder``: metadata must not change during a build, as for any backend. ``cudagraph``: the metadata that a graph of
decodes would read are examined. After one capture, the builder builds for other batches. Tensors must keep their
addresses and numbers their values; each request's state index must be its own first page, and padding must not use a
request's page. Cannot see: what kernels compute, which metadata they read, and steps that verify drafts. Therefore no
level is ever reported as measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend
from attncheck.cases.model import Case
from attncheck.harness.checks.builder.check import builds_of, metadata_fault, waits_while_building
from attncheck.harness.checks.builder.waits import WaitFinder
from attncheck.harness.checks.cudagraph.graph_inputs import allocate_inputs, dummy_call
from attncheck.harness.checks.cudagraph.measurement import level_for
from attncheck.harness.checks.cudagraph.metadata_trace import parts_of, trace
from attncheck.harness.checks.cudagraph.probe import Bucket
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.driver.construction import construct_builder, max_model_len
from attncheck.harness.driver.foreign_code import call_backend
from attncheck.harness.driver.forward_calls import forward_calls_of
from attncheck.harness.driver.persistent_inputs import copied_calls
from attncheck.harness.driver.step import make_step, request_order
from attncheck.harness.problem.problem import Problem, build_problem
from attncheck.reference.spec import BatchSpec, PaddingSpec, RequestSpec
from attncheck.reports.run_file.graph_levels import GRAPH_LEVELS, GraphLevel, GraphLevels, GraphProbe

_ONLY = "only its metadata builder is driven: its kernels take a state and weights, which no case describes"
_BUCKET = 4
_LENGTHS = (5, 40, 17, 33)
"""Numbers of keys of the requests in the first step. The second step's are longer."""

_LONGER = 21

_STATES = "state_indices"
"""Substring of the names of metadata that contain the page of a request's state."""

_DECODES: GraphLevel = "UNIFORM_SINGLE_TOKEN_DECODE"


class BuilderChecks:
    """The checks of one case on one backend. ``reasons``: why the backend excludes the case."""

    def __init__(
        self, backend: type[AttentionBackend], case: Case, seed: int, device: torch.device, reasons: tuple[str, ...]
    ) -> None:
        self._backend, self._case, self._seed, self._device, self._reasons = backend, case, seed, device, reasons

    def examine(self, check: str) -> Finding:
        """Return the finding of one check. Raise StageError if the builder raised."""
        if self._reasons:
            return NotExamined(self._reasons)
        if check == "builder":
            return self._purity()
        return self._levels() if check == "cudagraph" else NotExamined((_ONLY,), "attncheck")

    def dump(self, folder: Path, backend: str) -> None:
        """Write nothing, because a batch without keys and values is not a problem that could be repeated."""

    def _purity(self) -> Finding:
        problem = build_problem(self._case, self._seed)
        finder = WaitFinder(self._device)
        sizes = (self._case.batch.num_tokens,)
        make = partial(construct_builder, self._backend, (problem,), self._device, capture_sizes=sizes)
        builder = finder.construct(lambda: call_backend("builder", make))
        order = request_order(problem, builder.reorder_batch_threshold)
        call = forward_calls_of(make_step(problem, self._device, order), self._backend.features)[0]
        (lent,) = copied_calls((call,))
        waits = waits_while_building(finder, builder, lent)
        fault = metadata_fault("build", call, lent)
        for name, other, build in builds_of(self._backend, problem, builder, call, self._device):
            (lent,) = copied_calls((other,))
            call_backend(name, partial(build, lent.common))
            fault = fault or metadata_fault(name, other, lent)
        return fault or Holds(notes=tuple(f"build waits for the device: {wait}" for wait in waits or ()))

    def _levels(self) -> Finding:
        steps = [
            build_problem(self._of(_BUCKET, longer=0), self._seed),
            build_problem(self._of(_BUCKET - 2, longer=_LONGER), self._seed),
        ]
        declared = level_for(self._backend, steps[0])
        promised = GRAPH_LEVELS[1 : declared.value + 1]
        fault = next(self._faults(steps), "") if promised else ""
        built = GraphProbe(
            name="metadata of decodes", level=_DECODES, outcome="failed" if fault else "passed", reason=fault
        )
        unseen = [
            GraphProbe(name=f"kernels at {level}", level=level, outcome="not examined", reason=_ONLY)
            for level in promised
        ]
        probes = (built, *unseen) if promised else ()
        graph = GraphLevels(declared=GRAPH_LEVELS[declared.value], measured=None, recorder="emulated", probes=probes)
        if not fault:
            held = "its builder keeps what a graph of decodes reads; " if promised else ""
            return NotExamined((f"{held}{_ONLY}",), "attncheck", graph=graph)
        return Broken(
            f"declared {declared.name}: probe {built.name!r} broke: {fault}",
            {"declared_level": declared.value},
            "build changes what the graph reads: a captured graph reads the memory and the numbers of its capture",
            graph=graph,
        )

    def _faults(self, steps: Sequence[Problem]) -> Iterator[str]:
        """Capture once, then build for a full and for a padded batch; yield what a graph would read wrongly."""
        room = max_model_len(self._backend, steps)
        inputs = allocate_inputs(steps[0], _BUCKET, _BUCKET, room, self._device)
        make = partial(construct_builder, self._backend, steps, self._device, capture_sizes=(_BUCKET,))
        builder = call_backend("builder", make)
        dummy = inputs.load(dummy_call(steps[0], Bucket(_BUCKET, _BUCKET, 1), room, longest=False)).common
        captured = call_backend("capture", lambda: builder.build_for_cudagraph_capture(dummy))
        at_capture = trace({path: part for path, part in parts_of(captured).items() if not _is_empty(part)})
        for problem in steps:
            fresh = forward_calls_of(make_step(_padded(problem), self._device), self._backend.features)[0]
            common = inputs.load(fresh).common
            built = parts_of(call_backend("build", partial(builder.build, 0, common)))
            now = trace(built)
            yield from (f"{path} lies elsewhere than at capture" for path in at_capture.moved(now))
            yield from at_capture.changed(now)
            yield from _wrong_states(built, problem)

    def _of(self, count: int, longer: int) -> Case:
        """Return a case with ``count`` decodes on the layer and cache of the case."""
        requests = tuple(RequestSpec(query_len=1, seq_len=length + longer) for length in _LENGTHS[:count])
        return replace(self._case, batch=BatchSpec(requests=requests))


def _padded(problem: Problem) -> Problem:
    """Return the problem with its step padded to the size of the graph."""
    missing = _BUCKET - len(problem.requests)
    padding = PaddingSpec(requests=missing, tokens=missing)
    return replace(problem, case=replace(problem.case, batch=replace(problem.case.batch, padding=padding)))


def _is_empty(part: object) -> bool:
    return isinstance(part, Tensor) and not part.numel()


def _wrong_states(built: dict[str, Any], problem: Problem) -> Iterator[str]:
    """Yield faults in state pages: a request must have its own first page, and padding no request's page."""
    count, own = len(problem.requests), problem.block_table[:, 0].tolist()
    owned = {page for row in problem.block_table.tolist() for page in row} - {0}
    for path, value in built.items():
        if _STATES not in path or not isinstance(value, Tensor) or value.dim() not in (1, 2) or not len(value):
            continue
        first = (value if value.dim() == 1 else value[:, 0]).tolist()
        if first[:count] != own[: len(first)]:
            yield f"{path} names pages {first[:count]}, and the states of the requests lie in {own}"
        strays = [page for page in first[count:] if page in owned]
        if strays:
            yield f"{path} names page {strays[0]} for padding, which is a request's"
