"""Lazy imports of a package's names (PEP 562), read from the package's stub.

Type checkers read the stub ``__init__.pyi``. It imports each name once, from the module that defines it.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from sys import modules


def homes(init_file: str) -> dict[str, str]:
    """Return, by name, the module that the stub beside a package's ``__init__.py`` imports the name from."""
    stub = ast.parse(Path(init_file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def lazy_exports(package: str, init_file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Names with a leading underscore are private names of vLLM that its callers use. They are not listed in ``__all__``.
    """
    home = homes(init_file)
    public = sorted(name for name in home if not name.startswith("_"))

    def get(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name]), name)
        # A private name is looked up every time, because vLLM's callers rebind one of them.
        if not name.startswith("_"):
            setattr(modules[package], name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(modules[package]), *public})

    return get, listed, public
