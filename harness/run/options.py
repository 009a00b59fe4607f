"""The options of a run: one declaration each for the command line, ``[tool.attncheck]``, pytest and workers.

Every pytest run on a machine with attncheck imports this module, so it loads only modules of Python itself.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from attncheck.errors import CaseFileError, SelectionError

if TYPE_CHECKING:
    from attncheck.harness.checks.findings import TimingSettings
    from attncheck.harness.run.selection import Selection, Shard

# Readers: each turns the text of an option, or the value of a key, into the value of its field.

_NO_TEXT = re.compile(r"[\ud800-\udfff]")
"""Bytes of a name that cannot be decoded."""

_PARTS = re.compile(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,])+")
"""The parts between commas; commas inside brackets or braces do not separate."""


def split_commas(words: Iterable[str]) -> tuple[str, ...]:
    """Return the names in ``words``, split at commas; the name of an existing file is not split.

    >>> split_commas(["decode,smoke{layer.dtype: float16, cache.block_size: 32}", "[a,b]*"])
    ('decode', 'smoke{layer.dtype: float16, cache.block_size: 32}', '[a,b]*')
    """
    parts = ([word] if _is_file(word) else _PARTS.findall(word) for word in words)
    return tuple(part.strip() for own in parts for part in own if part.strip())


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except OSError:  # a list is longer than the name of a file can be
        return False


def listed(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return ``names``, or the one name."""
    return (names,) if isinstance(names, str) else tuple(names)


def _names(_option: str, words: Iterable[str]) -> tuple[str, ...]:
    return split_commas(words)


def _checks(_option: str, words: Iterable[str]) -> tuple[str, ...]:
    from attncheck.harness.run.selection import choose_checks

    return choose_checks(words)


_UNITS = {"s": 1, "m": 60, "h": 3600}


def read_time(option: str, text: str) -> float:
    """Return the seconds that ``text`` gives, such as ``90s``, ``5m``, ``1h`` or ``90``.

    Raises:
        SelectionError: the text is not a positive, finite time.
    """
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        seconds = float(number) * _UNITS[unit]
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < math.inf:
        raise SelectionError(f"{option} {text!r}: give a time, such as 90s, 5m or 1h")
    return seconds


def _deadline(option: str, text: str) -> float:
    """Return the ``time.monotonic()`` after this time; infinity for ``0``."""
    return math.inf if text == "0" else time.monotonic() + read_time(option, text)


def _shard(_option: str, text: str) -> "Shard":
    from attncheck.harness.run.selection import read_shard

    return read_shard(text)


def _expectations(_option: str, text: str | Path) -> Path:
    from attncheck.harness.run.expectations import expectation_file

    return expectation_file(Path(text))


def read_size(option: str, size: str | int) -> int:
    """Return the bytes that ``size`` gives, such as ``4GiB``, ``4G`` or ``4294967296``.

    Raises:
        SelectionError: it is not a size.
    """
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(size))
    except ValidationError:
        raise SelectionError(f"{option} {size!r}: give a size, such as 512MiB, 4GiB or a number of bytes") from None


def size_in_words(size: int) -> str:
    """Return ``size`` bytes as text such as ``4.13 GiB`` or ``600 MiB``."""
    unit, name = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
    return f"{round(size / unit, 2):g} {name}"


def read_jobs(option: str, text: str) -> int | None:
    """Return the number of processes that ``text`` gives; None for ``auto``.

    Raises:
        SelectionError: the text is neither ``auto`` nor a whole number, 1 or above.
    """
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise SelectionError(f"{option} {text!r}: give a whole number, 1 or above, or auto")
    return int(text)


@dataclass(frozen=True)
class RaySettings:
    """Which Ray cluster a run uses, and the resources of each actor.

    ``address``: None for RAY_ADDRESS, or else for the cluster that this machine is part of. ``resources``: amounts of
    ``CPU``, ``GPU``, ``memory`` in bytes, and of other resources of the nodes. ``runtime_env``: Ray's description of an
    actor's environment.
    """

    address: str | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] = field(default_factory=dict)


def read_executor(option: str, text: str) -> RaySettings | None:
    """Return the settings of ``ray`` or ``ray:FILE``; None for ``local``.

    Raises:
        SelectionError: the text is none of these.
        CaseFileError: the file cannot be read, or has an unknown key or an invalid value.
    """
    executor, _, file = text.partition(":")
    if text == "local":
        return None
    if executor != "ray":
        raise SelectionError(f"{option} {text!r}: give local, ray or ray:FILE")
    return _ray_settings(Path(file)) if file else RaySettings()


def _ray_settings(path: Path) -> RaySettings:
    import yaml
    from pydantic import BaseModel, ConfigDict, NonNegativeFloat, ValidationError

    class RayFile(BaseModel):
        model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

        address: str | None = None
        resources: dict[str, NonNegativeFloat] = {}
        runtime_env: dict[str, Any] = {}

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CaseFileError(f"cannot be read: {error}", file=str(path)) from error
    allowed = f"give {', '.join(RayFile.model_fields)}"
    if not isinstance(content, dict):
        raise CaseFileError("is no mapping", file=str(path), value=content, allowed=allowed)
    try:
        return RaySettings(**RayFile.model_validate(content).model_dump())
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise CaseFileError(first["msg"], file=str(path), key=key, value=first["input"], allowed=allowed) from error


# Declarations.


class OptionGroup(StrEnum):
    """A heading of ``attncheck run --help``."""

    WHAT = "What runs"
    TIMING = "How it is timed"
    LIMITS = "When it stops"
    OUTPUT = "Output"
    MACHINE = "Machine"


Place = Literal["run", "time", "table", "pytest"]
"""Where an option is given: to a command, in ``[tool.attncheck]``, or to pytest."""

RUN: tuple[Place, ...] = ("run", "time")


@dataclass(frozen=True)
class Option:
    """How a field of :class:`RunOptions` is given.

    ``names``: on the command line; pytest's name is the first one after ``--attncheck-``. ``group``: its heading there.
    ``places``: where it is valid. ``key``: in ``[tool.attncheck]``; empty for the name of the field.
    ``read``: turns what was given into the value; called with the name of the option and the text, words or TOML value.
    ``least``: the least number. ``complete``: the function of ``cli/common.py`` that completes the value in a shell.
    ``hidden``: whether the help leaves it out.
    """

    names: tuple[str, ...]
    help: str
    group: OptionGroup
    places: tuple[Place, ...]
    metavar: str | None = None
    key: str = ""
    read: Callable[[str, Any], Any] | None = None
    least: int | None = None
    complete: str = ""
    hidden: bool = False


def _option(
    group: OptionGroup,
    default: Any,
    typed: str,
    help: str,  # noqa: A002 (as in typer and pytest)
    *more: Place,
    places: tuple[Place, ...] = RUN,
    **how: Any,
) -> Any:
    """Return a field with this default.

    ``typed``: its names and its metavar, such as ``--jobs -j N|auto``. ``more``: places besides ``places``.
    """
    words = typed.split()
    names = tuple(word for word in words if word.startswith("-"))
    metavar = words[-1] if len(words) > len(names) else None
    option = Option(names, help, group, (*places, *more), metavar, **how)
    return field(default=default, metadata={"option": option})


_what, _timing, _limits, _output, _machine = (partial(_option, group) for group in OptionGroup)

KEEP = 50
"""Default number of run files kept in a folder."""

PROVIDER_SUITES = ("smoke", "named_batches", "padding")
"""Default suites of a run with providers and no backends; functions are examined on their batches."""

_LEAST_MEMORY = 2**29
"""Approximate memory of a process that has loaded torch and the checks, in bytes."""

_TABLE_AND_PYTEST: tuple[Place, ...] = ("table", "pytest")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a run examines and how. An empty field means that the option was not given, and its default applies.

    Fields without a declaration are set by commands:
    ``keys``: if not empty, only the cases of these ``suite/id``.
    ``functions``: patterns of the functions of providers; empty for all.
    ``until_failure``: as in :class:`~attncheck.harness.run.selection.RunPlan`; it applies only with ``in_process``.
    ``deadline`` is the ``time.monotonic()`` until which the backends share time and GPUs; None if they share neither.
    ``color``: whether the progress may have colours.
    ``notes``, ``command``: the origin of the options and the command line, for the run file.

    Raises:
        SelectionError: a check or pattern examines no backend or provider of the run, or options or limits are invalid.
    """

    backends: tuple[str, ...] = _what(
        (), "--backend REF", "A backend, like the argument BACKEND.", *_TABLE_AND_PYTEST, complete="backends"
    )
    providers: tuple[str, ...] = _what(
        (),
        "--provider REF",
        "A provider of metadata utilities: vllm, vllm:file.py, a module, or file.py. It is examined alone without "
        "BACKEND. --case also selects its functions, by name.",
        places=("run",),
    )
    suites: tuple[str, ...] = _what(
        (),
        "--suite NAME|FILE",
        "Built-in suites, YAML files, or all. Default: smoke, or interpreted where kernels are.",
        *_TABLE_AND_PYTEST,
        read=_names,
        complete="suites",
    )
    settings: tuple[str, ...] = _what(
        (), "--set KEY=VALUE", "Replace a default of the suites, such as cache.block_size=32.", *_TABLE_AND_PYTEST
    )
    cases: tuple[str, ...] = _what(
        (),
        "--case PATTERN",
        "Only cases whose id or suite/id matches this shell pattern; an id without variant selects all its variants.",
        "pytest",
        read=_names,
        complete="cases",
    )
    keywords: str = _what(
        "",
        "-k EXPR",
        "Only cases that match words in suite/id, description and needs, such as 'sinks and not head_size=64'.",
    )
    last_failed: bool = _what(
        False, "--last-failed --lf", "Only the cases, backends and checks that did not pass in the newest kept run."
    )
    keys: tuple[str, ...] = ()
    checks: tuple[str, ...] = _what(
        (),
        "--check NAME",
        "Only these checks: names or shell patterns. Default: all except timing.",
        *_TABLE_AND_PYTEST,
        places=("run",),
        read=_checks,
        complete="checks",
    )
    skip: tuple[str, ...] = _what(
        (), "--skip NAME", "All checks but these.", "table", places=("run",), read=_checks, complete="checks"
    )
    functions: tuple[str, ...] = ()
    shard: "Shard | None" = _what(
        None,
        "--shard I/N",
        "Shard I of N of the cases. `attncheck merge` merges the run files of all shards.",
        read=_shard,
    )
    seed: int = _what(0, "--seed N", "Seed of the inputs. Default: 0.", *_TABLE_AND_PYTEST, least=0)
    dry_run: bool = _what(
        False, "--dry-run", "Print which backends, cases and checks would run, and about how long; examine nothing."
    )
    rounds: int | None = _timing(
        None,
        "--rounds N",
        "Measure in N fresh processes of each backend; backends alternate. Default: 10.",
        places=("time",),
        least=1,
    )
    time_limit: float | None = _timing(
        None,
        "--time-limit S",
        "Seconds for which each part of a step is sampled in each process. Default: 0.25.",
        places=("time",),
    )
    warm_cache: bool = _timing(
        False, "--warm-cache", "Do not flush the GPU's L2 cache before each sample.", places=("time",)
    )
    kernels: bool = _timing(
        False, "--kernels", "Record the kernel names of each timed step with the profiler.", places=("time",)
    )
    exitfirst: bool = _limits(False, "-x", "Stop at the first record that does not pass: --maxfail 1.")
    maxfail: int | None = _limits(None, "--maxfail N", "Stop after N records that did not pass.", least=1)
    until_failure: Literal["", "check", "backend"] = ""
    case_timeout: float | None = _limits(
        None,
        "--case-timeout SECONDS",
        "Time limit for one check of one case, with compilation; then the backend's process is killed. 0: none. "
        "Default: 300, plus 10 times the reference's time.",
        *_TABLE_AND_PYTEST,
        least=0,
    )
    backend_timeout: float | None = _limits(
        None,
        "--backend-timeout SECONDS",
        "Time limit for all processes of a backend together; then its remaining cases are timed_out. Default: none.",
        *_TABLE_AND_PYTEST,
        least=0,
    )
    memory_limit: int | None = _limits(
        None,
        "--memory-limit SIZE",
        "Memory of a backend's process and its children, such as 4GiB; one that exceeds it is killed. Default: the "
        "memory of the host, minus a reserve.",
        *_TABLE_AND_PYTEST,
        read=read_size,
    )
    device_memory_limit: int | None = _limits(
        None,
        "--device-memory-limit SIZE",
        "GPU memory that torch may allocate in the process of a backend, such as 40GiB. Default: all.",
        *_TABLE_AND_PYTEST,
        read=read_size,
        hidden=True,
    )
    deadline: float | None = _limits(
        None,
        "--within TIME",
        "Time limit of the run, such as 60s or 2m: the cases and checks that find most come first, and what is not "
        "reached does not fail the run. The backends share the time. Default: no limit, like 0.",
        places=("run",),
        read=_deadline,
    )
    expect: Path | None = _output(
        None,
        "--expect FILE",
        "Expected failures: a YAML file, or the name of one that attncheck includes.",
        *_TABLE_AND_PYTEST,
        read=_expectations,
    )
    strict_expect: bool = _output(
        False, "--strict-expect", "Fail if an entry of --expect with `says` matches no record."
    )
    output: Path | None = _output(
        None,
        "--output FILE|DIR",
        "The run file to write, which must not exist, or a folder for it. Default: the folder results/ if it exists, "
        "else a folder in the user's cache.",
    )
    no_output: bool = _output(False, "--no-output", "Write no run file.")
    reports: tuple[str, ...] = _output(
        (),
        "--report FORMAT=FILE",
        "Write reports at the end, also after an interruption: html=FILE, junit=FILE and other formats of `attncheck "
        "report`; github needs no file. Separated by commas.",
        read=_names,
    )
    resume: Path | None = _output(
        None,
        "--resume RUN",
        "Continue an incomplete run, and append to its run file. Repeat the other arguments of the first command.",
    )
    folder: Path | None = _output(
        None,
        "",
        "The folder of run files without --output. It keeps the newest.",
        "table",
        places=(),
        key="output",
    )
    keep: int = _output(KEEP, "", "Number of run files kept in the folder.", "table", places=(), least=1)
    dump: Path | None = _output(
        None, "--dump DIR", "Write the tensors of each failing case into this folder.", "pytest"
    )
    show_output: bool = _output(
        False, "--show-output -s", "Show the output of backends immediately. Default: its last lines with each failure."
    )
    quiet: bool = _output(False, "--quiet -q", "Print only what did not pass, and the summary.")
    verbose: bool = _output(False, "--verbose -v", "Print each record to stderr immediately, and the report in full.")
    durations: int | None = _output(None, "--durations N", "Print the N slowest checks of cases; 0: all.", least=0)
    color: bool = True
    notes: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    device: str | None = _machine(
        None, "--device NAME", "cpu, cuda or cuda:N. Default: cuda if there is a GPU, else cpu.", *_TABLE_AND_PYTEST
    )
    jobs: int | None = _machine(
        None,
        "--jobs -j N|auto",
        "Number of backend processes at once; timing always uses one. Default: auto, which is as many as cores and "
        "memory allow, at most 8 on a CPU or a GPU.",
        read=read_jobs,
    )
    in_process: bool = _machine(
        False,
        "--in-process",
        "Examine backends in this process, without a progress display: for debuggers, profilers, sanitizers.",
        "pytest",
    )
    ray: RaySettings | None = _machine(
        None,
        "--executor local|ray[:FILE]",
        "local, or ray: the nodes of a Ray cluster. The YAML file may have its address, and resources and runtime_env "
        "of each actor. Default: local.",
        places=("run",),
        read=read_executor,
    )
    pass_env: tuple[str, ...] = _machine(
        (),
        "--pass-env PATTERN",
        "Further environment variables for the processes of backends: names or shell patterns.",
        *_TABLE_AND_PYTEST,
        read=_names,
    )
    cache: bool = _machine(
        True,
        "--no-cache",
        "Compute the float64 truth of every case, without the user's cache (see `attncheck doctor`).",
        *_TABLE_AND_PYTEST,
    )

    def __post_init__(self) -> None:
        self._check_encoding()
        self._check_processes()
        self._check_combinations()
        for ref in self.backends:
            if ref.endswith((".yaml", ".yml")):
                raise SelectionError(f"backend {ref!r} has the name of a case file; give --suite {ref}")
        if self.providers:
            self._check_providers()

    def _check_encoding(self) -> None:
        """Refuse names that other processes and the run file cannot hold, since they are no Unicode text."""
        for name in (*self.backends, *self.providers, *self.suites, *self.settings, *self.pass_env, str(self.dump)):
            if _NO_TEXT.search(name) and not self.in_process:
                raise SelectionError(f"{name!r} is not UTF-8, or not in the locale's encoding; give another name")

    def _check_processes(self) -> None:
        """Check the limits of the processes of backends, and what a run without such processes cannot have."""
        for option, seconds in (("--case-timeout", self.case_timeout), ("--backend-timeout", self.backend_timeout)):
            if seconds not in (None, 0, math.inf) and self.in_process:
                raise SelectionError(
                    f"{option} {seconds:g} kills the process of a backend, and --in-process starts none; "
                    "leave out one of them"
                )
        for option, limit in (
            ("--memory-limit", self.memory_limit),
            ("--device-memory-limit", self.device_memory_limit),
        ):
            if limit is not None and limit < _LEAST_MEMORY:
                raise SelectionError(
                    f"{option} {size_in_words(limit)}: torch needs more; give {size_in_words(_LEAST_MEMORY)} or more"
                )
            if limit is not None and self.in_process:
                raise SelectionError(
                    f"{option} limits the process of a backend, and --in-process starts none; leave out one of them"
                )
        if self.device == "cpu" and self.device_memory_limit is not None:
            raise SelectionError("--device-memory-limit is for a GPU, and --device cpu has none; leave out one of them")
        if self.jobs is not None and self.jobs > 1 and self.in_process:
            raise SelectionError(f"--jobs {self.jobs} and --in-process exclude each other; leave out one of them")
        if self.rounds is not None and self.rounds > 1 and self.in_process:
            raise SelectionError(
                f"--rounds {self.rounds} in one process: a round is a process; leave out --in-process or --rounds"
            )

    def _check_combinations(self) -> None:
        """Refuse options that exclude each other, by the names of their declarations."""
        excluded = {
            "ray": ("in_process", "deadline", "providers", "dump", "show_output"),
            "in_process": ("deadline",),
            "resume": ("output", "no_output", "providers", "last_failed"),
            "no_output": ("output",),
            "shard": ("providers",),
        }
        for name, others in excluded.items():
            for other in others:
                if self._is_given(name) and self._is_given(other):
                    raise SelectionError(
                        f"{self._as_given(name)} cannot be combined with {self._as_given(other)}; leave out one of them"
                    )

    def _is_given(self, name: str) -> bool:
        return getattr(self, name) not in ((), None, False)

    def _as_given(self, name: str) -> str:
        """Return the option as on a command line, such as ``--shard 2/7``."""
        value = getattr(self, name)
        if name in ("ray", "deadline"):
            return f"{OPTIONS[name].names[0]} {'ray' if name == 'ray' else OPTIONS[name].metavar}"
        words = "" if isinstance(value, bool) else f" {', '.join(value) if isinstance(value, tuple) else value}"
        return f"{OPTIONS[name].names[0]}{words}"

    def _check_providers(self) -> None:
        """Check that the checks of the run examine both its providers and its backends."""
        from attncheck.reports.run_file.records import UTILITIES

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

    @property
    def timing(self) -> "TimingSettings":
        """Settings of the check ``timing``; raises SelectionError if the time limit is invalid."""
        from attncheck.harness.checks.findings import TimingSettings

        settings = TimingSettings(warm=self.warm_cache, kernels=self.kernels)
        return settings if self.time_limit is None else replace(settings, limit_s=self.time_limit)

    @property
    def backend_refs(self) -> tuple[str, ...] | None:
        """References of the backends; empty for the default ones, None if only providers are examined."""
        return None if self.providers and not self.backends else self.backends

    @property
    def backend_checks(self) -> tuple[str, ...]:
        """The requested checks without that of providers; without providers it stays, and is refused later."""
        from attncheck.reports.run_file.records import UTILITIES

        return tuple(check for check in self.checks if check != UTILITIES or not self.providers)

    @property
    def suite_refs(self) -> tuple[str, ...]:
        """The suites that are named, or the default ones if only providers are examined."""
        return self.suites or (PROVIDER_SUITES if self.backend_refs is None else ())

    def select(self) -> "Selection":
        """Return the cases of the run.

        Raises:
            QuestionError: as :func:`~attncheck.harness.run.selection.select_cases`.
        """
        from attncheck.harness.run.selection import select_cases

        return select_cases(
            self.suite_refs,
            self.cases,
            self.backend_checks,
            self.settings,
            skip=self.skip,
            keywords=self.keywords,
            keys=self.keys,
        )


OPTIONS: Mapping[str, Option] = MappingProxyType(
    {each.name: each.metadata["option"] for each in fields(RunOptions) if "option" in each.metadata}
)
"""The declaration of each option, by the name of its field."""


def kind_of(name: str) -> Any:
    """Return the type of the value that is typed for the option of this field: a list for a repeated option."""
    annotation = {each.name: each.type for each in fields(RunOptions)}[name]
    if annotation == tuple[str, ...]:
        return list[str]
    if OPTIONS[name].read is not None:
        return str
    plain = [kind for kind in (bool, int, float, str, Path) if annotation in (kind, kind | None)]
    return plain[0]


def options_in(place: Place) -> list[str]:
    """Return the names of the fields that are given in ``place``, in the order of their declaration."""
    return [name for name, option in OPTIONS.items() if place in option.places]


def read_given(name: str, given: Any, said: str = "") -> Any:
    """Return the value of the field ``name`` for what was ``given``; ``said``: the option, as the user wrote it.

    Raises:
        QuestionError: it is not a value of this option.
    """
    option = OPTIONS[name]
    said = said or (OPTIONS[name].names or (name,))[0]
    if option.least is not None and not given >= option.least:
        raise SelectionError(f"{said} {given}: give a number, {option.least} or above")
    if option.read is not None:
        return option.read(said, given)
    return tuple(given) if kind_of(name) == list[str] else given
