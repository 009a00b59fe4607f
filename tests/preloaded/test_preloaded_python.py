"""A forked process is as a fresh one, but for the libraries that are imported."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from preloaded_python import LIBRARIES, Preloaded, Program, read_at_start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")

SHOW = """\
import json, os, stat, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "folder": os.getcwd(), "environment": dict(os.environ), "name": __name__,
    "leads": os.getsid(0) == os.getpid(), "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "input": sys.stdin.read(), "encodings": [each.encoding for each in (sys.stdin, sys.stdout, sys.stderr)],
    "main": sys.modules["__main__"].__dict__ is globals(),
}))
"""
Words = tuple[str, ...]
Both = Callable[..., list[object]]


def ended(*words: str, **fields: object) -> tuple[int, str, str]:
    """Exit code, output and errors of a process."""
    streams = {"input": "typed", "text": True, "capture_output": True}
    done = subprocess.run([sys.executable, *words], check=False, **streams, **fields)  # type: ignore[call-overload]
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def both(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[object]]:
    """``both(action)``: what the action returns with fresh processes, and with forked ones."""
    monkeypatch.chdir(tmp_path)

    def both(action: Callable[..., object], *arguments: object, **fields: object) -> list[object]:
        fresh = action(*arguments, **fields)
        request.getfixturevalue("preloaded")
        return [fresh, action(*arguments, **fields)]

    return both


@pytest.mark.parametrize(
    ("words", "leads"),
    [
        (("-c", SHOW, "a", "-b"), False),
        (("-P", "-u", "-c", SHOW), True),
        (("show.py", "a"), False),
        (("-m", "show", "a"), True),
    ],
)
def test_it_finds_what_a_fresh_one_finds(both: Both, words: Words, *, leads: bool) -> None:
    Path("show.py").write_text(SHOW)
    environment = {**os.environ, "ATTNCHECK_TEST": "ä", "PYTHONPATH": os.pathsep.join(["/nowhere", *sys.path[1:3]])}
    environment.pop("HOME", None)
    fresh, forked = both(ended, *words, env=environment, start_new_session=leads)
    assert isinstance(fresh, tuple)
    assert isinstance(forked, tuple)
    assert fresh[0] == 0, fresh
    found, expected = json.loads(forked[1]), json.loads(fresh[1])
    if words[0] == "-m":  # runpy makes the module's namespace of the main module
        expected["main"] = found["main"]
    assert found.pop("descriptors")[:3] == expected.pop("descriptors")[:3]
    assert found == expected
    assert forked[2] == fresh[2]


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(7)",
        "import sys; sys.exit('words')",
        "import os; os.abort()",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "print('without a newline', end='')",
        "import atexit; atexit.register(print, 'at the end')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
        "import os, sys; print('lost'); sys.stderr.write('kept'); os._exit(0)",
    ],
)
def test_it_ends_as_a_fresh_one_ends(both: Both, code: str) -> None:
    fresh, forked = both(ended, "-c", code)
    assert forked == fresh


def test_an_error_ends_it_with_its_traceback(preloaded: None) -> None:
    code, _, printed = ended("-c", "def f():\n    1 / 0\nf()")
    assert code == 1
    assert printed.splitlines()[0] == "Traceback (most recent call last):"
    assert printed.splitlines()[-2:] == ['  File "<string>", line 2, in f', "ZeroDivisionError: division by zero"]
    assert "preloaded_python" not in printed
    code, _, printed = ended("-c", "raise KeyboardInterrupt")
    assert (code, printed.splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")


def test_descriptors_keep_their_numbers_and_others_are_closed(preloaded: None) -> None:
    reading, writing = os.pipe()
    other = os.dup(writing)
    code = f"import os; os.write({writing}, b'x'); print(os.path.exists('/proc/self/fd/{other}'))"
    assert ended("-c", code, pass_fds=[writing]) == (0, "False\n", "")
    assert os.read(reading, 9) == b"x"
    for descriptor in (reading, writing, other):
        os.close(descriptor)


def test_it_is_a_child_with_the_libraries_and_no_module_of_attncheck(preloaded: None) -> None:
    names = (*LIBRARIES, "attncheck", "triton")
    code = f"import sys, os; print([name for name in {names} if name in sys.modules], os.getppid())"
    assert ended("-c", code)[1] == f"{list(LIBRARIES)} {os.getpid()}\n"


def test_it_can_be_ended_with_all_it_started(preloaded: None) -> None:
    sleeps = "['sleep', '60']"
    code = f"import subprocess as s; s.Popen({sleeps}); print('there', flush=True); s.run({sleeps})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert process.stdout.read() == b""  # which it is not while a copy lives


@pytest.mark.parametrize("words", [("-S", "-c", ""), ("-X", "importtime", "-c", ""), ("program",), ()])
def test_what_needs_an_interpreter_of_its_own_is_not_forked(words: Words) -> None:
    fields = {"folder": "/", "environment": {"LANG": "C"}, "descriptors": [0, 1, 2], "leads": False}
    assert Program.of(words, {"LANG": "C"}, **fields) is None
    assert Program.of(("-c", ""), {"LANG": "C"}, **fields) is not None
    assert Program.of(("-c", ""), {"LANG": "de"}, **fields) is None
    assert Program.of(("-c", "#" * 2**17), {"LANG": "C"}, **fields) is None
    assert read_at_start({"PYTHONPATH": "a", "OMP_NUM_THREADS": "1", "HOME": "/"}) == {"OMP_NUM_THREADS": "1"}


def test_programs_that_it_starts_are_forked_too(preloaded: None, tmp_path: Path) -> None:
    inner = "import os, sys; print('torch' in sys.modules, os.getppid())"
    (tmp_path / "outer.py").write_text(
        f"import os, subprocess, sys; print(os.getpid(), flush=True); subprocess.run([sys.executable, '-c', {inner!r}])"
    )
    code, printed, _ = ended(str(tmp_path / "outer.py"))
    outer, found = printed.splitlines()
    assert (code, found) == (0, f"True {outer}")


def test_commands_of_a_shell_are_forked_and_end_as_they_would(
    shell: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    leaves = "python -c 'import sys; print(\"torch\" in sys.modules); sys.exit(3)'"
    aborts = "python -c 'import os; os.abort()'"
    code, printed = shell(f"{leaves}; echo $?; {aborts}; echo $?; attncheck list checks | cat", tmp_path)
    assert code == 0
    assert printed.splitlines()[:3] == ["True", "3", "134"]
    assert "numerics" in printed
    finds = 'import os; print(os.environ["NAME"], os.getcwd())'
    assert shell(f"NAME=b python -c '{finds}'", tmp_path)[1] == f"b {tmp_path}\n"
    assert shell("python -S -c 'import sys; print(\"torch\" in sys.modules)'", tmp_path) == (0, "False\n")


def test_without_it_processes_are_fresh() -> None:
    Preloaded.uninstall()
    assert ended("-c", "import sys; print('torch' in sys.modules)")[1] == "False\n"


def test_each_imports_its_own_sitecustomize(preloaded: None, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['TIMES'] = os.environ.get('TIMES', '') + 'x'\n")
    shows = "import os, sys; print(os.environ['TIMES'], 'sitecustomize' in sys.modules)"
    (tmp_path / "outer.py").write_text(
        f"import os, subprocess, sys\n{shows}\nsys.stdout.flush()\ndel os.environ['TIMES']\n"
        f"subprocess.run([sys.executable, '-c', {shows!r}])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    assert ended(str(tmp_path / "outer.py"), env=environment)[1] == "x True\nx True\n"
