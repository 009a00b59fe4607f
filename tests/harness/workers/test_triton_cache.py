"""Kernels that several processes need are compiled by one of them, while the others wait for it."""

import fcntl
import subprocess
import sys
import threading

import pytest

pytest.importorskip("triton")

from triton import knobs
from triton.runtime.cache import FileCacheManager, get_cache_manager

from attncheck.harness.workers import triton_cache

KERNEL, OTHER = "ab" * 32, "cd" * 32
"""Keys of two kernels, as Triton computes them."""

PROCESS = """
import sys
from attncheck.harness.workers.worker import _TritonFinder
sys.meta_path.insert(0, _TritonFinder())
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget

@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, i < n) * 2.0, i < n)

def compiled(cache_hit, **_):
    print("found" if cache_hit else "compiled", flush=True)

triton.knobs.compilation.listener = compiled
source = triton.compiler.ASTSource(double, {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {(2,): 128})
print("ready", flush=True)
sys.stdin.readline()
triton.compile(source, target=GPUTarget("cuda", 80, 32))
"""

HOLDER = """
import sys
from attncheck.harness.workers.triton_cache import compile_once
compile_once()
from triton.runtime.cache import get_cache_manager
held = get_cache_manager(sys.argv[1])
print(held.get_group("kernel.json"), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, in which this process and its children compile each kernel once."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name in ("TRITON_CACHE_MANAGER", "TRITON_INTERPRET"):  # with the latter, nothing is compiled
        monkeypatch.delenv(name, raising=False)
    with knobs.cache.scope():
        triton_cache.compile_once()
        yield


@pytest.fixture
def started(tmp_path):
    """``started(source, *words)``: a process that runs the source, and has printed its first line."""
    processes = []

    def started(source, *words):
        script = tmp_path / "script.py"  # Triton reads the source of a kernel from its file
        script.write_text(source)
        command = [sys.executable, script, *words]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield started
    for process in processes:
        process.kill()
        process.communicate()


def store(manager):
    """Store a kernel as Triton does: first its files, then their list."""
    path = manager.put(b"code", "kernel.cubin")
    about = manager.put("{}", "kernel.json", binary=False)
    manager.put_group("kernel.json", {"kernel.cubin": path, "kernel.json": about})


class Search(threading.Thread):
    """Searches for a kernel in a thread. Locks of two objects exclude each other, also within one process."""

    def __init__(self, key=KERNEL):
        super().__init__(daemon=True)
        self.manager = get_cache_manager(key)
        self.start()

    def run(self):
        self.found = self.manager.get_group("kernel.json")

    def ends_within(self, seconds):
        self.join(seconds)
        return not self.is_alive()


def test_of_two_processes_that_need_a_kernel_one_compiles_it(started):
    processes = [started(PROCESS) for _ in range(2)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert sorted(process.communicate()[0] for process in processes) == ["compiled\n", "found\n"]


def test_a_search_waits_for_a_compilation_and_then_finds_its_kernel():
    manager = get_cache_manager(KERNEL)
    assert manager.get_group("kernel.json") is None
    search = Search()
    assert not search.ends_within(0.1)
    assert Search(OTHER).ends_within(10)  # another kernel
    store(manager)
    del manager
    assert search.ends_within(10)
    assert set(search.found) == {"kernel.cubin", "kernel.json"}


def test_a_launcher_is_compiled_once_too():
    manager = get_cache_manager(KERNEL)
    assert manager.get_file("launcher.so") is None
    search = Search()
    assert not search.ends_within(0.1)
    manager.put(b"code", "launcher.so")
    assert get_cache_manager(KERNEL).get_file("launcher.so") is not None
    del manager
    assert search.ends_within(10)


def test_results_of_tuning_are_not_waited_for():
    manager = get_cache_manager(KERNEL)
    assert manager.get_file("kernel.autotune.json") is None
    assert Search().ends_within(10)


def test_a_failed_compilation_frees_the_kernel():
    def fail():
        manager = get_cache_manager(KERNEL)
        manager.get_group("kernel.json")
        raise ValueError("CompilationError")

    with pytest.raises(ValueError, match="CompilationError") as kept:
        fail()
    search = Search()
    assert not search.ends_within(0.1)  # the traceback keeps the frame
    get_cache_manager(OTHER).get_group("kernel.json")  # the next kernel of the same thread
    assert search.ends_within(10)
    assert kept.traceback
    del kept


def test_a_process_that_dies_frees_its_kernel(started):
    holder = started(HOLDER, KERNEL)
    assert holder.stdout.readline() == "None\n"
    search = Search()
    assert not search.ends_within(0.1)
    holder.kill()
    assert search.ends_within(10)
    assert search.found is None  # so it compiles the kernel itself


def test_after_a_time_limit_a_kernel_is_compiled_although_another_process_has_begun(monkeypatch):
    manager = get_cache_manager(KERNEL)
    manager.get_group("kernel.json")
    monkeypatch.setattr(triton_cache, "LONGEST_WAIT_S", 0.1)
    search = Search()
    assert search.ends_within(10)
    assert search.found is None


def test_on_a_file_system_without_locks_kernels_are_compiled_without(monkeypatch):
    def refuse(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    manager = get_cache_manager(KERNEL)
    assert manager.get_group("kernel.json") is None
    assert Search().ends_within(10)


def test_the_users_own_cache_manager_stays():
    class Own(FileCacheManager):
        pass

    knobs.cache.manager_class = Own
    triton_cache.compile_once()
    assert knobs.cache.manager_class is Own
    assert type(get_cache_manager(KERNEL)) is Own
