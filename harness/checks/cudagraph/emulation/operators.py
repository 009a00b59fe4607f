"""What the emulation must know of an operator, read from its schema, its tags and its kernels."""

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
"""view: moves no data. allocation: memory with undefined contents. constant: what it writes depends on no tensor's
contents. read: its result is a Python value. custom: not torch's own. computation: everything else."""

_TORCHS_OWN = frozenset({"aten", "prim", "prims"})
_ALLOCATIONS = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)
_READS = frozenset({"aten::equal", "aten::allclose", "aten::is_nonzero"})
"""Beside those that torch tags."""

_PREFERRED = (
    DispatchKey.CPU,
    DispatchKey.CompositeExplicitAutograd,
    DispatchKey.CompositeExplicitAutogradNonFunctional,
    DispatchKey.AutogradCPU,
    DispatchKey.Autograd,
)
"""Whose kernels a call on the CPU meets before a composite one."""


WITHOUT_TENSORS = frozenset({int, float, bool, str, NoneType, torch.dtype, torch.device})
"""Types of most arguments that are no tensors and hold none."""


@dataclass(frozen=True)
class Operator:
    """One overload; ``name`` is without the overload's own."""

    name: str
    work: OperatorWork
    written: frozenset[int | str]
    """Positions and names of the arguments it writes."""
    is_dynamic: bool
    """Tagged by torch: the shape of its result depends on contents."""
    follows: bool
    """A ``*_like`` or ``new_*``: its result is shaped after a tensor whose contents do not matter."""
    is_composite: bool = False
    """It is defined by other operators. Below autograd (in inference mode, inside an operator) it comes whole: then
    ``.to`` or ``.contiguous`` would pass for a view even where it copies."""
    is_plain_view: bool = False
    """A view of its only tensor, which it does not change."""

    @property
    def stays_on_device(self) -> bool:
        """Whether it makes no memory of the host as long as it is given one tensor of the device."""
        return self.work in {"computation", "read"} and not self.follows

    def written_tensors(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Iterator[Tensor]:
        """Those of the arguments that it writes."""
        for place in self.written:
            if isinstance(place, str):
                yield from tensors_among(kwargs.get(place))
            elif place < len(args):
                yield from tensors_among(args[place])


def describe(func: AnyOperator) -> Operator:
    """What ``func`` is. Of torch's higher-order operators only FlexAttention is one piece of work for a device."""
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
    """Whether dispatch modes see no call of ``func`` on the CPU, nor, as a rule, what it does.

    So it is with C++ functions that a library registers without a dispatch key, ``m.def(schema, fn)``: to torch they
    are composite, and run before any mode is asked. Those of torch itself call operators that modes do see, and so does
    a composite operator written in Python.
    """
    key = DispatchKey.CompositeImplicitAutograd
    if func.namespace in _TORCHS_OWN or not func.has_kernel_for_dispatch_key(key):
        return False
    # torch.library notes what is registered from Python; without a key it notes none.
    noted = (f"{func._name.replace('::', '/', 1)}/{name}" for name in (key.name, ""))
    is_python = key in func.py_kernels or not torch.library._impls.isdisjoint(noted)
    return not is_python and not any(map(func.has_kernel_for_dispatch_key, _PREFERRED))


def unseen_overload(func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> OpOverload | None:
    """What a Python function stands for, if it is an operator that passes unseen, and is given a tensor.

    Without one it is the host's business, such as what the CPU can do or a handle's release: no graph repeats it.
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
    """The tensors of arguments or of a result, in order: operators nest them in lists, tuples and dicts only."""
    found: list[Tensor] = []
    _collect(values, found)
    return tuple(found)


def _collect(values: Iterable[object], found: list[Tensor]) -> None:
    for value in values:
        if type(value) in WITHOUT_TENSORS:  # faster than isinstance, which asks the metaclass of Tensor
            continue
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)
