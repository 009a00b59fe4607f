"""Processes that gather evidence, and what they leave behind, joined.

Each backend has one of its own, so that one that hangs or loses the device harms no other. Must not know: what is
gathered, how it is told.
"""

import contextlib
import lzma
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from attncheck.errors import QuestionError, RunFileError
from attncheck.harness.run.backend_description import BackendDescription
from attncheck.harness.run.backend_loading import describe_backend, load_backend
from attncheck.reports.run_file.joining import join_runs
from attncheck.reports.run_file.store import COMPRESSED, Run, read_run

ROOT = Path(__file__).resolve().parent.parent

ATTNCHECK = ("python", "-P", "-m", "attncheck")
"""How a command of this checkout begins; ``python`` is the one that runs this."""

CLOCKS = (
    "nvidia-smi --format=csv --query-gpu=clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"
)
FACTS = ("nvidia-smi", CLOCKS, shlex.join([*ATTNCHECK, "doctor"]))
"""Commands whose output describes the machine."""


@dataclass(frozen=True)
class Job:
    """One process: ``words`` about the backend ``ref``, which leave a run ``file``; and how it ended."""

    ref: str
    words: tuple[str, ...]
    file: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    status: str = ""
    output: str = ""
    seconds: float = 0.0

    def ended(self, status: str, output: str = "", seconds: float = 0.0) -> "Job":
        """The job as it ended."""
        return replace(self, status=status, output=output, seconds=seconds)

    @property
    def log(self) -> str:
        """What was typed and printed."""
        variables = "".join(f"{name}={value} " for name, value in self.variables.items())
        return f"$ {variables}{_shown(self.words)}\n{self.output}({self.status}, {self.seconds:.1f} s)"


@dataclass(frozen=True)
class Part:
    """What was asked of several backends on one side, such as ``cuda``. ``run``: all that they left behind.

    left_out: backends that were not asked, by the reason.
    """

    kind: str
    side: str
    jobs: tuple[Job, ...]
    run: Run | None = None
    problems: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    is_packed: bool = False

    @property
    def file(self) -> str:
        """Name of the run file."""
        return f"{self.kind}-{self.side}.jsonl" + (COMPRESSED if self.is_packed else "")


def examination(
    ref: str, words: Sequence[str], file: Path, *, under: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Job:
    """``attncheck run`` of one backend, within the command ``under``."""
    command = (*under, *ATTNCHECK, "run", "--backend", ref, *words, "--output", str(file))
    return Job(ref, command, file, variables or {})


def introduced(refs: Iterable[str], device: str) -> dict[str, BackendDescription | QuestionError]:
    """By reference, what each backend says of itself, to be run on ``device``, or why it names none."""
    found: dict[str, BackendDescription | QuestionError] = {}
    for ref in refs:
        try:
            found[ref] = describe_backend(load_backend(ref), device)
        except QuestionError as error:
            found[ref] = error
    return found


def default_folder(about: str, device: str) -> Path:
    """Where evidence found today on ``device`` is kept."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else "emulated"
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return ROOT / "docs" / "evidence" / f"{about}-{words}-{datetime.now(UTC):%Y-%m-%d}"


def make_folder(folder: Path) -> str | None:
    """Makes ``folder``; why it will not do, if it holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        return f"{folder} is no empty folder: name another, or remove it."
    folder.mkdir(parents=True, exist_ok=True)
    return None


def run_all(parts: Sequence[Part], deadline: float, limit: float, workers: int) -> list[Part]:
    """The parts as their jobs ended, ``workers`` of them at a time; see :func:`run_job`."""
    with ThreadPoolExecutor(workers) as pool:
        running = [[pool.submit(run_job, job, deadline, limit) for job in part.jobs] for part in parts]
        try:
            return [
                replace(part, jobs=tuple(future.result() for future in futures))
                for part, futures in zip(parts, running, strict=True)
            ]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)  # what runs ends with its own limit
            raise


def run_job(job: Job, deadline: float, limit: float) -> Job:
    """The job as it ended; killed with all its processes after ``limit`` seconds, or at ``deadline`` if that is first.

    What it has written by then is kept.
    """
    limit = min(limit, deadline - time.monotonic())
    if limit <= 0:
        return job.ended("not begun: out of time")
    began = time.monotonic()
    output = job.file.with_suffix(".txt")  # a file: a grandchild that lives on would hold a pipe open
    with output.open("wb") as sink:
        try:
            process = subprocess.Popen(
                _command(job.words),
                cwd=ROOT,
                # The tensors of a case are small, and many processes run at a time.
                env={"OMP_NUM_THREADS": "1", **os.environ, **job.variables},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return job.ended(f"not begun: {error}")
        try:
            status = f"exit code {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = output.read_text(encoding="utf-8", errors="replace")
    return job.ended(status, text, time.monotonic() - began)


def joined(part: Part, folder: Path, command: str) -> Part:
    """The part with the one run file made of its jobs' in ``folder``, and what could not be read or joined.

    The jobs may have asked different suites; the file's header names them all.
    """
    runs, problems = [], []
    for job in part.jobs:
        try:
            runs.append(read_run(job.file))
        except RunFileError as error:
            problems.append(f"{job.ref}: {error.reason}")
    run = None
    if runs:
        suites = tuple({suite: None for run in runs for suite in run.header.suites})
        runs = [replace(run, header=run.header.model_copy(update={"suites": suites})) for run in runs]
        try:
            join_runs(runs, folder / part.file, shlex.split(command))
            run = read_run(folder / part.file)
        except RunFileError as error:
            problems.append(str(error))
    return replace(part, run=run, problems=tuple(problems))


def packed(part: Part, folder: Path) -> Part:
    """The part with its run file compressed: a fiftieth of the room."""
    if part.run is None:
        return part
    plain, small = folder / part.file, replace(part, is_packed=True)
    (folder / small.file).write_bytes(lzma.compress(plain.read_bytes()))
    plain.unlink()
    return small


def fact(line: str) -> str:
    """A command and what it prints."""
    words = tuple(shlex.split(line))
    try:
        done = subprocess.run(
            _command(words), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"$ {_shown(words)}\n{error}"
    return f"$ {_shown(words)}\n{done.stdout}{done.stderr}".rstrip()


def write_texts(folder: Path, facts: Iterable[str], parts: Iterable[Part]) -> None:
    """What describes the machine, and what every process printed."""
    log = [job.log for part in parts for job in part.jobs]
    for name, texts in (("environment.txt", facts), ("log.txt", log)):
        (folder / name).write_text("\n\n".join(texts) + "\n", encoding="utf-8")


def _command(words: Sequence[str]) -> list[str]:
    return [sys.executable if word == "python" else word for word in words]


def _shown(words: Sequence[str]) -> str:
    return shlex.join(words).replace(shlex.join(ATTNCHECK), "attncheck")
