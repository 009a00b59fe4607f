"""One run file made of several: backends asked the same in processes of their own, so that none can harm another.

Must not know: how the runs were made, or how a run is shown.
"""

from collections.abc import Sequence
from pathlib import Path

from attncheck.errors import RunFileError
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.store import Run, RunWriter


def join_runs(runs: Sequence[Run], path: Path, command: Sequence[str] = ()) -> None:
    """Write the records of all ``runs`` (one at least) into a new run file, as one run that ``command`` asked for.

    A run that was cut off is an error of the whole, and what it holds is kept.

    Raises:
        RunFileError: a run asks other cases or checks than the first, or was made in other circumstances; or ``path``
            cannot be written or exists already.
        ValueError: two runs hold the same record.
    """
    first = runs[0].header
    for run in runs[1:]:
        if reason := _difference(first, run.header):
            raise RunFileError(run.path, f"cannot be joined with {runs[0].path}: {reason}")
    backends = tuple({backend.name: backend for run in runs for backend in run.header.backends}.values())
    notes = tuple(dict.fromkeys(note for run in runs for note in run.header.notes))
    header = first.model_copy(update={"backends": backends, "notes": notes, "command": tuple(command)})
    with RunWriter(path, header) as writer:
        for run in runs:
            for record in run.records:
                writer.add(record)
            for error in run.errors:
                writer.fail(error)
            if not run.complete:
                asked = ", ".join(backend.name for backend in run.header.backends)
                writer.fail(f"the run of {asked} was cut off after {len(run.records)} records")


def _difference(one: RunHeader, other: RunHeader) -> str | None:
    """What two headers must have in common, and have not."""
    for name in ("suites", "checks", "device", "seed", "environment"):
        if getattr(one, name) != getattr(other, name):
            return f"not the same {name}"
    return None
