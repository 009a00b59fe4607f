"""``attncheck.backend_tests``: the checks of a backend as tests of a module. Light to import, for test modules."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BackendTests:
    """What the tests of one name in a module examine; the pytest plugin collects one item per case and check.

    Each field has the meaning of the option of ``attncheck run`` of that name; empty selects the option's default.
    """

    backend: str
    suites: tuple[str, ...]
    cases: tuple[str, ...]
    checks: tuple[str, ...]


def backend_tests(
    backend: str,
    suite: str | Sequence[str] = "smoke",
    *,
    cases: str | Sequence[str] = (),
    checks: str | Sequence[str] = (),
) -> BackendTests:
    """Return the checks of ``backend``; assigned to ``NAME`` in a module, pytest collects them as ``NAME[CASE-CHECK]``.

    >>> test_mine = backend_tests("./mine.py:Mine", suite="smoke", checks="numerics")

    Args:
        backend: a name or reference (``"torch_sdpa"``, ``"./mine.py:Mine"``); paths are relative to the current folder.
        suite: names of built-in suites, or paths of case files.
        cases: patterns on ``suite/id`` or on the id. Default: every case.
        checks: names of checks. Default: all that apply except ``timing``.
    """
    return BackendTests(backend, _listed(suite), _listed(cases), _listed(checks))


def _listed(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
