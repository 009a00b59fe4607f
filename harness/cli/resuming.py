"""``--resume``: completes a run that was cut off, in the same run file. Loads no torch."""

import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from attncheck.errors import RunFileError
from attncheck.harness.cli.output import print_stderr
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.merging import question_differences
from attncheck.reports.run_file.records import EXAMINED, Record
from attncheck.reports.run_file.store import Run, lacks_header, read_run
from attncheck.reports.run_file.timings import TIMING

Found = tuple[str, str, str, int]
"""Identity of an examined check: reference of the backend, ``suite/id`` of the case, check, round."""


def read_part(path: Path, header: RunHeader) -> Run:
    """Return the run of ``path`` as the first part of the run of ``header``; it may be complete.

    Raises:
        RunFileError: the file is no run, is compressed, or examines something else than ``header``.
    """
    if path.suffix != ".jsonl":
        raise RunFileError(str(path), "cannot be resumed: its name does not end in .jsonl")
    if lacks_header(path):
        print_stderr(f"note: {path}: its header was cut off; the run starts from the beginning")
        return Run(str(path), header, ())
    run = read_run(path)
    if not run.complete and not path.read_bytes().endswith(b"\n"):
        if not run.cut_line:  # its last record has no end of line, and is examined again
            run = replace(run, records=run.records[:-1])
        print_stderr(f"note: {path}: the last line was cut off, and is written again")
    if differences := question_differences(run.header, header):
        reason = f"this command differs from that of the run in {', '.join(differences)}; repeat the command of the run"
        raise RunFileError(str(path), reason)
    return run


def found_in(records: Iterable[Record], rounds: int) -> frozenset[Found]:
    """Return what ``records`` have examined; checks not examined in round 0 count as done in all rounds."""
    found = set()
    for record in records:
        is_final = record.check == TIMING and record.round == 0 and record.outcome not in EXAMINED
        numbers = range(rounds) if is_final else (record.round,)
        found |= {(record.backend_ref, record.case, record.check, number) for number in numbers}
    return frozenset(found)


def resume_command(command: Iterable[str], path: Path) -> str:
    """Return the command that resumes the run of ``command`` with run file ``path``."""
    words = list(command)
    for name in ("--output", "--resume"):
        if name in words:
            index = words.index(name)
            del words[index : index + 2]
    kept = [word for word in words if not word.startswith(("--output=", "--resume="))]
    return shlex.join([*kept, "--resume", str(path)])
