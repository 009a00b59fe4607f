"""The process of a backend: how it starts and ends, its environment, and what it prints."""

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from attncheck.harness.run.options import read_given
from attncheck.harness.workers import printed as printed_module
from attncheck.harness.workers import process as process_module
from attncheck.harness.workers import process_tree as tree_module
from attncheck.harness.workers import starting as starting_module
from attncheck.harness.workers.limits import Limit, passed_environment, variables_read
from attncheck.harness.workers.printed import KEPT, KEPT_OF_EARLIER, PrintedOutput, mark_of
from attncheck.harness.workers.process import AwakeClock, ProcessEndedError, RefusedError, WorkerError, WorkerProcess
from attncheck.harness.workers.process_tree import ending_orphans
from attncheck.harness.workers.worker import CaseServer


def start(monkeypatch, code):
    """A process that runs ``code`` where the worker would be.

    ``send(text)`` writes a line into its pipe; ``answer(kind, value)`` waits for a call, and answers it.
    """
    send = (
        "import os, sys\nsend = lambda text: os.write(int(sys.argv[2]), text.encode() + b'\\n')\n"
        "called = lambda: os.read(int(sys.argv[1]), 4096).split()[0].decode()\n"
        "answer = lambda kind, value: send(f'{called()} {kind} {value}')\n"
    )
    monkeypatch.setattr(starting_module, "_START", send + code)
    return WorkerProcess({"ATTNCHECK_TEST": "given"})


def descriptors():
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def ended(process):
    """Whether it is gone, or a zombie that its parent has yet to look after."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(condition, limit=20):
    deadline = time.monotonic() + limit
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(found)


INTRUDED = "stopped, since it wrote into attncheck's own pipe"


@pytest.mark.parametrize(
    ("code", "cause", "smaller"),
    [
        ("os.abort()", "killed by SIGABRT", {}),
        ("os._exit(0)", "exited with code 0", {}),
        ("sys.exit(3)", "exited with code 3", {}),
        ("os.kill(os.getpid(), 35)", "killed by signal 35", {}),
        ("send('no message'); time.sleep(60)", INTRUDED, {}),
        ("while True: os.write(int(sys.argv[2]), b'x' * 65536)", INTRUDED, {"_LONGEST_ANSWER": 300_000}),
        ("os.closerange(3, 256); time.sleep(60)", "stopped, since it closed attncheck's own pipe", {"_GRACE_S": 0.2}),
    ],
)
def test_how_a_process_ended(monkeypatch, code, cause, smaller):
    for name, value in smaller.items():
        monkeypatch.setattr(process_module, name, value)
    text = f"import time\nprint('last words', flush=True)\n{code}"
    with start(monkeypatch, text) as process, pytest.raises(ProcessEndedError) as caught:
        process.receive()
    assert (caught.value.end.cause, caught.value.end.output) == (cause, "last words\n")


def test_what_was_sent_before_is_not_lost(monkeypatch):
    reason = "x" * 200_000
    text = """answer('refused', '{"reason":"' + "x" * 200_000 + '"}'); os.abort()"""
    with start(monkeypatch, text) as process:
        process.send(CaseServer.describe)
        with pytest.raises(RefusedError) as refused:
            process.receive()
        assert str(refused.value) == reason
        with pytest.raises(ProcessEndedError, match="SIGABRT"):
            process.receive()


SILENT = """
import faulthandler, signal, time
faulthandler.register(signal.SIGUSR2)
token = called()
child = os.fork()
if child: print(child, flush=True)
send(token + ' event {"name":"check lse"}')
def hang():
    time.sleep(600)
hang()
"""


def test_a_silent_process_is_killed_at_its_limit_with_what_it_started(monkeypatch):
    monkeypatch.setattr(process_module, "native_stack", lambda pid: f"frames of {pid}")
    with start(monkeypatch, SILENT) as process:
        process.send(CaseServer.examine, "smoke/decode", ("lse",), 0, None)
        assert process.receive(Limit(60)).name == "check lse"
        assert process.receive(Limit(60)).name == "check lse"
        with pytest.raises(
            ProcessEndedError, match=r"not finished within the time limit; the limit was 0\.3 s \(as given\)$"
        ) as caught:
            process.receive(Limit(0.3, "as given"))
        assert process.has_ended
        end = caught.value.end
        assert (end.limit_s, end.native_stack) == (0.3, f"frames of {process._process.pid}")
        child, *stack = end.output.splitlines()
        assert any(line.endswith(" in hang") for line in stack)
        assert wait_for(lambda: ended(int(child)))
        with pytest.raises(ProcessEndedError) as again:
            process.receive()
        assert again.value.end == end


def test_a_stopped_process_is_killed_and_described_as_stopped(monkeypatch):
    monkeypatch.setattr(printed_module, "_STACK_S", 0.2)
    with start(monkeypatch, "import signal; os.kill(os.getpid(), signal.SIGSTOP)") as process:
        with pytest.raises(
            ProcessEndedError, match=r"not finished within the time limit; .*; a signal has stopped the process$"
        ):
            process.receive(Limit(0.5))
        assert process.has_ended


def test_a_process_that_nothing_ends_is_left_and_named(monkeypatch):
    monkeypatch.setattr(printed_module, "_STACK_S", 0.1)
    monkeypatch.setattr(tree_module, "_TERM_S", 0.1)
    monkeypatch.setattr(tree_module, "_KILL_S", 0.1)
    code = "import signal, time; signal.signal(signal.SIGUSR2, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    kill = os.killpg
    monkeypatch.setattr(tree_module.os, "killpg", lambda pid, number: None)  # as a driver that holds it
    monkeypatch.setattr(process_module, "end_marked", lambda mark: None)
    with start(monkeypatch, code) as process:
        pid = process._process.pid
        assert wait_for(process.output)
        with pytest.raises(ProcessEndedError, match=rf"process {pid} could not be killed, and is left$"):
            process.receive(Limit(0.1))
    assert not ended(pid)
    kill(pid, signal.SIGKILL)
    process._process.wait()


def test_a_process_that_prints_without_end_does_not_block_and_fills_no_disk(monkeypatch):
    code = "for _ in range(200): os.write(1, b'x' * 2**20)\nos._exit(0)"
    with start(monkeypatch, code) as process:
        assert wait_for(lambda: process.has_ended)  # nothing reads its output meanwhile
        note, _, kept = process.output().partition("\n")
        assert note.startswith(
            f"[{200 * 2**20 - 20_000} bytes before this are not kept; of a case that prints more than 64"
        )
        assert kept == "x" * 20_000


@pytest.mark.parametrize(
    ("kills", "words"), [((1, 1), "out of memory?"), ((1, 2), "out of memory, as the kernel counts")]
)
def test_a_killed_process_is_reported_with_its_memory(monkeypatch, kills, words):
    counts = iter(kills)
    for module in (process_module, tree_module):
        monkeypatch.setattr(module, "oom_kills", lambda: next(counts))
    monkeypatch.setattr(tree_module, "free_host_bytes", lambda: 3 * 2**29)
    code = "x = bytearray(b'x' * 2**28); os.kill(os.getpid(), 9)"
    with start(monkeypatch, code) as process, pytest.raises(ProcessEndedError) as caught:
        process.receive()
    pattern = (
        rf"killed by SIGKILL; {re.escape(words)} \(peak memory of the process (\d+\.\d) GiB, free memory 1\.5 GiB\)"
    )
    found = re.fullmatch(pattern, caught.value.end.cause)
    # Linux counts what this process held when it forked, as the peak of its child.
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert 0.5 <= float(found[1]) <= max(0.6, own + 0.1)


def test_the_interpreter_is_this_one_with_its_path_and_the_environment(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("json.py").write_text("raise RuntimeError('taken from the current directory')")
    code = "print(sys.executable, os.environ['ATTNCHECK_TEST'], sys.argv[-1].split(chr(10))[0])\nimport json"
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)] + [str(tmp_path)])
    with start(monkeypatch, code) as process, pytest.raises(ProcessEndedError, match="exited with code 0") as caught:
        process.receive()
    assert caught.value.end.output.split() == [sys.executable, "given", sys.path[0]]


def test_processes_leave_no_descriptor_and_no_process(monkeypatch):
    before = descriptors()
    for _ in range(10):
        with start(monkeypatch, "import time; time.sleep(60)") as process:
            identity = process.identity
            assert os.getsid(identity) == identity  # Ctrl-C at the terminal does not reach it
        assert ended(identity)
    assert descriptors() == before


def test_a_process_that_cannot_be_started_leaves_no_descriptor(monkeypatch):
    before = descriptors()
    monkeypatch.setattr(sys, "executable", "/nothing/of/that/name")
    with pytest.raises(FileNotFoundError):
        WorkerProcess()
    assert descriptors() == before


def test_closing_twice_and_sending_to_a_dead_process_do_no_harm(monkeypatch):
    with start(monkeypatch, "os._exit(1)") as process:
        with pytest.raises(ProcessEndedError):
            process.receive()
        process.send(CaseServer.examine, "smoke/decode", ("numerics",), 0, None)
        process.finish()
        process.close()
        process.close()


def test_when_the_run_is_killed_its_process_ends_even_if_it_is_busy(tmp_path):
    (tmp_path / "endless.py").write_text("import pathlib, time\npathlib.Path('began').touch()\ntime.sleep(1000)")
    code = (
        "import pathlib, sys, time\nfrom attncheck.harness.workers.worker import CaseServer, Imports\n"
        "from attncheck.harness.workers.process import WorkerProcess\n"
        "process = WorkerProcess()\nprocess.send(CaseServer.prepare, Imports(checks=(), functions=False))\n"
        "process.send(CaseServer.load, 'endless.py:Mine')\n"
        "while not pathlib.Path('began').exists(): time.sleep(0.02)\n"
        "print(process._process.pid, flush=True)\ntime.sleep(60)"
    )
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        process = int(run.stdout.readline())
        run.send_signal(signal.SIGKILL)
        run.wait()
        assert wait_for(lambda: ended(process), limit=60)
    finally:
        run.kill()
        run.communicate()


STRAYS = """
import ctypes, subprocess, time
fields = {"env": {}, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
started = [subprocess.Popen(["sleep", "60"], start_new_session=True, **fields).pid]
started += [subprocess.Popen(["sleep", "60"], process_group=0, **fields).pid]
hidden = os.fork()
if not hidden:
    os.setsid()
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
    os.execve("/bin/sleep", ["sleep", "60"], {})
while os.getsid(hidden) != hidden:
    time.sleep(0.01)
print(*started, hidden, flush=True)
"""
"""Starts processes that have neither its environment nor its process group."""


@pytest.mark.parametrize(
    ("then", "are_adopted"),
    [("time.sleep(60)", False), ("os.read(int(sys.argv[1]), 1)", False), ("os._exit(1)", True)],
    ids=["killed", "finished", "ends"],
)
def test_no_process_outlives_its_worker(monkeypatch, then, are_adopted):
    with ending_orphans():
        process = start(monkeypatch, STRAYS + then)
        assert wait_for(lambda: process.output().endswith("\n"))
        strays = [int(word) for word in process.output().split()]
        if "read" in then:
            process.finish()
        process.close()
        assert are_adopted or wait_for(lambda: all(map(ended, strays)))
    assert wait_for(lambda: all(map(ended, strays)))


def test_an_import_of_torch_that_fails_is_a_fault_of_ours(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is damaged')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with WorkerProcess() as process, pytest.raises(WorkerError, match="libtorch is damaged"):
        process.call(None, CaseServer.describe)


def test_a_process_that_cannot_be_killed_is_left(monkeypatch):
    monkeypatch.setattr(tree_module, "_KILL_S", 0.1)
    with ending_orphans():
        held = subprocess.Popen(["sleep", "60"], start_new_session=True)
        kill = os.kill
        monkeypatch.setattr(os, "kill", lambda pid, number: None if pid == held.pid else kill(pid, number))
    assert not ended(held.pid)
    monkeypatch.undo()
    held.kill()
    held.wait()


def test_a_pause_of_the_machine_does_not_count():
    readings = iter([0.0, 0.2, 0.4, 9.4, 9.6])
    clock = AwakeClock(lambda: next(readings))
    assert [clock.now() for _ in range(4)] == pytest.approx([0.2, 0.4, 1.4, 1.6])


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    yield reading, writing
    os.close(writing)


def test_cases_that_were_begun_ahead_keep_what_is_theirs(pipe):
    printed = PrintedOutput(pipe[0], "mine")
    os.write(pipe[1], b"loading\n" + mark_of("smoke/a") + b"one\n" + mark_of("smoke/b") + b"two\n")
    assert [printed.of(case) for case in ("", "smoke/a", "smoke/b", "smoke/c")] == ["loading\n", "one\n", "two\n", ""]
    os.write(pipe[1], b"three")
    assert printed.of() == "two\nthree"
    printed.close()
    printed.close()


def test_a_mark_may_come_in_pieces_and_what_looks_like_one_is_text(pipe):
    printed = PrintedOutput(pipe[0], "mine")
    for byte in b"a\0attn\0b" + mark_of("s/c") + b"d\0":
        os.write(pipe[1], bytes([byte]))
        printed.of()
    os.write(pipe[1], b"\xffe")
    assert (printed.of(""), printed.of("s/c")) == ("a\0attn\0b", "d\0\ufffde")
    printed.close()


def test_little_is_kept_of_earlier_cases_and_the_rest_is_counted(pipe):
    printed = PrintedOutput(pipe[0], "mine")
    line = b"x" * 99 + b"\n"
    os.write(pipe[1], line * 1000 + mark_of("s/next"))
    whole = KEPT_OF_EARLIER // 100
    assert printed.of("") == f"[{100_000 - 100 * whole} bytes before this are not kept]\n" + line.decode() * whole
    os.write(pipe[1], line * 1000)
    assert len(printed.of().encode()) <= KEPT + 60
    assert printed.of("s/next", 250).endswith("kept]\n" + line.decode() * 2)
    printed.close()


def test_whole_lines_are_shown_as_they_come_and_the_last_at_the_end(pipe):
    shown = []
    came = threading.Event()

    def show(label, text):
        shown.append((label, text))
        came.set()

    printed = PrintedOutput(pipe[0], "mine", show)
    os.write(pipe[1], "a\nb\n\u00fc".encode()[:-1])
    assert came.wait(20)
    assert shown == [("mine", "a\nb")]
    os.write(pipe[1], "\u00fc".encode()[-1:] + mark_of("s/c") + b"!")
    printed.close()
    assert shown[1:] == [("mine", "\u00fc!")]


def test_of_more_than_a_case_may_show_the_rest_is_dropped_and_the_next_case_is_shown(pipe, monkeypatch):
    monkeypatch.setattr(printed_module, "SHOWN", 1000)
    shown = []
    printed = PrintedOutput(pipe[0], "mine", lambda _label, text: shown.extend(text.split("\n")))
    os.write(pipe[1], mark_of("s/a") + b"x" * 99 + b"\n" + b"\xc3\xbc" * 600 + b"\nthe end\n")
    os.write(pipe[1], mark_of("s/b") + b"short\n")
    printed.close()
    assert shown[0] == "x" * 99
    assert set(shown[1]) == {"\u00fc"}
    assert shown[2:] == [printed_module._DROPPED.strip(), "short"]
    assert printed.of("s/a").endswith("\nthe end\n")
    assert printed.of("s/b") == "short\n"


def test_a_line_without_end_is_shown_in_pieces_and_takes_no_memory(pipe):
    shown = []
    printed = PrintedOutput(pipe[0], "mine", lambda _label, text: shown.append(text))
    block = b"x" * 2**20
    for _ in range(8):
        rest = memoryview(block)
        while rest:
            rest = rest[os.write(pipe[1], rest) :]
    assert len(printed._line) <= printed_module._LONGEST_LINE
    printed.close()
    assert "".join(shown) == "x" * 2**23


NEEDED = ("PATH", "HOME", "LC_ALL", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "VLLM_CACHE_ROOT", "CC")
NEEDED += ("HF_HOME", "HF_HUB_OFFLINE")
OTHERS = ("GITHUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "https_proxy", "DATABASE_URL", "PATHS")
SECRET = (
    "VLLM_API_KEY",
    "HF_TOKEN",
    "ATTNCHECK_TOKEN",
    "NVIDIA_PASSWORD",
    "XDG_SECRET",
    "CUDA_CREDENTIALS",
    "TORCH_hub_token",
)
ALL = dict.fromkeys((*NEEDED, *OTHERS, *SECRET), "x")


def test_what_is_usual_is_passed_but_for_secrets():
    assert tuple(passed_environment(ALL)) == NEEDED


@pytest.mark.parametrize(
    ("pattern", "added"),
    [
        ("DATABASE_URL", {"DATABASE_URL"}),
        ("GITHUB_*", {"GITHUB_TOKEN"}),
        ("VLLM_API_KEY,https_proxy ,", {"VLLM_API_KEY", "https_proxy"}),
        ("*", {*OTHERS, *SECRET}),
        ("NOWHERE", set()),
    ],
)
def test_a_pattern_adds_all_that_it_matches(pattern, added):
    assert set(passed_environment(ALL, read_given("pass_env", pattern.split()))) == {*NEEDED, *added}


def test_the_variables_that_a_file_and_the_modules_beside_it_look_up_are_named(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import helper.part\nfrom os import environ, getenv\nimport os  # os.getenv('COMMENT')\n"
        "a = os.environ['ITEM']; b = os.environ.get('GET', ''); c = environ.pop('POP'); d = 'IN' in environ\n"
        "e = os.getenv('GETENV'); f = getenv('BARE'); g = {}.get('OTHER'); os.environ[a] = os.environ['STORED'] = ''\n"
    )
    (tmp_path / "helper.py").write_text("import mine, os\nos.getenv('HELPER')\n")
    (tmp_path / "stranger.py").write_text("import os\nos.getenv('STRANGER')\n")
    read = variables_read(tmp_path / "mine.py")
    assert read == {"ITEM", "GET", "POP", "IN", "GETENV", "BARE", "HELPER"}
    (tmp_path / "broken.py").write_text("def (")
    assert variables_read(tmp_path / "broken.py") == variables_read(tmp_path / "none.py") == set()
