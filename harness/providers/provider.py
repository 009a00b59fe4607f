"""From a name to a provider: ``vllm``, a file of its functions, a module, a file or a mutant, and what it offers.

A plain module offers objects under the reference's names, and under ``v0`` those of the first generation; it is asked
in the reference's own objects. A package that needs more (objects of its own, several modules, known departures) is
described in this package.
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
"""Makes a provider's object look like the reference's."""

BUILTIN: Mapping[str, str] = {"vllm": "attncheck.harness.providers.vllm:load_vllm"}
"""Packages that need more than their name, and who describes them."""


@dataclass(frozen=True)
class ProviderObject:
    """An object of a provider, and the module it was found in."""

    target: Any
    place: str


@dataclass(frozen=True)
class Provider:
    """A module, or several, that offer metadata utilities.

    ``modules`` are searched in order, those of ``v0`` for the first generation; ``adapters`` by subject key, with
    ``adapt`` for all others, if there is need for one.
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
        """None: functions are offered, and no attention."""
        return frozenset()

    def find(self, name: str, generation: str = "v1") -> ProviderObject | None:
        """The object called ``name``, or None. A name both generations have is looked for in its own modules only."""
        modules = [*self.modules] if generation == "v1" else [*self.v0]
        if generation == "v0" and not hasattr(attncheck.reference, name):
            modules += self.modules
        for module in modules:
            if hasattr(module, name):
                return ProviderObject(getattr(module, name), module.__name__)
        return None

    def adapted(self, key: str, target: Any) -> Any:
        """``target``, the object of subject ``key``, looking like the reference's."""
        adapt = self.adapters.get(key, self.adapt)
        return target if adapt is None else adapt(target)


def load_provider(ref: str) -> Provider:
    """The provider ``ref`` names: ``vllm``, ``mutants:NAME``, ``package.module`` or ``path/to/file.py``.

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
    """What a module offers under ``v0``: a submodule, or any object with attributes."""
    if hasattr(found, "__path__") and importlib.util.find_spec(f"{found.__name__}.v0") is not None:
        return _module(f"{found.__name__}.v0")
    return getattr(found, "v0", None)


def provider_file(ref: str, path: str) -> ModuleType:
    """Return the module that a file holds, for provider ``ref``.

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
    except (Exception, SystemExit) as error:
        raise ProviderLoadError(ref, registry.import_failure(error)) from error
