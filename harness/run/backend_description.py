"""What a run knows of a backend without its code: how it describes itself, from this process or from its own.

Loads no torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from attncheck.errors import QuestionError
from attncheck.harness.run.outcomes import IMPORT, ProcessEnd
from attncheck.reports.run_file.header import BackendInfo


@dataclass(frozen=True)
class LoadError:
    """An exception while the backend was loaded. ``message``: with the backend's name.

    ``stage``: attncheck itself where the exception was raised in its own code, perhaps since the backend's has spoilt
    the process.
    """

    error_type: str
    message: str
    stage: str = IMPORT
    traceback: str = ""


class BackendDescription(BaseModel):
    """A backend's own words. ``unavailable_reasons``: why it cannot run on the run's device here; empty: it can.

    Not ``is_loaded``: it could not be, for these reasons or by this ``failure``, and nothing can be asked of it.
    ``default_suite``: what it is asked where the user names no suite. ``page_sizes``: the page sizes that it takes.
    ``page_multiples``: those of which it takes every multiple. ``layouts``: those of its cache. Empty: unknown.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    info: BackendInfo
    is_loaded: bool = True
    is_mla: bool = False
    default_suite: str = "smoke"
    page_sizes: tuple[int, ...] = ()
    page_multiples: tuple[int, ...] = ()
    layouts: tuple[str, ...] = ()
    unavailable_reasons: tuple[str, ...] = ()
    failure: ProcessEnd | LoadError | None = None

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.info.name

    @property
    def ref(self) -> str:
        """What to type after ``--backend``."""
        return self.info.ref

    @property
    def version(self) -> str:
        """Its version, empty where unknown."""
        return self.info.version

    @property
    def features(self) -> frozenset[str]:
        """The features it declares, empty where unknown."""
        return frozenset(self.info.features)

    @property
    def reason(self) -> str:
        """Why the backend was not loaded, or cannot run here; empty if it can."""
        match self.failure:
            case ProcessEnd(cause=reason) | LoadError(message=reason):
                return reason
            case None:
                return "; ".join(self.unavailable_reasons)


def unloadable(name: str, ref: str, reasons: Sequence[str], version: str = "") -> BackendDescription:
    """The description of a backend that cannot be loaded here, for these reasons."""
    info = BackendInfo(name=name, ref=ref, version=version)
    return BackendDescription(info=info, is_loaded=False, unavailable_reasons=tuple(reasons))


def unloaded(ref: str, failure: ProcessEnd | LoadError) -> BackendDescription:
    """Return the description of a backend whose own code failed while it was loaded; its name is taken from ``ref``."""
    place, _, name = ref.rpartition(":")
    info = BackendInfo(name=name if place else Path(ref).stem, ref=ref, version="")
    return BackendDescription(info=info, is_loaded=False, failure=failure)


def missing_variables(required: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """What of a required environment does not stand in ``environment``."""
    return {name: value for name, value in required.items() if environment.get(name) != value}


DescribeBackends = Callable[[Sequence[str]], Sequence[BackendDescription | QuestionError]]
"""Answers references, in order, with what they name, or with why they name nothing that could be examined."""
