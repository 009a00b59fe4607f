"""``Deeds`` does something outside of its process once for each case, by the head size of the case.

``Slow`` waits in each case while the file ``hold`` is there, for ten seconds at most.
"""

import ctypes
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl

_PR_SET_DUMPABLE = 4  # of linux/prctl.h


def note(process: int) -> None:
    with Path("started").open("a") as file:
        file.write(f"{process}\n")


def start_daemon(**options: Any) -> None:
    note(subprocess.Popen(["sleep", "600"], env={}, **options).pid)


def fork_undumpable() -> None:
    """Start a process of another session, whose environment only root can read."""
    process = os.fork()
    if process != 0:
        note(process)
        return
    os.closerange(3, 100)
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
    time.sleep(600)
    os._exit(0)


def fill_files() -> None:
    """Hold 500 MiB in each of two files that are memory, for three seconds."""
    with os.fdopen(os.memfd_create("memory"), "wb") as first, tempfile.TemporaryFile(dir="/dev/shm") as second:
        for file in (first, second):
            os.posix_fallocate(file.fileno(), 0, 500 * 2**20)
        time.sleep(3)


def work_long() -> None:
    """Work for three seconds of a process that is not stopped."""
    Path("working").touch()
    for _ in range(30):
        time.sleep(0.1)


DEEDS = {
    16: lambda: start_daemon(start_new_session=True),
    32: lambda: start_daemon(process_group=0),
    48: fork_undumpable,
    64: work_long,
    80: fill_files,
}


class Impl(ReferenceImpl):
    def forward(self, *args: Any, **others: Any) -> torch.Tensor:
        DEEDS.pop(self.head_size, bool)()
        return super().forward(*args, **others)


class Deeds(ReferenceBackend):
    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl


class SlowImpl(ReferenceImpl):
    def forward(self, *args: Any, **others: Any) -> torch.Tensor:
        for _ in range(200):
            if Path("hold").exists():
                time.sleep(0.05)
        return super().forward(*args, **others)


class Slow(ReferenceBackend):
    @staticmethod
    def get_impl_cls() -> type[SlowImpl]:
        return SlowImpl
