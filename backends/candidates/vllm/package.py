"""The installed vLLM: imported on first use, with its log output reduced; finds classes wherever this version has them.

All of vLLM is accessed through here, by name and untyped, because it is not installed where attncheck is type-checked.
"""

import importlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import torch

from attncheck.backends.candidates.vllm import interpreted

_LEVEL = "VLLM_LOGGING_LEVEL"
_QUIET = "ERROR"

ABSENT_OPERATOR = "'_OpNamespace'"
"""Part of torch's message for an operator that no library has registered."""


def module(name: str) -> Any:
    """Import and return a module of vLLM's by its full name; exceptions of the import are not caught."""
    _import_quietly()
    return importlib.import_module(name)


def find(name: str, *modules: str) -> Any:
    """Return ``name`` from the first of ``modules`` that has it.

    Raises:
        ImportError: none of them has it, or none of them exists.
    """
    for place in modules:
        found = _if_there(place)
        if found is not None and hasattr(found, name):
            return getattr(found, name)
    raise ImportError(f"vLLM {version()} has no {name} in {' or '.join(modules)}")


def version() -> str:
    """Return the installed version."""
    return str(module("vllm").__version__)


def is_batch_invariant() -> bool:
    """Return whether ``VLLM_BATCH_INVARIANT`` selects vLLM's batch-invariant kernels; False in versions without it."""
    return bool(getattr(_if_there("vllm.envs"), "VLLM_BATCH_INVARIANT", False))


def load_plugins() -> None:
    """Load vLLM's general plugins, which may register classes, as every process of vLLM does.

    Raises:
        ImportError: a plugin raises.
    """
    plugins = _if_there("vllm.plugins")
    if plugins is None or not hasattr(plugins, "load_general_plugins"):
        return
    try:
        plugins.load_general_plugins()
    except Exception as error:
        raise ImportError(
            f"a plugin of the group vllm.general_plugins raised {type(error).__name__}: {error}"
        ) from error


def platform() -> Any:
    """Return the platform that vLLM detects here, and was built for."""
    return module("vllm.platforms").current_platform


@cache
def keep_operators() -> None:
    """Prevent ``import vllm._C`` if vLLM loaded its operators from another library: torch would abort the process.

    A CPU build loads ``_C_AVX512`` or ``_C_AVX2`` on a CPU without AVX512_BF16, but its ROCm module imports ``_C``.
    """
    platforms = _if_there("vllm.platforms")
    if platforms is None or platforms.current_platform.device_type != "cpu":
        return
    if _if_there("vllm._custom_ops") is None:  # its import loads the library
        return
    if "vllm._C" not in sys.modules and hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        sys.modules["vllm._C"] = None  # type: ignore[assignment] # an import raises ImportError, which vLLM catches


def lowest_capability() -> Any:
    """Return a compute capability that every GPU has at least."""
    return module("vllm.platforms.interface").DeviceCapability(0, 0)


@contextmanager
def kept_environment() -> Iterator[None]:
    """Restore the environment on exit: vLLM sets variables for its workers (``LD_PRELOAD``, ...)."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@cache
def _import_quietly() -> None:
    """Import vLLM without log messages below errors, unless the user has set a level.

    Some versions read the level from the environment during import and configure their loggers with it. Others keep
    Python's defaults, which print every warning. Both cases are handled; no log handlers are changed.
    """
    before = os.environ.get(_LEVEL)
    logger = logging.getLogger("vllm")
    if logger.level == logging.NOTSET:
        logger.setLevel((before or _QUIET).upper())
    os.environ[_LEVEL] = before or _QUIET
    try:
        interpreted.import_triton_utils()
        importlib.import_module("vllm.logger")
    finally:
        if before is None:
            del os.environ[_LEVEL]


def _if_there(name: str) -> ModuleType | None:
    """Return the module, or None if this version has none of that name; other import errors are raised."""
    try:
        found: ModuleType = module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name) and error.name != "vllm":
            return None
        raise
    return found
