"""The process that workers are forked from: it has imported torch and the checks, and uses no device."""

import ctypes
import importlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from attncheck.harness.device import accelerators_in_use
from attncheck.harness.host import MARK, end_with
from attncheck.harness.workers.worker import Imports, import_checks, import_torch, imports_kept, leave, serve

_LOOK_EVERY_S = 0.0005


def main(words: list[str]) -> None:
    """Fork workers for the run, and serve the run in each; started by :mod:`attncheck.harness.workers.starting`.

    ``words``: the descriptor of the socket for requests, and the process id of the run.
    """
    descriptor, run = map(int, words)
    if not end_with(run):
        return
    pipes = None
    try:
        import_torch()
        with socket.socket(fileno=descriptor) as requests:
            pipes = _forked(requests, run)
    finally:
        if pipes is None:
            os._exit(1)  # at once: until its descriptors are closed, the run waits for an answer
    serve(*pipes, run)
    leave()


def _forked(requests: socket.socket, run: int) -> tuple[int, int] | None:
    """Fork a worker for each request. Return the ends of its pipes in the worker, and None when this process may end.

    A request has the ends of the worker's pipes, and of a socket, to which the worker writes its process id. The socket
    is closed without that if there is no worker, or the run has not adopted it. A request with ``modules`` has the
    descriptor of another socket for requests instead of pipes: the fork imports them, and forks workers itself.
    """
    while True:
        words, descriptors, _, _ = socket.recv_fds(requests, 2**20, 4)
        if not words:
            return None  # the run starts no more workers
        request = json.loads(words)
        import_checks(Imports.model_validate_json(request["imports"]))
        if not _may_fork():
            return None
        if _is_grandchild():
            if os.getppid() != run:
                return None
            *pipes, to_answer = descriptors
            if "environment" in request:
                _become_worker(pipes[2], request["environment"], request["path"])
            os.write(to_answer, str(os.getpid()).encode())
            os.close(to_answer)
            if "environment" in request:
                return pipes[0], pipes[1]
            requests.close()
            if not end_with(run):
                return None
            sys.path[:] = request["path"]
            _import(request["modules"])
            with socket.socket(fileno=pipes[0]) as others:
                return _forked(others, run)
        for each in descriptors:
            os.close(each)


def _import(modules: Sequence[str]) -> None:
    """Import these modules, and compute what their libraries compute once for all of their files."""
    from attncheck.backends.interpreter import is_interpreted
    from attncheck.harness.driver.foreign_code import settings_kept

    with imports_kept(), settings_kept():
        for name in modules:
            if name.startswith("vllm."):
                from attncheck.backends.candidates.vllm import package

                package.module(name)
            else:
                importlib.import_module(name)
        if "triton" in sys.modules and not is_interpreted():
            from triton.runtime.cache import triton_key

            triton_key()  # reads all of Triton, before the first kernel


_DEVICE_FILES = ("/dev/nvidia-uvm", "/dev/kfd")
"""What a driver of CUDA or ROCm keeps open from its initialisation, which torch may not notice."""


def _may_fork() -> bool:
    """Return whether this process has a single thread, and uses no device.

    OpenBLAS, which numpy loads, starts threads, but ends them before a fork.
    """
    if _num_threads() > 1:
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
    if threading.active_count() > 1 or _num_threads() > 1 or accelerators_in_use():
        return False
    opened = map(os.path.realpath, Path("/proc/self/fd").iterdir())
    return not any(each.startswith(_DEVICE_FILES) for each in opened)


def _num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _is_grandchild() -> bool:
    """Fork a child of a child, which ends at once; return whether this is the child that is left.

    Raises OSError, perhaps in the child, if the system starts no further process.
    """
    if child := os.fork():
        os.waitpid(child, 0)
        return False
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    return True


def _become_worker(to_print: int, environment: Mapping[str, str | None], path: Sequence[str]) -> None:
    """Be as a new interpreter: with a session, ``to_print`` for what is printed, and these variables and paths."""
    import torch

    os.setsid()
    sys.path[:] = path
    torch.default_generator.seed()  # torch itself does so when it is imported
    for number in (1, 2):
        os.dup2(to_print, number)
    os.close(to_print)
    # The mark of this process in /proc is that of the process that was forked, until its memory is overwritten.
    find = ctypes.CDLL(None).getenv
    find.restype = ctypes.c_void_p
    mark = (environment[MARK] or "").encode()
    ctypes.memmove(find(MARK.encode()), mark, len(mark))
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
