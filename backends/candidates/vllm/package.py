"""The installed vLLM: imported on first use and kept quiet; its classes found wherever this version has them.

Everything of vLLM's is reached through here, by name and untyped: it is not there when attncheck is checked or listed.
"""

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

from attncheck.backends.candidates.vllm import interpreted

_LEVEL = "VLLM_LOGGING_LEVEL"
_QUIET = "ERROR"

ABSENT_OPERATOR = "'_OpNamespace'"
"""Of the message with which torch answers for an operator that no library has registered."""


def module(name: str) -> Any:
    """A module of vLLM's by its full name. What importing it raises passes through."""
    _import_quietly()
    return importlib.import_module(name)


def find(name: str, *modules: str) -> Any:
    """``name`` from the first of ``modules`` that has it.

    Raises:
        ImportError: none of them has it, or none of them is there.
    """
    for place in modules:
        found = _if_there(place)
        if found is not None and hasattr(found, name):
            return getattr(found, name)
    raise ImportError(f"vLLM {version()} has no {name} in {' or '.join(modules)}")


def version() -> str:
    """The installed version."""
    return str(module("vllm").__version__)


def load_plugins() -> None:
    """Loads vLLM's general plugins, which may register classes, as every process of vLLM does.

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
    """What vLLM takes this machine for, and was built for."""
    return module("vllm.platforms").current_platform


def lowest_capability() -> Any:
    """The compute capability that no GPU falls short of."""
    return module("vllm.platforms.interface").DeviceCapability(0, 0)


@contextmanager
def kept_environment() -> Iterator[None]:
    """The environment is afterwards what it was: vLLM prepares its workers by writing to it (``LD_PRELOAD``, ...)."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@cache
def _import_quietly() -> None:
    """Imports vLLM with its messages below errors left out, unless the user has said what to show.

    Some versions read the level from the environment when they are imported and set their loggers up by it; others
    leave them as Python's defaults are, which print every warning. Both are served; handlers are touched by neither.
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
    """The module, or None where this version has none of that name; what it raises otherwise is no absence."""
    try:
        found: ModuleType = module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name) and error.name != "vllm":
            return None
        raise
    return found
