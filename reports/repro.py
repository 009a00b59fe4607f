"""The one line that repeats a record: made to be pasted into a POSIX shell, from the directory of the first run.

Must not know: anything but the record's fields and the run's header.
"""

import shlex

from attncheck.reports.records import Record, RunHeader


def repro_command(record: Record, header: RunHeader | None = None) -> str:
    """``attncheck run ...`` for this backend, case, check and seed alone, in one plain process.

    The header adds what a record does not say: the file of a suite that is not built in, and the device. A seed of 0
    is the default and left out.
    """
    suite = record.suite if header is None else header.suite_ref(record.suite)
    words = ["attncheck", "run", "--backend", record.backend_ref, "--suite", suite, "--case", record.case_id]
    words += ["--check", record.check]
    if record.seed:
        words += ["--seed", str(record.seed)]
    if header is not None:
        words += ["--device", header.device]
    return shlex.join([*words, "--in-process"])
