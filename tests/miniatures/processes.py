"""Backends that do something to their process, each at the case with as many rows as its key in the table.

They are correct otherwise. ``Lively`` backends do not kill the process, ``Deadly`` ones end it or cut its connection.
"""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl

LIBC = ctypes.CDLL(None)


def flood() -> None:
    """Write ten megabytes of invalid UTF-8 to each output stream."""
    for descriptor in (1, 2):
        for _ in range(10):
            os.write(descriptor, b"\xff\xfe{\n" * 2**18)


def meddle() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    os.chdir("/")
    os.environ["TZ"] = "nowhere"
    sys.path.clear()


def fork() -> None:
    """Return from ``forward`` in two processes."""
    if not os.fork():
        sys.stdout.write("the copy goes on\n")


def fork_behind_python() -> None:
    LIBC.fork()


def fork_and_leave() -> None:
    if not os.fork():
        os._exit(7)


def close_streams() -> None:
    for descriptor in (0, 1, 2):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def start_threads() -> None:
    """Start a thread that Python waits for at exit, and one that it does not wait for."""
    for is_daemon in (True, False):
        threading.Thread(target=time.sleep, args=(1000,), daemon=is_daemon).start()


def leave() -> None:
    sys.exit(0)


LIVELY: dict[int, Callable[[], object]] = {
    11: flood,
    12: meddle,
    13: fork,
    14: fork_behind_python,
    15: fork_and_leave,
    16: close_streams,
    17: start_threads,
    18: leave,
}


def abort() -> None:
    sys.stdout.write("about to abort\n")
    os.abort()


def segfault() -> None:
    ctypes.string_at(0)


def leave_at_once() -> None:
    os._exit(0)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


def close_everything() -> None:
    os.closerange(3, 256)


def write_everywhere() -> None:
    """Write to every open descriptor, including all pipes."""
    for descriptor in range(3, 256):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"{not a message}\n")


def die_as_a_copy_lives() -> None:
    """Exit while a copy keeps all descriptors open."""
    if LIBC.fork():
        os._exit(9)
    time.sleep(60)


DEADLY: dict[int, Callable[[], object]] = {
    11: abort,
    12: segfault,
    13: leave_at_once,
    14: be_killed,
    15: interrupt,
    16: close_everything,
    17: write_everywhere,
    18: die_as_a_copy_lives,
}


class Doing(ReferenceBackend):
    """Calls the function that ``deeds`` has for a batch's number of rows, once for each impl class."""

    deeds: dict[int, Callable[[], object]]

    @classmethod
    def get_impl_cls(cls) -> Any:
        deeds = dict(cls.deeds)

        class Impl(ReferenceImpl):
            def forward(self, attn_layer: Any, query: Any, *args: Any, **keywords: Any) -> Any:
                deed = deeds.pop(query.shape[0], None)
                if deed is not None:
                    deed()
                return super().forward(attn_layer, query, *args, **keywords)

        return Impl


class Lively(Doing):
    deeds = LIVELY


class Deadly(Doing):
    deeds = DEADLY
