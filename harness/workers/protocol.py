"""Calls of methods in a backend's process, over two pipes: one line for each call, event and result.

::

    the run                                    the process
      TOKEN METHOD [ARGUMENTS] -------------->  runs the method of its server
                              <--------------   TOKEN event VALUE, any number
                              <--------------   TOKEN result VALUE, or TOKEN refused REASON

Arguments and values are JSON, and are checked against the annotations of the method. A method that returns None has no
answer. If attncheck itself fails, the answer is ``TOKEN fault``. The token is known to the run and to its process: a
line without it comes from the backend. The methods are those of :mod:`~attncheck.harness.workers.worker`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any, ClassVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter

EVENT, RESULT, REFUSED, FAULT = b"event", b"result", b"refused", b"fault"
"""The kinds of answers."""


class Message(BaseModel):
    """Base of values that are sent: immutable, without unknown keys."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")


class Refused(Message):
    """The call was wrong: no such device or backend, or a suite has changed.

    ``raised``: type of the exception that the backend's own code raised while it was loaded, or "".
    """

    reason: str
    raised: str = ""


class HarnessFailure(Message):
    """attncheck itself failed: ``error`` in one line, and the traceback."""

    error: str
    traceback: str


@dataclass(frozen=True)
class Signature:
    """How the arguments of a method, and the values of each kind of answer, are written and read."""

    arguments: TypeAdapter[tuple[Any, ...]]
    answers: Mapping[bytes, TypeAdapter[Any]]

    @property
    def is_answered(self) -> bool:
        """Whether the method returns something."""
        return RESULT in self.answers


@cache
def signature_of(method: Callable[..., Any]) -> Signature:
    """Return the signature of a method. Its parameter ``emit``, if it has one, is a function that takes its events."""
    hints = get_type_hints(method, include_extras=True)
    result, emit = hints.pop("return"), hints.pop("emit", None)
    answers: dict[bytes, TypeAdapter[Any]] = {REFUSED: TypeAdapter(Refused), FAULT: TypeAdapter(HarnessFailure)}
    if emit is not None:
        (event,), _ = get_args(emit)
        answers[EVENT] = TypeAdapter(event)
    if emit is not None or result is not NoneType:
        answers[RESULT] = TypeAdapter(result)
    arguments: Any = tuple[*hints.values()]  # type: ignore[misc]
    return Signature(TypeAdapter(arguments), answers)


def write_call(token: bytes, method: Callable[..., Any], arguments: Sequence[Any]) -> bytes:
    """Return the line of a call."""
    return b"%s %s %s\n" % (token, method.__name__.encode(), signature_of(method).arguments.dump_json(tuple(arguments)))


def write_answer(token: bytes, method: Callable[..., Any], kind: bytes, value: Any) -> bytes:
    """Return the line of an answer."""
    if isinstance(value, BaseModel):  # whose own writer has a form for infinities
        written = value.model_dump_json().encode()
    else:
        written = signature_of(method).answers[kind].dump_json(value)
    return b"%s %s %s\n" % (token, kind, written)


def read_answer(token: bytes, method: Callable[..., Any], line: bytes) -> tuple[bytes, Any]:
    """Return the kind and the value of an answer. Raises ValueError for a line that is none."""
    sent, _, rest = line.partition(b" ")
    kind, _, value = rest.partition(b" ")
    answers = signature_of(method).answers
    if sent != token or kind not in answers:
        raise ValueError("no answer to this call")
    return kind, answers[kind].validate_json(value)
