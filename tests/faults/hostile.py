"""A backend that attacks the harness in each case of ``ATTACKS``, and backends with a bad declaration.

The process of a backend sends its answers through a pipe. ``Pipe`` stands between: it keeps each line, and lets the
backend send lines again, change or drop them. So most of these attacks need no knowledge of the messages.
"""

import fcntl
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

HEAD_SIZE = 16
"""Of the cases that are right; that of an attack is larger, by a multiple of 8."""


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


def send_answer_again() -> None:
    """Send again what was sent about the case before."""
    first = min(number for number, line in enumerate(PIPE.lines) if b'"before"' in line)
    PIPE.say(*PIPE.lines[first : first + 2])


def begin_for_ever() -> None:
    """Send the line with which the present stage began each half second, and never return."""
    time.sleep(0.1)  # until the thread has forwarded it
    line = PIPE.lines[-1]
    for _ in range(80):
        PIPE.say(line)
        time.sleep(0.5)


def changing(field: str, value: str) -> Callable[[], None]:
    """Return an attack that gives this JSON value to a field of its next record."""
    pattern, field_and_value = rb'"%s":("[^"]*"|\d+)' % field.encode(), f'"{field}":{value}'.encode()

    def change(line: bytes) -> list[bytes]:
        return [re.sub(pattern, field_and_value, line) if b'"case_id"' in line else line]

    return lambda: setattr(PIPE, "change", change)


def drop_record() -> None:
    PIPE.change = lambda line: [] if b'"case_id"' in line else [line]


LINES = {
    "answer_again": send_answer_again,
    "load_again": lambda: PIPE.say(PIPE.lines[0]),
    "refused": lambda: PIPE.say(b'{"kind":"refused","reason":"","raised":""}\n'),
    "done": lambda: PIPE.say(b'{"kind":"done","blind":null}\n'),
    "done_blind": lambda: PIPE.say(b'{"kind":"done","blind":"oh"}\n'),
    "fault": lambda: PIPE.say(b'{"kind":"fault","error":"oh","traceback":"oh"}\n'),
    "no_record": drop_record,
    "other_backend": changing("backend", '"torch_sdpa"'),
    "no_backend": changing("backend", '"unlisted"'),
    "other_seed": changing("seed", "7"),
    "other_case": changing("case_id", '"after"'),
    "other_hash": changing("case_hash", '"000000000000"'),
    "other_machine": changing("environment", '"000000000000"'),
    "stage_again": begin_for_ever,
    "prints": lambda: print("\x1b[31m \x1b]8;;http://x.example\x1b\\ \x9b1m \u202e \0 end", flush=True),  # noqa: T201
}
"""Attacks by what the process writes."""


class HostileTensor(torch.Tensor):
    """A tensor each of whose functions raises."""

    @classmethod
    def __torch_function__(cls, *args: Any, **others: Any) -> Any:
        raise RuntimeError("hostile tensor")


TENSORS = {
    "freed_query": lambda right, query: query.untyped_storage().resize_(0),
    "hostile_query": lambda right, query: setattr(query, "__class__", HostileTensor),
    "hostile_output": lambda right, query: right.as_subclass(HostileTensor),
    "hostile_in_place": lambda right, query: setattr(right, "__class__", HostileTensor),
    "transposed": lambda right, query: right.transpose_(0, 1),
}
"""Attacks by what happens to the right output or to the query; a tensor is returned in place of the output."""

ATTACKS = (*LINES, *TENSORS)


class Impl(ReferenceImpl):
    def forward(self, layer: Any, query: torch.Tensor, *args: Any, **others: Any) -> Any:
        attack = None if self.head_size == HEAD_SIZE else ATTACKS[(self.head_size - HEAD_SIZE) // 8 - 1]
        if attack in LINES:
            LINES[attack]()
        right = super().forward(layer, query, *args, **others)
        answer = TENSORS[attack](right, query) if attack in TENSORS else None
        return answer if isinstance(answer, torch.Tensor) else right


def declaring(**methods: Callable[..., Any]) -> type[Any]:
    return type("Declaring", (ReferenceBackend,), {name: staticmethod(each) for name, each in methods.items()})


def raise_error() -> str:
    raise RuntimeError("no name today")


def shape_of_floats(*args: Any, **others: Any) -> Any:
    return tuple(map(float, ReferenceBackend.get_kv_cache_shape(*args, **others)))


Good = declaring()
Hostile = declaring(get_impl_cls=lambda: Impl)
name_raises = declaring(get_name=raise_error)
no_name = declaring(get_name=lambda: None)
no_impl = declaring(get_impl_cls=lambda: None)
float_shape = declaring(get_kv_cache_shape=shape_of_floats)
