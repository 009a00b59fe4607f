"""The pytest plugin: options, collection and reports."""

import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from attncheck.harness.pytest_plugin.items import PytestSession

# `attncheck.backend_tests`: the checks of a backend as tests of a module. Light to import, for test modules.


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


# Entry point of the pytest plugin: adds the options, and loads nothing else until items are requested.
#
# Every pytest run on a machine with attncheck imports this module, so it must not import torch, pydantic or anything
# else that is slow. `session` imports them once an option requests items, or a module has `attncheck.backend_tests`.

MARKER = "attncheck: one check of one case of one backend, collected by attncheck"
_TESTS_MODULE = "attncheck.harness.pytest_plugin.plugin"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; they have the meaning of those of ``attncheck run``."""
    group = parser.getgroup("attncheck", "attention backends")
    group.addoption(
        "--attncheck-suite",
        action="append",
        default=[],
        metavar="NAME|FILE",
        help="examine the cases of this suite; may be repeated (default, with --attncheck-backend: smoke, or "
        "interpreted where kernels are)",
    )
    group.addoption(
        "--attncheck-backend",
        action="append",
        default=[],
        metavar="REF",
        help="examine this backend; may be repeated (default, with --attncheck-suite: all built-in ones)",
    )
    group.addoption(
        "--attncheck-set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace a default of the suites, such as cache.block_size=32; may be repeated",
    )
    group.addoption(
        "--attncheck-case", action="append", default=[], metavar="PATTERN", help="only cases whose id matches"
    )
    group.addoption("--attncheck-check", action="append", default=[], metavar="NAME", help="only this check")
    group.addoption(
        "--attncheck-timing",
        action="store_true",
        help="make the check timing as well, its samples taken by pytest-benchmark (and so its --benchmark-json, "
        "--benchmark-compare, ...); --attncheck-check timing makes no other",
    )
    group.addoption("--attncheck-device", default=None, metavar="NAME", help="cpu, cuda or cuda:N (default: the best)")
    group.addoption("--attncheck-seed", type=int, default=0, metavar="N", help="seed of the inputs (default: 0)")
    group.addoption(
        "--attncheck-expect", default=None, metavar="FILE", help="expected failures, as YAML: their items are xfailed"
    )
    group.addoption(
        "--attncheck-dump", default=None, metavar="DIR", help="write the tensors of each failing case into this folder"
    )
    group.addoption(
        "--attncheck-case-timeout",
        type=float,
        default=None,
        metavar="SECONDS",
        help="kill the process of a backend that finishes no check for so long (default: 300, and 10 times what the "
        "reference takes; 0: no limit)",
    )
    group.addoption(
        "--attncheck-backend-timeout",
        type=float,
        default=None,
        metavar="SECONDS",
        help="stop the processes of a backend when they have been at work for so long together (default: no limit)",
    )
    group.addoption(
        "--attncheck-memory-limit",
        default=None,
        metavar="SIZE",
        help="kill the process of a backend that holds more, such as 4GiB, with all it started",
    )
    group.addoption(
        "--attncheck-device-memory-limit",
        default=None,
        metavar="SIZE",
        help="GPU memory that torch may take in the process of a backend, such as 40GiB",
    )
    group.addoption(
        "--attncheck-in-process",
        action="store_true",
        help="examine backends in the process of pytest, not each in one of its own: for debuggers and profilers",
    )
    group.addoption(
        "--attncheck-pass-env",
        action="append",
        default=[],
        metavar="PATTERN",
        help="let the processes of backends see these environment variables as well; may be repeated",
    )
    group.addoption(
        "--attncheck-no-cache",
        action="store_true",
        help="compute every truth here: read and store none in the user's cache",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the session plugin if an option requests items."""
    config.addinivalue_line("markers", MARKER)
    if config.getoption("attncheck_suite") or config.getoption("attncheck_backend"):
        _session(config)


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    """Collect the items of a value returned by ``attncheck.backend_tests``."""
    if type(obj).__module__ != _TESTS_MODULE:
        return None
    found: Any = obj
    return [*_session(collector.config).module_items(collector, name, found)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to the report each examination that did not pass among the local variables of the failing frame.

    pytest truncates the text of an assertion, so this shows it in full.
    """
    report = yield
    if report.failed and call.excinfo is not None and (api := sys.modules.get("attncheck.harness.api")):
        for value in call.excinfo.traceback[-1].frame.f_locals.values():
            if isinstance(value, api.Examination) and not isinstance(call.excinfo.value, api.ExaminationFailedError):
                report.sections += [] if value.passed else [("attncheck", str(value))]
    return report


def _session(config: pytest.Config) -> "PytestSession":
    """Return the plugin that collects the items; register it at the first call."""
    from attncheck.harness.pytest_plugin.items import PytestSession

    name = "attncheck-session"
    if not config.pluginmanager.hasplugin(name):
        config.pluginmanager.register(PytestSession(config), name)
    session: Any = config.pluginmanager.get_plugin(name)
    return cast("PytestSession", session)
