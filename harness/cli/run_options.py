"""The options of ``attncheck run`` as one value, and checks for invalid combinations. Loads no torch."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ByteSize, TypeAdapter, ValidationError

from attncheck.errors import CaseFileError, SelectionError
from attncheck.harness.cli.config import KEEP
from attncheck.harness.run.patterns import split_commas
from attncheck.harness.run.selection import Selection, select_cases
from attncheck.harness.run.sharding import Shard
from attncheck.harness.workers.memory_limits import MemoryLimits, size_in_words
from attncheck.harness.workers.ray_cluster import RaySettings
from attncheck.harness.workers.time_limits import TimeLimits, read_limit
from attncheck.harness.workers.worker_settings import WorkerSettings
from attncheck.reports.run_file.records import UTILITIES

PROVIDER_SUITES = ("smoke", "named_batches", "padding")
"""Default suites of a run with providers and no backends; functions are examined on their batches."""

_LEAST_MEMORY = 2**29
"""Approximate memory of a process that has loaded torch and the checks, in bytes."""


def read_size(option: str, text: str | None, default: int | None = None) -> int | None:
    """Return the bytes that ``text`` gives, such as ``4GiB``, ``4G`` or ``4294967296``; ``default`` if it is None.

    Raises:
        SelectionError: the text is not a size.
    """
    if text is None:
        return default
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise SelectionError(f"{option} {text!r}: give a size, such as 512MiB, 4GiB or a number of bytes") from None


def read_jobs(text: str | None) -> int | None:
    """Return the number of processes that ``--jobs`` gives; None for ``auto`` or if it is not given.

    Raises:
        SelectionError: the text is neither ``auto`` nor a whole number, 1 or above.
    """
    if text in (None, "auto"):
        return None
    if not text.isdecimal() or int(text) < 1:
        raise SelectionError(f"--jobs {text!r}: give a whole number, 1 or above, or auto")
    return int(text)


def read_ray(
    address: str | None, resources: Iterable[str], runtime_env: Path | None, *, is_used: bool
) -> RaySettings | None:
    """Return the settings of ``--executor ray``, or None if ``is_used`` is False.

    Raises:
        SelectionError: a resource is not NAME=AMOUNT, or an option of Ray is given without ``--executor ray``.
        CaseFileError: ``runtime_env`` cannot be read, or is not a mapping.
    """
    given = {"--ray-address": address, "--ray-resources": resources, "--ray-runtime-env": runtime_env}
    if not is_used:
        for name in (name for name, value in given.items() if value):
            raise SelectionError(f"{name} is about a Ray cluster; add --executor ray")
        return None
    return RaySettings(
        address, dict(map(_resource, split_commas(resources))), _runtime_env(runtime_env) if runtime_env else {}
    )


def _resource(text: str) -> tuple[str, float]:
    name, _, amount = text.partition("=")
    try:
        number = float(amount)
    except ValueError:
        number = -1.0
    if not name or not 0 <= number < float("inf"):
        raise SelectionError(
            f"--ray-resources {text!r}: give NAME=AMOUNT, such as GPU=1 or accelerator_type:H100=0.001"
        )
    return name, number


def _runtime_env(path: Path) -> dict[str, Any]:
    name = f"--ray-runtime-env {path}"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CaseFileError(f"cannot be read: {error}", file=name) from error
    if not isinstance(content, dict):
        raise CaseFileError("is no mapping", file=name, value=content, allowed="give fields such as working_dir")
    return content


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a run examines and how. Each field has the meaning of the command-line option of that name.

    An empty field means that the option was not given, and its default applies.
    ``checks``, ``skip``: names, with patterns resolved.
    ``keys``: if not empty, only the cases of these ``suite/id``. ``first``: the cases of these ``suite/id`` come first.
    ``folder``: where a run file is written without ``output``, and the newest ``keep`` are kept; None writes none.
    ``ray``: the cluster that examines the cases, or None for this machine.
    ``until_failure``: as in :class:`~attncheck.harness.run.plan.RunPlan`; it applies only with ``in_process``.
    ``deadline``: the ``time.monotonic()`` until which the backends share time and GPUs; None if they share neither.
    ``color``: whether the progress may have colours.
    ``notes``, ``command``: the origin of the options and the command line, for the run file.

    Raises:
        SelectionError: a check or pattern examines no backend or provider of the run, or options or limits are invalid.
    """

    backends: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    suites: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    keywords: str = ""
    keys: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    shard: Shard | None = None
    rounds: int | None = None
    time_limit: float | None = None
    warm_cache: bool = False
    kernels: bool = False
    device: str | None = None
    case_timeout: float | None = None
    backend_timeout: float | None = None
    memory_limit: int | None = None
    device_memory_limit: int | None = None
    seed: int = 0
    output: Path | None = None
    resume: Path | None = None
    folder: Path | None = None
    keep: int = KEEP
    maxfail: int | None = None
    until_failure: Literal["", "check", "backend"] = ""
    expect: Path | None = None
    strict_expect: bool = False
    dump: Path | None = None
    in_process: bool = False
    pass_env: tuple[str, ...] = ()
    jobs: int | None = None
    deadline: float | None = None
    ray: RaySettings | None = None
    show_output: bool = False
    warm: bool = True
    cache: bool = True
    verbose: bool = False
    color: bool = True
    notes: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option, seconds in (("--case-timeout", self.case_timeout), ("--backend-timeout", self.backend_timeout)):
            if read_limit(option, seconds) not in (None, math.inf) and self.in_process:
                raise SelectionError(
                    f"{option} {seconds:g} kills the process of a backend, and --in-process starts none; "
                    "leave out one of them"
                )
        self._check_memory("--memory-limit", self.memory_limit)
        self._check_memory("--device-memory-limit", self.device_memory_limit)
        if self.device == "cpu" and self.device_memory_limit is not None:
            raise SelectionError("--device-memory-limit is for a GPU, and --device cpu has none; leave out one of them")
        if self.jobs is not None and self.jobs > 1 and self.in_process:
            raise SelectionError(f"--jobs {self.jobs} and --in-process exclude each other; leave out one of them")
        if self.ray is not None:
            refused = {
                "--in-process": self.in_process,
                "--provider": self.providers,
                "--dump": self.dump,
                "--show-output": self.show_output,
            }
            for name in (name for name, is_given in refused.items() if is_given):
                raise SelectionError(f"--executor ray cannot be combined with {name}; leave out one of them")
        if self.resume is not None:
            refused = {"--output": self.output, "--provider": self.providers, "--last-failed": self.keys}
            for name in (name for name, is_given in refused.items() if is_given):
                raise SelectionError(f"--resume {self.resume} cannot be combined with {name}; leave out one of them")
        if self.shard is not None and self.providers:
            raise SelectionError(
                f"--shard {self.shard} divides the cases of backends; examine a provider in a run of its own"
            )
        for ref in self.backends:
            if ref.endswith((".yaml", ".yml")):
                raise SelectionError(f"backend {ref!r} has the name of a case file; give --suite {ref}")
        if not self.providers:
            if self.functions:
                raise SelectionError("--function selects functions of a provider; give --provider")
            return
        if self.checks and UTILITIES not in self.checks:
            raise SelectionError(f"a provider is examined by the check {UTILITIES}, which --check leaves out")
        if UTILITIES in self.skip:
            raise SelectionError(f"a provider is examined by the check {UTILITIES}, which --skip leaves out")
        if self.skip and not self.backends:
            raise SelectionError(
                f"--skip {self.skip[0]}: a run of providers alone has the one check {UTILITIES}; leave --skip out"
            )
        if self.checks and self.backends and not self.backend_checks:
            raise SelectionError(f"--check {UTILITIES} leaves nothing to examine of a backend; leave out --backend")
        if self.backend_checks and not self.backends:
            raise SelectionError(
                f"check {self.backend_checks[0]!r} examines a backend, and there is none; give --backend"
            )

    def _check_memory(self, option: str, limit: int | None) -> None:
        if limit is not None and limit < _LEAST_MEMORY:
            raise SelectionError(
                f"{option} {size_in_words(limit)}: torch needs more; give {size_in_words(_LEAST_MEMORY)} or more"
            )
        if limit is not None and self.in_process:
            raise SelectionError(
                f"{option} limits the process of a backend, and --in-process starts none; leave out one of them"
            )

    @property
    def worker_settings(self) -> WorkerSettings:
        """Settings for starting the processes of backends."""
        backend_s = read_limit("--backend-timeout", self.backend_timeout)
        return WorkerSettings(
            TimeLimits(read_limit("--case-timeout", self.case_timeout), math.inf if backend_s is None else backend_s),
            MemoryLimits(self.memory_limit, self.device_memory_limit),
            self.pass_env,
        )

    @property
    def backend_refs(self) -> tuple[str, ...] | None:
        """References of the backends; empty for the default ones, None if only providers are examined."""
        return None if self.providers and not self.backends else self.backends

    @property
    def backend_checks(self) -> tuple[str, ...]:
        """The requested checks without that of providers; without providers it stays, and is refused later."""
        return tuple(check for check in self.checks if check != UTILITIES or not self.providers)

    @property
    def suite_refs(self) -> tuple[str, ...]:
        """The suites that are named, or the default ones if only providers are examined."""
        return self.suites or (PROVIDER_SUITES if self.backend_refs is None else ())

    def select(self) -> Selection:
        """Return the cases of the run, those of ``first`` before the others.

        Raises:
            QuestionError: as :func:`~attncheck.harness.run.selection.select_cases`.
        """
        return select_cases(
            self.suite_refs,
            self.cases,
            self.backend_checks,
            self.settings,
            skip=self.skip,
            keywords=self.keywords,
            keys=self.keys,
        ).beginning_with(self.first)
