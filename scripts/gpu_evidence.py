"""Gathers evidence about CUDA graphs on a machine with a GPU: run files, and a page that says what they show.

    scripts/gpu-evidence [FOLDER]        default: docs/evidence/<gpu>-<date>

Every backend is asked in a process of its own, so that one that hangs or loses the device harms no other; the run files
of a part are joined afterwards. Whatever goes wrong is told on the page, and the rest goes on. Exit codes: 0 the page
is written, whatever it says; 2 this machine or the folder will not do.
"""

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path

from evidence_page import Job, Part, page

from attncheck.backends.contract import AttentionBackend
from attncheck.backends.registry import builtin_names, import_file
from attncheck.errors import BackendLoadError, DeviceError, RunFileError
from attncheck.harness.candidates import choose_device
from attncheck.reference.spec import BACKEND_CHECKS
from attncheck.reports.graph_agreement import CHECK
from attncheck.reports.joining import join_runs
from attncheck.reports.store import read_run

ROOT = Path(__file__).resolve().parent.parent

MINIATURES = "tests/miniatures/graphs*.py"
MINIATURE_SUITE = "tests/miniatures/graphs.yaml"

JOB_LIMIT_S = 150.0
"""The longest one backend may take; what was found by then is kept."""

ENVIRONMENT = {"OMP_NUM_THREADS": "1", **os.environ}
"""Of every process: the tensors are small, and many processes run at a time."""

CLOCKS = (
    "nvidia-smi --format=csv --query-gpu=clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"
)
FACTS = ("nvidia-smi", CLOCKS, "python -m attncheck doctor")
"""Commands whose output describes the machine; ``python`` is the one that runs this."""


def main(words: list[str]) -> int:
    """Gather, write the page, say where it is."""
    asked = _arguments(words)
    began = time.monotonic()
    try:
        device = choose_device("cpu" if asked.emulated_only else "cuda")
    except DeviceError as error:
        print(f"gpu-evidence needs a GPU: {error}. --emulated-only tries the script itself.", file=sys.stderr)
        return 2
    folder = asked.folder or ROOT / "docs" / "evidence" / f"{_device_name(device)}-{datetime.now(UTC):%Y-%m-%d}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        print(f"{folder} is no empty folder: name another, or remove it.", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["scripts/gpu-evidence", *words])
    facts = [_fact(line) for line in FACTS]
    with tempfile.TemporaryDirectory() as scratch:
        parts = _run_all(_plan(asked, device, Path(scratch)), began + asked.limit, asked.workers)
        parts = [_joined(part, folder, command) for part in parts]
    facts.append(_fact(CLOCKS))
    log = [
        f"{_shown(job.words)}\n{job.output}({job.status}, {job.seconds:.1f} s)" for part in parts for job in part.jobs
    ]
    for name, texts in (("environment.txt", facts), ("log.txt", log)):
        (folder / name).write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    text = page(parts, command=command, seconds=time.monotonic() - began)
    (folder / "README.md").write_text(text, encoding="utf-8")
    print(f"{time.monotonic() - began:.0f} s, {folder / 'README.md'}")
    return 0


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu-evidence", description="Real CUDA graphs beside their emulation.")
    kinds = ("candidates", "miniatures", "first-look")
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="where it all goes; must be empty")
    parser.add_argument("--part", action="append", choices=kinds, help="only this part; may be repeated")
    parser.add_argument("--backend", default="*", metavar="PATTERN", help="only backends whose reference matches")
    parser.add_argument("--case", action="append", metavar="PATTERN", help="only these cases of smoke")
    parser.add_argument("--limit", type=float, default=440, metavar="S", help="stop all processes after S seconds")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="processes at a time")
    parser.add_argument("--emulated-only", action="store_true", help="both sides on the CPU: tries the script itself")
    asked = parser.parse_args(words)
    asked.part = asked.part or kinds
    return asked


def _device_name(device: str) -> str:
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else "emulated"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _plan(asked: argparse.Namespace, device: str, scratch: Path) -> list[Part]:
    """What is asked of whom, what matters most first."""
    side = "cuda" if device == "cuda" else "again"
    sides = {side: device, "emulated": "cpu"}
    smoke = ("--suite", "smoke", *(word for case in asked.case or () for word in ("--case", case)))
    graphs = ("--check", CHECK)
    others = tuple(word for check in BACKEND_CHECKS if check != CHECK for word in ("--check", check))
    plan = []
    for name, on in sides.items():
        plan.append(("candidates", name, on, builtin_names(), (*smoke, *graphs)))
        plan.append(("miniatures", name, on, _miniatures(), ("--suite", MINIATURE_SUITE, *graphs)))
    plan.append(("first-look", side, device, builtin_names(), (*smoke, *others)))
    parts = []
    for kind, name, on, refs, words in plan:
        jobs = [
            Job(ref, ("--backend", ref, *words, "--device", on), scratch / f"{kind}-{name}-{number}.jsonl")
            for number, ref in enumerate(refs)
            if kind in asked.part and fnmatch(ref, asked.backend)
        ]
        if jobs:
            parts.append(Part(kind, name, tuple(jobs)))
    return parts


def _miniatures() -> list[str]:
    """References of the backends in those files, but for the base they share."""
    refs = []
    for path in sorted(ROOT.glob(MINIATURES)):
        try:
            module = import_file(str(path), path)
        except BackendLoadError:
            refs.append(str(path.relative_to(ROOT)))  # asked for as it is, it says why
            continue
        refs += [
            f"{path.relative_to(ROOT)}:{name}"
            for name, found in vars(module).items()
            if isinstance(found, type) and issubclass(found, AttentionBackend) and found.__module__ == module.__name__
            if name != "Miniature"
        ]
    return refs


def _run_all(parts: list[Part], deadline: float, workers: int) -> list[Part]:
    with ThreadPoolExecutor(workers) as pool:
        running = [[pool.submit(_run, job, deadline) for job in part.jobs] for part in parts]
        try:
            return [
                replace(part, jobs=tuple(future.result() for future in futures))
                for part, futures in zip(parts, running, strict=True)
            ]
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)  # what runs ends with its own limit
            raise


def _run(job: Job, deadline: float) -> Job:
    """A run of one backend, killed with its process when its time is up; a fault of the device costs one case."""
    limit = min(JOB_LIMIT_S, deadline - time.monotonic())
    if limit <= 0:
        return job.ended("not begun: out of time")
    began = time.monotonic()
    command = [sys.executable, "-P", "-m", "attncheck", "run", *job.words, "--output", str(job.file)]
    output = job.file.with_suffix(".txt")  # a file: a grandchild that lives on would hold a pipe open
    with output.open("wb") as sink:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
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


def _joined(part: Part, folder: Path, command: str) -> Part:
    """The part with the one run file made of its jobs', and what could not be read or joined."""
    runs, problems = [], []
    for job in part.jobs:
        try:
            runs.append(read_run(job.file))
        except RunFileError as error:
            problems.append(f"{job.ref}: {error.reason}")
    run = None
    if runs:
        try:
            join_runs(runs, folder / part.file, shlex.split(command))
            run = read_run(folder / part.file)
        except RunFileError as error:
            problems.append(str(error))
    return replace(part, run=run, problems=tuple(problems))


def _fact(line: str) -> str:
    """A command and what it prints."""
    program, *words = shlex.split(line)
    command = [sys.executable, "-P", *words] if program == "python" else [program, *words]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"$ {line}\n{error}"
    return f"$ {line}\n{done.stdout}{done.stderr}".rstrip()


def _shown(words: tuple[str, ...]) -> str:
    return "$ " + shlex.join(["attncheck", "run", *words])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
