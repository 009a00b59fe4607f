"""Torch modes that forward every call to a watch, and a context that disables compilation."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._C import _len_torch_dispatch_stack, _pop_torch_dispatch_stack, _push_on_torch_dispatch_stack
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck.harness.checks.cudagraph.emulation.operators import AnyOperator, Operator
from attncheck.harness.checks.cudagraph.emulation.torch_functions import FACTS, TorchFunction

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
