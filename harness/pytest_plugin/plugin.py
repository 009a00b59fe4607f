"""The pytest plugin's door: options, and nothing else until one of them is given.

Every pytest run on a machine where attncheck is installed imports this module, so it must not import torch, pydantic
or anything heavy; ``items`` does, once ``--attncheck-suite`` or ``--attncheck-backend`` asks for items.
"""

import pytest

MARKER = "attncheck: one check of one case of one backend, collected by --attncheck-suite or --attncheck-backend"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; they mean what those of ``attncheck run`` mean."""
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


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker; with our options, let the items join."""
    config.addinivalue_line("markers", MARKER)
    if not (config.getoption("attncheck_suite") or config.getoption("attncheck_backend")):
        return
    from attncheck.harness.pytest_plugin.items import Collection

    collection = Collection(config)
    config.pluginmanager.register(collection, "attncheck-collection")
    if config.getoption("attncheck_timing") or "timing" in config.getoption("attncheck_check"):
        from attncheck.harness.pytest_plugin.benchmark import Machine

        config.pluginmanager.register(Machine(collection), "attncheck-machine")
