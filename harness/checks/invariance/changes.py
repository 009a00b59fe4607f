"""Combined changes that must not matter, and a search for the smallest set of them that makes an output wrong."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from attncheck.harness.checks.findings import Broken
from attncheck.harness.driver.observation import Raised

T = TypeVar("T")

_KEPT = "something is kept from an earlier step, of other requests"

_STATE = "something is kept from an earlier call, or the backend is not deterministic"


@dataclass(frozen=True)
class Change(Generic[T]):
    """One change to how a step is passed. ``what``: the change in words. ``meaning``: the fault that it reveals."""

    what: str
    meaning: str
    alter: Callable[[T], T]


@dataclass(frozen=True)
class Variation(Generic[T]):
    """A step passed in another way. ``plain``: the step without changes. ``judge``: returns what is wrong with a step.

    ``instead``: the variation to try if this one raises. If None, an exception is a failure. ``afresh``: judges with an
    impl and a builder that have seen no other step.
    """

    plain: T
    changes: tuple[Change[T], ...]
    judge: Callable[[T], Broken | Raised | None]
    instead: "Variation[T] | None" = None
    afresh: Callable[[T], Broken | Raised | None] | None = None

    @property
    def what(self) -> str:
        """The changes in words."""
        return _listed(self.changes)

    def wrong(self) -> Broken | Raised | None:
        """Return what is wrong with the step, with the smallest set of changes that causes it; None if it is right."""
        wrong = self._wrong_with(self.changes)
        if wrong is None:
            return None
        unchanged = self._wrong_with(())
        if unchanged is not None:
            return _finding(unchanged, "when it is repeated unchanged", _STATE)
        needed = self.changes
        for change in self.changes:
            fewer = tuple(each for each in needed if each is not change)
            still = self._wrong_with(fewer) if fewer else None
            if still is not None:
                wrong, needed = still, fewer
        is_kept = self.afresh is not None and self.afresh(self._with(needed)) is None
        meaning = _KEPT if is_kept else "; ".join(dict.fromkeys(change.meaning for change in needed))
        return _finding(wrong, f"with {_listed(needed)}", meaning)

    def _wrong_with(self, changes: Sequence[Change[T]]) -> Broken | Raised | None:
        return self.judge(self._with(changes))

    def _with(self, changes: Sequence[Change[T]]) -> T:
        put = self.plain
        for change in changes:
            put = change.alter(put)
        return put


def _listed(changes: Sequence[Change[T]]) -> str:
    return " and ".join(change.what for change in changes)


def _finding(wrong: Broken | Raised, how: str, meaning: str) -> Broken | Raised:
    if isinstance(wrong, Raised):
        return replace(wrong, stage=f"{wrong.stage} of the step {how}")
    return replace(wrong, summary=f"right at first, wrong {how}: {wrong.summary}", meaning=meaning)
