"""What torch's operators and Python functions do with the memory of host and device, without a GPU."""

import ast
import linecache
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from types import (
    BuiltinFunctionType,
    EllipsisType,
    MethodDescriptorType,
    MethodWrapperType,
    NoneType,
    WrapperDescriptorType,
)
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._device import _device_constructors

from attncheck.harness.checks.cudagraph.recorder import ViolationKind, find_call_site

Args = tuple[object, ...]
Kwargs = dict[str, object]

TorchFunction = Callable[..., object]
"""A function as passed to a TorchFunctionMode."""

AnyOperator = OpOverload | HigherOrderOperator

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


_WITHOUT_TENSORS = frozenset({int, float, bool, str, NoneType, torch.dtype, torch.device})
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

    def written_tensors(self, args: Args, kwargs: Kwargs) -> Iterator[Tensor]:
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


def unseen_overload(func: object, args: Args, kwargs: Kwargs) -> OpOverload | None:
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
        if type(value) in _WITHOUT_TENSORS:  # faster than isinstance, which calls Tensor's metaclass
            continue
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)


# Rules for what a captured graph cannot contain, applied to one operator call.
#
# The rules state what torch does on a GPU. Operators for which torch's tags do not show this are listed by name.

_INDEX_PUTS = frozenset({"aten.index_put", "aten.index_put_", "aten._index_put_impl_", "aten._unsafe_index_put"})
_MASK_DTYPES = (torch.bool, torch.uint8)
_READ_VALUES = {"aten.masked_fill": 2, "aten.masked_fill_": 2, "aten.index_fill": 3, "aten.index_fill_": 3}
"""Operators that read a value given as a tensor, and the value's position. On a GPU this is an ``.item()``."""


class OperatorCall(NamedTuple):
    """One call of an operator. ``given``: its tensor arguments, in order. ``on_host``: those of them on the host."""

    operator: Operator
    args: Args
    kwargs: Kwargs
    given: tuple[Tensor, ...]
    on_host: tuple[Tensor, ...]

    @property
    def is_host_work(self) -> bool:
        """Whether all tensor arguments are on the host, so that on a GPU no work would reach the device."""
        return len(self.on_host) == len(self.given)


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


def mixes_devices(call: OperatorCall) -> bool:
    """Return whether a GPU refuses a call with tensors of host and device, instead of copying one."""
    return call.operator.name not in {"aten.copy_", "aten.index", *_INDEX_PUTS}


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
_IS_AVAILABLE = "is_available"

_GPU = "cuda"

KINDS_OF_DEVICE: dict[TorchFunction, bool | int] = {
    getattr(Tensor, "is_cuda").__get__: True,  # noqa: B009 (mypy takes it for a bool)
    getattr(Tensor, "is_cpu").__get__: False,  # noqa: B009 (the same)
    Tensor.get_device: 0,
    torch.get_device: 0,
}
"""Functions that return the kind of a tensor's device, and what they return for a tensor on a GPU."""

ON_GPU: dict[TorchFunction, torch.device | bool | int] = {_DEVICE_OF: torch.device(_GPU, 0), **KINDS_OF_DEVICE}
"""Functions that read a tensor's device, and what they return for a tensor on a GPU."""

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


def is_plain(function: TorchFunction, kwargs: Kwargs) -> bool:
    """Return whether the operators of a call reveal all that it does with memory."""
    return (
        "device" not in kwargs
        and function not in _functions_of_memory()
        and not isinstance(function, OpOverload | OpOverloadPacket)
    )


@cache
def _functions_of_memory() -> frozenset[TorchFunction]:
    return READERS | ADDRESSES | COPIES | MAKERS | constructors() | {Tensor.new_tensor, *ON_GPU}


def is_view(function: TorchFunction, args: Args, kwargs: Kwargs) -> bool:
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


def stays_on_device(function: TorchFunction, args: Args, host: HostMemory) -> bool:
    """Return whether a plain call creates no host memory: a view, or one C++ function of a tensor on the device."""
    if type(function) not in _BUILT_IN or not args or type(args[0]) is not Tensor:
        return False
    key = storage_key(args[0])
    return (key != 0 and not host.holds_key(key)) or is_view(function, args, {})


def without_gpu(function: TorchFunction, args: Args, kwargs: Kwargs) -> tuple[TorchFunction, Args, Kwargs]:
    """Return the call with the device of tensors in place of a GPU that it names."""
    present = torch.device(_HOST)

    def is_gpu(value: object) -> bool:
        return isinstance(value, torch.device | str) and str(value).partition(":")[0] == _GPU

    if function is Tensor.cuda:
        return Tensor.to, (args[0], present), {}
    named = {name: present if is_gpu(value) else value for name, value in kwargs.items()}
    return function, tuple(present if is_gpu(value) else value for value in args), named


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
    function: TorchFunction, args: Args, kwargs: Kwargs, host_device: torch.device
) -> Memory | Tensor | None:
    """Return where a call puts its result: "host", "device", or a tensor beside which it goes. None if not specified.

    ``host_device``: the device object that host tensors report. A literal ``"cpu"`` of the calling module also means
    the host. It is compared by identity, because literals are interned but the strings that torch makes of a device
    (``device.type``) are not.
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
    is_literal = type(wanted) is str and wanted is _HOST and _is_named_by_caller()
    return "host" if wanted is host_device or is_literal else "device"


def _is_named_by_caller() -> bool:
    """Return whether the calling code names the host: in its function, or as a value or default in its module.

    Code that depends on ``is_available`` may name a GPU on another machine. So may a variable of another module.
    """
    line = find_call_site().line
    if line is None:
        return True
    if _HOST in line.code.co_consts:
        return _IS_AVAILABLE not in line.code.co_names
    return _has_host_as_value(line.code.co_filename)


@cache
def _has_host_as_value(filename: str) -> bool:
    """Return whether a file assigns the host or has it as a default, and contains no ``is_available``."""
    try:
        nodes = list(ast.walk(ast.parse("".join(linecache.getlines(filename)))))
    except (SyntaxError, ValueError):
        return False
    names = {getattr(node, "attr", getattr(node, "id", "")) for node in nodes}
    if _IS_AVAILABLE in names:
        return False
    values: list[ast.expr | None] = []
    for node in nodes:
        match node:
            case ast.arguments():
                values += [*node.defaults, *node.kw_defaults]
            case ast.Assign() | ast.AnnAssign():
                values.append(node.value)
    return any(isinstance(value, ast.Constant) and value.value == _HOST for value in values)


def place_of_new(
    function: TorchFunction,
    args: Args,
    kwargs: Kwargs,
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
