"""Which class of vLLM's an argument names: a name of vLLM's own, ``module:Class``, or ``path/to/file.py:Class``.

Names are those of vLLM's two registries, of attention and of layers with a state, with what plugins have registered.
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
    """Every name that vLLM's registries have, with its member; plugins are loaded, and what they register counts.

    A name of attention comes before the same name of layers with a state, unless it has no class.

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
    """Whether vLLM's class is for layers with a state in place of a cache."""
    return hasattr(their_backend, "is_ssm") and bool(their_backend.is_ssm())


def select(argument: str) -> type[Any]:
    """The class derived from vLLM's ``AttentionBackend``.

    Raises:
        ImportError: vLLM, or a library that the backend needs, cannot be imported.
        ValueError: there is no such class, or it is none that the bridge can drive; the message says what is.
        BackendLoadError: the file or the class in it cannot be had.
    """
    found = select_class(argument)
    _refuse_undriven(argument, found)
    return found


def select_class(argument: str) -> type[Any]:
    """The same, whether or not the bridge can drive it."""
    package.module("vllm")  # first, so that it is quiet whoever else imports it
    package.load_plugins()
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
    """The class vLLM has under ``name``, as its registry has it now: an override by a plugin counts."""
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
        # Modules of kernels ask the machine while they are imported, and raise whatever comes of it.
        raise ImportError(registry.import_failure(error)) from error


def path_of(member: Any) -> str:
    """Return the path of the class that a registry's member names, which a plugin may have replaced; empty: none."""
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
    """ValueError for classes that answer other questions than the contract's, or that vLLM's layer would not take."""
    if is_state_space(found):
        return
    if hasattr(found, "is_sparse") and found.is_sparse():
        raise ValueError(
            f"{argument} is for layers with keys that an indexer chooses: no case says which keys it would choose"
        )
    members = package.find("AttentionBackendEnum", *_REGISTRY).__members__
    is_latent = hasattr(found, "is_mla") and found.is_mla()  # whose layer asks for no name
    if found.get_name() not in members and not is_latent:
        raise ValueError(
            f"{argument} calls itself {found.get_name()!r}: vLLM's layers take names of AttentionBackendEnum only, "
            "of which CUSTOM is free"
        )
