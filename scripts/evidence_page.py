"""The page that says what ``scripts/gpu-evidence`` found: from processes and run files to Markdown. Starts nothing.

What other pages say in the same way stands here, too.
"""

from collections.abc import Sequence

from evidence_jobs import Part

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.summary import summarise
from attncheck.reports.markdown import markup
from attncheck.reports.markdown.graph_agreement import compare, render
from attncheck.reports.run_file.header import Environment
from attncheck.reports.run_file.records import FALLEN_SHORT
from attncheck.reports.run_file.store import Run

HEAD = """\
Real CUDA graphs beside their emulation on the CPU, over the built-in candidates and the miniatures of
`tests/miniatures/graphs*.py`, then the other checks over suite smoke on the same device as a first look. Every backend
ran in a process of its own; `log.txt` holds what each printed, `environment.txt` the machine, and the run files can be
read with `attncheck report FILE`.
"""

TRIAL = "**No GPU was used: both sides are the emulation, which tries the script and shows nothing else.**"

USUAL = ("exit code 0", "exit code 1")
"""How a process ends that found every answer right, or some wrong."""


MOST_LINES = 200
"""Lines about records that fell short; a device that was lost can make thousands."""


def page(parts: Sequence[Part], *, command: str, seconds: float) -> str:
    """The whole page."""
    runs = [part.run for part in parts if part.run]
    device = runs[0].header.environment.device_name if runs else "no device"
    sections = [
        f"# CUDA graphs on {device}",
        HEAD.strip(),
        *([] if any(part.side == "cuda" for part in parts) else [TRIAL]),
        circumstances([run.header.environment for run in runs], command, seconds),
        "## What was run",
        what_was_run(parts),
        *problems(parts),
        *left_out(parts),
    ]
    for kind in ("candidates", "miniatures"):
        sections += _agreement(kind, [part for part in parts if part.kind == kind])
    for part in parts:
        if part.kind == "first-look" and part.run:
            sections += [f"## The other checks on {part.run.header.device}", *checks_table(part.run)]
    return "\n\n".join(sections) + "\n"


def circumstances(environments: Sequence[Environment], command: str, seconds: float) -> str:
    """Command, devices and versions."""
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


def what_was_run(parts: Sequence[Part]) -> str:
    """The parts, in a table."""
    return markup.table(["part", "processes", "how they ended", "records", "run file"], map(_row, parts))


def _row(part: Part) -> list[str]:
    """One part: how its processes ended, and what its records come to."""
    ends = [job.status for job in part.jobs]
    told = ", ".join(f"{ends.count(status)} x {status}" for status in dict.fromkeys(ends))
    if part.run is None:
        return [f"{part.kind}, {part.side}", str(len(ends)), told, "none", "none"]
    counts = phrases.closing(summarise(part.run.records), part.run.errors)
    return [f"{part.kind}, {part.side}", str(len(ends)), told, counts, f"[{part.file}]({part.file})"]


def problems(parts: Sequence[Part]) -> list[str]:
    """What ended otherwise than a run does, with its last words; what could not be read or joined."""
    lines = []
    for part in parts:
        for job in part.jobs:
            if job.status not in USUAL:
                last = next(iter(job.output.strip().splitlines()[::-1]), "it printed nothing")
                lines.append(f"- {part.kind}, {part.side}: {markup.escaped(f'{job.ref}: {job.status}: {last}')}")
        lines += [f"- {part.kind}, {part.side}: {markup.escaped(problem)}" for problem in part.problems]
    return ["What did not end as a run does:", "\n".join(lines)] if lines else []


def left_out(parts: Sequence[Part]) -> list[str]:
    """Candidates that one side was not asked of."""
    lines = []
    for part in parts:
        reasons = dict.fromkeys(part.left_out.values())
        told = [f"{', '.join(ref for ref in part.left_out if part.left_out[ref] == why)}: {why}" for why in reasons]
        lines += [f"- {part.kind}, {part.side}: {markup.escaped(text)}" for text in told]
    return ["Left out, so that nothing is said of them there:", "\n".join(lines)] if lines else []


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


def checks_table(run: Run) -> list[str]:
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
        f"Passed of examined. {phrases.closing(summary, run.errors)}.",
        markup.table(["backend", *summary.checks, "worst error (budgets)"], rows),
        *(["\n".join(f"- {markup.escaped(line)}" for line in short[:MOST_LINES])] if short else []),
        *([f"And {len(short) - MOST_LINES} more, which the run file holds."] if len(short) > MOST_LINES else []),
    ]
