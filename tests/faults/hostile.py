"""Backends that attack the harness at the case with head size ``FAULTY``, and are right everywhere else.

The process of such a backend sends its answers through a pipe. ``Pipe`` stands between: it keeps each line, and lets a
backend send lines again, change or drop them. So these attacks need no knowledge of the messages, except ``OLD_LINES``.
"""

import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl

FAULTY = 32
OLD_LINES = {
    "refused": b'{"kind":"refused","reason":"","raised":""}\n',
    "done": b'{"kind":"done","blind":null}\n',
    "done_blind": b'{"kind":"done","blind":"oh"}\n',
    "fault": b'{"kind":"fault","error":"oh","traceback":"oh"}\n',
}
MESSAGE = "\x1b[31m \x1b]8;;http://x.example\x1b\\ \x9b1m \u202e \0 end"


class Pipe:
    """Every pipe that this process writes to, but not what it prints; ``change`` maps a line to the lines to send."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.change: Callable[[bytes], list[bytes]] = lambda line: [line]
        self._real: list[int] = []
        printed = [Path(f"/proc/self/fd/{number}").readlink() for number in (1, 2)]
        for place in list(Path("/proc/self/fd").iterdir()):
            with suppress(OSError):  # that of the list itself
                is_pipe = place.readlink().name.startswith("pipe:") and place.readlink() not in printed
                if is_pipe and fcntl.fcntl(int(place.name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
                    self._stand_before(int(place.name))

    def _stand_before(self, number: int) -> None:
        real = os.dup(number)
        reading, writing = os.pipe()
        os.dup2(writing, number, inheritable=False)
        self._real.append(real)
        threading.Thread(target=self._forward, args=(reading, real), daemon=True).start()

    def _forward(self, reading: int, real: int) -> None:
        with os.fdopen(reading, "rb") as lines:
            for line in lines:
                self.lines.append(line)
                os.write(real, b"".join(self.change(line)))

    def say(self, *lines: bytes) -> None:
        for real in self._real:
            os.write(real, b"".join(lines))


PIPE = Pipe()


def faulty(deed: Callable[[], object] = bool, answer: Callable[..., Any] = lambda right, query: right) -> type[Any]:
    """Return a backend that calls ``deed`` before, and returns what ``answer`` makes of the right output and query."""

    class Impl(ReferenceImpl):
        def forward(self, layer: Any, query: torch.Tensor, *args: Any, **others: Any) -> Any:
            if self.head_size != FAULTY:
                return super().forward(layer, query, *args, **others)
            deed()
            return answer(super().forward(layer, query, *args, **others), query)

    return type("Faulty", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl)})


def old_line(name: str) -> type[Any]:
    return faulty(lambda: PIPE.say(OLD_LINES[name]))


def answer_before() -> None:
    """Send again all that was sent about the case ``before``."""
    first = min(number for number, line in enumerate(PIPE.lines) if b'"before"' in line)
    PIPE.say(*PIPE.lines[first : first + 2])


def stage_for_ever() -> None:
    """Send the line with which the present stage began each half second, and never return."""
    time.sleep(0.1)  # until the thread has forwarded it
    line = PIPE.lines[-1]
    for _ in range(80):
        PIPE.say(line)
        time.sleep(0.5)


def changed(**fields: object) -> type[Any]:
    """Return a backend whose record of the case ``faulty`` has these fields."""

    def change(line: bytes) -> list[bytes]:
        if b'"case_id":"faulty"' not in line:
            return [line]
        for name, value in fields.items():
            line = re.sub(
                rb'"%s":("[^"]*"|\d+)' % name.encode(), b'"%s":%s' % (name.encode(), json.dumps(value).encode()), line
            )
        return [line]

    return faulty(lambda: setattr(PIPE, "change", change))


def without_record() -> None:
    PIPE.change = lambda line: [] if b'"case_id":"faulty"' in line else [line]


class Hostile(torch.Tensor):
    """A tensor each of whose functions raises."""

    @classmethod
    def __torch_function__(cls, *args: Any, **others: Any) -> Any:
        raise RuntimeError("hostile tensor")


def as_hostile(tensor: torch.Tensor) -> torch.Tensor:
    tensor.__class__ = Hostile
    return tensor


class Good(ReferenceBackend):
    pass


refused, done, done_blind, fault = map(old_line, OLD_LINES)
load_again = faulty(lambda: PIPE.say(PIPE.lines[0]))
before_again = faulty(answer_before)
stage_again = faulty(stage_for_ever)
no_record = faulty(without_record)
other_backend = changed(backend="torch_sdpa", backend_ref="torch_sdpa")
no_backend = changed(backend="nobody")
other_seed = changed(seed=7)
other_case = changed(case_id="later")
other_hash = changed(case_hash="0" * 12)
other_machine = changed(environment="0" * 12)
freed_query = faulty(answer=lambda right, query: (query.untyped_storage().resize_(0), right)[1])
hostile_output = faulty(answer=lambda right, query: right.as_subclass(Hostile))
hostile_in_place = faulty(answer=lambda right, query: as_hostile(right))
hostile_query = faulty(answer=lambda right, query: (as_hostile(query), right)[1])
transposed = faulty(answer=lambda right, query: right.transpose_(0, 1))
prints = faulty(lambda: print(MESSAGE, flush=True))  # noqa: T201


class NameRaises(ReferenceBackend):
    @staticmethod
    def get_name() -> str:
        raise RuntimeError("no name today")


class NoName(ReferenceBackend):
    @staticmethod
    def get_name() -> Any:
        return None


class NoImpl(ReferenceBackend):
    @staticmethod
    def get_impl_cls() -> Any:
        return None


class FloatShape(ReferenceBackend):
    @staticmethod
    def get_kv_cache_shape(*args: Any, **others: Any) -> Any:
        return tuple(map(float, ReferenceBackend.get_kv_cache_shape(*args, **others)))
