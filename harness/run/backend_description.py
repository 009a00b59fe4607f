"""Descriptions of backends, which may be loaded in other processes. Loads no torch."""

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
    """An exception raised while a backend was loaded. ``message`` includes the backend's name.

    ``stage`` is attncheck itself if its own code raised, perhaps because the backend left the process broken.
    """

    error_type: str
    message: str
    stage: str = IMPORT
    traceback: str = ""


class BackendDescription(BaseModel):
    """What a backend declares about itself.

    ``unavailable_reasons``: why it cannot run on the run's device on this machine; empty if it can.
    ``is_loaded``: False if it could not be loaded, for these reasons or because of ``failure``.
    ``default_suite``: the suite used if the user names none.
    ``page_sizes``: the page sizes it accepts, in tokens. ``page_multiples``: bases of which it accepts every multiple.
    ``layouts``: the cache layouts it accepts. Each of these three is empty if unknown.
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
        """The name in reports."""
        return self.info.name

    @property
    def ref(self) -> str:
        """The reference to give to ``--backend``."""
        return self.info.ref

    @property
    def version(self) -> str:
        """The version; empty if unknown."""
        return self.info.version

    @property
    def features(self) -> frozenset[str]:
        """The features that it declares; empty if unknown."""
        return frozenset(self.info.features)

    @property
    def reason(self) -> str:
        """Why the backend could not be loaded or cannot run here; empty if it can."""
        match self.failure:
            case ProcessEnd(cause=reason) | LoadError(message=reason):
                return reason
            case None:
                return "; ".join(self.unavailable_reasons)


def unloadable(name: str, ref: str, reasons: Sequence[str], version: str = "") -> BackendDescription:
    """Return the description of a backend that cannot be loaded on this machine, with the reasons."""
    info = BackendInfo(name=name, ref=ref, version=version)
    return BackendDescription(info=info, is_loaded=False, unavailable_reasons=tuple(reasons))


def unloaded(ref: str, failure: ProcessEnd | LoadError) -> BackendDescription:
    """Return the description of a backend whose own code failed during loading; its name is derived from ``ref``."""
    place, _, name = ref.rpartition(":")
    info = BackendInfo(name=name if place else Path(ref).stem, ref=ref, version="")
    return BackendDescription(info=info, is_loaded=False, failure=failure)


def missing_variables(required: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``required`` that ``environment`` lacks or has with another value."""
    return {name: value for name, value in required.items() if environment.get(name) != value}


DescribeBackends = Callable[[Sequence[str]], Sequence[BackendDescription | QuestionError]]
"""Function from references to descriptions, in order; a QuestionError if a reference names no backend to examine."""
