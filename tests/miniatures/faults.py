"""Backends with one fault each, named as in ``faults.yaml``.

A fault occurs once in a process, at the case with head size ``FAULTY``, or for ``later`` at the one with ``LATER``.
"""

import atexit
import ctypes
import faulthandler
import gc
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl

FAULTY, LATER = 32, 48
LONG_S = 600
LIBC = ctypes.CDLL(None)
LIBC.malloc.restype = ctypes.c_void_p
LIBC.free.argtypes = [ctypes.c_void_p]

Deed = Callable[[], object]
Answer = Callable[[Any, Any, Any], object]


def faulty(
    construct: Deed = bool,
    build: Deed = bool,
    forward: Deed = bool,
    later: Deed = bool,
    answer: Answer = lambda right, query, cache: right,
) -> type[ReferenceBackend]:
    """Return a backend that calls ``construct``, ``build``, ``forward`` in its methods, and ``later`` in ``forward``.

    ``answer``: computes its return value from the right output, the query and the cache.
    """
    due = {("construct", FAULTY): construct, ("build", FAULTY): build}
    due |= {("forward", FAULTY): forward, ("forward", LATER): later}

    def do(stage: str, head_size: int) -> None:
        deed = due.pop((stage, head_size), None)
        if deed is not None:
            deed()

    class Impl(ReferenceImpl):
        def __init__(self, num_heads: int, head_size: int, *args: Any, **keywords: Any) -> None:
            do("construct", head_size)
            super().__init__(num_heads, head_size, *args, **keywords)

        def forward(
            self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, *args: Any, **others: Any
        ) -> Any:
            do("forward", self.head_size)
            right = super().forward(layer, query, key, value, kv_cache, *args, **others)
            return answer(right, query, kv_cache) if self.head_size == FAULTY else right

    class Builder(ReferenceBuilder):
        def build(self, *args: Any, **keywords: Any) -> Any:
            do("build", self.kv_cache_spec.head_size)
            return super().build(*args, **keywords)

    methods = {"get_impl_cls": staticmethod(lambda: Impl), "get_builder_cls": staticmethod(lambda: Builder)}
    return type("Faulty", (ReferenceBackend,), methods)


def throw(error: BaseException) -> NoReturn:
    raise error


def descend() -> object:
    return list(map(lambda _: descend(), (0,)))  # noqa: C417 (the recursion must pass through C)


def wait_in_python() -> None:
    while True:
        time.sleep(0.01)


def in_thread(deed: Deed) -> None:
    threading.Thread(target=deed, daemon=True).start()


# Faults that end the process.
segfault = faulty(forward=lambda: ctypes.string_at(0))
abort = faulty(forward=os.abort)
exit_at_once = faulty(forward=lambda: os._exit(0))
kill_of_itself = faulty(forward=lambda: os.kill(os.getpid(), signal.SIGKILL))
keyboard_interrupt = faulty(forward=lambda: throw(KeyboardInterrupt()))
closed_descriptors = faulty(forward=lambda: os.closerange(3, 256))


def overflow() -> None:
    sys.setrecursionlimit(10**6)
    threading.stack_size(2**15)
    thread = threading.Thread(target=descend)
    thread.start()
    thread.join()


def write_everywhere() -> None:
    for descriptor in range(3, 256):
        with suppress(OSError):
            os.write(descriptor, b"{not a message}\n")


stack_overflow = faulty(forward=overflow)
written_pipes = faulty(forward=write_everywhere)
copy_that_outlives = faulty(forward=lambda: os._exit(9) if LIBC.fork() else time.sleep(LONG_S))

# Faults that occur at a later case, or only once.
blocks: list[int] = []
released = threading.Event()


def corrupt_heap() -> None:
    block = LIBC.malloc(2**22)  # large enough for its own mapping
    ctypes.memset(block - 8, 0xFF, 8)  # overwrites the size in the allocator's header
    blocks.append(block)


def use_heap() -> None:
    for block in blocks:
        LIBC.free(block)


def release() -> None:
    if threading.active_count() > 1:
        released.set()
        time.sleep(LONG_S)


def crash_the_first_time() -> None:
    with suppress(FileExistsError):
        Path("crashed").touch(exist_ok=False)
        os.abort()


heap_corruption = faulty(forward=corrupt_heap, later=use_heap)
thread_that_exits_later = faulty(forward=lambda: in_thread(lambda: (released.wait(), os._exit(3))), later=release)
crash_at_random = faulty(forward=crash_the_first_time)


# Faults that do not return.
def print_for_ever() -> None:
    while True:
        os.write(1, b"x" * 2**20 + b"\n")


hang_in_c_with_gil = faulty(forward=lambda: ctypes.PyDLL(None).sleep(LONG_S))
hang_in_c_without_gil = faulty(forward=lambda: LIBC.sleep(LONG_S))
hang_in_python = faulty(forward=wait_in_python)
hang_in_build = faulty(build=wait_in_python)
hang_in_constructor = faulty(construct=wait_in_python)
hang_without_sigterm = faulty(forward=lambda: (signal.signal(signal.SIGTERM, signal.SIG_IGN), time.sleep(LONG_S)))
stop_of_itself = faulty(forward=lambda: os.kill(os.getpid(), signal.SIGSTOP))
endless_print = faulty(forward=print_for_ever)
hang_at_exit = faulty(forward=lambda: atexit.register(time.sleep, LONG_S))


# Faults that use many resources, or leave something behind.
def leak() -> None:
    blocks = []
    while True:
        blocks.append(bytearray(b"x") * 2**24)
        time.sleep(0.03)


def print_one_line() -> None:
    for _ in range(int(os.environ.get("FAULT_MIB", "1024"))):
        os.write(1, b"x" * 2**20)


def fork_twenty() -> None:
    for _ in range(20):
        if not os.fork():
            time.sleep(LONG_S)
            os._exit(0)


def leave_daemon() -> None:
    if not os.fork():
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(LONG_S)
        os._exit(0)
    os.wait()


def spin_and_print() -> None:
    while True:
        sys.stdout.write("the thread goes on\n")


def hold_descriptors() -> None:
    with suppress(OSError):
        while True:
            descriptors.append(os.open(os.devnull, os.O_RDONLY))


descriptors: list[int] = []
memory_leak = faulty(forward=leak)
huge_line = faulty(forward=print_one_line)
twenty_forks = faulty(forward=fork_twenty)
fork_that_returns = faulty(forward=os.fork)
daemon_left = faulty(forward=leave_daemon)
thread_left = faulty(forward=lambda: in_thread(spin_and_print))
used_up_descriptors = faulty(forward=hold_descriptors)


# Exceptions.
class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Hostile(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("hands off")


system_exit = faulty(forward=lambda: sys.exit(0))
unprintable_exception = faulty(forward=lambda: throw(UnprintableError()))
generator_exit = faulty(forward=lambda: throw(GeneratorExit()))
recursion_error = faulty(forward=descend)
huge_message = faulty(forward=lambda: throw(ValueError("x" * 10**8)))

# Wrong return values.
kept: list[Any] = []
wrong_type = faulty(answer=lambda right, query, cache: "text")
output_is_input = faulty(answer=lambda right, query, cache: query)
output_on_meta = faulty(answer=lambda right, query, cache: right.to("meta"))
wrong_shape = faulty(answer=lambda right, query, cache: right[:-1])
exchanged_axes = faulty(answer=lambda right, query, cache: right.transpose_(0, 1))
hostile_tensor = faulty(answer=lambda right, query, cache: right.as_subclass(Hostile))
resized_storage = faulty(answer=lambda right, query, cache: (right.untyped_storage().resize_(0), right)[1])
cache_of_nan = faulty(answer=lambda right, query, cache: (kept.append(cache.fill_(torch.nan)), right)[1])


# Changes of the process's state.
def change_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda *_: os._exit(5))


def close_streams() -> None:
    sys.stdout.close()
    sys.stderr.close()
    for descriptor in (0, 1, 2):
        with suppress(OSError):
            os.close(descriptor)


def change_modules() -> None:
    sys.path.clear()
    for name in ("json", "math", "attncheck.reports.run_file.records", "torch.nn.functional"):
        sys.modules.pop(name, None)


def answer_wrongly(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("this function of torch was replaced")


def replace_functions() -> None:
    for name in ("matmul", "einsum", "softmax", "isnan", "equal", "empty", "full"):
        setattr(torch, name, answer_wrongly)


default_dtype = faulty(forward=lambda: torch.set_default_dtype(torch.float16))
default_device = faulty(forward=lambda: torch.set_default_device("meta"))
threads = faulty(forward=lambda: torch.set_num_threads(7))
seed = faulty(forward=lambda: (torch.manual_seed(7), random.seed(7)))
gradients = faulty(forward=lambda: torch.set_grad_enabled(False))
inference_mode = faulty(forward=lambda: torch.inference_mode().__enter__())
determinism = faulty(forward=lambda: torch.use_deterministic_algorithms(True))
matmul_precision = faulty(forward=lambda: torch.set_float32_matmul_precision("medium"))
print_options = faulty(forward=lambda: torch.set_printoptions(precision=0, threshold=0))
flushed_denormals = faulty(forward=lambda: torch.set_flush_denormal(True))
folder = faulty(forward=lambda: os.chdir("/"))
environment = faulty(forward=os.environ.clear)
signal_handlers = faulty(forward=change_signals)
warnings_as_errors = faulty(forward=lambda: warnings.simplefilter("error"))
replaced_functions = faulty(forward=replace_functions)
collector_off = faulty(forward=gc.disable)
closed_streams = faulty(forward=close_streams)
no_stdout = faulty(forward=lambda: setattr(sys, "stdout", None))
recursion_limit = faulty(forward=lambda: sys.setrecursionlimit(120))
trace_function = faulty(forward=lambda: sys.settrace(lambda *_: throw(RuntimeError("traced"))))
modules_gone = faulty(forward=change_modules)
limits = faulty(forward=lambda: (resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16)), os.umask(0o777)))
faulthandler_off = faulty(forward=lambda: (faulthandler.disable(), ctypes.string_at(0)))
