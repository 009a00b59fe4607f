"""``attncheck shrink``: reduces a recorded failure to a small case, and writes it to files. Loads no torch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attncheck.errors import SelectionError
from attncheck.harness.cli import completion
from attncheck.harness.cli import process_arguments as processes
from attncheck.harness.cli.fuzz import OutputFolder, ShrinkTime
from attncheck.harness.cli.interruption import interruptible

if TYPE_CHECKING:
    from attncheck.harness.fuzz.failures import Failure
    from attncheck.reports.run_file.store import Run


def shrink(
    context: typer.Context,
    record: Annotated[
        str,
        typer.Argument(metavar="RUN::CASE[::CHECK]", help="Run file, case and check, as run.jsonl::smoke/decode::lse."),
    ],
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The backend, if the case did not pass for several.",
            autocompletion=completion.backends,
        ),
    ] = None,
    shrink_time: ShrinkTime = 30.0,
    output: OutputFolder = None,
    case_timeout: processes.CaseTimeout = None,
    memory_limit: processes.MemoryLimit = None,
    pass_env: processes.PassEnv = None,
) -> int:
    """Reduce a failure of a run to a small case.

    The result has few requests and heads, short lengths and default values. A smaller case is accepted if the same
    check has the same outcome. The smallest one is written twice: as a case file for `attncheck run --suite FILE`, and
    as a Python file that needs no attncheck. Exit code 1: the case still fails; 0: it passes now, or fails in another
    way.
    """
    context.with_resource(interruptible())

    from attncheck.harness.cli.small_failures import backend_process, folder_for, print_small
    from attncheck.harness.fuzz.failures import Shrinker
    from attncheck.reports.run_file.store import read_run

    path, case_id, check = _parts(record)
    run = read_run(path)
    failure = recorded_failure(run, case_id, check, backend)
    with backend_process(
        failure.record.backend_ref,
        device=run.header.device,
        seed=failure.record.seed,
        case_timeout=case_timeout,
        memory_limit=memory_limit,
        pass_env=pass_env,
    ) as process:
        small = Shrinker(process, shrink_time).make_small(failure)
        if small.shrunk is None:
            typer.echo(f"{failure.case.key} {failure.record.check}: passes now, or fails in another way")
            return 0
        return print_small(process, small, folder_for(output, "shrink"))


def _parts(record: str) -> tuple[Path, str, str]:
    """Return run file, case and check of ``RUN::CASE[::CHECK]``; an empty check means the first that failed.

    Raises:
        SelectionError: the run file or the case is missing.
    """
    run, _, rest = record.partition("::")
    case, _, check = rest.partition("::")
    if not run or not case:
        raise SelectionError(f"{record!r}: give RUN::CASE[::CHECK], such as run.jsonl::smoke/decode::numerics")
    return Path(run), case, check


def recorded_failure(run: "Run", case_id: str, check: str, backend: str | None) -> "Failure":
    """Return the first failure in ``run`` that matches, with its case as loaded from the suite now.

    Raises:
        SelectionError: no failure matches, or those of several backends do; the suite has changed; the backend has no
            reference.
        CaseFileError, UnknownNameError: the suite no longer exists.
    """
    from attncheck.cases.loader import load_suite
    from attncheck.harness.fuzz.failures import Failure
    from attncheck.reports.run_file.records import Ended, Errored, Failed

    short = [each for each in run.records if isinstance(each, Failed | Errored | Ended)]
    meant = [each for each in short if case_id in (each.case_id, each.case) and check in ("", each.check)]
    meant = [each for each in meant if backend in (None, each.backend, each.backend_ref)]
    if not meant:
        known = ", ".join(dict.fromkeys(f"{each.case}::{each.check}" for each in short[:8])) or "none"
        by = f" in check {check}" if check else ""
        raise SelectionError(f"{run.path}: {case_id} has no failure{by}; failures of this run: {known}")
    backends = tuple(dict.fromkeys(each.backend for each in meant))
    if len(backends) > 1:
        raise SelectionError(f"{run.path}: {case_id} did not pass for {', '.join(backends)}; choose one with --backend")
    record = meant[0]
    if record.backend_ref.startswith("<"):
        raise SelectionError(f"{record.backend} was handed over in Python, and cannot be loaded by name; run its file")
    ref = run.header.suite_ref(record.suite)
    case = next((each for each in load_suite(ref) if each.id == record.case_id), None)
    if case is None or case.hash != record.case_hash:
        raise SelectionError(
            f"{run.path}: case {record.case} has changed in suite {ref} since the run; run the suite again"
        )
    return Failure(case, record)
