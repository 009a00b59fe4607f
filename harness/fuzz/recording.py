"""Records one step of a backend as the calls that the harness would make, without making them, so none can crash.

For a function that ``kernel_backend`` wraps, its own arguments are recorded. For any other backend, those of its impl
and builder are. Needs a process of its own, since the backend is imported and constructed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend
from attncheck.errors import SpecError
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.driver.session import Session
from attncheck.harness.driver.step import make_step
from attncheck.harness.driver.turn import Fill
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.truth import Truth

BACKEND, KERNEL, WRITER = "backend", "kernel", "writing_kernel"
CONSTRUCT, BUILDER, BUILD, UPDATE, FORWARD = "construct", "builder", "build", "do_kv_cache_update", "forward"


class NotExpressibleError(SpecError):
    """A case that cannot be written as one step with plain arguments; ``reason`` has the cause."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, field="case", value="", allowed="repeat it with attncheck")


@dataclass(frozen=True)
class Call:
    """One call: ``name`` of the function, and its arguments."""

    name: str
    args: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass
class CallRecorder:
    """The calls so far. ``is_on``: record calls instead of making them."""

    calls: list[Call] = field(default_factory=list)
    is_on: bool = False

    def note(self, name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Append a call."""
        self.calls.append(Call(name, args, keywords))


@dataclass(frozen=True)
class RecordedStep:
    """The calls of one step, and the expected results.

    ``functions``: the functions that ``kernel_backend`` wraps, by call name; empty if the backend is a class.
    ``expected``: float64 ``[rows, H, Dv]``, in the row order of the step. ``expected_lse``: log-sum-exp in the same
    order.
    ``norm``, ``peak``, ``lse_error``: the errors allowed.
    ``cache_after``: the expected memory of the cache after the step; None if unknown, or if the backend does not write
    it.
    """

    calls: tuple[Call, ...]
    functions: dict[str, Callable[..., object]]
    expected: Tensor
    norm: Tensor
    peak: Tensor
    expected_lse: Tensor
    lse_error: Tensor
    cache_after: Tensor | None


def record_step(
    backend: type[AttentionBackend], problem: Problem, truth: Truth, device: torch.device, fill: Fill
) -> RecordedStep:
    """Record the first step of ``problem`` over a cache filled according to ``fill``.

    Raises:
        NotExpressibleError: the step takes several calls, or its output is quantised.
    """
    if truth.codes is not None:
        raise NotExpressibleError("its output is quantised")
    recorder = CallRecorder()
    recorded, functions = _recorded(backend, recorder)
    step = None
    cache_after = None
    try:
        session = Session(recorded, problem, device)
        recorder.is_on = True
        session.run(fill)
        recorder.is_on = False
        step = make_step(problem, device, session.order)
        if session.pool is not None and session.pool.codec is not None and session.impl.brings_writer:
            session.pool.filled(fill.poison, fill.regions)
            before = session.pool.bytes().clone()
            if step.key is not None and step.value is not None:
                slots = step.slot_mapping  # shorter than the key rows if the last ones are unmapped
                session.pool.write(slots, step.key[: len(slots)], step.value[: len(slots)])
            cache_after = session.pool.bytes().clone()
            session.pool.bytes().copy_(before)
    except StageError:
        if not recorder.calls:
            raise
    forwards = sum(call.name in (FORWARD, KERNEL) for call in recorder.calls)
    if forwards > 1:
        raise NotExpressibleError(f"the path {problem.case.batch.path.name} takes {forwards} calls of forward")
    order = torch.arange(len(truth.out)) if step is None else step.row_order
    return RecordedStep(
        tuple(recorder.calls),
        functions,
        truth.out.cpu()[order],
        truth.budget.norm.cpu()[order],
        truth.budget.peak.cpu()[order],
        truth.lse.cpu()[order],
        truth.budget.lse.cpu()[order],
        cache_after,
    )


def _recorded(
    backend: type[AttentionBackend], recorder: CallRecorder
) -> tuple[type[AttentionBackend], dict[str, Callable[..., object]]]:
    impl_cls: Any = backend.get_impl_cls()
    functions = {name: getattr(impl_cls, name) for name in (KERNEL, WRITER) if hasattr(impl_cls, name)}
    methods: dict[str, Any] = {}
    if functions:
        recorded_impl = type(impl_cls.__name__, (impl_cls,), {name: _noting(recorder, name) for name in functions})
        methods["get_impl_cls"] = staticmethod(lambda: recorded_impl)
    else:
        builder_cls: Any = backend.get_builder_cls()

        def make(name: str, cls: Any, noted: tuple[str, ...], args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            is_first = all(call.name != name for call in recorder.calls)
            if is_first:
                recorder.note(name, args, keywords)
            made = cls(*args, **keywords)
            return _Noted(made, recorder, noted) if is_first else made

        methods["get_impl_cls"] = staticmethod(
            lambda: lambda *args, **keywords: make(CONSTRUCT, impl_cls, (UPDATE, FORWARD), args, keywords)
        )
        methods["get_builder_cls"] = staticmethod(
            lambda: lambda *args, **keywords: make(BUILDER, builder_cls, (BUILD,), args, keywords)
        )
    return type(backend.__name__, (backend,), methods), functions


def _noting(recorder: CallRecorder, name: str) -> Any:
    return staticmethod(lambda *args, **keywords: recorder.note(name, args, keywords))


class _Noted:
    """An impl or a builder; while the recorder is on, the methods in ``noted`` are recorded instead of called."""

    def __init__(self, made: Any, recorder: CallRecorder, noted: tuple[str, ...]) -> None:
        self.__dict__ |= {"_made": made, "_recorder": recorder, "_noted": noted}

    def __getattr__(self, name: str) -> Any:
        if name not in self._noted or not self._recorder.is_on:
            return getattr(self._made, name)

        def note(*args: Any, **keywords: Any) -> Any:
            self._recorder.note(name, args, keywords)
            return keywords.get("output")

        return note
