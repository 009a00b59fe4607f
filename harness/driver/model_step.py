"""A step of several layers or micro-batches, as a model makes it: what is built first, then turn by turn.

Sessions of one step over the same builder and batch share one metadata object. Every builder builds before the first
layer runs, that of the sessions without a role first. A builder whose calls are built one by one builds the next when
every layer had its turn.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.driver.forward_calls import ForwardCall
from attncheck.harness.driver.observation import Observation
from attncheck.harness.driver.session import Session

T = TypeVar("T")

_DEPTH = 3
"""How deep the objects within the metadata are looked at: the common metadata, and plans."""


def run_step(sessions: Sequence[Session], changes: list[str] | None = None) -> list[Observation]:
    """Make one step in which each of ``sessions`` has its turn, in order; return what was seen of each.

    ``changes``: takes the fields of the metadata that a turn changes, each with the turn. Raises StageError, whose
    stage names the session by its role.
    """
    turns = [(session, _named(session, partial(session.begin, images=False))) for session in sessions]
    built: dict[object, Iterator[tuple[ForwardCall, Any]]] = {}
    for session, turn in sorted(turns, key=lambda pair: pair[0].role != ""):
        if _batch_of(session) not in built:
            built[_batch_of(session)] = iter(_named(session, partial(session.built, turn.calls)))
    for number in range(max(len(turn.calls) for _, turn in turns)):
        made = {batch: next(calls, None) for batch, calls in built.items()}
        for session, turn in turns:
            if (pair := made[_batch_of(session)]) is None:
                continue
            call, metadata = replace(turn.calls[number], common=pair[0].common), pair[1]
            before = {} if changes is None else _contents(metadata)
            _named(session, partial(session.take, turn, call, metadata))
            if changes is not None:
                who = session.role or "the layer"
                changes += [f"forward of {who} changes {name}" for name in _changed(before, _contents(metadata))]
    return [session.finish(turn) for session, turn in turns]


def _batch_of(session: Session) -> object:
    """What two sessions have in common whose metadata are one object."""
    return id(session.builder), id(session.problem.layout)


def _named(session: Session, enter: Callable[[], T]) -> T:
    try:
        return enter()
    except StageError as failure:
        if not session.role:
            raise
        raise StageError(replace(failure.raised, stage=f"{failure.raised.stage} of {session.role}")) from failure


def _contents(metadata: object, name: str = "metadata", depth: int = _DEPTH) -> dict[str, object]:
    """Return what the fields of an object hold, and those of objects within it, by name; copies of tensors."""
    if isinstance(metadata, Tensor):
        return {name: metadata.detach().clone()}
    members = getattr(metadata, "__dict__", None)
    if not isinstance(members, Mapping) or isinstance(metadata, type) or not depth:
        return {name: metadata}
    held: dict[str, object] = {name: type(metadata)}
    for key, value in members.items():
        held |= _contents(value, f"{name}.{key}", depth - 1)
    return held


def _changed(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Names of what differs; of an object that is new as a whole, its name alone."""
    names = dict.fromkeys((*before, *after))
    differ = [n for n in names if n not in before or n not in after or _differ(before[n], after[n])]
    return [name for name in differ if name.rpartition(".")[0] not in differ]


def _differ(was: object, now: object) -> bool:
    if isinstance(was, Tensor) and isinstance(now, Tensor):
        return was.dtype != now.dtype or not torch.equal(was, now)
    return was is not now and not (type(was) is type(now) and bool(was == now))
