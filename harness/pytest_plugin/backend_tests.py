"""``attncheck.backend_tests``: a backend's checks as tests of a module. Loads nothing: a test module calls it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BackendTests:
    """What the tests of one name in a module examine; the pytest plugin collects one item for each case and check.

    Each field means what the option of ``attncheck run`` of that name means; empty: the option's default.
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
    """Return the checks of ``backend``, which pytest collects as ``NAME[CASE-CHECK]`` where a module assigns them.

    >>> test_mine = backend_tests("./mine.py:Mine", suite="smoke", checks="numerics")

    Args:
        backend: a name or reference (``"torch_sdpa"``, ``"./mine.py:Mine"``); paths start at the current folder.
        suite: names of built-in suites, or paths of case files.
        cases: patterns on ``suite/id`` or on the id; none: every case.
        checks: names of checks; none: all that apply, but for ``timing``.
    """
    return BackendTests(backend, _listed(suite), _listed(cases), _listed(checks))


def _listed(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
