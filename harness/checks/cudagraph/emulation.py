"""CUDA graphs emulated without a GPU: ``forward`` runs under a watch, and a tape replays its operators.

On the CPU all tensors share one memory, so how a tensor was created determines whether a GPU would hold it.

Not recorded: work that torch does not see, such as a C extension called directly, a Triton kernel launched outside a
custom operator, or other threads. The Python code of a custom operator runs at every replay. Memory that such an
operator, or a FlexAttention modifier, accesses by itself and not through an argument is not tracked.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from textwrap import shorten
from types import CodeType
from typing import NamedTuple, cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack, _pop_torch_dispatch_stack, _push_on_torch_dispatch_stack
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily

from attncheck.harness.checks.cudagraph.operators import (
    ADDRESSES,
    COPIES,
    EXPORTS,
    KINDS_OF_DEVICE,
    MAKERS,
    ON_GPU,
    READERS,
    AnyOperator,
    Args,
    HostMemory,
    Kwargs,
    Memory,
    Operator,
    OperatorCall,
    TorchFunction,
    describe,
    destination,
    forbidden,
    is_plain,
    is_view,
    mixes_devices,
    place_of_new,
    stays_on_device,
    storage_key,
    tensors_among,
    unseen_overload,
    without_gpu,
    words,
)
from attncheck.harness.checks.cudagraph.recorder import (
    BranchError,
    CallSite,
    CaptureError,
    Forward,
    Recording,
    Released,
    UnseenError,
    Violation,
    ViolationKind,
    count_uses,
    find_call_site,
)

# Torch modes that forward every call to a watch, and a context that disables compilation.

_COMPILERS = frozenset({"torch._dynamo", "torch.nn.attention.flex_attention"})


class FunctionMode(TorchFunctionMode):
    """Forward torch's Python functions to ``call``."""

    def __init__(self, call: Callable[[TorchFunction, Args, Kwargs], object]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return self._call(func, args, kwargs or {})


class OperatorMode(TorchDispatchMode):
    """Forward operators to ``call``, with composite ones decomposed. ``facts_of`` returns whether one is composite."""

    supports_higher_order_operators = True

    def __init__(
        self, call: Callable[[AnyOperator, Args, Kwargs], object], facts_of: Callable[[AnyOperator], Operator]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call, self._facts_of = call, facts_of

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False. Otherwise torch would import the compiler at the first operator and enter it at each."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if self._facts_of(func).is_composite:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return self._call(func, args, kwargs or {})


def call_past_operator_mode(func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
    """Return the result of ``func`` with its operators hidden from the innermost dispatch mode, if an OperatorMode."""
    mode = _pop_torch_dispatch_stack(None) if _len_torch_dispatch_stack() else None
    if not isinstance(mode, OperatorMode):
        if mode is not None:
            _push_on_torch_dispatch_stack(mode)
        return func(*args, **kwargs)
    try:
        return func(*args, **kwargs)
    finally:
        _push_on_torch_dispatch_stack(mode)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled functions in eager mode, because the compiler fails under modes and caches the failure.

    The compiler takes seconds to import, so this does nothing until a module that uses it is imported.
    """
    if not sys.modules.keys().isdisjoint(_COMPILERS):
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    try:
        yield
    finally:
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()


# Recorded operators, and their replay in the memory they were recorded with.
#
# The tape freezes what a captured graph freezes: addresses, shapes and strides (by aliases made at the call), Python
# numbers, and host memory.

Fresh = tuple[Tensor | None, ...]
"""Tensors that an operator returned, with None for those that share memory with an argument."""


class TapedOperator(NamedTuple):
    """One operator with its arguments. A replay copies its results to those ``outputs`` that are not None."""

    func: Callable[..., object]
    args: Args
    kwargs: Kwargs
    outputs: Fresh


@dataclass(frozen=True)
class ExternalMemory:
    """Memory that existed before the recording. ``alias``: one of the tape's references to it."""

    alias: Tensor
    user: str
    place: CallSite

    def released(self) -> Released:
        """Return the memory as a ``Released`` value."""
        memory = self.alias.untyped_storage()
        first_used = self.user + (f" at {self.place}" if str(self.place) else "")
        return Released(memory.data_ptr(), memory.data_ptr() + memory.nbytes(), first_used)


@dataclass(frozen=True)
class TapeMark:
    """The state of a tape, for :meth:`Tape.go_back_to`."""

    num_steps: int
    made: dict[int, Tensor]
    outside: dict[int, ExternalMemory]
    references: dict[int, int]


class Tape:
    """Operators in order, the memory they use, and what a graph cannot contain; without duplicates.

    ``boundary``: a code object. Frames outside the one that runs it do not belong to the backend. ``tapes``: all tapes
    that may hold the same memory, including this one.
    """

    def __init__(self, boundary: CodeType, tapes: "WeakSet[Tape]") -> None:
        self._boundary = boundary
        self._tapes = tapes
        tapes.add(self)
        self.violations: dict[Violation, None] = {}
        self.host_reads: dict[str, None] = {}
        self._steps: list[TapedOperator] = []
        self._made: dict[int, Tensor] = {}
        self._outside: dict[int, ExternalMemory] = {}
        self._references: dict[int, int] = {}
        self._addresses: dict[int, int] = {}

    def note(self, kind: ViolationKind, call: str, *, mixes_devices: bool = False) -> None:
        """Add a violation, unless it comes from Triton's interpreter, which emulates a kernel."""
        place = find_call_site(self._boundary)
        if not place.interpreted:
            self.violations[Violation(kind, call, str(place), mixes_devices)] = None

    def note_host_read(self, call: str) -> None:
        """Add a read of host memory, with its line."""
        self.host_reads[f"{call} at {find_call_site(self._boundary)}"] = None

    def freeze(self, user: str, args: Args, kwargs: Kwargs, host: HostMemory) -> tuple[Args, Kwargs]:
        """Return the arguments that operator ``user`` gets at each replay.

        They contain aliases of device tensors, and copies of host tensors, which freeze their contents.
        """

        def frozen(value: object) -> object:
            if isinstance(value, Tensor):
                key = storage_key(value)
                return value.clone() if host.holds_key(key) else self._alias(value, key, user)
            if isinstance(value, list | tuple):
                parts = [frozen(part) for part in value]
                return parts if isinstance(value, list) else tuple(parts)
            return value

        return tuple(map(frozen, args)), {name: frozen(value) for name, value in kwargs.items()} if kwargs else {}

    def _alias(self, tensor: Tensor, key: int, user: str) -> Tensor:
        alias = tensor.detach()
        if key not in self._made:
            self._references[key] = self._references.get(key, 0) + 1
            if key not in self._outside:
                self._outside[key] = ExternalMemory(alias, user, find_call_site(self._boundary))
        return alias

    def add(self, func: AnyOperator, args: Args, kwargs: Kwargs, fresh: Fresh) -> None:
        """Append a call of ``func`` on frozen arguments, which each replay repeats."""
        outputs = [None if tensor is None else self.keep(tensor) for tensor in fresh]
        is_new = any(output is not None for output in outputs)
        self._steps.append(TapedOperator(func, args, kwargs, tuple(outputs) if is_new else ()))

    def add_new(self, fresh: Fresh, *, is_constant: bool) -> None:
        """Add memory that the recording allocated. Each replay writes a constant again, with its present value."""
        for tensor in fresh:
            if tensor is not None:
                kept = self.keep(tensor)
                if is_constant:
                    self._steps.append(TapedOperator(Tensor.copy_, (kept, kept.clone()), {}, ()))

    def keep(self, tensor: Tensor) -> Tensor:
        """Return an alias of memory that the recording allocated, and keep it alive as long as the tape."""
        alias = tensor.detach()
        self._made.setdefault(storage_key(alias), alias)
        return alias

    def close(self) -> None:
        """End the recording. A later change of an address counts as a release; earlier resizes do not."""
        self._addresses = {key: _address(outside.alias) for key, outside in self._outside.items()}

    def mark(self) -> TapeMark:
        """Return the present state, for :meth:`go_back_to`."""
        return TapeMark(len(self._steps), dict(self._made), dict(self._outside), dict(self._references))

    def has_grown_since(self, mark: TapeMark) -> bool:
        """Return whether a step was added after ``mark``."""
        return len(self._steps) > mark.num_steps

    def go_back_to(self, mark: TapeMark) -> None:
        """Discard everything added after ``mark``."""
        del self._steps[mark.num_steps :]
        self._made = dict(mark.made)
        self._outside = dict(mark.outside)
        self._references = dict(mark.references)

    def replay(self) -> None:
        """Repeat each step."""
        inference = any(alias.is_inference() for alias in self._made.values())
        with torch.no_grad(), torch.inference_mode(inference):
            for func, args, kwargs, outputs in self._steps:
                result = func(*args, **kwargs)
                if outputs:
                    for output, new in zip(outputs, tensors_among(result), strict=True):
                        if output is not None:
                            output.copy_(new)

    def uses_outside(self, tensor: Tensor) -> bool:
        """Return whether the memory of ``tensor`` existed before the recording and is used by the tape."""
        return storage_key(tensor) in self._outside

    def released(self) -> Iterator[Released]:
        """Yield memory from before the recording that only tapes keep alive or that a resize has moved."""
        extra = count_uses(torch.empty(1)) - 1
        for key, outside in self._outside.items():
            moved = _address(outside.alias) != self._addresses[key]
            if moved or count_uses(outside.alias) - extra <= sum(tape._references.get(key, 0) for tape in self._tapes):
                yield outside.released()


def fresh_among(result: object, known: Iterable[int]) -> Fresh:
    """Return an operator's result tensors, with None for those whose storage key is among ``known``."""
    known = set(known)
    return tuple([None if storage_key(tensor) in known else tensor for tensor in tensors_among(result)])


def _address(tensor: Tensor) -> int:
    """Return the address of the storage, not of the first element."""
    return tensor.untyped_storage().data_ptr()


# Watch what code does with tensors: track host memory and, while a graph is recorded, write a tape.
#
# Two torch modes forward their calls here. One sees operators. The other sees Python functions, which reveal what
# operators do not: reads without an operator, and the intended device of a result.

_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Watch:
    """Tracks host memory while :meth:`active`. :meth:`recording` also writes a tape and collects violations."""

    def __init__(self, *, device_is_gpu: bool = False) -> None:
        self.host = HostMemory()
        self._host_device = torch.device("cpu")
        self._operators: dict[AnyOperator, Operator] = {}
        self._tapes: WeakSet[Tape] = WeakSet()
        self._is_active = False
        self._tape: Tape | None = None
        self._function: TorchFunction | None = None
        self._placed: Memory | None = None
        self._depth = 0
        self._is_opaque = False
        self.hands_out_memory = False
        self.has_read_device = False
        self._device_is_gpu = self._device_was_gpu = device_is_gpu

    @contextmanager
    def with_device_of_gpu(self) -> Iterator[None]:
        """Replace the device of each tensor on the device by a GPU's, where the backend reads it."""
        self._device_is_gpu = self._device_was_gpu = True
        try:
            yield
        finally:
            self._device_is_gpu = False

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
    def recording(self, boundary: CodeType) -> Iterator[Tape]:
        """Track host memory, and write a tape of the code within the frame that runs ``boundary``."""
        self.hands_out_memory = False
        self._tape = Tape(boundary, self._tapes)
        try:
            with self.active():
                yield self._tape
        finally:
            self._tape = None

    def _note_host_read(self, call: str) -> None:
        if self._tape is not None:
            self._tape.note_host_read(call)

    def _note(self, kind: ViolationKind, call: str, *, mixes_devices: bool = False) -> None:
        if self._tape is not None:
            self._tape.note(kind, call, mixes_devices=mixes_devices)

    # Functions.

    def function(self, func: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        """Run a call of a torch function and record its effect on memory."""
        if self._device_was_gpu:  # the backend may have kept it
            func, args, kwargs = without_gpu(func, args, kwargs)
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
            if func in ON_GPU:
                return self._read_device(func, tensors_among(args, kwargs)[0])
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

    def _read_device(self, func: TorchFunction, tensor: Tensor) -> object:
        if self.host.holds(tensor):
            return func(tensor) if func in KINDS_OF_DEVICE else self._host_device
        self.has_read_device = True
        return ON_GPU[func] if self._device_is_gpu and not find_call_site().interpreted else func(tensor)

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
        wanted = destination(func, args, kwargs, self._host_device)
        here = self.host.memory_of((source,))
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
        with torch._C.DisableTorchFunction():
            given = tensors_among(args, kwargs)
            call = OperatorCall(operator, args, kwargs, given, self.host.held(given))
            kind = None if self._tape is None else forbidden(call, self.host)
            if kind is not None:
                mixes = kind == "host copy" and mixes_devices(call)
                self._note(kind, words(self._function, operator.name), mixes_devices=mixes)
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
        args, kwargs = cast(tuple[Args, Kwargs], self.host.snapshot((call.args, call.kwargs)))
        num_host_reads = 0 if tape is None else len(tape.host_reads)
        with torch._C._EnableTorchFunction():
            result, is_opaque = self._run_inside(func, call.args, call.kwargs)
        fresh = fresh_among(result, map(storage_key, call.given))
        self.host.place(memory, fresh)
        if tape is not None and mark is not None and (is_opaque or not tape.has_grown_since(mark)):
            if call.on_host and len(tape.host_reads) == num_host_reads:
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


class EmulatedRecorder:
    """Records on the CPU. Use one recorder per backend, since it tracks host memory from its creation.

    ``device_is_gpu``: each tensor on the device has the device of a GPU, where the backend reads it.
    """

    def __init__(self, *, device_is_gpu: bool = False) -> None:
        self._watch = Watch(device_is_gpu=device_is_gpu)
        self._device_is_gpu = device_is_gpu

    def watching(self) -> AbstractContextManager[None]:
        """Return a context that tracks which memory is on the host."""
        return self._watch.active()

    def mark_host(self, *tensors: Tensor) -> None:
        """Mark these tensors, and all that share their memory, as being on the host."""
        for tensor in tensors:
            self._watch.host.mark(tensor)

    def record(self, prepare: Callable[[], Forward]) -> Recording:
        """Run once to warm up, then run ``forward`` again and record it.

        If ``forward`` mixes tensors of host and device, which no GPU allows, it may have branched on the device. Then
        repeat both runs with the device of a GPU, and judge these.

        Raise :class:`CaptureError` with all violations of the run. Raise :class:`UnseenError` if ``forward`` runs alone
        but fails under torch's modes, or if it raises only in the recorded run. Raise :class:`BranchError` if a GPU may
        take another branch.
        """
        try:
            return self._recorded(prepare)
        except CaptureError as error:
            if self._device_is_gpu or not any(each.mixes_devices for each in error.violations):
                raise
            return self._recorded_with_device_of_gpu(prepare, error)

    def _recorded_with_device_of_gpu(self, prepare: Callable[[], Forward], found: CaptureError) -> Recording:
        untried = BranchError(
            f"forward branches on the device, and a GPU may take another branch than the CPU: {found}"
        )
        try:
            with self._watch.with_device_of_gpu():
                return self._recorded(prepare)
        except CaptureError as error:
            if self._watch.has_read_device and all(each.mixes_devices for each in error.violations):
                raise untried from error  # an earlier run may have kept a tensor of the CPU's branch
            raise
        except Exception as error:
            if all(each.kind == "host copy" for each in found.violations):
                raise untried from error
            raise found from error

    def _recorded(self, prepare: Callable[[], Forward]) -> Recording:
        self._warm_up(prepare)
        with self._watch.active():
            forward = prepare()
        with self._watch.recording(run.__code__) as tape:
            try:
                run(forward)
            except Exception as error:
                if tape.violations:
                    raise CaptureError(tuple(tape.violations)) from error
                raise UnseenError(f"forward raised while its operators were recorded: {_in_words(error)}") from error
        if tape.violations:
            raise CaptureError(tuple(tape.violations))
        tape.close()
        return Recording(
            replay=tape.replay,
            launch=tape.replay,  # a CPU has no separate device to wait for
            reads=tape.uses_outside,
            host_reads=tuple(tape.host_reads),
            hands_out_memory=self._watch.hands_out_memory,
            released=lambda: tuple(tape.released()),
        )

    def _warm_up(self, prepare: Callable[[], Forward]) -> None:
        try:
            with self._watch.active():
                prepare()()
        except Exception as error:
            # Run without the modes; if this raises as well, the exception is the backend's own.
            prepare()()
            raise UnseenError(f"it does not run while torch's modes watch it: {_in_words(error)}") from error


def run(call: Forward) -> None:
    """Make a call of the backend. Its frame marks the boundary between the backend's code and ours."""
    call()


def _in_words(error: Exception) -> str:
    return shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
