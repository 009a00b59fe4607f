"""Facts about an operator that the emulation needs, read from its schema, its tags and its kernels."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Literal

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

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
