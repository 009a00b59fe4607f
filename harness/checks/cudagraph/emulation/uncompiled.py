"""Keeps torch's compiler out of what is watched. Must not know: watches, tapes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_COMPILERS = frozenset({"torch._dynamo", "torch.nn.attention.flex_attention"})


@contextmanager
def uncompiled() -> Iterator[None]:
    """Compiled functions run as they were written: the compiler fails under modes, and remembers it.

    It takes seconds to import, and is left alone until something that calls it is imported.
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
