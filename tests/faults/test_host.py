"""What a host or a user gives the command never ends as a failure of attncheck: it runs, or names what would be right."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from re import search

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the limits are those of Linux")]

RUN = ("run", "torch_sdpa", "--suite", "small.yaml", "--case", "between")
FULL_CACHE = """
mount -t tmpfs -o size=64k none "$XDG_CACHE_HOME" || exit 77
mkdir "$XDG_CACHE_HOME"/attncheck
cat /dev/zero 2>/dev/null >"$XDG_CACHE_HOME"/attncheck/full
exec "$@"
"""
Attncheck = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def with_mounts() -> Callable[[str], list[str]]:
    """``with_mounts(script)`` returns a program that executes a command after ``script``, with mounts of its own."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False).returncode != 0:
        pytest.skip("root, and unshare, are needed")
    return lambda script: ["unshare", "-m", "sh", "-c", script, "sh"]


def assert_runs(code: int, printed: str) -> None:
    if code == 77:
        pytest.skip("this machine mounts nothing")
    assert code == 0, printed
    assert "passed: 1 backend, 1 case" in printed


def assert_helps(code: int, printed: str, remedy: str) -> None:
    """Assert that the command runs, or that its message has the remedy."""
    assert "attncheck itself" not in printed
    if code in (2, 3):
        assert remedy in printed
    else:
        assert_runs(code, printed)


def test_a_full_disk_of_the_cache_moves_the_run_file(
    attncheck: Attncheck, folder: Path, with_mounts: Callable[[str], list[str]]
) -> None:
    cache = folder / "disk"
    cache.mkdir()
    assert_runs(*attncheck(*RUN, before=with_mounts(FULL_CACHE), XDG_CACHE_HOME=str(cache), ATTNCHECK_NO_CACHE=""))


def test_a_limit_of_processes_is_named(attncheck: Attncheck, as_user: list[str]) -> None:
    assert_helps(*attncheck(*RUN, before=[*as_user, "prlimit", "--nproc=3"]), "ulimit -u")


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        pytest.param(["run", b"./\xff.py:Good", "--suite", "small.yaml"], {0, 2}, "", id="a name that is not UTF-8"),
        pytest.param([*RUN, "--output", "o" * 500], {2}, "too long", id="an output with a name of 500 characters"),
        pytest.param([*RUN, "--suite", "s" * 300], {2}, "s" * 30, id="a suite with a name of 300 characters"),
        pytest.param([*RUN, "--check", ",".join(["numerics"] * 40)], {0}, "passed", id="a list of 360 characters"),
        pytest.param(["run", *(f"./many.py:B{number}" for number in range(257))], {2}, r"\b256\b", id="257 backends"),
    ],
)
def test_a_strange_word_runs_or_is_refused(
    attncheck: Attncheck, folder: Path, forked: None, words: list[str], code: set[int], text: str
) -> None:
    shutil.copy(folder / "hostile.py", folder / os.fsdecode(b"\xff.py"))
    classes = (f"class B{number}(ReferenceBackend): pass\n" for number in range(257))
    source = "from attncheck.backends.candidates.reference import ReferenceBackend\n"
    (folder / "many.py").write_text(source + "".join(classes))
    ended, printed = attncheck(*map(os.fsdecode, words), "--no-output" if "--output" not in words else "--quiet")
    assert ended in code, printed
    assert search(text, printed)
    assert "attncheck itself" not in printed


@pytest.mark.parametrize(
    ("host", "origin", "is_answered"),
    [
        ("127.0.0.1:{port}", None, True),
        ("localhost:{port}", "http://localhost:{port}", True),
        ("evil.example", None, False),
        ("evil.example:{port}", "http://evil.example:{port}", False),
        ("127.0.0.1:{port}", "http://evil.example", False),
    ],
)
def test_the_site_answers_only_this_machine(port: int, host: str, origin: str | None, is_answered: bool) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {"Host": host.format(port=port)} | ({"Origin": origin.format(port=port)} if origin else {})
    connection.request("GET", "/index.html", headers=headers)
    status = connection.getresponse().status
    connection.close()
    assert status == 200 if is_answered else 400 <= status < 500


@pytest.fixture(scope="module")
def port(start: Callable[..., "subprocess.Popen[str]"], attncheck: Attncheck, forked: None):
    """The port of a site of one run, on this machine."""
    attncheck(*RUN, "--output", "site.jsonl")
    with start("site", "site.jsonl", "--serve", "--port", "0") as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        yield next(int(found[1]) for line in lines if (found := search(r"http://127\.0\.0\.1:(\d+)/", line)))
        process.kill()
