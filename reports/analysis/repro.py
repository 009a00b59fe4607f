"""The command that repeats a record: one line for a POSIX shell, to run in the directory of the first run.

A backend that was passed as a Python object has no name for a shell; its line is Python.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import ENGINE_CHECKS, UTILITIES, Crashed, Ended, Failed, Record, TimedOut

_LIMIT = re.compile(r"--(?:case|backend)-timeout [\d.e+]+")
"""An option in the cause of a timeout, with its value."""

ENGINE_OPTION = "engine."
"""Prefix of the keys of an engine's case that are options of ``attncheck engine``."""

FIRST_STEP = "first_step"
"""The figure with the first step of an engine in which something was wrong."""

_NEEDS_A_WORKER = re.compile("out of memory|exited with code")


def python_ref(name: str) -> str:
    """Return the ``backend_ref`` of a backend that was passed as a Python object under ``name``."""
    return f"<{name}>"


def repro_command(
    record: Record, header: RunHeader | None = None, environment: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return ``attncheck run ...`` for this backend, case, check and seed alone, in one process; "" if none repeats it.

    A timeout and a crash out of memory are repeated in a worker process, since only there a run enforces its limits. So
    is an exit: in one process it would end attncheck, perhaps with code 0.

    ``header`` adds what a record lacks: the file of a suite that is not built in, and the device. A seed of 0 is the
    default and left out. Environment variables precede the command: those that the backend requires according to
    ``header``, and ``environment``.
    """
    if record.check == UTILITIES:
        return _repro_function(record, header)
    if record.check in ENGINE_CHECKS and header is not None:
        return _repro_engine(record, header)
    suite = record.suite if header is None else header.suite_ref(record.suite)
    if record.backend_ref.startswith("<"):
        return _repro_call(record, suite, header)
    words = ["attncheck", "run", "--backend", record.backend_ref, "--suite", suite, "--case", record.case_id]
    words += ["--check", record.check]
    if record.seed:
        words += ["--seed", str(record.seed)]
    if header is not None:
        words += ["--device", header.device, *_passed(header.command)]
    if isinstance(record, TimedOut):
        words += [word for option in _LIMIT.findall(record.cause) for word in option.split()]
    elif not (isinstance(record, Crashed) and _NEEDS_A_WORKER.search(record.cause)):
        words.append("--in-process")
    return assignments(environment) + _required(record, header) + shlex.join(words)


def _passed(command: Sequence[str]) -> list[str]:
    """Return the options ``--pass-env`` of a command, without which the backend would see other variables."""
    words = [word for word in command if word.startswith("--pass-env=")]
    for name, value in pairwise(command):
        words += [name, value] if name == "--pass-env" else []
    return words


def repeat_line(record: Record, header: RunHeader | None = None) -> str:
    """Return ``repeat:`` with the command, or "" if no command repeats the record."""
    command = repro_command(record, header)
    return f"repeat: {command}" if command else ""


def sanitizer_command(record: Record, header: RunHeader | None = None) -> str:
    """Return the command that repeats a crash on a GPU under compute-sanitizer, or "" for other records."""
    is_crash = isinstance(record, Crashed) and not record.backend_ref.startswith("<")
    if not is_crash or header is None or header.device == "cpu":
        return ""
    required = _required(record, header)
    command = repro_command(record, header).removeprefix(required)
    return f"{required}compute-sanitizer --target-processes all {command}"


def _required(record: Record, header: RunHeader | None) -> str:
    """Return assignments of the environment variables that the repetition needs."""
    if header is None:
        return ""
    required = next((info.required_environment for info in header.backends if info.name == record.backend), {})
    # With blocking launches, the error is raised at the kernel that causes it.
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"} if isinstance(record, Ended) and header.device != "cpu" else {}
    return assignments({**blocking, **required})


def assignments(values: Mapping[str, str]) -> str:
    """Return ``NAME=value`` and a space for each environment variable, quoted for a POSIX shell."""
    return "".join(f"{shlex.quote(name)}={shlex.quote(value)} " for name, value in values.items())


def _repro_function(record: Record, header: RunHeader | None) -> str:
    """Return the command for a function of a provider; its suites are those that supply the batches."""
    words = ["attncheck", "run", "--provider", record.backend_ref, "--case", record.case_id]
    if header is not None:
        words += [word for suite in header.suites if suite.name != UTILITIES for word in ("--suite", suite.ref)]
        words += ["--device", header.device]
    if record.seed:
        words += ["--seed", str(record.seed)]
    return shlex.join(words)


def _repro_engine(record: Record, header: RunHeader) -> str:
    """Return the command that serves the same requests up to the first wrong step, or "" for those of a server."""
    case = header.case_by_name.get((record.suite, record.case_id))
    options = {} if case is None else case.keys
    words = ["attncheck", "engine"]
    for key, value in options.items():
        if key.startswith(ENGINE_OPTION):
            words += [f"--{key.removeprefix(ENGINE_OPTION)}", str(value)]
    if len(words) == len(("attncheck", "engine")):
        return ""
    words += ["--seed", str(record.seed)]
    if isinstance(record, Failed) and (step := record.figures.get(FIRST_STEP)):
        words += ["--steps", str(step)]
    return shlex.join(words)


def _repro_call(record: Record, suite: str, header: RunHeader | None) -> str:
    options: dict[str, object] = {"cases": record.case_id, "checks": record.check}
    if record.seed:
        options["seed"] = record.seed
    if header is not None:
        options["device"] = header.device
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return f"attncheck.examine({record.backend_ref.strip('<>')}, {suite!r}, {given})"
