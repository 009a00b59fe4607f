"""Settings of all tests, the processes that run commands of the docs, and records and run files for several rooms.

Property tests are deterministic and have no deadline.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from preloaded_python import Preloaded
from shell_commands import ShellCommands

from attncheck.reports.run_file.header import BackendInfo, Environment, RunHeader, SuiteInfo
from attncheck.reports.run_file.records import Record, RunFooter, parse_line
from attncheck.reports.run_file.store import RunWriter

if not torch.cuda.is_available():
    # Triton reads it when a kernel is decorated, in the import of any test.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The documents show the output of a terminal of 100 columns, and pytest-xdist sets the width of its workers.
os.environ["COLUMNS"] = "100"

# With this variable, each process that a test starts would compile all modules of attncheck again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Tests compute every truth and do not touch the user's cache.
os.environ["ATTNCHECK_NO_CACHE"] = "1"

settings.register_profile("attncheck", derandomize=True, deadline=None, database=None)
settings.register_profile("fuzz", settings.get_profile("attncheck"), max_examples=100_000)
settings.load_profile("attncheck")


pytest.register_assert_rewrite("paged_batches", "common_batches", "toy_engine")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Collect no doctests of test modules, which have none.

    The doctest plugin skips a module that it cannot import. Pytest then finds the module half imported, without tests.
    """
    found = yield
    return [each for each in found if type(each).__name__ != "DoctestModule"]


_DIRECTORIES = pytest.StashKey[dict[Path, pytest.Collector | None]]()


@pytest.hookimpl(wrapper=True)
def pytest_collect_directory(
    path: Path, parent: pytest.Collector
) -> Generator[None, pytest.Collector | None, pytest.Collector | None]:
    """Make one node for each folder.

    pytest 9.1 makes others after a file of a folder above is named (its issue 14635). They lack the folder's fixtures.
    """
    made = yield
    return parent.session.stash.setdefault(_DIRECTORIES, {}).setdefault(path, made)


@pytest.fixture(autouse=True)
def own_module_path() -> Iterator[None]:
    """Take back the folders that backends' files add to ``sys.path``, so that no test finds modules of another."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(scope="session")
def _preloaded() -> Iterator[Preloaded | None]:
    """Yield None on other systems, and under coverage, which cannot follow forked processes."""
    if sys.platform != "linux" or "coverage" in sys.modules:
        yield None
        return
    started = Preloaded.start()
    yield started
    started.close()


@pytest.fixture
def preloaded(_preloaded: Preloaded | None) -> Iterator[None]:
    """Fork the Python processes that a test starts from one with torch imported; not for tests of imports."""
    if _preloaded is not None:
        _preloaded.install()
    yield
    Preloaded.uninstall()


@pytest.fixture(scope="session")
def shell(
    _preloaded: Preloaded | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., tuple[int, str]]]:
    """``shell(command, folder, NAME=value)`` runs a command in a folder, without a GPU, with this interpreter first.

    Returns the exit code, and output and errors as one text.
    """
    first = [str(Path(sys.executable).parent)]
    commands = None if _preloaded is None else ShellCommands(tmp_path_factory.mktemp("commands"), _preloaded)
    if commands is not None:
        first.insert(0, str(commands.folder))

    def run(command: str, folder: Path, **environment: str) -> tuple[int, str]:
        path = os.pathsep.join([*first, os.environ["PATH"]])
        env = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", **environment}
        done = subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    yield run
    if commands is not None:
        commands.close()


@pytest.fixture
def plain(tmp_path: Path) -> Callable[[str], str]:
    """``plain(text)`` writes TMP, ROOT, N and HASH for folders, lines and hashes, and ... for lists of names and errors."""
    root = Path(__file__).resolve().parent.parent

    def plain(text: str) -> str:
        text = text.replace(str(tmp_path), "TMP").replace(f"{root}/", "ROOT/")
        text = re.sub(
            r"(\(known: |built-in suites: |(?:registered names|taken) are |; the largest error is )[^)\"';]*",
            r"\1...",
            text,
        )
        text = re.sub(r"'[0-9a-f]{12}'", "'HASH'", text)
        return re.sub(r"(\w\.py):\d+", r"\1:N", text)

    return plain


ENVIRONMENT = Environment(
    attncheck="0.1.0",
    python="3.11.9",
    torch="2.13.0+cpu",
    numpy="2.3.0",
    platform="Linux x86_64",
    cpu="a cpu",
    cores=2,
    device="cpu",
    device_name="a cpu",
)

_OWN_FIELDS: dict[str, dict[str, Any]] = {
    "passed": {"figures": {"rows": 40, "worst_budget": 0.5}},
    "failed": {"summary": "7 of 40 rows", "figures": {"rows": 40, "worst_budget": 18.4}},
    "errored": {"stage": "forward", "error_type": "RuntimeError", "message": "no such kernel"},
    "crashed": {"stage": "check numerics", "cause": "killed by SIGABRT"},
    "timed_out": {
        "stage": "check lse",
        "cause": "not finished within the time limit; the limit was 3 s",
        "limit_s": 3.0,
    },
    "unsupported": {"reasons": ["head_size 80 is not one of 64, 128"]},
    "unavailable": {"reasons": ["needs CUDA"]},
    "xfailed": {"underlying": "failed", "summary": "7 of 40 rows", "reason": "known"},
    "xpassed": {"reason": "known"},
}


@pytest.fixture
def header(make_header: Callable[[], RunHeader]) -> RunHeader:
    """The header of a run of two suites, three checks and two backends; vary it with ``model_copy``."""
    return make_header()


@pytest.fixture(scope="session")
def make_header() -> Callable[[], RunHeader]:
    """``make_header()`` returns ``header`` anew: a header keeps what it has worked out, and its copies have that too."""
    return lambda: RunHeader(
        started="2026-01-01T00:00:00+00:00",
        environment=ENVIRONMENT,
        suites=(SuiteInfo(name="smoke", ref="smoke", cases=2), SuiteInfo(name="mine", ref="./my suite.yaml", cases=1)),
        checks=("numerics", "lse", "cache_write"),
        device="cpu",
        seed=0,
        backends=(
            BackendInfo(name="reference", ref="reference", version="0.1.0", conventions={"lse_base": "e"}),
            BackendInfo(name="Wrong", ref="./wrong.py:Wrong", conventions={"lse_base": "2", "batch_invariant": True}),
        ),
    )


@pytest.fixture(scope="session")
def make_record() -> Callable[..., Record]:
    """``make_record("failed", case_id="b", ...)`` returns a record of that outcome with defaults for other fields."""

    def make(outcome: str, **fields: Any) -> Record:
        who = {
            "kind": "record",
            "outcome": outcome,
            "suite": "smoke",
            "case_id": "edge",
            "case_hash": "0123456789ab",
            "check": "numerics",
            "seed": 0,
            "backend": "reference",
            "backend_ref": "reference",
            "backend_version": "0.1.0",
            "environment": ENVIRONMENT.digest,
            "attncheck_version": "0.1.0",
        }
        if fields.get("backend") == "Wrong":
            who |= {"backend_ref": "./wrong.py:Wrong", "backend_version": ""}

        record = parse_line(json.dumps(who | _OWN_FIELDS[outcome] | fields))
        assert not isinstance(record, RunHeader | RunFooter)
        return record

    return make


@pytest.fixture(scope="session")
def write_run() -> Callable[..., Path]:
    """``write_run(path, header, *records)`` writes a complete run file with ``errors`` and returns its path."""

    def write(path: Path, header: RunHeader, *records: Record, errors: tuple[str, ...] = ()) -> Path:
        with RunWriter(path, header) as writer:
            for record in records:
                writer.add(record)
            for error in errors:
                writer.fail(error)
        return path

    return write
