"""The page that says what ``scripts/gpu-evidence`` found: from processes and run files to Markdown. Starts nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from attncheck.reports import markup, phrases
from attncheck.reports.graph_agreement import compare, render
from attncheck.reports.records import FALLEN_SHORT, Environment
from attncheck.reports.store import Run
from attncheck.reports.summary import summarise

HEAD = """\
Real CUDA graphs beside their emulation on the CPU, over the built-in candidates and the miniatures of
`tests/miniatures/graphs*.py`, then the other checks over suite smoke on the same device as a first look. Every backend
ran in a process of its own; `log.txt` holds what each printed, `environment.txt` the machine, and the run files can be
read with `attncheck report FILE`.
"""

TRIAL = "**No GPU was used: both sides are the emulation, which tries the script and shows nothing else.**"

USUAL = ("exit code 0", "exit code 1")
"""How a process ends that found every answer right, or some wrong."""


@dataclass(frozen=True)
class Job:
    """One process: ``attncheck run`` of one backend, ``ref``, into a run ``file``; and how it ended."""

    ref: str
    words: tuple[str, ...]
    file: Path
    status: str = ""
    output: str = ""
    seconds: float = 0.0

    def ended(self, status: str, output: str = "", seconds: float = 0.0) -> "Job":
        """The job as it ended."""
        return replace(self, status=status, output=output, seconds=seconds)


@dataclass(frozen=True)
class Part:
    """What was asked of several backends on one side, ``cuda`` or ``emulated``. ``run``: all that they left behind."""

    kind: str
    side: str
    jobs: tuple[Job, ...]
    run: Run | None = None
    problems: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """Name of the run file."""
        return f"{self.kind}-{self.side}.jsonl"


def page(parts: Sequence[Part], *, command: str, seconds: float) -> str:
    """The whole page."""
    runs = [part.run for part in parts if part.run]
    device = runs[0].header.environment.device_name if runs else "no device"
    sections = [
        f"# CUDA graphs on {device}",
        HEAD.strip(),
        *([] if any(part.side == "cuda" for part in parts) else [TRIAL]),
        _circumstances([run.header.environment for run in runs], command, seconds),
        "## What was run",
        markup.table(["part", "processes", "how they ended", "records", "run file"], map(_row, parts)),
        *_problems(parts),
    ]
    for kind in ("candidates", "miniatures"):
        sections += _agreement(kind, [part for part in parts if part.kind == kind])
    for part in parts:
        if part.kind == "first-look" and part.run:
            sections += _first_look(part.run)
    return "\n\n".join(sections) + "\n"


def _circumstances(environments: Sequence[Environment], command: str, seconds: float) -> str:
    lines = [f"- Command: {markup.code(command)}, {seconds:.0f} s"]
    for env in {each.device: each for each in environments}.values():
        gpu = f", compute capability {env.capability}, driver {env.driver}" if env.driver else ""
        lines.append(f"- {env.device}: {env.device_name}{gpu}")
    lines += [
        f"- attncheck {env.attncheck}, commit {env.git_commit or 'unknown'}, torch {env.torch}, Python {env.python}, "
        f"{phrases.plural(env.cores, 'core')}, {env.platform}"
        for env in environments[:1]
    ]
    return "\n".join(lines)


def _row(part: Part) -> list[str]:
    """One part: how its processes ended, and what its records come to."""
    ends = [job.status for job in part.jobs]
    told = ", ".join(f"{ends.count(status)} x {status}" for status in dict.fromkeys(ends))
    if part.run is None:
        return [f"{part.kind}, {part.side}", str(len(ends)), told, "none", "none"]
    counts = phrases.closing(summarise(part.run.records), part.run.errors)
    return [f"{part.kind}, {part.side}", str(len(ends)), told, counts, f"[{part.file}]({part.file})"]


def _problems(parts: Sequence[Part]) -> list[str]:
    """What ended otherwise than a run does, with its last words; what could not be read or joined."""
    lines = []
    for part in parts:
        for job in part.jobs:
            if job.status not in USUAL:
                last = next(iter(job.output.strip().splitlines()[::-1]), "it printed nothing")
                lines.append(f"- {part.kind}, {part.side}: {markup.escaped(f'{job.ref}: {job.status}: {last}')}")
        lines += [f"- {part.kind}, {part.side}: {markup.escaped(problem)}" for problem in part.problems]
    return ["What did not end as a run does:", "\n".join(lines)] if lines else []


def _agreement(kind: str, parts: Sequence[Part]) -> list[str]:
    """The table that compares both sides, and how long each took."""
    match [part for part in parts if part.run]:
        case [Part(run=Run() as left), Part(run=Run() as right)]:
            rows = compare(left.records, right.records)
            return [f"## {kind.capitalize()}: do both sides agree?", render(rows, parts[0].side, parts[1].side)]
        case _:
            return (
                [f"## {kind.capitalize()}", "Only one side ran, or none: there is nothing to compare."] if parts else []
            )


def _first_look(run: Run) -> list[str]:
    """Passed of examined for each backend and check, and what fell short, one line each."""
    summary = summarise(run.records, checks=run.header.checks)
    rows = [
        [
            markup.escaped(backend),
            *(
                f"{tally['passed']}/{tally.examined}" if (tally := summary.by_check.get((backend, check))) else "-"
                for check in summary.checks
            ),
            phrases.budgets(summary.by_backend[backend].worst_share),
        ]
        for backend in summary.backends
    ]
    short = [
        f"{record.backend}, {record.case}, {record.check}, {record.outcome}: {phrases.what_happened(record)}"
        for record in run.records
        if record.outcome in FALLEN_SHORT
    ]
    return [
        f"## The other checks on {run.header.device}",
        f"Passed of examined. {phrases.closing(summary, run.errors)}.",
        markup.table(["backend", *summary.checks, "worst error (budgets)"], rows),
        *(["\n".join(f"- {markup.escaped(line)}" for line in short)] if short else []),
    ]
