"""Resolve a name to a provider, and find what it offers.

A name denotes ``vllm``, a file of its functions, a module, a file or a mutant. A plain module offers objects under
the reference's names, and those of the first generation under ``v0``; it takes and returns the reference's own objects.
A package that needs more (objects of its own, several modules, known departures) is described in this package.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import attncheck.reference
from attncheck.backends import registry
from attncheck.backends.mutants.catalogue import PREFIX
from attncheck.backends.mutants.loading import mutant_utilities
from attncheck.errors import BackendLoadError, ProviderLoadError
from attncheck.harness.providers.departures import Departures

Adapter = Callable[[Any], Any]
"""Makes a provider's object accept and return the reference's objects."""

BUILTIN: Mapping[str, str] = {"vllm": "attncheck.harness.providers.vllm:load_vllm"}
"""Packages that need an adapter, and the function that returns their provider."""


@dataclass(frozen=True)
class ProviderObject:
    """An object of a provider, and the name of the module it was found in."""

    target: Any
    place: str


@dataclass(frozen=True)
class Provider:
    """One or several modules that offer metadata utilities.

    ``modules`` are searched in order; for the first generation, those of ``v0`` are. ``adapters``: by subject key.
    ``adapt``: for all other subjects, or None.
    """

    name: str
    ref: str
    version: str
    modules: Sequence[ModuleType]
    v0: Sequence[ModuleType] = ()
    adapt: Adapter | None = None
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    departures: Departures = field(default_factory=Departures)

    @property
    def features(self) -> frozenset[str]:
        """Empty, since a provider offers functions and no attention."""
        return frozenset()

    def find(self, name: str, generation: str = "v1") -> ProviderObject | None:
        """Return the object called ``name``, or None.

        For the first generation, ``modules`` are searched after ``v0``, unless both generations have the name.
        """
        modules = [*self.modules] if generation == "v1" else [*self.v0]
        if generation == "v0" and not hasattr(attncheck.reference, name):
            modules += self.modules
        for module in modules:
            if hasattr(module, name):
                return ProviderObject(getattr(module, name), module.__name__)
        return None

    def adapted(self, key: str, target: Any) -> Any:
        """Return ``target``, the object of subject ``key``, with the interface of the reference's object."""
        adapt = self.adapters.get(key, self.adapt)
        return target if adapt is None else adapt(target)


def load_provider(ref: str) -> Provider:
    """Return the provider for ``ref``: ``vllm``, ``mutants:NAME``, ``package.module`` or ``path/to/file.py``.

    ``vllm:path/to/file.py`` is a file of functions that take and return vLLM's objects.

    Raises:
        ProviderLoadError: nothing of that name can be imported, or importing it fails.
    """
    package = ref.partition(":")[0]
    if package in BUILTIN:
        module, _, name = BUILTIN[package].partition(":")
        provider: Provider = getattr(import_module(module), name)(ref)
        return provider
    if ref.startswith(PREFIX):
        first, second = mutant_utilities(ref.removeprefix(PREFIX))
        return Provider(name=ref, ref=ref, version=attncheck.__version__, modules=[first], v0=[second])
    found = provider_file(ref, ref) if ref.endswith(".py") else _module(ref)
    v0 = _v0_of(found)
    return Provider(
        name=Path(ref).stem if ref.endswith(".py") else ref,
        ref=ref,
        version=str(getattr(found, "__version__", "")),
        modules=[found],
        v0=[v0] if v0 is not None else [],
    )


def _v0_of(found: ModuleType) -> Any:
    """Return what a module offers as ``v0``: a submodule, or any object with attributes."""
    if hasattr(found, "__path__") and importlib.util.find_spec(f"{found.__name__}.v0") is not None:
        return _module(f"{found.__name__}.v0")
    return getattr(found, "v0", None)


def provider_file(ref: str, path: str) -> ModuleType:
    """Return the module in a file, for provider ``ref``.

    Raises:
        ProviderLoadError: it cannot be read or imported.
    """
    try:
        return registry.import_file(ref, Path(path))
    except BackendLoadError as error:
        raise ProviderLoadError(ref, error.reason) from error


def _module(ref: str) -> ModuleType:
    if not all(part.isidentifier() for part in ref.split(".")):
        raise ProviderLoadError(ref, "is neither a module's name nor a Python file")
    try:
        return import_module(ref)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{ref}.".startswith(f"{error.name}."):
            raise ProviderLoadError(ref, registry.import_failure(error)) from error
        raise ProviderLoadError(ref, f"no module {error.name!r} is installed; for a file, give its path") from error
    except (Exception, SystemExit) as error:
        raise ProviderLoadError(ref, registry.import_failure(error)) from error
