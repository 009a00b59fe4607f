"""A folder with the hostile backends and a small suite, and commands of attncheck in processes of their own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from preloaded_python import Preloaded

from attncheck.reports.run_file.store import read_run

OPTIONS = ("--device", "cpu", "--check", "numerics", "--no-cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the commands of a module run."""
    made = tmp_path_factory.mktemp("faults")
    here = Path(__file__).parent
    for file in (here / "hostile.py", here / "deeds.py", here.parent / "miniatures" / "small.yaml"):
        shutil.copy(file, made)
    return made


@pytest.fixture(scope="module")
def forked(_preloaded: Preloaded | None) -> Iterator[None]:
    """Fork the processes of a module from one with torch imported."""
    if _preloaded is not None:
        _preloaded.install()
    yield
    Preloaded.uninstall()


@pytest.fixture(scope="module")
def start(folder: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """``start(*words, before=(), NAME=value)`` starts a command of attncheck in ``folder``.

    ``before``: a program that executes it. ``run`` gets the device and one check.
    """
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])

    def start(*words: object, before: Sequence[str] = (), **environment: str) -> "subprocess.Popen[str]":
        options = OPTIONS if words[0] == "run" else ()
        return subprocess.Popen(
            [*before, sys.executable, "-m", "attncheck", words[0], *options, *map(str, words[1:])],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
        )

    return start


@pytest.fixture(scope="module")
def attncheck(start: Callable[..., "subprocess.Popen[str]"]) -> Callable[..., tuple[int, str]]:
    """``attncheck(*words, before=(), NAME=value)`` returns the exit code of a command and what it printed."""

    def attncheck(*words: object, before: Sequence[str] = (), **environment: str) -> tuple[int, str]:
        with start(*words, before=before, **environment) as process:
            printed = "".join(process.communicate(timeout=300))
        return process.returncode, printed

    return attncheck


@pytest.fixture(scope="module")
def as_user() -> list[str]:
    """A program that executes a command as an ordinary user, who may read and write all files."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("an ordinary user, or setpriv, is needed")
    rights = "+dac_override,+dac_read_search"
    user = ["--reuid", "12345", "--regid", "12345", "--clear-groups"]
    return ["setpriv", *user, "--inh-caps", rights, "--ambient-caps", rights]


@pytest.fixture(scope="module")
def records(folder: Path) -> Callable[[str], dict[tuple[str, str], dict[str, Any]]]:
    """``records(name)`` returns the records of a run file by reference of the backend and id of the case.

    Without their duration.
    """

    def records(name: str) -> dict[tuple[str, str], dict[str, Any]]:
        dumped = [each.model_dump(mode="json", exclude={"duration_s"}) for each in read_run(folder / name).records]
        found = {(record["backend_ref"], record["case_id"]): record for record in dumped}
        assert len(found) == len(dumped)
        return found

    return records
