"""CUDA graphs emulated without a GPU: ``forward`` runs under a watch, and a tape replays its operators."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from textwrap import shorten
from types import (
    BuiltinFunctionType,
    CodeType,
    EllipsisType,
    MethodDescriptorType,
    MethodWrapperType,
    NoneType,
    WrapperDescriptorType,
)
from typing import Literal, NamedTuple, cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch._C import DispatchKey, _len_torch_dispatch_stack, _pop_torch_dispatch_stack, _push_on_torch_dispatch_stack
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily

from attncheck.harness.checks.cudagraph.recorder import (
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

# Track which storages would be on the host, on a machine where all tensors are.
#
# Without a GPU a tensor's device is no evidence, so how the tensor was created decides. Untracked memory counts as
# device memory.

Memory = Literal["host", "device"]

_FIRST_SWEEP = 1024
"""Number of entries at which those of freed memory are first removed."""


def storage_key(tensor: Tensor) -> int:
    """Return a number that identifies the storage of ``tensor``, or 0 if it has no storage.

    The number is unique while a tensor of the storage, or a weak reference to it, is alive. Wrappers of torch.func and
    sparse tensors have no storage.
    """
    try:
        address: int = torch._C._storage_address(tensor)  # type: ignore[attr-defined]
    except (NotImplementedError, RuntimeError):
        return 0
    return address


class HostMemory:
    """The storages on the host. Weak references to them prevent the reuse of their keys after a free."""

    def __init__(self) -> None:
        self._marked: dict[int, StorageWeakRef] = {}
        self._sweep_at = _FIRST_SWEEP

    def mark(self, tensor: Tensor) -> None:
        """Record that the memory of ``tensor`` is on the host."""
        key = storage_key(tensor)
        if key == 0 or key in self._marked:
            return
        self._marked[key] = StorageWeakRef(tensor.untyped_storage())
        if len(self._marked) >= self._sweep_at:
            self._marked = {key: held for key, held in self._marked.items() if not held.expired()}
            self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._marked))

    def unmark(self, tensor: Tensor) -> None:
        """Record that the memory of ``tensor`` is on the device."""
        self._marked.pop(storage_key(tensor), None)

    def place(self, memory: Memory, tensors: Iterable[Tensor | None]) -> None:
        """Record that the memory of those ``tensors`` that are not None is in ``memory``."""
        for tensor in tensors:
            if tensor is not None:
                (self.mark if memory == "host" else self.unmark)(tensor)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the memory of ``tensor`` is on the host."""
        return storage_key(tensor) in self._marked

    def holds_key(self, key: int) -> bool:
        """Return whether the storage with this :func:`storage_key` is on the host."""
        return key in self._marked

    def memory_of(self, tensors: Iterable[Tensor]) -> Memory:
        """Return "device" if at least one of ``tensors`` is on the device, else "host"."""
        return "host" if all(map(self.holds, tensors)) else "device"

    def held(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Return those tensors whose memory is on the host."""
        return tuple([tensor for tensor in tensors if storage_key(tensor) in self._marked])

    def snapshot(self, value: object) -> object:
        """Return an operator's arguments in their current state: aliases of device memory, copies of host memory."""
        if isinstance(value, Tensor):
            if not self.holds(value):
                return value.detach()
            copied = value.clone()
            self.mark(copied)
            return copied
        if isinstance(value, list | tuple):
            parts = [self.snapshot(part) for part in value]
            return parts if isinstance(value, list) else tuple(parts)
        if isinstance(value, dict):
            return {name: self.snapshot(part) for name, part in value.items()}
        return value


# Facts about an operator that the emulation needs, read from its schema, its tags and its kernels.

AnyOperator = OpOverload | HigherOrderOperator

OperatorWork = Literal["view", "allocation", "constant", "read", "custom", "computation"]
"""view: moves no data. allocation: memory with undefined contents. constant: writes values that depend on no tensor's
contents. read: returns a Python value. custom: not part of torch. computation: everything else."""

_TORCHS_OWN = frozenset({"aten", "prim", "prims"})
_ALLOCATIONS = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)
_READS = frozenset({"aten::equal", "aten::allclose", "aten::is_nonzero"})
"""Reads that torch does not tag."""

_PREFERRED = (
    DispatchKey.CPU,
    DispatchKey.CompositeExplicitAutograd,
    DispatchKey.CompositeExplicitAutogradNonFunctional,
    DispatchKey.AutogradCPU,
    DispatchKey.Autograd,
)
"""Dispatch keys whose kernels take precedence over a composite one in a call on the CPU."""


WITHOUT_TENSORS = frozenset({int, float, bool, str, NoneType, torch.dtype, torch.device})
"""Common types of arguments that contain no tensor."""


@dataclass(frozen=True)
class Operator:
    """One operator overload. ``name``: without the overload's suffix."""

    name: str
    work: OperatorWork
    written: frozenset[int | str]
    """Positions and names of the arguments that it writes."""
    is_dynamic: bool
    """Tagged by torch: the shape of the result depends on contents."""
    follows: bool
    """A ``*_like`` or ``new_*``: its result is shaped after a tensor argument whose contents do not matter."""
    is_composite: bool = False
    """Defined by other operators. Below autograd (in inference mode, or inside an operator) it arrives undecomposed,
    and ``.to`` or ``.contiguous`` would then look like a view even if they copy."""
    is_plain_view: bool = False
    """A view of its only tensor argument, which it does not change."""

    @property
    def stays_on_device(self) -> bool:
        """Whether it creates no host memory if its tensor argument is on the device."""
        return self.work in {"computation", "read"} and not self.follows

    def written_tensors(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Iterator[Tensor]:
        """Yield the tensor arguments that it writes."""
        for place in self.written:
            if isinstance(place, str):
                yield from tensors_among(kwargs.get(place))
            elif place < len(args):
                yield from tensors_among(args[place])


def describe(func: AnyOperator) -> Operator:
    """Return the facts about ``func``. Raise NotImplementedError for higher-order operators except FlexAttention."""
    if isinstance(func, HigherOrderOperator):
        name = func.name()
        if name != "flex_attention":
            raise NotImplementedError(f"the higher-order operator {name} is not recorded")
        return Operator(name, "custom", written=frozenset(), is_dynamic=False, follows=False)
    schema = func._schema
    written: set[int | str] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {position, argument.name}
    short = schema.name.partition("::")[2]
    follows = func.namespace in _TORCHS_OWN and (short.endswith("_like") or short.startswith("new_"))
    work = _work(func, bool(written), follows)
    is_dynamic = torch.Tag.dynamic_output_shape in func.tags
    num_tensors = sum(_takes_tensors(argument) for argument in schema.arguments)
    return Operator(
        name=schema.name.replace("::", "."),
        work=work,
        written=frozenset(written),
        is_dynamic=is_dynamic,
        follows=follows,
        is_composite=func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
        and not passes_unseen(func),
        is_plain_view=work == "view" and not written and not is_dynamic and num_tensors == 1 and short != "lift_fresh",
    )


def passes_unseen(func: OpOverload) -> bool:
    """Return whether dispatch modes do not see calls of ``func`` on the CPU, nor usually the operators inside.

    This applies to C++ functions that a library registers without a dispatch key, ``m.def(schema, fn)``. torch treats
    them as composite and runs them before any mode. torch's own composites, and those written in Python, call operators
    that modes do see.
    """
    key = DispatchKey.CompositeImplicitAutograd
    if func.namespace in _TORCHS_OWN or not func.has_kernel_for_dispatch_key(key):
        return False
    # torch.library records registrations from Python, under an empty key if none was given.
    noted = (f"{func._name.replace('::', '/', 1)}/{name}" for name in (key.name, ""))
    is_python = key in func.py_kernels or not torch.library._impls.isdisjoint(noted)
    return not is_python and not any(map(func.has_kernel_for_dispatch_key, _PREFERRED))


def unseen_overload(func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> OpOverload | None:
    """Return the operator behind a Python function if modes do not see it and it is given a tensor, else None.

    Without a tensor argument it is host work that no graph repeats, such as a query of the CPU or the release of a
    handle.
    """
    if not isinstance(func, OpOverload | OpOverloadPacket) or not tensors_among((args, kwargs)):
        return None
    if isinstance(func, OpOverloadPacket):
        func = getattr(func, torch._C._jit_resolve_packet(func._qualified_op_name, *args, **kwargs))
    return func if isinstance(func, OpOverload) and passes_unseen(func) else None


def _work(func: OpOverload, writes: bool, follows: bool) -> OperatorWork:
    schema, tags = func._schema, func.tags
    if func.namespace not in _TORCHS_OWN:
        return "custom"
    if schema.name in _READS or torch.Tag.data_dependent_output in tags:
        return "read"
    if torch.Tag.inplace_view in tags or (not writes and any(found.alias_info is not None for found in schema.returns)):
        return "view"
    if schema.name in _ALLOCATIONS:
        return "allocation"
    if (
        (follows or not any(map(_takes_tensors, schema.arguments)))
        and not writes
        and torch.Tag.nondeterministic_seeded not in tags
    ):
        return "constant"
    return "computation"


def _takes_tensors(argument: torch.Argument) -> bool:
    return "Tensor" in str(argument.type)


def tensors_among(*values: object) -> tuple[Tensor, ...]:
    """Return the tensors among arguments or results, in order. They are nested in lists, tuples and dicts only."""
    found: list[Tensor] = []
    _collect(values, found)
    return tuple(found)


def _collect(values: Iterable[object], found: list[Tensor]) -> None:
    for value in values:
        if type(value) in WITHOUT_TENSORS:  # faster than isinstance, which calls Tensor's metaclass
            continue
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)


# Rules for what a captured graph cannot contain, applied to one operator call, and a report of violations.
#
# The rules state what torch does on a GPU. Operators for which torch's tags do not show this are listed by name.

_INDEX_PUTS = frozenset({"aten.index_put", "aten.index_put_", "aten._index_put_impl_", "aten._unsafe_index_put"})
_MASK_DTYPES = (torch.bool, torch.uint8)
_READ_VALUES = {"aten.masked_fill": 2, "aten.masked_fill_": 2, "aten.index_fill": 3, "aten.index_fill_": 3}
"""Operators that read a value given as a tensor, and the value's position. On a GPU this is an ``.item()``."""


class OperatorCall(NamedTuple):
    """One call of an operator. ``given``: its tensor arguments, in order. ``on_host``: those of them on the host."""

    operator: Operator
    args: tuple[object, ...]
    kwargs: dict[str, object]
    given: tuple[Tensor, ...]
    on_host: tuple[Tensor, ...]

    @property
    def is_host_work(self) -> bool:
        """Whether all tensor arguments are on the host, so that on a GPU no work would reach the device."""
        return len(self.on_host) == len(self.given)


class CaptureReport:
    """Violations and host reads of one recording, in order, without duplicates.

    ``boundary``: a code object. Frames outside the one that runs it do not belong to the backend.
    """

    def __init__(self, boundary: CodeType) -> None:
        self._boundary = boundary
        self.violations: dict[Violation, None] = {}
        self.host_reads: dict[str, None] = {}

    def add(self, kind: ViolationKind, call: str) -> None:
        """Add a violation, unless it comes from Triton's interpreter, which emulates a kernel."""
        place = find_call_site(self._boundary)
        if not place.interpreted:
            self.violations[Violation(kind, call, str(place))] = None

    def add_host_read(self, call: str) -> None:
        """Add a read of host memory, with its line."""
        self.host_reads[f"{call} at {find_call_site(self._boundary)}"] = None


def is_held_on_device(operator: Operator) -> bool:
    """Return whether a graph can contain every call of ``operator`` whose tensor arguments are all on the device."""
    return (
        operator.work == "computation"
        and not operator.is_dynamic
        and operator.name not in _INDEX_PUTS
        and operator.name not in _READ_VALUES
    )


def forbidden(call: OperatorCall, host: HostMemory) -> ViolationKind | None:
    """Return why a graph cannot contain ``call``, or None if it can."""
    operator = call.operator
    if call.is_host_work:
        return None
    if operator.work == "read" or _reads_value(call, host):
        return "host read"
    if _has_data_dependent_shape(call, host):
        return "data-dependent shape"
    if not call.on_host or operator.work == "custom":
        return None
    if any(host.holds(tensor) for tensor in operator.written_tensors(call.args, call.kwargs)):
        return "host read"
    return "host copy" if _copies_from_host(call, host) else None


def _reads_value(call: OperatorCall, host: HostMemory) -> bool:
    position = _READ_VALUES.get(call.operator.name)
    if position is None or len(call.args) <= position:
        return False
    value = call.args[position]
    return isinstance(value, Tensor) and not host.holds(value)


def _has_data_dependent_shape(call: OperatorCall, host: HostMemory) -> bool:
    """Return whether the shape depends on data. An index does only if it is a mask; ``x[mask] = number`` is a fill."""
    name = call.operator.name
    if name in _INDEX_PUTS:
        return _has_mask(call, host) and not _is_masked_fill(call, host)
    if not call.operator.is_dynamic:
        return False
    if name == "aten.index":
        return _has_mask(call, host)
    return name != "aten.repeat_interleave" or call.kwargs.get("output_size") is None


def _copies_from_host(call: OperatorCall, host: HostMemory) -> bool:
    """Return whether torch copies a host tensor to the device. Host scalars usually become kernel arguments instead."""
    name = call.operator.name
    if name == "aten.copy_":
        return True
    if name in _INDEX_PUTS:
        return not _is_masked_fill(call, host)
    return any(tensor.dim() > 0 for tensor in call.on_host)


def _has_mask(call: OperatorCall, host: HostMemory) -> bool:
    return any(index.dtype in _MASK_DTYPES and not host.holds(index) for index in tensors_among(call.args[1]))


def _is_masked_fill(call: OperatorCall, host: HostMemory) -> bool:
    """Return whether the call sets one mask on the device to one number on the host, without accumulation."""
    value = call.args[2]
    accumulates = call.args[3] if len(call.args) > 3 else call.kwargs.get("accumulate", False)
    indices = tuple(tensors_among(call.args[1]))
    return (
        not accumulates
        and isinstance(value, Tensor)
        and value.numel() == 1
        and host.holds(value)
        and len(indices) == 1
        and indices[0].dtype in _MASK_DTYPES
        and not host.holds(indices[0])
    )


# What torch's Python functions reveal about host and device beyond their operators: destinations and constructors.

TorchFunction = Callable[..., object]
"""A function as passed to a TorchFunctionMode."""

EXPORTS: frozenset[TorchFunction] = frozenset((Tensor.numpy, Tensor.__array__))
"""Functions that a GPU tensor refuses. Inside a custom operator, a CPU kernel accesses memory through them."""

READERS: frozenset[TorchFunction] = EXPORTS | {Tensor.tolist, Tensor.__repr__, Tensor.__str__, Tensor.__format__}
"""Functions that read contents without an operator that shows it."""

ADDRESSES: frozenset[TorchFunction] = frozenset({Tensor.data_ptr, Tensor.untyped_storage, Tensor.__dlpack__})
"""Functions that give memory to code that torch does not see."""

COPIES: frozenset[TorchFunction] = frozenset(
    {Tensor.to, Tensor.type_as, Tensor.cpu, torch.as_tensor, torch.asarray, torch.tensor}
)
"""Functions that copy a tensor to another device. Some return their argument if it is on that device already."""

MAKERS: frozenset[TorchFunction] = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
"""Functions that create a tensor from their argument. Tensors within lists are read one by one."""

FACTS: frozenset[TorchFunction] = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "layout", "itemsize", "ndim", "is_nested", "is_cuda", "requires_grad")
) | {Tensor.__len__, Tensor.dim, Tensor.size, Tensor.stride, Tensor.numel, Tensor.storage_offset}
"""Functions that return metadata, read neither contents nor the device, and call no operator."""

_BUILT_IN = frozenset({BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType})
"""Types of functions that run no Python code."""

_VIEWS: frozenset[TorchFunction] = frozenset(
    getattr(owner, name)
    for name in ("detach", "transpose", "permute", "unsqueeze", "squeeze", "select", "narrow", "unbind")
    for owner in (Tensor, torch)
) | {Tensor.view, Tensor.expand, Tensor.t}
"""Functions that return views."""

_NUMBERS = frozenset({int, NoneType, EllipsisType, torch.dtype})
"""Types of view arguments other than slices. A bool or a list makes an index that copies instead."""

_MOVES: frozenset[TorchFunction] = frozenset({Tensor.to, Tensor.type_as})

_DEVICE_OF = Tensor.device.__get__
_HOST = "cpu"

_WORDS: dict[str, str] = {
    "__bool__": "bool()",
    "__int__": "int()",
    "__float__": "float()",
    "__complex__": "complex()",
    "__index__": "a tensor as an index",
    "__contains__": "in",
    "__repr__": "repr()",
    "__str__": "str()",
    "__format__": "format()",
    "__array__": "numpy.asarray()",
}


@cache
def constructors() -> frozenset[TorchFunction]:
    """Return functions that create a tensor from no tensor, on the host unless ``device`` is given."""
    return frozenset(_device_constructors())


def is_plain(function: TorchFunction, kwargs: dict[str, object]) -> bool:
    """Return whether the operators of a call reveal all that it does with memory."""
    return (
        "device" not in kwargs
        and function not in _functions_of_memory()
        and not isinstance(function, OpOverload | OpOverloadPacket)
    )


@cache
def _functions_of_memory() -> frozenset[TorchFunction]:
    return READERS | ADDRESSES | COPIES | MAKERS | constructors() | {Tensor.new_tensor, _DEVICE_OF}


def is_view(function: TorchFunction, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Return whether the call returns a view without reading a number from a tensor."""
    is_index = function is Tensor.__getitem__
    if kwargs or not (is_index or function in _VIEWS):
        return False
    is_nested = len(args) == 2 and type(args[1]) in ((tuple,) if is_index else (tuple, list, torch.Size))
    return all(map(_is_number, cast(tuple[object, ...], args[1] if is_nested else args[1:])))


def _is_number(part: object) -> bool:
    if type(part) is slice:
        return all(type(bound) in _NUMBERS for bound in (part.start, part.stop, part.step))
    return type(part) in _NUMBERS


def stays_on_device(function: TorchFunction, args: tuple[object, ...], host: HostMemory) -> bool:
    """Return whether a plain call creates no host memory: a view, or one C++ function of a tensor on the device."""
    if type(function) not in _BUILT_IN or not args or type(args[0]) is not Tensor:
        return False
    key = storage_key(args[0])
    return (key != 0 and not host.holds_key(key)) or is_view(function, args, {})


def reads_device(function: TorchFunction) -> bool:
    """Return whether the function reads ``tensor.device``."""
    return function == _DEVICE_OF


def words(function: TorchFunction | None, operator_name: str) -> str:
    """Return the call as its author wrote it, if known: ``.item()``, ``torch.nonzero()``, ``x[...]``."""
    name = str(getattr(function, "__name__", ""))
    if function is None or not name:
        return operator_name
    if name in _WORDS:
        return _WORDS[name]
    if name in {"__getitem__", "__setitem__"}:
        return f"x[...]{' = y' if name == '__setitem__' else ''} ({operator_name})"
    owner = str(getattr(function, "__qualname__", "")).partition(".")[0]
    method = owner in {"Tensor", "TensorBase", "_TensorBase"} or name.startswith("__")
    return f".{name}()" if method else f"torch.{name}()"


def destination(
    function: TorchFunction, args: tuple[object, ...], kwargs: dict[str, object], host_device: torch.device
) -> Memory | Tensor | None:
    """Return where a call puts its result: "host", "device", or a tensor beside which it goes. None if not specified.

    ``host_device``: the device object that host tensors report. The literal ``"cpu"`` also means the host. It is
    compared by identity, because literals are interned but the strings that torch makes of a device (``device.type``)
    are not.
    """
    if function is Tensor.cpu:
        return "host"
    wanted = kwargs.get("device")
    if wanted is None and function in _MOVES:
        first = args[1] if len(args) > 1 else kwargs.get("other")
        if isinstance(first, Tensor):
            return first
        wanted = first if isinstance(first, torch.device | str | int) else None
    if wanted is None:
        return None
    return "host" if wanted is host_device or (type(wanted) is str and wanted is _HOST) else "device"


def place_of_new(
    function: TorchFunction,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    host_device: torch.device,
    host: HostMemory,
) -> Memory | None:
    """Return where the call puts a new tensor, or None if the function does not determine it."""
    named = destination(function, args, kwargs, host_device)
    if isinstance(named, str):
        return named
    if function in constructors():
        return "host"
    return host.memory_of(tensors_among(args[:1])) if function is Tensor.new_tensor else None


# Torch modes that forward every call to a watch, and a context that disables compilation.

Args = tuple[object, ...]
Kwargs = dict[str, object]

_COMPILERS = frozenset({"torch._dynamo", "torch.nn.attention.flex_attention"})


class FunctionMode(TorchFunctionMode):
    """Forward torch's Python functions to ``call``, except those that read neither contents nor the device."""

    def __init__(self, call: Callable[[TorchFunction, Args, Kwargs], object]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in FACTS:
            return func(*args, **kwargs) if kwargs else func(*args)
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
    args: tuple[object, ...]
    kwargs: dict[str, object]
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
    """Operators in order, and the memory they use.

    ``find_place``: returns the line of the backend that is running. ``tapes``: all tapes that may hold the same memory,
    including this one.
    """

    def __init__(self, find_place: Callable[[], CallSite], tapes: "WeakSet[Tape]") -> None:
        self._find_place = find_place
        self._tapes = tapes
        tapes.add(self)
        self._steps: list[TapedOperator] = []
        self._made: dict[int, Tensor] = {}
        self._outside: dict[int, ExternalMemory] = {}
        self._references: dict[int, int] = {}
        self._addresses: dict[int, int] = {}

    def freeze(
        self, user: str, args: tuple[object, ...], kwargs: dict[str, object], host: HostMemory
    ) -> tuple[tuple[object, ...], dict[str, object]]:
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

    def freeze_on_device(
        self, user: str, args: tuple[object, ...], host: HostMemory
    ) -> tuple[tuple[object, ...], list[int]] | None:
        """Return the frozen arguments, as :meth:`freeze` does, and the keys of their tensors.

        Return None if there is no tensor, or if a tensor is on the host or inside a container.
        """
        keys: list[int] = []
        for value in args:
            if type(value) is Tensor:
                keys.append(storage_key(value))
                if host.holds_key(keys[-1]):
                    return None
            elif type(value) not in WITHOUT_TENSORS:
                return None
        left = iter(keys)
        frozen = [self._alias(value, next(left), user) if type(value) is Tensor else value for value in args]
        return (tuple(frozen), keys) if keys else None

    def _alias(self, tensor: Tensor, key: int, user: str) -> Tensor:
        alias = tensor.detach()
        if key not in self._made:
            self._references[key] = self._references.get(key, 0) + 1
            if key not in self._outside:
                self._outside[key] = ExternalMemory(alias, user, self._find_place())
        return alias

    def add(self, func: AnyOperator, args: tuple[object, ...], kwargs: dict[str, object], fresh: Fresh) -> None:
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
        self._made, self._outside, self._references = dict(mark.made), dict(mark.outside), dict(mark.references)

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


# A recorder for machines without a GPU: it freezes what `torch.cuda.CUDAGraph` freezes and reports what it forbids.
#
# On the CPU all tensors share one memory, so how a tensor was created determines whether a GPU would hold it; see
# :mod:`attncheck.harness.checks.cudagraph.emulation`. Not recorded: work that torch does not see, such as a
# C extension called directly, a Triton kernel launched outside a custom operator, or other threads. The Python code of
# a custom operator runs at every replay. Memory that such an operator, or a FlexAttention modifier, accesses by itself
# and not through an argument is not tracked.


class EmulatedRecorder:
    """Records on the CPU. Use one recorder per backend, since it tracks host memory from its creation."""

    def __init__(self) -> None:
        self._watch = Watch()

    def watching(self) -> AbstractContextManager[None]:
        """Return a context that tracks which memory is on the host."""
        return self._watch.active()

    def mark_host(self, *tensors: Tensor) -> None:
        """Mark these tensors, and all that share their memory, as being on the host."""
        for tensor in tensors:
            self._watch.host.mark(tensor)

    def record(self, prepare: Callable[[], Forward]) -> Recording:
        """Run once to warm up, then run ``forward`` again and record it.

        Raise :class:`CaptureError` with all violations of the run. Raise :class:`UnseenError` if ``forward`` runs alone
        but fails under torch's modes, or if it raises only in the recorded run.
        """
        self._warm_up(prepare)
        with self._watch.active():
            forward = prepare()
        with self._watch.recording(_run.__code__) as (tape, report):
            try:
                _run(forward)
            except Exception as error:
                if report.violations:
                    raise CaptureError(tuple(report.violations)) from error
                raise UnseenError(f"forward raised while its operators were recorded: {_in_words(error)}") from error
        if report.violations:
            raise CaptureError(tuple(report.violations))
        tape.close()
        return Recording(
            replay=tape.replay,
            launch=tape.replay,  # a CPU has no separate device to wait for
            reads=tape.uses_outside,
            host_reads=tuple(report.host_reads),
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


def _run(forward: Forward) -> None:
    """Call ``forward``. Its frame marks the boundary between the backend's code and ours."""
    forward()


def _in_words(error: Exception) -> str:
    return shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
