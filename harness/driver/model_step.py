"""Run one step over several layers or micro-batches, in the order in which a model builds and calls them.

Sessions over the same builder and batch share one metadata object. Every builder builds before the first layer runs;
that of the sessions without a role builds first. A builder that builds its calls one by one builds the next call after
every layer has run the current one.
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
"""Levels of nested objects within the metadata that are compared: the common metadata, and plans."""


def run_step(sessions: Sequence[Session], changes: list[str] | None = None) -> list[Observation]:
    """Run one step in which each of ``sessions`` makes its calls, in order; return their observations.

    ``changes``: a list that receives each metadata field that a call of ``forward`` changed, with the layer that
    changed it. Raises StageError, whose stage includes the session's role.
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
    """Return a key that is equal for two sessions if they share one metadata object."""
    return id(session.builder), id(session.problem.block_table)


def _named(session: Session, enter: Callable[[], T]) -> T:
    try:
        return enter()
    except StageError as failure:
        if not session.role:
            raise
        raise StageError(replace(failure.raised, stage=f"{failure.raised.stage} of {session.role}")) from failure


def _contents(metadata: object, name: str = "metadata", depth: int = _DEPTH) -> dict[str, object]:
    """Return the values of an object's fields and of nested objects, by dotted name; tensors are copied."""
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
    """Return the names of the values that differ; if a whole object was replaced, only its own name."""
    names = dict.fromkeys((*before, *after))
    differ = [n for n in names if n not in before or n not in after or _differ(before[n], after[n])]
    return [name for name in differ if name.rpartition(".")[0] not in differ]


def _differ(was: object, now: object) -> bool:
    if isinstance(was, Tensor) and isinstance(now, Tensor):
        return was.dtype != now.dtype or not torch.equal(was, now)
    return was is not now and not (type(was) is type(now) and bool(was == now))
