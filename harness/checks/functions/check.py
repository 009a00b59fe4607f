"""The paths that examine a function instead of attention: the function of each, and how each check examines it."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend
from attncheck.cases.model import Case
from attncheck.harness.checks.dump import dump_tensors
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.checks.function_calls import FormError, Function
from attncheck.harness.checks.functions import convolution, merging
from attncheck.harness.checks.refusals import failure_of_declared
from attncheck.harness.driver.foreign_code import StageError, call_backend


class FunctionUnderTest(Protocol):
    """One function on one problem. Most methods are checks.

    They may raise StageError if the function raises, and FormError if its result has the wrong form.
    """

    def run(self) -> None:
        """Run the first call."""

    def tensors(self) -> Mapping[str, Tensor | None]:
        """Return arguments, truth and budget, by name."""

    def numerics(self) -> Finding:
        """Judge the values that the function returns."""

    def lse(self) -> Finding:
        """Judge the log-sum-exp."""

    def cache_write(self) -> Finding:
        """Judge which memory is written, and its contents."""

    def containment(self) -> Finding:
        """Judge whether memory outside the problem influences the result."""


Examiner = Callable[[type[AttentionBackend], Function, Case, int, torch.device], FunctionUnderTest]
"""(backend, its function, case, seed, device): returns the examination."""

EXAMINATIONS: Mapping[str, tuple[str, Examiner]] = {
    "merge": (merging.NAME, merging.Merging),
    "causal_conv1d": (convolution.NAME, convolution.Convolution),
}
"""Maps a path to the name of its function in ``functions()``, and to the class that examines it."""


class FunctionChecks:
    """One case of one backend on a path that examines a function. ``reasons``: why the backend excludes the case."""

    def __init__(
        self, backend: type[AttentionBackend], case: Case, seed: int, device: torch.device, reasons: tuple[str, ...]
    ) -> None:
        self._case, self._seed = case, seed
        self._name, examination = EXAMINATIONS[case.batch.path.name]
        function = call_backend("functions", lambda: backend.functions().get(self._name))
        absent = () if function is not None else (f"functions() offers no {self._name}",)
        self._reasons = (*absent, *reasons)
        self._examination = self._later = None
        if function is not None and not reasons:
            self._examination = examination(backend, function, case, seed, device)
            self._later = partial(examination, backend, function, case, seed + 1, device)

    def examine(self, check: str) -> Finding:
        """Return the finding of one check. Raise StageError if the function raises."""
        if self._examination is None:
            return NotExamined(self._reasons)
        if check == "refusals":
            return self._refusals(self._examination)
        try:
            return self._checked(self._examination, check)
        except FormError as failure:
            return failure.finding

    def dump(self, folder: Path, backend: str) -> None:
        """Write arguments, truth and budget to one file."""
        if self._examination is not None:
            dump_tensors(folder, self._case, self._seed, backend, self._examination.tensors())

    def _checked(self, examination: FunctionUnderTest, check: str) -> Finding:
        match check:
            case "numerics":
                return self._twice(examination.numerics())
            case "lse":
                return examination.lse()
            case "cache_write":
                return examination.cache_write()
            case "containment":
                return examination.containment()
            case _:
                return NotExamined((f"the path examines {self._name}, to which {check} does not apply",), "attncheck")

    def _twice(self, first: Finding) -> Finding:
        """Return ``first``, or a failure if a second call with other numbers in the same shapes is wrong."""
        if self._later is None or not isinstance(first, Holds):
            return first
        second = self._later().numerics()
        if not isinstance(second, Broken):
            return first
        return Broken(
            f"right in the first call, wrong in the second: {second.summary}",
            second.figures,
            "something is kept from an earlier call, or the function is not deterministic",
            second.details,
        )

    def _refusals(self, examination: FunctionUnderTest) -> Finding:
        """Judge whether an offered function can be called as documented. Other checks judge its result."""
        try:
            examination.run()
        except StageError as failure:
            return failure_of_declared(failure.raised)
        except FormError:
            pass
        return Holds()
