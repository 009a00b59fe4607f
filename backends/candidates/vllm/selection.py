"""Which class of vLLM's an argument names: a name of vLLM's own, ``module:Class``, or ``path/to/file.py:Class``."""

from pathlib import Path
from typing import Any

from attncheck.backends import registry
from attncheck.backends.candidates.vllm import package
from attncheck.errors import UnknownNameError

_REGISTRY = ("vllm.v1.attention.backends.registry", "vllm.attention.backends.registry")


def select(argument: str) -> type[Any]:
    """The class derived from vLLM's ``AttentionBackend``.

    Raises:
        ImportError: vLLM, or a library that the backend needs, cannot be imported.
        ValueError: there is no such class, or it is none that the bridge can drive; the message says what is.
        BackendLoadError: the file or the class in it cannot be had.
    """
    package.module("vllm")  # first, so that it is quiet whoever else imports it
    place, _, attribute = argument.rpartition(":")
    if not place:
        found = _named(argument)
    else:
        module = registry.import_file(argument, Path(place)) if place.endswith(".py") else _module(argument, place)
        if not hasattr(module, attribute):
            raise ValueError(f"{place} has no {attribute!r}")
        found = getattr(module, attribute)
    base = package.find("AttentionBackend", "vllm.v1.attention.backend", "vllm.attention.backends.abstract")
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(  # noqa: TRY004 (the argument's value is what is wrong)
            f"{argument} is {found!r}: give a class derived from vLLM's AttentionBackend"
        )
    _refuse_undriven(argument, found)
    return found


def _named(name: str) -> Any:
    """The class vLLM has under ``name``, as its registry has it now: an override by a plugin counts."""
    members = package.find("AttentionBackendEnum", *_REGISTRY).__members__
    known = [member for member, value in members.items() if value.value]
    if name not in known:
        raise ValueError(str(UnknownNameError(f"backend of vLLM {package.version()}", name, known)))
    try:
        return members[name].get_class()
    except ImportError:
        raise
    except Exception as error:
        # Modules of kernels ask the machine while they are imported, and raise whatever comes of it.
        raise ImportError(registry.import_failure(error)) from error


def _module(argument: str, place: str) -> Any:
    try:
        return package.module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}.") or error.name == "vllm":
            raise
        raise ValueError(f"{argument}: there is no module {error.name}") from error


def _refuse_undriven(argument: str, found: type[Any]) -> None:
    """ValueError for classes that answer other questions than the contract's, or that vLLM's layer would not take."""
    other = {"is_mla": "a latent cache", "is_ssm": "a state in place of a cache", "is_sparse": "chosen keys only"}
    for predicate, kind in other.items():
        if hasattr(found, predicate) and getattr(found, predicate)():
            raise ValueError(f"{argument} is for layers with {kind}: the bridge drives attention over keys and values")
    members = package.find("AttentionBackendEnum", *_REGISTRY).__members__
    if found.get_name() not in members:
        raise ValueError(
            f"{argument} calls itself {found.get_name()!r}: vLLM's layers take names of AttentionBackendEnum only, "
            "of which CUSTOM is free"
        )
