"""Workers as forks of a process that has imported torch: they are as new interpreters, and end as those do."""

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from attncheck.harness.cli import run as cli_run
from attncheck.harness.host import MARK
from attncheck.harness.run.options import RunOptions
from attncheck.harness.workers import starting
from attncheck.harness.workers.limits import WorkerSettings, passed_environment
from attncheck.harness.workers.pool import WorkerPool
from attncheck.harness.workers.process import WorkerProcess
from attncheck.harness.workers.starting import ForkServer, start_worker
from attncheck.harness.workers.worker import CaseServer, Imports
from attncheck.reports.run_file.records import format_line

IMPORTS = Imports(checks=(), functions=False)


def is_forked(process):
    return b"workers.fork_server" in Path(f"/proc/{process.identity}/cmdline").read_bytes()


def variables(pid):
    return dict(word.split("=", 1) for word in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in word)


def ended(pid):
    """Whether it is gone, or a zombie that its parent has yet to look after."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def wait_for(condition, limit=20):
    deadline = time.monotonic() + limit
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(found)


@pytest.fixture(scope="module")
def server():
    started = ForkServer(passed_environment(os.environ))
    started.imports = IMPORTS.model_dump_json()
    yield started
    started.close()


@pytest.fixture
def load(server, tmp_path):
    """Start a worker with more variables, and have it load a backend that runs ``code``; it is closed at the end."""
    started = []

    def loaded(code, environment=None, start=server):
        path = tmp_path / f"backend_{len(started)}.py"
        path.write_text(f"import os, sys, time\n{code}\nprint('loaded', flush=True)\ntime.sleep(100)\n")
        process = WorkerProcess(environment, start=start)
        started.append(process)
        process.send(CaseServer.prepare, IMPORTS)
        process.send(CaseServer.load, f"{path}:Mine")
        return process

    yield loaded
    for process in started:
        process.close()


def printed(process):
    assert wait_for(lambda: process.output().endswith("loaded\n"), limit=60)
    return process.output().splitlines()[:-1]


FACTS = """
import gc, threading, torch
print(sorted(name for name in sys.modules if name != "attncheck.harness.workers.fork_server"))
print(sys.argv, sys.path, sys.flags, os.getcwd(), os.readlink("/proc/self/fd/0"), os.getsid(0) == os.getpid())
print(sorted((name, value) for name, value in os.environ.items() if name != "ATTNCHECK_WORKER"))
print(torch.get_num_threads(), torch.get_default_dtype(), gc.isenabled())
print(threading.active_count(), sys.stdout.encoding, sys.stdout.line_buffering, sys.stderr.write_through)
print(len(os.listdir("/proc/self/fd")))
"""


def test_a_fork_is_as_a_new_interpreter(load):
    forked, new = load(FACTS), load(FACTS, start=start_worker)
    facts = [[line.replace("backend_1", "backend_0") for line in printed(each)] for each in (forked, new)]
    assert [is_forked(forked), is_forked(new)] == [True, False]
    assert facts[0] == facts[1]


def test_a_fork_is_a_child_of_the_run_with_a_mark_of_its_own(load):
    code = "copy = os.fork()\nif copy: print(copy, flush=True)\nelse: time.sleep(100)"
    draws = "import random, torch\nprint(random.random())\nprint(torch.rand(1))"
    first, second, third = load(code), load(draws), load(draws)
    assert not {*printed(second)} & {*printed(third)}
    assert all(map(is_forked, (first, second, third)))
    for process in (first, second):
        assert Path(f"/proc/{process.identity}/stat").read_text().rpartition(")")[2].split()[1] == str(os.getpid())
        assert variables(process.identity)[MARK] == process._mark
    assert variables(*printed(first))[MARK] == first._mark  # of the copy that it made
    assert first._mark != second._mark


def test_variables_of_mps_are_set_in_a_fork_and_any_other_needs_a_new_interpreter(load):
    code = "import ctypes\nfind = ctypes.CDLL(None).getenv\nfind.restype = ctypes.c_char_p\n"
    code += "print(find(b'CUDA_MPS_PIPE_DIRECTORY').decode(), os.environ['CUDA_MPS_PIPE_DIRECTORY'])"
    client = load(code, {"CUDA_MPS_PIPE_DIRECTORY": "/pipes"})
    other = load("print(os.environ['ATTNCHECK_NEED'])", {"ATTNCHECK_NEED": "1"})
    assert [is_forked(client), is_forked(other)] == [True, False]
    assert (printed(client), printed(other)) == (["/pipes /pipes"], ["1"])


def test_a_copy_in_a_session_of_its_own_ends_with_a_fork_that_has_died(load):
    code = "copy = os.fork()\nif copy: print(copy, flush=True)\nif copy: os._exit(7)\nos.setsid()\ntime.sleep(100)"
    process = load(code)
    assert wait_for(lambda: process.has_ended)
    copy = int(process.output())
    assert wait_for(lambda: variables(copy).get(MARK) == process._mark)
    assert not ended(copy)
    process.close()
    assert process._process.returncode == 7
    assert wait_for(lambda: ended(copy))


FAULTS = {
    "it has a second thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(100,)).start()\n",
    "its child cannot fork": """
import os
fork, server = os.fork, os.getpid()
def refused():
    if os.getpid() != server:
        raise BlockingIOError("no further process")
    return fork()
os.fork = refused
""",
    "the fork dies": "import os, signal\nos.setsid = lambda: os.kill(os.getpid(), signal.SIGKILL)\n",
}
"""What Python runs at its start, by the fault that it makes."""


@pytest.mark.parametrize("cause", ["it was killed", "it fails", "the run adopts no process", *FAULTS])
def test_where_no_worker_can_be_forked_a_new_interpreter_is_started(load, cause, tmp_path, monkeypatch):
    if cause in FAULTS:
        (tmp_path / "sitecustomize.py").write_text(FAULTS[cause])
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    broken = ForkServer(passed_environment(os.environ))
    broken.imports = "no JSON" if cause == "it fails" else IMPORTS.model_dump_json()
    broken.begin()
    pid = broken._process.pid
    if cause == "the run adopts no process":
        monkeypatch.setattr(starting, "adopting_orphans", nullcontext)
    if cause == "it was killed":
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    process = load("", start=broken)
    assert time.monotonic() - began < 40  # not the seconds that the import of torch may take
    assert not is_forked(process)
    assert ended(pid)


def test_a_process_to_fork_from_that_stops_later_is_given_up_soon(load, monkeypatch):
    monkeypatch.setattr(starting, "_FORKING_S", 0.5)
    stopped = ForkServer(passed_environment(os.environ))
    stopped.imports = IMPORTS.model_dump_json()
    assert is_forked(load("", start=stopped))
    pid = stopped._process.pid
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    process = load("", start=stopped)
    assert time.monotonic() - began < 40
    assert not is_forked(process)
    assert ended(pid)


def test_a_start_that_is_interrupted_ends_the_process_to_fork_from(load, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    interrupted = ForkServer(passed_environment(os.environ))
    interrupted.begin()
    pid = interrupted._process.pid
    monkeypatch.setattr(socket.socket, "recv", interrupt)
    with pytest.raises(KeyboardInterrupt):
        interrupted(interrupted.environment)
    assert ended(pid)
    assert not is_forked(load("", start=interrupted))


def test_a_start_that_fails_leaves_no_descriptor_open(monkeypatch):
    server = ForkServer(passed_environment(os.environ))
    before = num_descriptors()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(FileNotFoundError):
        server.begin()
    assert num_descriptors() == before


def test_the_process_to_fork_from_outlives_a_pool_that_is_replaced():
    pool = WorkerPool()
    pool._start_worker._thread.submit(pool._server.begin).result()  # as in a thread that is not the main one
    pool = pool.with_settings(WorkerSettings())
    gc.collect()
    with pool:
        time.sleep(0.3)
        assert pool._server._process.poll() is None


LIBRARIES = {
    "fine": "",
    "fails": "raise RuntimeError('no such driver')",
    "starts a thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(100,), daemon=True).start()\n",
    "uses a device": "opened = open('/dev/zero')\n",
}


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """A backend imports a library: ``libraries(code)`` returns what forks, and what starts the backend's workers."""
    started = []

    def server_with(code):
        (tmp_path / "slow_library.py").write_text(code)
        (tmp_path / "sitecustomize.py").write_text(
            "import sys\nif 'fork_server' in ' '.join(sys.orig_argv):\n"
            "    from attncheck.harness.workers import fork_server\n    fork_server._DEVICE_FILES = ('/dev/zero',)\n"
        )
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(starting, "MODULES", {"kind": ("slow_library",)})
        started.append(ForkServer(passed_environment(os.environ)))
        started[-1].imports = IMPORTS.model_dump_json()
        return started[-1], started[-1].of("kind:Name")

    yield server_with
    for each in started:
        each.close()


@pytest.mark.parametrize("library", LIBRARIES)
def test_workers_of_one_kind_of_backend_are_forked_with_its_library_if_that_can_be_forked(load, libraries, library):
    server, of_kind = libraries(LIBRARIES[library])
    which = "print('slow_library' in sys.modules)"
    before, after, other = load(which, start=of_kind), load(which, start=of_kind), load(which, start=server)
    assert all(map(is_forked, (before, after, other)))
    has_library = str(library == "fine")
    assert [printed(each)[-1] for each in (before, after, other)] == [has_library, has_library, "False"]
    pids = [each._process.pid for each in (server, of_kind) if each._process]
    assert len(pids) == 1 + (library == "fine")
    server.close()
    assert all(map(ended, pids))


def test_a_process_with_a_library_outlives_the_one_it_was_forked_from_and_serves_no_file(libraries):
    server, of_kind = libraries("")
    assert server.of("kind:./mine.py:Mine") is server.of("other") is server
    of_kind.begin()
    pid = of_kind._process.pid
    os.kill(server._process.pid, signal.SIGKILL)
    with WorkerProcess(start=of_kind) as process:
        assert is_forked(process)
    assert not ended(pid)


RUN = """
import os, sys, time
from attncheck.harness.workers import starting
from attncheck.harness.workers.limits import passed_environment
from attncheck.harness.workers.process import WorkerProcess
from attncheck.harness.workers.starting import ForkServer
server = ForkServer(passed_environment(os.environ))
process = WorkerProcess(start=server.of("triton_unified"))
print(server._process.pid, server.of("triton_unified")._process.pid, process.identity, flush=True)
time.sleep(100)
"""


def test_when_the_run_is_killed_the_server_and_its_forks_end_within_a_second():
    run = subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True)
    try:
        pids = list(map(int, run.stdout.readline().split()))
        assert not any(map(ended, pids))
        run.send_signal(signal.SIGKILL)
        run.wait()
        assert wait_for(lambda: all(map(ended, pids)), limit=1)
    finally:
        run.kill()
        run.communicate()


def test_records_are_those_of_new_interpreters(tmp_path, monkeypatch):
    options = RunOptions(
        backends=("torch_sdpa",),
        suites=("smoke",),
        cases=("smoke/prefill",),
        checks=("numerics", "features", "invariance"),
        device="cpu",
        output=tmp_path / "run.jsonl",
    )

    def records():
        options.output.unlink(missing_ok=True)
        found = cli_run.execute_run(options, see=lambda *_: None).records
        return [format_line(record.model_copy(update={"duration_s": 0.0})) for record in found]

    forked = records()
    monkeypatch.setattr(ForkServer, "__call__", lambda _, environment: start_worker(environment))
    assert records() == forked
