"""Conformance tests for attention backends: cases in YAML, a float64 reference, one verdict for each backend.

>>> import attncheck
>>> attncheck.examine("torch_sdpa", suite="smoke", cases="decode.float32", device="cpu").verdict
'passed'

Importing this package loads no other module. Each public name is imported at its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attncheck.backends.kernel import KernelParams, kernel_backend
    from attncheck.errors import ExaminationFailedError
    from attncheck.harness.api import Examination, examine
    from attncheck.harness.checks.findings import TimingSettings
    from attncheck.harness.pytest_plugin.plugin import backend_tests
    from attncheck.harness.recording.plugin import record

    __version__: str

__all__ = [
    "Examination",
    "ExaminationFailedError",
    "KernelParams",
    "TimingSettings",
    "__version__",
    "backend_tests",
    "examine",
    "kernel_backend",
    "record",
]

_HOME = {
    "Examination": "attncheck.harness.api",
    "ExaminationFailedError": "attncheck.errors",
    "KernelParams": "attncheck.backends.kernel",
    "TimingSettings": "attncheck.harness.checks.findings",
    "backend_tests": "attncheck.harness.pytest_plugin.plugin",
    "examine": "attncheck.harness.api",
    "kernel_backend": "attncheck.backends.kernel",
    "record": "attncheck.harness.recording.plugin",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _version() -> str:
    """Return the installed version, or the one in pyproject.toml if this is a checkout that is not installed."""
    import importlib.metadata
    import tomllib
    from pathlib import Path

    try:
        return importlib.metadata.version("attncheck")
    except importlib.metadata.PackageNotFoundError:
        stated = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
        return str(stated["project"]["version"])
