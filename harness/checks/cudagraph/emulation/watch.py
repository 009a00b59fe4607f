"""Watch what code does with tensors: track host memory and, while a graph is recorded, write a tape.

Two torch modes forward their calls here. One sees operators. The other sees Python functions, which reveal what
operators do not: reads without an operator, and the intended device of a result.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType
from typing import cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from attncheck.harness.checks.cudagraph.call_sites import find_call_site
from attncheck.harness.checks.cudagraph.emulation.capture_rules import (
    CaptureReport,
    OperatorCall,
    forbidden,
    is_held_on_device,
)
from attncheck.harness.checks.cudagraph.emulation.host_memory import HostMemory, Memory, storage_key
from attncheck.harness.checks.cudagraph.emulation.modes import (
    Args,
    FunctionMode,
    Kwargs,
    OperatorMode,
    call_past_operator_mode,
    uncompiled,
)
from attncheck.harness.checks.cudagraph.emulation.operators import (
    AnyOperator,
    Operator,
    describe,
    tensors_among,
    unseen_overload,
)
from attncheck.harness.checks.cudagraph.emulation.tape import Tape, fresh_among
from attncheck.harness.checks.cudagraph.emulation.torch_functions import (
    ADDRESSES,
    COPIES,
    EXPORTS,
    MAKERS,
    READERS,
    TorchFunction,
    destination,
    is_plain,
    is_view,
    place_of_new,
    reads_device,
    stays_on_device,
    words,
)
from attncheck.harness.checks.cudagraph.recorder import ViolationKind

_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Watch:
    """Tracks host memory while :meth:`active`. :meth:`recording` also writes a tape and collects violations."""

    def __init__(self) -> None:
        self.host = HostMemory()
        self._host_device = torch.device("cpu")
        self._operators: dict[AnyOperator, Operator] = {}
        self._tapes: WeakSet[Tape] = WeakSet()
        self._is_active = False
        self._tape: Tape | None = None
        self._report: CaptureReport | None = None
        self._function: TorchFunction | None = None
        self._placed: Memory | None = None
        self._depth = 0
        self._is_opaque = False
        self.hands_out_memory = False

    @contextmanager
    def active(self) -> Iterator[None]:
        """Track host memory. Nested calls have no effect."""
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
    def recording(self, boundary: CodeType) -> Iterator[tuple[Tape, CaptureReport]]:
        """Track host memory, write a tape, and report violations of code within the frame that runs ``boundary``."""
        self._report = report = CaptureReport(boundary)
        self.hands_out_memory = False
        self._tape = Tape(lambda: find_call_site(boundary), self._tapes)
        try:
            with self.active():
                yield self._tape, report
        finally:
            self._report = self._tape = None

    def _note_host_read(self, call: str) -> None:
        if self._report is not None:
            self._report.add_host_read(call)

    def _note(self, kind: ViolationKind, call: str) -> None:
        if self._report is not None:
            self._report.add(kind, call)

    # Functions.

    def function(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        """Run a call of a torch function and record its effect on memory."""
        is_operators_alone = is_plain(func, kwargs)
        if is_operators_alone and (
            stays_on_device(func, args, self.host)
            if self._tape is None
            else not self._depth and is_view(func, args, kwargs)
        ):
            return call_past_operator_mode(func, args, kwargs)
        outer = self._function, self._placed
        self._function, self._placed = func, None
        try:
            if is_operators_alone:
                return func(*args, **kwargs)
            if func in READERS:
                return self._read(func, args, kwargs)
            if func in COPIES and args and isinstance(args[0], Tensor):
                return self._copy(func, args[0], args, kwargs)
            if reads_device(func) and self.host.holds(cast(Tensor, args[0])):
                return self._host_device
            if func in ADDRESSES:
                self._is_opaque = True
                self.hands_out_memory |= self._depth == 0
            if func in MAKERS and self.host.memory_of(tensors_among(args)) == "device":
                self._note("host read", words(func, ""))
            self._placed = place_of_new(func, args, kwargs, self._host_device, self.host)
            if (unseen := unseen_overload(func, args, kwargs)) and isinstance(
                _get_current_dispatch_mode(), OperatorMode
            ):
                with _pop_mode_temporarily():
                    return self.operator(unseen, args, kwargs)
            return func(*args, **kwargs)
        finally:
            self._function, self._placed = outer

    def _read(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        if self.host.memory_of(tensors_among(args[:1])) == "device":
            if self._depth and func in EXPORTS:
                self._is_opaque = True
            else:
                self._note("host read", words(func, ""))
        else:
            self._note_host_read(words(func, ""))
        return func(*args, **kwargs)

    def _copy(self, func: TorchFunction, source: Tensor, args: Args, kwargs: Kwargs) -> object:
        wanted, here = destination(func, args, kwargs, self._host_device), self.host.memory_of((source,))
        if isinstance(wanted, Tensor):
            wanted = self.host.memory_of((wanted,))
        if wanted in {None, here} or find_call_site().interpreted:
            if self._tape is None and stays_on_device(func, args, self.host):
                return call_past_operator_mode(func, args, kwargs)
            return func(*args, **kwargs)
        if wanted == "device":
            self._note("host copy", words(func, ""))
        else:
            self._note("host read", '.to("cpu")' if func is Tensor.to else words(func, ""))
        result = cast(Tensor, func(*args, **kwargs))
        if storage_key(result) == storage_key(source):
            result = result.clone()
        self.host.place(wanted, (result,))
        return result

    # Operators.

    def operator(self, func: AnyOperator, args: Args, kwargs: Kwargs) -> object:
        """Check, run and tape one operator call, and record where its result is."""
        operator = self.facts_of(func)
        is_custom = operator.work == "custom" and isinstance(func, OpOverload)
        if self._depth and not is_custom:
            self._look_for_hidden_work()
        if self._is_of_no_account(operator, args):
            return func(*args, **kwargs)
        if self._tape is not None and not kwargs and not operator.follows and is_held_on_device(operator):
            with torch._C.DisableTorchFunction():
                on_device = self._tape.freeze_on_device(operator.name, args, self.host)
            if on_device is not None:
                result = func(*args)
                with torch._C.DisableTorchFunction():
                    self._tape.add(func, on_device[0], {}, fresh_among(result, on_device[1]))
                return result
        with torch._C.DisableTorchFunction():
            given = tensors_among(args, kwargs)
            call = OperatorCall(operator, args, kwargs, given, self.host.held(given))
            kind = None if self._tape is None else forbidden(call, self.host)
            if kind is not None:
                self._note(kind, words(self._function, operator.name))
            if operator.work == "read" and call.is_host_work:
                self._note_host_read(words(self._function, operator.name))
            memory = self._place_of_result(call)
            tape = self._tape if memory == "device" else None
            if is_custom:
                return self._custom(cast(OpOverload, func), call, memory, tape)
            computes = operator.work in {"computation", "custom"}
            frozen = tape.freeze(operator.name, args, kwargs, self.host) if tape is not None and computes else None
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            if operator.name == "aten.lift_fresh":
                self._place_lifted(cast(Tensor, result))
            if operator.work in {"view", "read"}:
                return result
            fresh = fresh_among(result, map(storage_key, given))
            self.host.place(memory, fresh)
            if tape is not None and frozen is not None:
                tape.add(func, *frozen, fresh)
            elif tape is not None:
                tape.add_new(fresh, is_constant=operator.work == "constant")
        return result

    def _is_of_no_account(self, operator: Operator, args: Args) -> bool:
        """Return whether a call creates no host memory, cannot violate a rule, and is not taped."""
        return operator.is_plain_view or (
            self._tape is None
            and operator.stays_on_device
            and len(args) > 0
            and type(args[0]) is Tensor
            and not self.host.holds(args[0])
        )

    def facts_of(self, func: AnyOperator) -> Operator:
        """Return the facts about an operator, which are computed once."""
        return self._operators.get(func) or self._operators.setdefault(func, describe(func))

    def _place_of_result(self, call: OperatorCall) -> Memory:
        if self._placed is not None and (not call.given or call.operator.follows):
            return self._placed
        return "host" if call.given and call.is_host_work else "device"

    def _place_lifted(self, made: Tensor) -> None:
        """Record where a tensor made from Python data is; inside a custom operator it counts as a kernel's output."""
        if self._placed == "device":
            self._note("host copy", words(self._function, "aten.lift_fresh"))
        elif self._function is not None or self._depth == 0:
            self.host.mark(made)

    # Custom operators.

    def _custom(self, func: OpOverload, call: OperatorCall, memory: Memory, tape: Tape | None) -> object:
        """Run a custom operator, and tape the operators inside it, because decisions of its Python code are frozen.

        Its work may be partly hidden, in a kernel that receives addresses or in C++ code. Then tape the operator as one
        step that is recomputed as a whole, whatever its schema declares as written.
        """
        mark = None if tape is None else tape.mark()
        host_reads = {} if self._report is None else self._report.host_reads
        args, kwargs = cast(tuple[Args, Kwargs], self.host.snapshot((call.args, call.kwargs)))
        num_host_reads = len(host_reads)
        with torch._C._EnableTorchFunction():
            result, is_opaque = self._run_inside(func, call.args, call.kwargs)
        fresh = fresh_among(result, map(storage_key, call.given))
        self.host.place(memory, fresh)
        if tape is not None and mark is not None and (is_opaque or not tape.has_grown_since(mark)):
            if call.on_host and len(host_reads) == num_host_reads:
                self._note_host_read(call.operator.name)
            tape.go_back_to(mark)
            tape.add(func, *tape.freeze(call.operator.name, args, kwargs, self.host), fresh)
        return result

    def _run_inside(self, func: OpOverload, args: Args, kwargs: Kwargs) -> tuple[object, bool]:
        """Run the operator's own implementation under watch; return its result, and whether part of its work is hidden.

        A capture would not allow it to read on the host either.
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
        """Mark the enclosing custom operator as opaque if no Python code but Triton's called this operator."""
        if self._tape is not None and not self._is_opaque:
            place = find_call_site(Watch._run_inside.__code__)
            self._is_opaque = place.line is None or place.interpreted
