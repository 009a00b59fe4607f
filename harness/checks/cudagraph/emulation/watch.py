"""Watches what code does with tensors: an account of host memory, and, while a graph is recorded, its tape.

Two torch modes pass their calls here. One sees operators; the other sees Python functions, which say what operators
cannot: a read without an operator, and where a result is meant to lie.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from attncheck.harness.checks.cudagraph.call_sites import find_call_site
from attncheck.harness.checks.cudagraph.emulation.capture_rules import OperatorCall, forbidden
from attncheck.harness.checks.cudagraph.emulation.host_memory import HostMemory, storage_key
from attncheck.harness.checks.cudagraph.emulation.modes import Args, FunctionMode, Kwargs, OperatorMode, uncompiled
from attncheck.harness.checks.cudagraph.emulation.operators import (
    AnyOperator,
    Operator,
    describe,
    tensors_among,
    unseen_overload,
)
from attncheck.harness.checks.cudagraph.emulation.tape import Tape
from attncheck.harness.checks.cudagraph.emulation.torch_functions import (
    ADDRESSES,
    COPIES,
    EXPORTS,
    MAKERS,
    READERS,
    Memory,
    TorchFunction,
    asks_device,
    constructors,
    destination,
    words,
)
from attncheck.harness.checks.cudagraph.recorder import Violation, ViolationKind

_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Watch:
    """One account, kept while :meth:`active`; :meth:`recording` adds a tape and collects violations."""

    def __init__(self) -> None:
        self.host = HostMemory()
        self._host_device = torch.device("cpu")
        self._operators: dict[AnyOperator, Operator] = {}
        self._tapes: WeakSet[Tape] = WeakSet()
        self._is_active = False
        self._tape: Tape | None = None
        self._violations: dict[Violation, None] = {}
        self._host_reads: dict[str, None] = {}
        self._boundary: CodeType | None = None
        self._function: TorchFunction | None = None
        self._placed: Memory | None = None
        self._depth = 0
        self._is_opaque = False
        self.hands_out_memory = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Keep the account; within another ``active`` nothing changes."""
        if self._is_active:
            yield
            return
        self._is_active = True
        try:
            with uncompiled(), self._modes():
                yield
        finally:
            self._is_active = False

    @contextmanager
    def _modes(self) -> Iterator[None]:
        with FunctionMode(self.function), OperatorMode(self.operator, self.facts_of):
            yield

    @contextmanager
    def recording(self, boundary: CodeType) -> Iterator[tuple[Tape, dict[Violation, None]]]:
        """Keep the account, tape, and collect violations, in the order they come, each once.

        ``boundary``: frames outside of the one that runs it are nobody's to blame.
        """
        self._boundary, self._violations, self._host_reads = boundary, {}, {}
        self.hands_out_memory = False
        self._tape = Tape(lambda: find_call_site(boundary), self._tapes)
        try:
            with self.active():
                yield self._tape, self._violations
        finally:
            self._boundary = self._tape = None

    def host_reads(self) -> tuple[str, ...]:
        """What the latest recording read of host memory: call and line, each once."""
        return tuple(self._host_reads)

    def _note_host_read(self, call: str) -> None:
        if self._boundary is not None:
            self._host_reads[f"{call} at {find_call_site(self._boundary)}"] = None

    def _report(self, kind: ViolationKind, call: str) -> None:
        if self._boundary is None:
            return
        place = find_call_site(self._boundary)
        if not place.interpreted:
            self._violations[Violation(kind, call, str(place))] = None

    def _memory_of(self, tensors: Iterable[Tensor]) -> Memory:
        return "host" if all(self.host.holds(tensor) for tensor in tensors) else "device"

    # Functions.

    def function(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        """One call of a torch function, with what it says about memory."""
        outer = self._function, self._placed
        self._function, self._placed = func, None
        try:
            if func in READERS:
                return self._read(func, args, kwargs)
            if func in COPIES and args and isinstance(args[0], Tensor):
                return self._copy(func, args[0], args, kwargs)
            if asks_device(func) and self.host.holds(cast(Tensor, args[0])):
                return self._host_device
            if func in ADDRESSES:
                self._is_opaque = True
                self.hands_out_memory |= self._depth == 0
            if func in MAKERS and self._memory_of(tensors_among(args)) == "device":
                self._report("host read", words(func, ""))
            self._placed = self._place_of_new(func, args, kwargs)
            if (unseen := unseen_overload(func, args, kwargs)) and isinstance(
                _get_current_dispatch_mode(), OperatorMode
            ):
                with _pop_mode_temporarily():
                    return self.operator(unseen, args, kwargs)
            return func(*args, **kwargs)
        finally:
            self._function, self._placed = outer

    def _read(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if self._memory_of(tensors_among(args[:1])) == "device":
            if self._depth and func in EXPORTS:
                self._is_opaque = True
            else:
                self._report("host read", words(func, ""))
        else:
            self._note_host_read(words(func, ""))
        return func(*args, **kwargs)

    def _copy(self, func: TorchFunction, source: Tensor, args: Args, kwargs: Kwargs) -> object:
        wanted, here = destination(func, args, kwargs, self._host_device), self._memory_of((source,))
        if isinstance(wanted, Tensor):
            wanted = self._memory_of((wanted,))
        if wanted in {None, here} or find_call_site().interpreted:
            return func(*args, **kwargs)
        if wanted == "device":
            self._report("host copy", words(func, ""))
        else:
            self._report("host read", '.to("cpu")' if func is Tensor.to else words(func, ""))
        result = cast(Tensor, func(*args, **kwargs))
        if storage_key(result) == storage_key(source):
            result = result.clone()
        self._place(wanted, (result,))
        return result

    def _place_of_new(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> Memory | None:
        """Where a new tensor lies, as far as the function says."""
        named = destination(func, args, kwargs, self._host_device)
        if isinstance(named, str):
            return named
        if func in constructors():
            return "host"
        return self._memory_of(tensors_among(args[:1])) if func is Tensor.new_tensor else None

    # Operators.

    def operator(self, func: AnyOperator, args: Args, kwargs: Kwargs) -> object:
        """One call of an operator: judged, run, taped, and its result placed in the account."""
        with torch._C.DisableTorchFunction():
            operator = self.facts_of(func)
            given = tensors_among((args, kwargs))
            call = OperatorCall(operator, args, kwargs, given, self.host.held(given))
            kind = None if self._tape is None else forbidden(call, self.host)
            if kind is not None:
                self._report(kind, words(self._function, operator.name))
            if operator.work == "read" and call.is_host_work:
                self._note_host_read(words(self._function, operator.name))
            memory = self._place_of_result(call)
            tape = self._tape if memory == "device" else None
            if operator.work == "custom" and isinstance(func, OpOverload):
                return self._custom(func, call, memory, tape)
            if self._depth:
                self._look_for_hidden_work()
            computes = operator.work in {"computation", "custom"}
            frozen = tape.freeze(operator.name, args, kwargs, self.host) if tape is not None and computes else None
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if operator.name == "aten.lift_fresh":
                self._place_lifted(cast(Tensor, result))
            if operator.work in {"view", "read"}:
                return result
            known = {storage_key(tensor) for tensor in given}
            fresh = tuple(None if storage_key(tensor) in known else tensor for tensor in tensors_among(result))
            self._place(memory, fresh)
            if tape is not None and frozen is not None:
                tape.add(func, *frozen, fresh)
            elif tape is not None:
                tape.add_new(fresh, is_constant=operator.work == "constant")
        return result

    def facts_of(self, func: AnyOperator) -> Operator:
        """What is known of an operator."""
        return self._operators.get(func) or self._operators.setdefault(func, describe(func))

    def _place_of_result(self, call: OperatorCall) -> Memory:
        if self._placed is not None and (not call.given or call.operator.follows):
            return self._placed
        return "host" if call.given and call.is_host_work else "device"

    def _place(self, memory: Memory, tensors: Iterable[Tensor | None]) -> None:
        for tensor in tensors:
            if tensor is not None:
                (self.host.mark if memory == "host" else self.host.unmark)(tensor)

    def _place_lifted(self, made: Tensor) -> None:
        """A tensor made from Python data. Within an operator, what numpy made stands for what its kernel wrote."""
        if self._placed == "device":
            self._report("host copy", words(self._function, "aten.lift_fresh"))
        elif self._function is not None or self._depth == 0:
            self.host.mark(made)

    # Custom operators.

    def _custom(self, func: OpOverload, call: OperatorCall, memory: Memory, tape: Tape | None) -> object:
        """A custom operator: taped as what it is made of, since whatever Python decides in between is frozen.

        Where part of it is hidden (a kernel that is handed addresses, C++ code), it is one step, computed as a whole,
        whatever its schema says that it writes.
        """
        mark = None if tape is None else tape.mark()
        args, kwargs = cast(tuple[Args, Kwargs], self.host.snapshot((call.args, call.kwargs)))
        num_host_reads = len(self._host_reads)
        with torch._C._EnableTorchFunction():
            result, is_opaque = self._run_inside(func, call.args, call.kwargs)
        known = {storage_key(tensor) for tensor in call.given}
        fresh = tuple(None if storage_key(tensor) in known else tensor for tensor in tensors_among(result))
        self._place(memory, fresh)
        if tape is not None and mark is not None and (is_opaque or not tape.has_grown_since(mark)):
            if call.on_host and len(self._host_reads) == num_host_reads:
                self._note_host_read(call.operator.name)
            tape.go_back_to(mark)
            tape.add(func, *tape.freeze(call.operator.name, args, kwargs, self.host), fresh)
        return result

    def _run_inside(self, func: OpOverload, args: Args, kwargs: Kwargs) -> tuple[object, bool]:
        """The operator's own implementation, watched: what it reads on the host, no capture would allow either.

        Its result, and whether part of its work is hidden.
        """
        kernel = torch.library.get_kernel(func, "CPU")
        outer = self._function, self._placed, self._is_opaque
        self._function, self._placed, self._is_opaque = None, None, False
        self._depth += 1
        try:
            with self._modes():
                result = kernel.call_boxed(_CPU_KEYS, *args, **kwargs)
            return result, self._is_opaque
        finally:
            self._function, self._placed, self._is_opaque = outer
            self._depth -= 1

    def _look_for_hidden_work(self) -> None:
        """No Python code between a custom operator and this one, or only Triton's: more may be done there unseen."""
        place = find_call_site(Watch._run_inside.__code__)
        self._is_opaque |= place.line is None or place.interpreted
