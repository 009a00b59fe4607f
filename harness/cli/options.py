"""The options of commands that run backends, and the values they give."""

import math
import os
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml
from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from attncheck.errors import CaseFileError, SelectionError
from attncheck.harness.cli import common
from attncheck.harness.run.selection import Selection, Shard, select_cases, split_commas
from attncheck.harness.workers.limits import MemoryLimits, TimeLimits, WorkerSettings, read_limit, size_in_words
from attncheck.harness.workers.ray import RaySettings
from attncheck.reports.run_file.records import UTILITIES

# Arguments and options of `attncheck run` as parameter types, with names, help and completion.

# What is examined.
BackendArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="BACKEND",
        help="Backends: a name, file.py, file.py:NAME of a class or function, module:NAME, or vllm:NAME. "
        "Default: all built-in backends.",
        autocompletion=common.backends,
        show_default=False,
    ),
]
BackendOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        metavar="REF",
        help="A backend, like the argument BACKEND. May be repeated.",
        autocompletion=common.backends,
    ),
]
Providers = Annotated[
    list[str] | None,
    typer.Option(
        "--provider",
        metavar="REF",
        help="A provider of metadata utilities: vllm, vllm:file.py, a module, or file.py. May be repeated. Without "
        "BACKEND, only providers are examined.",
    ),
]
Functions = Annotated[
    list[str] | None,
    typer.Option(
        "--function",
        metavar="PATTERN",
        help="Examine only provider functions whose name matches this shell pattern. May be repeated.",
    ),
]
Suites = Annotated[
    list[str] | None,
    typer.Option(
        "--suite",
        metavar="NAME|FILE",
        help="Built-in suites or YAML files, separated by commas. May be repeated. Default: smoke, or interpreted for "
        "backends whose kernels are interpreted; for providers alone also named_batches and padding.",
        autocompletion=common.suites,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a default of the suites, such as cache.block_size=32, cache.layout=HND, layer.head_size=96. "
        "A case that sets the key itself keeps its value. May be repeated.",
    ),
]
Cases = Annotated[
    list[str] | None,
    typer.Option(
        "--case",
        metavar="PATTERN",
        help="Select only cases whose id or suite/id matches one of these shell patterns (*, ?, [...]), separated by "
        "commas. An id without a variant selects all its variants: decode selects decode.float16. May be repeated.",
        autocompletion=common.cases,
    ),
]
Keywords = Annotated[
    str | None,
    typer.Option(
        "-k",
        metavar="EXPR",
        help="Select only cases that match this expression of words in suite/id, description and needs, with and, or, "
        "not, such as 'sliding_window and not head_size=64'.",
    ),
]
LastFailed = Annotated[
    bool,
    typer.Option(
        "--last-failed",
        "--lf",
        help="Select only the cases and backends that did not pass in the newest kept run, and the checks that failed.",
    ),
]
Checks = Annotated[
    list[str] | None,
    typer.Option(
        "--check",
        metavar="NAME",
        help="Run only these checks: names or shell patterns, separated by commas. May be repeated. Default: all "
        "except timing.",
        autocompletion=common.checks,
    ),
]
Skip = Annotated[
    list[str] | None,
    typer.Option(
        "--skip",
        metavar="NAME",
        help="Skip these checks: names or shell patterns, separated by commas. May be repeated.",
        autocompletion=common.checks,
    ),
]
Watch = Annotated[
    bool,
    typer.Option(
        "--watch",
        help="Run again after each save of the backend's file, a Python file in its folder, or a case file. Cases that "
        "did not pass run first. Press q to end.",
    ),
]

# How.
ShardOption = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Examine shard I of N of the cases; all shards take about equally long. `attncheck merge` merges their "
        "run files.",
    ),
]
Rounds = Annotated[
    int | None,
    typer.Option(
        "--rounds",
        metavar="N",
        help="Measure the check timing in N fresh processes of each backend; backends alternate. Default: 10.",
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="S",
        help="Seconds for which the check timing samples each part of a step in each process. Default: 0.25.",
    ),
]
WarmCache = Annotated[
    bool, typer.Option("--warm-cache", help="Do not flush the GPU's L2 cache before each timing sample.")
]
Kernels = Annotated[
    bool, typer.Option("--kernels", help="Record the kernel names of each timed step with the profiler.")
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="cpu, cuda or cuda:N. Default: cuda if there is a GPU, else cpu."),
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, metavar="N", help="Seed of the inputs. Default: 0.")]
ExitFirst = Annotated[bool, typer.Option("--exitfirst", "-x", help="Stop at the first record that does not pass.")]
MaxFail = Annotated[
    int | None, typer.Option("--maxfail", min=1, metavar="N", help="Stop after N records that did not pass.")
]
Expect = Annotated[
    Path | None,
    typer.Option(
        "--expect", metavar="FILE", help="Expected failures: a YAML file, or the name of one that attncheck includes."
    ),
]
StrictExpect = Annotated[
    bool, typer.Option("--strict-expect", help="Fail if an entry of --expect with `says` matches no record.")
]
Dump = Annotated[
    Path | None,
    typer.Option("--dump", metavar="DIR", help="Write the tensors of each failing case into this folder."),
]
ShowOutput = Annotated[
    bool,
    typer.Option(
        "--show-output",
        "-s",
        help="Show the output of backends immediately, each line with the backend's name. Default: show its last lines "
        "with each failure.",
    ),
]


# What is written.
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="FILE|DIR",
        help="The run file to write, which must not exist, or a folder for it. Default: the folder results/ if it "
        "exists, else a folder in the user's cache; both keep the newest 50 runs.",
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="RUN",
        help="Continue an incomplete run, and append to its run file. Repeat the other arguments of the first command.",
    ),
]
Reports = Annotated[
    list[str] | None,
    typer.Option(
        "--report",
        metavar="FORMAT=FILE,...",
        help="Write reports at the end, also after an interruption: html=FILE, junit=FILE, ... (the formats of "
        "`attncheck report`); github needs no file. May be repeated.",
    ),
]
NoOutput = Annotated[bool, typer.Option("--no-output", help="Write no run file.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only what did not pass, and the summary.")]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Print each record to stderr immediately, and print the report in full.",
    ),
]
Durations = Annotated[
    int | None, typer.Option("--durations", min=0, metavar="N", help="Print the N slowest checks of cases; 0: all.")
]


# Options of `attncheck run` that select and limit the processes of backends. Loads no torch.


class ExecutorChoice(StrEnum):
    """Where backends are examined."""

    LOCAL = "local"
    RAY = "ray"


CaseTimeout = Annotated[
    float | None,
    typer.Option(
        "--case-timeout",
        metavar="SECONDS",
        help="Time limit for one check of one case, with kernel compilation. After it, the process of the backend is "
        "killed, and the check is timed_out. The check timing gets extra time for its samples. 0: no limit. "
        "Default: 300, plus 10 times the reference's time.",
    ),
]
BackendTimeout = Annotated[
    float | None,
    typer.Option(
        "--backend-timeout",
        metavar="SECONDS",
        help="Time limit for all processes of a backend together. After it, its remaining cases are timed_out. "
        "Default: no limit.",
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help="Memory limit for the process of a backend and its children, such as 4GiB. A process that exceeds it is "
        "killed. Default: the memory of the host, minus a reserve.",
    ),
]
DeviceMemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--device-memory-limit",
        metavar="SIZE",
        help="GPU memory that torch may allocate in the process of a backend, such as 40GiB. Default: all.",
    ),
]
PassEnv = Annotated[
    list[str] | None,
    typer.Option(
        "--pass-env",
        metavar="PATTERN",
        help="Additional environment variables for the processes of backends (docs/processes.md): "
        "names or shell patterns, separated by commas. May be repeated.",
    ),
]
InProcess = Annotated[
    bool,
    typer.Option(
        "--in-process",
        help="Examine backends in this process, without a progress display: for debuggers, profilers, sanitizers.",
    ),
]
Jobs = Annotated[
    str | None,
    typer.Option(
        "--jobs",
        "-j",
        metavar="N|auto",
        help="Number of backend processes at once; the check timing always uses one. Default: auto, which is one per "
        "GPU, and on a CPU as many as cores and memory allow.",
    ),
]
Executor = Annotated[
    ExecutorChoice,
    typer.Option("--executor", help="local: examine backends on this machine; ray: on the nodes of a Ray cluster."),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="ADDRESS",
        help="Address of the Ray cluster; local starts one on this machine. Default: $RAY_ADDRESS, else the cluster of "
        "this machine.",
    ),
]
RayResources = Annotated[
    list[str] | None,
    typer.Option(
        "--ray-resources",
        metavar="NAME=AMOUNT",
        help="Resources of each actor, such as CPU=4, memory=8e9, accelerator_type:H100=0.001, separated by "
        "commas. May be repeated. Default: one CPU, and one GPU unless the device is cpu.",
    ),
]
RayRuntimeEnv = Annotated[
    Path | None,
    typer.Option(
        "--ray-runtime-env",
        metavar="FILE",
        help="The runtime environment of the actors, as YAML or JSON, such as working_dir, pip, env_vars.",
    ),
]
Within = Annotated[
    float | None,
    typer.Option(
        "--within",
        metavar="SECONDS",
        help="Time limit of the run, of which each backend has an equal part. On a GPU, several backends run at once. "
        "0: no limit. Default: no limit, and backends run one after another.",
    ),
]
NoCache = Annotated[
    bool,
    typer.Option(
        "--no-cache",
        help="Compute the float64 truth of every case, without the user's cache (see `attncheck doctor`).",
    ),
]
NoWarm = Annotated[
    bool,
    typer.Option(
        "--no-warm",
        help="On a GPU, do not compile kernels in advance in other processes (see `attncheck warm`).",
    ),
]


# Reads `[tool.attncheck]` of pyproject.toml: values for options that the command line omits. Loads no torch.

TABLE = "tool.attncheck"
KEEP = 50
"""Default number of run files kept in a folder."""

_PATH = re.compile(r"(?P<before>vllm:)?(?P<path>[^{]+\.(?:py|ya?ml))(?P<after>[:{].*)?")
"""A backend or a suite given as the path of a file."""


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]
"""A string or a list of strings."""


class Config(BaseModel):
    """The keys of the table. Each corresponds to the option of the same name, such as ``suites`` to ``--suite``.

    ``settings``: as ``--set``, a list of ``KEY=VALUE``. ``cache``: False has the effect of ``--no-cache``.
    ``output``: the folder of run files, of which the newest ``keep`` are kept.
    ``_path``: the file that the keys were read from, or None.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    suites: Names = ()
    backends: Names = ()
    checks: Names = ()
    skip: Names = ()
    settings: Names = ()
    expect: Path | None = None
    device: str | None = None
    seed: Annotated[int, Field(ge=0, strict=True)] | None = None
    case_timeout: Annotated[float, Field(ge=0)] | None = None
    backend_timeout: Annotated[float, Field(ge=0)] | None = None
    memory_limit: ByteSize | None = None
    device_memory_limit: ByteSize | None = None
    pass_env: Names = ()
    output: Path | None = None
    keep: Annotated[int, Field(ge=1, strict=True)] = KEEP
    cache: Annotated[bool, Field(strict=True)] = True

    _path: Path | None = None

    @property
    def note(self) -> str:
        """The note in a run's header that names this file; empty if there is no file."""
        if self._path is None:
            return ""
        given = ", ".join(f"{name} = {_shown(getattr(self, name))}" for name in sorted(self.model_fields_set))
        return f"options not given on the command line are from {self._path}: {given or 'none'}"


def _shown(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def read_config(start: Path) -> Config:
    """Return the table of the nearest pyproject.toml that has one, searching from folder ``start`` upwards.

    Paths in the table are relative to its file; they are returned relative to the current folder.

    Raises:
        CaseFileError: the file is not valid TOML, or has an unknown key or an invalid value.
    """
    for folder in (start, *start.parents):
        path = folder / "pyproject.toml"
        if path.is_file() and (table := _table(path)) is not None:
            return _config(Path(os.path.relpath(path)), table)
    return Config()


def _table(path: Path) -> dict[str, Any] | None:
    """Return the table of this file, or None if there is none or the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if "attncheck" not in text:
        return None
    try:
        table = tomllib.loads(text).get("tool", {}).get("attncheck")
    except tomllib.TOMLDecodeError as error:
        raise CaseFileError(f"is not TOML: {error}", file=str(path)) from error
    return table if isinstance(table, dict) else None


def _config(path: Path, table: dict[str, Any]) -> Config:
    try:
        config = Config.model_validate(table)
    except ValidationError as error:
        raise _wrong(path, error) from error
    folder = path.parent
    config = config.model_copy(
        update={
            "suites": tuple(_from(folder, name) for name in config.suites),
            "backends": tuple(_from(folder, name) for name in config.backends),
            "expect": config.expect and folder / config.expect,
            "output": config.output and folder / config.output,
        }
    )
    config._path = path
    return config


def _from(folder: Path, name: str) -> str:
    """Return ``name`` with its path, if it has one, made relative to the current folder."""
    match = _PATH.fullmatch(name)
    if match is None or folder == Path() or Path(match["path"]).is_absolute():
        return name
    return f"{match['before'] or ''}{folder / match['path']}{match['after'] or ''}"


def _wrong(path: Path, error: ValidationError) -> CaseFileError:
    first = error.errors(include_url=False, include_context=False)[0]
    key, *_ = first["loc"]
    known = list(Config.model_fields)
    if first["type"] == "extra_forbidden":
        near = get_close_matches(str(key), known, n=1)
        allowed = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
        return CaseFileError("unknown key", file=str(path), key=f"{TABLE}.{key}", allowed=allowed)
    return CaseFileError(first["msg"], file=str(path), key=f"{TABLE}.{key}", value=first["input"])


# The options of `attncheck run` as one value, and checks for invalid combinations. Loads no torch.

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
    ``until_failure``: as in :class:`~attncheck.harness.run.selection.RunPlan`; it applies only with ``in_process``.
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
        if self.deadline is not None and self.in_process:
            raise SelectionError(
                "--within ends processes of backends, and --in-process starts none; leave out one of them"
            )
        if self.ray is not None:
            refused = {
                "--in-process": self.in_process,
                "--within": self.deadline is not None,
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
