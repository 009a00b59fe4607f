"""What the command line wants of providers, held against what it wants of backends.

Must not know: how a provider is found or examined.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from attncheck.errors import SelectionError
from attncheck.reports.run_file.records import UTILITIES

DEFAULT_SUITES = ("smoke", "named_batches", "padding")
"""Whose batches providers are asked about, where no backend is examined with them and no suite is named."""


@dataclass(frozen=True)
class ProviderRequest:
    """Providers (``refs``), ``patterns`` on names of their functions, ``checks``; and whether backends are asked for.

    Raises:
        SelectionError: a check or a pattern with nobody to examine, or somebody whom no check examines.
    """

    refs: tuple[str, ...]
    patterns: tuple[str, ...]
    checks: tuple[str, ...]
    with_backends: bool

    def __post_init__(self) -> None:
        if not self.refs:
            if self.patterns:
                raise SelectionError("--function chooses among the functions of a provider; give --provider")
            return
        if self.checks and UTILITIES not in self.checks:
            raise SelectionError(f"a provider is examined by the check {UTILITIES}, which --check leaves out")
        if self.checks and self.with_backends and not self.backend_checks:
            raise SelectionError(f"--check {UTILITIES} leaves nothing to examine of a backend; leave out --backend")
        if self.backend_checks and not self.with_backends:
            raise SelectionError(
                f"check {self.backend_checks[0]!r} examines a backend, and there is none; give --backend"
            )

    @property
    def are_alone(self) -> bool:
        """Whether providers are examined and nothing else."""
        return bool(self.refs) and not self.with_backends

    @property
    def backend_checks(self) -> tuple[str, ...]:
        """The checks asked for, without the providers'; a run without providers must refuse that one by itself."""
        return tuple(check for check in self.checks if check != UTILITIES or not self.refs)

    def suites(self, named: Sequence[str]) -> Sequence[str]:
        """The suites of the run: those named, else what suits who is examined."""
        return named or (DEFAULT_SUITES if self.are_alone else ())
