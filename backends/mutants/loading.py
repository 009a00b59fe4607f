"""Loads mutants: the class with a fault, or a private copy of a correct backend with the fault in its source.

The patched module is copied, and every module through which the backend imports it. All other modules are the real
ones. No real module changes, so the code that judges a mutant stays correct.
"""

import ast
import builtins
import linecache
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

from attncheck import reference
from attncheck.backends.mutants.catalogue import Mutant, mutant_of
from attncheck.backends.registry import BUILTIN
from attncheck.errors import BackendLoadError
from attncheck.reference import v0
from attncheck.reference.lazy_exports import homes

_OPERATORS = '"attncheck::'
"""Prefix of the names of torch operators, which two modules must not both define."""


class MutantBackend:
    """Loads the backend that ``mutants:NAME`` names."""

    @staticmethod
    def from_argument(name: str) -> Any:
        """Return the backend class of the mutant ``name``.

        Raises:
            QuestionError: there is no such mutant, it is a provider, or its patch does not fit.
        """
        mutant = mutant_of(name)
        if mutant.is_provider:
            raise BackendLoadError(mutant.ref, "is a provider of utilities", allowed=f"give --provider {mutant.ref}")
        if mutant.class_name is not None:
            return getattr(import_module(f"attncheck.backends.mutants.{mutant.area}"), mutant.class_name)
        module, _, attribute = BUILTIN.get(mutant.base, mutant.base_ref).partition(":")
        return getattr(_Copies(mutant, [module]).load(module), attribute)


def mutant_utilities(name: str) -> tuple[ModuleType, ModuleType]:
    """Return what the provider ``name`` offers: the utilities, and the utilities of the first generation.

    Raises:
        QuestionError: there is no such mutant, it is a backend, or its patch does not fit.
    """
    mutant = mutant_of(name)
    if not mutant.is_provider:
        raise BackendLoadError(mutant.ref, "is a backend", allowed=f"give --backend {mutant.ref}")
    exported = [(package, homes(str(package.__file__))) for package in (reference, v0)]
    copies = _Copies(mutant, [home for _, names in exported for home in names.values()])
    first, second = (_offer(package, names, copies) for package, names in exported)
    return first, second


def _offer(package: ModuleType, exported: Mapping[str, str], copies: "_Copies") -> ModuleType:
    offered = ModuleType(f"{copies.prefix}{package.__name__}")
    for name, home in exported.items():
        source = copies.load(home) if home in copies.names else package
        setattr(offered, name, getattr(source, name))
    return offered


class _Copies:
    """Copies of modules, one of them with the fault of ``mutant``; ``names`` are the modules that are copied.

    Raises:
        BackendLoadError: an old text does not occur exactly once, or no module of ``entries`` imports the patched one.
    """

    def __init__(self, mutant: Mutant, entries: Iterable[str]) -> None:
        self._mutant = mutant
        self._patched = f"attncheck.{mutant.file.removesuffix('.py').replace('/', '.')}"
        self.prefix = f"attncheck_mutants.{mutant.name.replace('-', '_')}."
        self.names = _between(tuple(dict.fromkeys(entries)), self._patched)
        if self._patched not in self.names:
            raise BackendLoadError(mutant.ref, f"{mutant.base} does not import {mutant.file}")
        self._source = _source(self._patched)
        for old, new in zip(mutant.old, mutant.new, strict=True):
            if (count := self._source.count(old)) != 1:
                reason = f"its old text occurs {count} times in {mutant.file}"
                raise BackendLoadError(mutant.ref, reason, allowed="it must occur exactly once")
            self._source = self._source.replace(old, new)
        self._builtins = MappingProxyType({**vars(builtins), "__import__": self._import})

    def load(self, name: str) -> ModuleType:
        """Return the copy of the module ``name``, executed once."""
        private = self.prefix + name
        if private in sys.modules:
            return sys.modules[private]
        source = self._source if name == self._patched else _source(name)
        source = source.replace(_OPERATORS, f'"{self.prefix.rstrip(".").replace(".", "_")}::')
        filename = f"{self._mutant.ref}/{name.partition('.')[2].replace('.', '/')}.py"
        # `inspect`, which Triton's compiler uses, looks here for sources that are not files.
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        module = ModuleType(private)
        vars(module).update({"__file__": filename, "__builtins__": dict(self._builtins)})
        sys.modules[private] = module  # dataclasses look up their module
        try:
            exec(compile(source, filename, "exec"), vars(module))  # noqa: S102 (attncheck's own source)
        except BaseException:
            del sys.modules[private]
            raise
        return module

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,  # noqa: A002 (the parameters of __import__)
        locals: Mapping[str, object] | None = None,  # noqa: A002
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        """Import as ``__import__`` does, but return the copies instead of the real modules."""
        if name in self.names and fromlist:
            return self.load(name)
        found = builtins.__import__(name, globals, locals, fromlist or (), level)
        copied = {item: self.load(f"{name}.{item}") for item in fromlist or () if f"{name}.{item}" in self.names}
        if not copied:
            return found
        return SimpleNamespace(**{item: copied.get(item) or getattr(found, item) for item in fromlist or ()})


def _between(entries: tuple[str, ...], target: str) -> frozenset[str]:
    """Return ``target`` and the modules through which ``entries`` import it, themselves included."""
    imports: dict[str, frozenset[str]] = {}
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        if name not in imports:
            imports[name] = _imports(name)
            waiting += imports[name]
    between = {target} & imports.keys()
    while more := {name for name, found in imports.items() if found & between} - between:
        between |= more
    return frozenset(between)


@cache
def _imports(name: str) -> frozenset[str]:
    """Return the modules of backends and of the reference that the module ``name`` imports, anywhere in its source."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(_source(name))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
            found.update(each for each in names if _path(each) is not None)
    return frozenset(found)


def _source(name: str) -> str:
    path = _path(name)
    if path is None:
        raise BackendLoadError(name, "is no module of backends or of the reference")
    return path.read_text(encoding="utf-8")


@cache
def _path(name: str) -> Path | None:
    """Return the file of a module of backends or of the reference, or None for a package or another module."""
    package, *parts = name.split(".")
    if package != "attncheck" or not parts or parts[0] not in ("backends", "reference"):
        return None
    path = Path(str(reference.__file__)).parents[1].joinpath(*parts).with_suffix(".py")
    return path if path.is_file() else None
