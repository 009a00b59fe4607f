"""A run file has one writer, all cases of its header, and one code; and it names no code that a command executes."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attncheck.harness.cli import app as cli

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="locks and owners are those of Linux"),
]

BACKEND = """\
import ctypes
from pathlib import Path
from attncheck.backends.candidates.reference import ReferenceBackend
{imported}
ctypes.CDLL(str(Path(__file__).with_name("{library}")))

class {name}(ReferenceBackend):
    pass
"""
FOREIGN = """\
from pathlib import Path
from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
with Path("executed").open("a") as file:
    file.write("x")

class Impl(ReferenceImpl):
    def forward(self, *args, **others):
        return super().forward(*args, **others).mul_(2)

class Foreign(ReferenceBackend):
    @staticmethod
    def get_impl_cls():
        return Impl
"""
SUITE = ("--suite", "small.yaml")
REFS = ("pkg.back:InPackage", "./file.py")

Attncheck = Callable[..., tuple[int, str]]
Start = Callable[..., "subprocess.Popen[str]"]
Records = Callable[[str], dict[tuple[str, str], dict[str, Any]]]


@pytest.fixture(scope="module", autouse=True)
def _forked(forked: None) -> None:
    """Fork all processes of this module."""


def here(folder: Path, *words: str) -> tuple[int, str]:
    """Return the exit code of a command in ``folder`` that starts no process, and what it printed."""
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        return cli.main([*words]), printed.getvalue()


def edited(lines: list[str], **fields: object) -> str:
    """Return a run file whose header has these fields, and whose footer counts its records."""
    header, *records = [json.loads(line) for line in lines]
    footer = records.pop() | {"counts": {"passed": len(records)}}
    return "".join(json.dumps(line) + "\n" for line in (header | fields, *records, footer))


def test_a_run_file_has_one_writer(start: Start, attncheck: Attncheck, folder: Path, records: Records) -> None:
    words = ("run", "./deeds.py:Slow", *SUITE, "--jobs", "1")
    file, hold = folder / "live.jsonl", folder / "hold"
    hold.touch()
    with start(*words, "--output", file.name) as live:
        while not (file.exists() and b"\n" in file.read_bytes()) and live.poll() is None:
            time.sleep(0.05)
        code, printed = attncheck(*words, "--resume", file.name)
        is_live = live.poll() is None
        live.kill()
        live.communicate()
    assert (is_live, code) == (True, 2), printed
    assert file.name in printed
    with start(*words, "--resume", file.name) as first, start(*words, "--resume", file.name) as second:
        limit = time.monotonic() + 60
        while first.poll() is None and second.poll() is None and time.monotonic() < limit:
            time.sleep(0.05)
        hold.unlink()
        texts = [process.communicate(timeout=120) for process in (first, second)]
    assert sorted((first.returncode, second.returncode)) == [0, 2], texts
    assert len(records(file.name)) == 4
    assert here(folder, "report", file.name)[0] == 0


@pytest.fixture(scope="module")
def shards(attncheck: Attncheck, folder: Path) -> list[list[str]]:
    """The lines of the two shards of a run."""
    for number in (1, 2):
        words = ("--shard", f"{number}/2", "--output", f"shard{number}.jsonl")
        code, printed = attncheck("run", "torch_sdpa", *SUITE, *words)
        assert code == 0, printed
    lines = [(folder / f"shard{number}.jsonl").read_text().splitlines(keepends=True) for number in (1, 2)]
    assert list(map(len, lines)) == [4, 4]
    return lines


@pytest.mark.parametrize("fault", ["relabelled", "without its label", "shortened", "emptied"])
def test_shards_with_a_hole_are_not_merged(folder: Path, shards: list[list[str]], fault: str) -> None:
    first, second = shards
    texts = {
        "relabelled": ["".join(first), edited(first, shard="2/2")],
        "without its label": [edited(first, shard="")],
        "shortened": ["".join(first), edited([second[0], *second[2:]])],
        "emptied": ["".join(first), edited([second[0], second[-1]])],
    }[fault]
    for number, text in enumerate(texts):
        (folder / f"part{number}.jsonl").write_text(text)
    merged = folder / f"{fault}.jsonl"
    parts = [f"part{number}.jsonl" for number in range(len(texts))]
    code, printed = here(folder, "merge", *parts, "--output", merged.name)
    assert not merged.exists(), printed
    assert code == 2


def test_a_run_file_that_lacks_a_record_is_not_complete(folder: Path, shards: list[list[str]]) -> None:
    for name, lines in (("whole", shards[0]), ("short", [shards[0][0], *shards[0][2:]])):
        (folder / f"{name}.jsonl").write_text(edited(lines))
    assert "unfinished" not in here(folder, "report", "whole.jsonl")[1]
    assert "unfinished" in here(folder, "report", "short.jsonl")[1]
    code, printed = here(folder, "compare", "whole.jsonl", "short.jsonl")
    assert code == 1, printed
    assert "incomplete" in printed


@pytest.fixture(scope="module")
def half(attncheck: Attncheck, folder: Path) -> str:
    """The begin of a run of a backend in a package, and of one in a file; both import a module, and load a library."""
    library = next(Path(sysconfig.get_config_var("DESTSHARED")).glob("_bisect.*.so"))
    (folder / "pkg").mkdir()
    for name in ("__init__.py", "kernel.py"):
        (folder / "pkg" / name).write_text("FACTOR = 1\n")
    (folder / "helper.py").write_text("FACTOR = 1\n")
    texts = (
        BACKEND.format(name="InPackage", imported="from .kernel import FACTOR", library="ours.so"),
        BACKEND.format(name="InFile", imported="from helper import FACTOR", library="theirs.so"),
    )
    for name, text in zip(("pkg/back.py", "file.py"), texts, strict=True):
        (folder / name).write_text(text)
    shutil.copy(library, folder / "pkg" / "ours.so")
    shutil.copy(library, folder / "theirs.so")
    code, printed = attncheck("run", *REFS, *SUITE, "--output", "code.jsonl")
    assert code == 0, printed
    lines = (folder / "code.jsonl").read_text().splitlines(keepends=True)
    return "".join(lines[:3])


@pytest.mark.parametrize("name", ["pkg/back.py", "pkg/kernel.py", "pkg/ours.so", "helper.py", "theirs.so"])
def test_a_run_is_not_resumed_with_other_code(attncheck: Attncheck, folder: Path, half: str, name: str) -> None:
    (folder / "half.jsonl").write_text(half)
    file = folder / name
    before = file.read_bytes()
    file.write_bytes(before + b"\n# edited\n")
    try:
        code, printed = attncheck("run", *REFS, *SUITE, "--resume", "half.jsonl")
    finally:
        file.write_bytes(before)
    assert code == 2, printed
    assert file.name in printed
    assert (folder / "half.jsonl").read_text() == half


def test_a_run_is_resumed_with_its_own_code(attncheck: Attncheck, folder: Path, half: str, records: Records) -> None:
    (folder / "half.jsonl").write_text(half)
    code, printed = attncheck("run", *REFS, *SUITE, "--resume", "half.jsonl")
    assert code == 0, printed
    assert records("half.jsonl") == records("code.jsonl")


@pytest.fixture(scope="module")
def foreign(attncheck: Attncheck, folder: Path) -> Path:
    """A kept run of a wrong backend."""
    (folder / "foreign.py").write_text(FOREIGN)
    words = ("run", "./foreign.py:Foreign", *SUITE, "--jobs", "1")
    code, printed = attncheck(*words, XDG_CACHE_HOME=str(folder / "cache"))
    assert code == 1, printed
    (run,) = (folder / "cache").rglob("*.jsonl")
    return run


def test_a_run_file_names_no_code_that_is_executed(attncheck: Attncheck, folder: Path, foreign: Path) -> None:
    shutil.copy(foreign, folder / "foreign.jsonl")
    (folder / "executed").unlink(missing_ok=True)
    words = ("shrink", "foreign.jsonl::small/before", "--shrink-time", "1")
    code, printed = attncheck(*words, XDG_CACHE_HOME=str(folder / "none"))
    assert not (folder / "executed").exists(), printed
    assert code == 2
    assert "--backend" in printed


@pytest.mark.parametrize(
    ("words", "owner", "mode"),
    [
        pytest.param(("run", "--lf"), 12345, 0o644, id="of another user, repeated"),
        pytest.param(("run", "--lf"), 0, 0o666, id="writable by others, repeated"),
        pytest.param(("shrink", "--shrink-time", "1"), 12345, 0o644, id="of another user, reduced"),
    ],
)
def test_a_kept_run_of_others_names_no_code_that_is_executed(
    attncheck: Attncheck, folder: Path, foreign: Path, words: tuple[str, ...], owner: int, mode: int
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(foreign, owner, owner)
    foreign.chmod(mode)
    (folder / "executed").unlink(missing_ok=True)
    code, printed = attncheck(*words, XDG_CACHE_HOME=str(folder / "cache"))
    assert not (folder / "executed").exists(), printed
    assert code == 2
