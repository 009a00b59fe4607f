"""Time limits of a backend: for loading it, for each stage of a case, and for all its cases together."""

import math
import time
from dataclasses import dataclass, replace

from attncheck.cases.model import Case
from attncheck.errors import SelectionError
from attncheck.harness.problem.memory_estimate import needed_bytes
from attncheck.reports.run_file.causes import BACKEND_TIME
from attncheck.reports.run_file.timings import TIMING

FLOOR_S = 300.0
"""Seconds that each stage gets by default. They include compiling a kernel, which takes minutes with autotuning."""

REFERENCE_FACTOR = 10.0
"""Multiple of the reference's own time that each stage gets in addition."""

LEAST_LOADING_S = 60.0
"""Minimum seconds for loading, which includes importing torch, perhaps from a slow disk."""

PREPARATION = "the preparation of the case"
_PREPARED_BYTES_PER_S = 1e7
"""Bytes of a case (inputs and truth) that the slowest machine prepares per second."""

_TIMED_PARTS = 40
"""Maximum number of samplings of one check ``timing``."""


_SET = "--case-timeout changes it"


@dataclass(frozen=True)
class Limit:
    """``seconds`` without an answer, or ``math.inf``. ``words``: how the limit was computed."""

    seconds: float = math.inf
    words: str = ""

    def __str__(self) -> str:
        return f"the limit was {self.seconds:.4g} s{self.words and f' ({self.words})'}"


@dataclass(frozen=True)
class TimeLimits:
    """Time limits of a run; ``math.inf`` is no limit.

    ``case_s``: seconds without an answer to a question about a case; None to scale with the reference's own time.
    ``backend_s``: seconds that the processes of one backend may be at work together. ``sampling_s``: seconds for which
    the check ``timing`` samples one part of a step. ``deadline``: the ``time.monotonic()`` until which ``backends``,
    ``jobs`` of them at once, share the time; None if they do not.
    """

    case_s: float | None = None
    backend_s: float = math.inf
    sampling_s: float = 0.0
    deadline: float | None = None
    backends: int = 1
    jobs: int = 1

    @property
    def of_loading(self) -> Limit:
        """The limit for a process to start, import a backend and describe it."""
        return Limit(FLOOR_S, _SET) if self.case_s is None else self._given(LEAST_LOADING_S)

    @property
    def of_function(self) -> Limit:
        """The limit for all questions about one function of a provider."""
        return Limit(FLOOR_S, _SET) if self.case_s is None else self._given()

    def of_stage(self, stage: str, case: Case, reference_s: float = 0.0) -> Limit:
        """Return the limit of a stage of ``case``. ``reference_s``: seconds that the reference took for the case."""
        if self.case_s is not None:
            return self._given()
        if stage == PREPARATION:
            return Limit(FLOOR_S + needed_bytes(case) / _PREPARED_BYTES_PER_S, _SET)
        words = f"{FLOOR_S:g} s, and {REFERENCE_FACTOR:g} times the {reference_s:.3g} s that the reference took"
        limit_s = FLOOR_S + REFERENCE_FACTOR * reference_s
        if stage == f"check {TIMING}":
            limit_s += _TIMED_PARTS * self.sampling_s
            words += f", and {_TIMED_PARTS * self.sampling_s:g} s for samples"
        return Limit(limit_s, f"{words}; {_SET}")

    def shared(self, within_s: float, backends: int, jobs: int) -> "TimeLimits":
        """Return limits with which ``backends``, ``jobs`` at once, end within ``within_s`` seconds from now.

        Each has an equal part, and goes on if the rest suffices for those that wait. A tenth is left for starts.
        """
        end_s, turns = 0.9 * max(within_s, 0.0), max(math.ceil(backends / jobs), 1)
        return replace(self, backend_s=end_s / turns, deadline=time.monotonic() + end_s, backends=backends, jobs=jobs)

    def of_backend(self, spent_s: float, begun: int) -> Limit:
        """Return what is left to a backend that was at work for ``spent_s``, if ``begun`` backends were at work yet."""
        own_s = self.backend_s - spent_s
        if self.deadline is None:
            return Limit(own_s, f"{BACKEND_TIME} by --backend-timeout {self.backend_s:g}")
        turns, rest_s = math.ceil((self.backends - begun) / self.jobs), self.deadline - time.monotonic()
        return Limit(min(max(own_s, rest_s - turns * self.backend_s), rest_s), f"{BACKEND_TIME} by --within")

    def _given(self, least_s: float = 0.0) -> Limit:
        """Return the limit of ``--case-timeout``, but at least ``least_s``."""
        given_s = self.case_s or 0.0
        least = f"; the least for loading is {least_s:g} s" if least_s > given_s else ""
        return Limit(max(given_s, least_s), f"--case-timeout {given_s:g}{least}")


def read_limit(option: str, seconds: float | None) -> float | None:
    """Return the limit that an option gives; 0 becomes ``math.inf``, None stays None.

    Raises:
        SelectionError: it is negative or NaN.
    """
    if seconds is None:
        return None
    if not seconds >= 0:
        raise SelectionError(f"{option} {seconds:g}: give seconds, or 0 for no limit")
    return seconds or math.inf
