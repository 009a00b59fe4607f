"""Runs vLLM's Triton kernels on a CPU, by Triton's own interpreter.

See :mod:`attncheck.backends.interpreter`. On a machine without a GPU, two obstacles keep vLLM's kernels from being
interpreted. Both are handled here:

- Without an active driver, vLLM considers Triton unusable, and replaces it by a placeholder whose ``jit`` does nothing.
  Its CPU build makes an exception if Triton lists a backend called ``cpu``: :func:`import_triton_utils` lists one while
  vLLM checks.
- The launcher of the cache writer queries the GPU's compute capability to choose a tile size; a CPU has none.
  :func:`launches` supplies one.

No module, kernel or function of vLLM is replaced or edited: the interpreted source is the one that is compiled
elsewhere. Known faults of the interpreter are not fixed here: :func:`gaps` names them, and such cases are not run.
"""

import dis
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from attncheck.backends.interpreter import BFLOAT16_GAP, is_interpreted
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import CacheSpec

_CAPABILITY = (9, 0)


def import_triton_utils() -> None:
    """Import ``vllm.triton_utils`` so that kernels imported later are real; call before any other vLLM import.

    Without ``TRITON_INTERPRET`` or without Triton, do nothing: vLLM decides by itself.
    """
    if not is_interpreted() or importlib.util.find_spec("triton") is None:
        return
    listed = importlib.import_module("triton.backends")
    if "cpu" in listed.backends:
        importlib.import_module("vllm.triton_utils")
        return
    # Abstract classes, so that no compiler or driver of the entry can be constructed.
    bases = [importlib.import_module(f"triton.backends.{name}") for name in ("compiler", "driver")]
    listed.backends["cpu"] = listed.Backend(compiler=bases[0].BaseBackend, driver=bases[1].DriverBase)
    try:
        importlib.import_module("vllm.triton_utils")
    finally:
        del listed.backends["cpu"]


def missing_triton() -> list[str]:
    """Return why the kernels of vLLM cannot be launched here; an empty list if they can."""
    if importlib.import_module("vllm.triton_utils").HAS_TRITON:
        return []
    if importlib.util.find_spec("triton") is None:
        return ["it consists of Triton kernels, and Triton is not installed"]
    if is_interpreted():
        return ["it consists of Triton kernels, and this build of vLLM takes Triton for missing where there is no GPU"]
    return [
        "it consists of Triton kernels, and vLLM finds no driver for Triton here; TRITON_INTERPRET=1 interprets them"
    ]


def launches() -> AbstractContextManager[None]:
    """Return a context for kernel launches; it supplies a compute capability to interpreted launchers."""
    return _capability_answered() if is_interpreted() else nullcontext()


@contextmanager
def _capability_answered() -> Iterator[None]:
    """Make ``torch.cuda.get_device_capability`` return Hopper's for CPU devices; others are unchanged."""
    original = torch.cuda.get_device_capability

    def answer(device: Any = None) -> tuple[int, int]:
        return _CAPABILITY if isinstance(device, torch.device) and device.type == "cpu" else original(device)

    torch.cuda.get_device_capability = answer
    try:
        yield
    finally:
        torch.cuda.get_device_capability = original


def gaps(layer: LayerSpec, cache: CacheSpec) -> list[str]:
    """Return what Triton's interpreter (3.6.0) computes wrongly for such a case; an empty list if nothing is known."""
    reasons = []
    if layer.dtype == "bfloat16":
        reasons.append(BFLOAT16_GAP)
    if cache.kv_cache_dtype.startswith("fp8"):
        reasons.append(
            f"kv_cache_dtype {cache.kv_cache_dtype}: Triton's interpreter loses carries when it rounds to FP8"
        )
    if layer.output_quant is not None:
        reasons.append("output_quant: Triton's interpreter loses carries when it rounds to FP8")
    return reasons


def launches_triton(backend: Any) -> bool:
    """Return whether a method of the impl or builder names a Triton kernel, or a function of a module with Triton.

    This inspects the classes, so it works whether or not vLLM has Triton: its placeholder is a module of the same name.
    It is True also if only one of many paths uses Triton, and False if a module merely mentions Triton.

    Args:
        backend: a vLLM ``AttentionBackend`` class, imported.
    """
    classes = (backend.get_impl_cls(), backend.get_builder_cls())
    return any(map(_names_triton, classes))


@lru_cache(maxsize=64)
def _names_triton(cls: type) -> bool:
    # Cached, because reading the code of all methods takes tens of milliseconds.
    return any(_is_of_triton(value) for value in _values_named_by(cls))


def _values_named_by(cls: type) -> Iterator[object]:
    """Yield module-level values that the methods of ``cls`` name; inherited methods use their own modules."""
    for attribute in dir(cls):
        method = getattr(cls, attribute, None)
        function = getattr(method, "__func__", method)
        if isinstance(function, FunctionType):
            for name in _names(function.__code__):
                yield function.__globals__.get(name)


def _names(code: CodeType) -> Iterator[str]:
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_of_triton(value: object) -> bool:
    if isinstance(value, ModuleType):
        return _is_triton(value)
    if not (isinstance(value, FunctionType) or type(value).__module__.startswith("triton.")):
        return False
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return module is not None and any(_is_triton(held) for held in vars(module).values())


def _is_triton(value: object) -> bool:
    return isinstance(value, ModuleType) and value.__name__.partition(".")[0] == "triton"
