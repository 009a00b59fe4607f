"""Where foreign code is entered: each entry has a name, and whatever is raised there comes back with it.

Must not know: backends, what a stage does.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from attncheck.errors import AttncheckError
from attncheck.harness.observation import Raised

T = TypeVar("T")


class StageError(AttncheckError):
    """Carries what a stage of the contract raised up to the caller of a session."""

    def __init__(self, raised: Raised) -> None:
        self.raised = raised
        super().__init__(raised.stage)


def stage(name: str, call: Callable[[], T]) -> T:
    """The result of ``call``; what it raises comes back as a StageError that names the stage."""
    try:
        return call()
    except StageError:
        raise
    except (Exception, SystemExit) as error:  # a backend's sys.exit() is its failure, not the end of the run
        raise StageError(Raised(name, error)) from error


def declared_reasons(call: Callable[[], Sequence[str]]) -> tuple[str, ...]:
    """The reasons a declaration gives; a StageError where it raises, or answers with anything but a list of strings."""

    def ask() -> tuple[str, ...]:
        reasons: object = call()
        if not isinstance(reasons, list | tuple) or not all(isinstance(reason, str) for reason in reasons):
            raise TypeError(f"the declaration returned {reasons!r}, which is no list of strings")
        return tuple(reasons)

    return stage("declaration", ask)
