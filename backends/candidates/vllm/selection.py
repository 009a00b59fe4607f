"""Selects a class of vLLM's by a name of vLLM's own, by ``module:Class``, or by ``path/to/file.py:Class``.

Names are those of vLLM's two registries, of attention and of state-space layers, including names registered by plugins.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attncheck.backends import registry
from attncheck.backends.candidates.vllm import package
from attncheck.errors import UnknownNameError

_REGISTRY = ("vllm.v1.attention.backends.registry", "vllm.attention.backends.registry")
_STATE_SPACE = "MambaAttentionBackendEnum"


def registered() -> Mapping[str, Any]:
    """Return the members of vLLM's registries by name, after loading plugins.

    An attention name has precedence over the same name of a state-space layer, unless it has no class.

    Raises:
        ImportError: vLLM has no registry, or one of its plugins raises.
    """
    package.load_plugins()
    members = dict(package.find("AttentionBackendEnum", *_REGISTRY).__members__)
    try:
        others = package.find(_STATE_SPACE, *_REGISTRY).__members__
    except ImportError:  # an older version
        return members
    return members | {name: member for name, member in others.items() if not path_of(members.get(name))}


def is_state_space(their_backend: type[Any]) -> bool:
    """Return whether vLLM's class is for layers with a state instead of a KV cache."""
    return hasattr(their_backend, "is_ssm") and bool(their_backend.is_ssm())


def is_sparse(their_backend: type[Any]) -> bool:
    """Return whether vLLM's class is for layers whose keys an indexer chooses."""
    return hasattr(their_backend, "is_sparse") and bool(their_backend.is_sparse())


def select(argument: str) -> type[Any]:
    """Return a class derived from vLLM's ``AttentionBackend`` that the bridge can drive.

    Raises:
        ImportError: vLLM, or a library that the backend needs, cannot be imported.
        ValueError: there is no such class, or the bridge cannot drive it; the message names those it can.
        BackendLoadError: the file cannot be imported.
    """
    found = select_class(argument)
    _refuse_undriven(argument, found)
    return found


def select_class(argument: str) -> type[Any]:
    """Return the class, whether or not the bridge can drive it; errors are those of :func:`select`."""
    package.module("vllm")  # first, so that vLLM's log output is reduced also if a plugin or a file imports it
    package.load_plugins()
    package.keep_operators()
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
    return found


def _named(name: str) -> Any:
    """Return the class that vLLM's registry currently has under ``name``; plugins may override it."""
    members = registered()
    known = [each for each, member in members.items() if path_of(member)]
    if name in members and name not in known:
        raise ValueError(f"{name} names no class of vLLM {package.version()}: a plugin may register one")
    if name not in known:
        raise ValueError(str(UnknownNameError(f"backend of vLLM {package.version()}", name, known)))
    try:
        return members[name].get_class()
    except ImportError:
        raise
    except Exception as error:
        # Kernel modules query the machine during import, and raise arbitrary exceptions.
        raise ImportError(registry.import_failure(error)) from error


def path_of(member: Any) -> str:
    """Return the class path of a registry's member, which a plugin may have replaced; "" if there is none."""
    if not hasattr(member, "get_path"):
        return getattr(member, "value", "") or ""
    try:
        return str(member.get_path())
    except ValueError:
        return ""


def _module(argument: str, place: str) -> Any:
    try:
        return package.module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}.") or error.name == "vllm":
            raise
        raise ValueError(f"{argument}: there is no module {error.name}") from error


def _refuse_undriven(argument: str, found: type[Any]) -> None:
    """Raise ValueError for classes outside the contract, and for those that vLLM's layer would not accept."""
    if is_state_space(found):
        return
    if is_sparse(found):
        raise ValueError(f"{argument} is for layers whose keys an indexer chooses, and the bridge makes no indexer")
    members = package.find("AttentionBackendEnum", *_REGISTRY).__members__
    is_latent = hasattr(found, "is_mla") and found.is_mla()  # its layer needs no registered name
    if found.get_name() not in members and not is_latent:
        raise ValueError(
            f"{argument} calls itself {found.get_name()!r}: vLLM's layers take names of AttentionBackendEnum only, "
            "of which CUSTOM is free"
        )


def named_after(theirs: type[Any], base: type[Any], suffix: str, members: Mapping[str, Any]) -> type[Any]:
    """Return a class derived from ``base``, named after vLLM's class ``theirs``, which is its ``their_backend``."""
    described = f"vLLM's {theirs.__module__}.{theirs.__qualname__}."
    own = {"their_backend": theirs, "__module__": base.__module__, "__doc__": described}
    return type(f"{theirs.__name__}{suffix}", (base,), own | dict(members))
