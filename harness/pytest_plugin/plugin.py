"""The pytest plugin: options, collection and reports."""

import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest

from attncheck.harness.run.options import OPTIONS, RunOptions, kind_of, listed, options_in

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
    within: str = ""


def backend_tests(
    backend: str,
    suite: str | Sequence[str] = "smoke",
    *,
    cases: str | Sequence[str] = (),
    checks: str | Sequence[str] = (),
    within: str = "",
) -> BackendTests:
    """Return the checks of ``backend``; assigned to ``NAME`` in a module, pytest collects them as ``NAME[CASE-CHECK]``.

    >>> test_mine = backend_tests("./mine.py:Mine", suite="smoke", checks="numerics")

    Args:
        backend: a name or reference (``"torch_sdpa"``, ``"./mine.py:Mine"``); paths are relative to the current folder.
        suite: names of built-in suites, or paths of case files.
        cases: patterns on ``suite/id`` or on the id. Default: every case.
        checks: names of checks. Default: all that apply except ``timing``.
        within: a time such as ``"60s"``: the cases and checks that find most come first, and those that are not reached
            in time are skipped. Default: no limit.
    """
    return BackendTests(backend, listed(suite), listed(cases), listed(checks), within)


# Entry point of the pytest plugin: adds the options, and loads nothing else until items are requested.
#
# Every pytest run on a machine with attncheck imports this module, so it must not import torch, pydantic or anything
# else that is slow. `session` imports them once an option requests items, or a module has `attncheck.backend_tests`.

MARKER = "attncheck: one check of one case of one backend, collected by attncheck"
_TESTS_MODULE = "attncheck.harness.pytest_plugin.plugin"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; they have the meaning of those of ``attncheck run``."""
    group = parser.getgroup("attncheck", "attention backends")
    for name in options_in("pytest"):
        option, kind = OPTIONS[name], kind_of(name)
        how: dict[str, Any] = {"dest": f"attncheck_{name}", "help": option.help.replace("%", "%%"), "default": None}
        if kind is bool:
            how |= {"action": "store_const", "const": not getattr(RunOptions, name)}
        elif kind == list[str]:
            how |= {"action": "append", "metavar": option.metavar}
        else:
            how |= {"type": kind, "metavar": option.metavar}
        group.addoption(name_in_pytest(name), **how)
    group.addoption(
        "--attncheck-timing",
        action="store_true",
        help="make the check timing as well, its samples taken by pytest-benchmark (and so its --benchmark-json, "
        "--benchmark-compare, ...); --attncheck-check timing makes no other",
    )


def name_in_pytest(name: str) -> str:
    """Return the option of pytest for this field of :class:`RunOptions`, such as ``--attncheck-suite``."""
    return f"--attncheck-{OPTIONS[name].names[0].removeprefix('--')}"


def given_to_pytest(config: pytest.Config) -> dict[str, Any]:
    """Return what the options of pytest give, by the field of :class:`RunOptions`."""
    found = {name: config.getoption(f"attncheck_{name}") for name in options_in("pytest")}
    return {name: value for name, value in found.items() if value is not None}


def has_question(config: pytest.Config) -> bool:
    """Return whether an option requests items."""
    return bool(given_to_pytest(config).keys() & {"suites", "backends"})


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the session plugin if an option requests items."""
    config.addinivalue_line("markers", MARKER)
    if has_question(config):
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
