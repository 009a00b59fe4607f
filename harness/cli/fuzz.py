"""The commands ``fuzz`` and ``shrink``."""

import math
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attncheck.backends.registry import known_names
from attncheck.cases.loader import load_suite
from attncheck.cases.yaml_text import case_yaml
from attncheck.errors import SelectionError, unwritable
from attncheck.harness.cli import common
from attncheck.harness.cli.common import interruptible, make_folder, print_foreign
from attncheck.harness.cli.options import Given, read_options, with_options
from attncheck.harness.cli.run_files import is_kept, kept_folder, make_kept_folder, run_path
from attncheck.harness.fuzz.shrink import (
    BackendProcess,
    Failure,
    Shrinker,
    SmallFailure,
    num_keys,
    search_failures,
    size_in_words,
)
from attncheck.harness.fuzz.stand_alone import write_stand_alone
from attncheck.harness.run.options import RunOptions, read_time
from attncheck.harness.run.selection import check_seed
from attncheck.harness.workers.limits import worker_settings
from attncheck.harness.workers.pool import WorkerPool
from attncheck.reference.spec import DEFAULT_CHECKS
from attncheck.reports.analysis.findings import stated_cause
from attncheck.reports.analysis.phrases import plural
from attncheck.reports.analysis.repro import assignments, repro_command
from attncheck.reports.run_file.records import ENGINE_CHECKS, OURSELVES, UTILITIES, Ended, Errored, Failed
from attncheck.reports.run_file.store import Run, read_run

if TYPE_CHECKING:
    from attncheck.cases.model import Case
    from attncheck.harness.fuzz.search import DrawnQuestion
    from attncheck.harness.fuzz.shrink import ExaminedCase
    from attncheck.reports.run_file.records import Record

# Shared by `fuzz` and `shrink`: the backend's process, and writing and printing of small failures.


@contextmanager
def backend_process(ref: str, options: RunOptions) -> Iterator[BackendProcess]:
    """Yield a process of the backend, with the limits, the device and the seed of ``options``; end it on leaving."""
    with WorkerPool(settings=worker_settings(options)) as pool:
        yield BackendProcess(ref, pool, device=options.device, seed=check_seed(options.seed))


def folder_for(output: Path | None, command: str) -> Path:
    """Create the folder for small failures, ``output`` or a new one among the kept runs, and return it.

    Raises:
        WriteError: the folder cannot be created.
    """
    folder = output or kept_folder() / f"{command}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if output is None:
        with suppress(OSError):  # the next step raises it, with the name of the folder
            make_kept_folder(folder.parent)
    make_folder(folder, f"--output {folder}")
    return folder


def print_small(process: BackendProcess, failure: SmallFailure, folder: Path) -> int:
    """Write the small case and its stand-alone file, print how it was reduced, and return the exit code."""
    first, small, shrunk = failure.first, failure.small, failure.shrunk
    record = small.record
    print_foreign(
        f"\n{record.outcome}  {process.backend.name}  {record.check}: {small.case.description or first.way[2]}"
    )
    typer.echo(f"  found: {size_in_words(first.case)}")
    if shrunk is None:
        typer.echo("  does not fail again by itself: it depends on the cases before it, or on chance")
    else:
        tried = f"{shrunk.tried} steps tried in {shrunk.seconds:.1f} s{'' if shrunk.is_finished else ', out of time'}"
        typer.echo(f"  small: {size_in_words(small.case)} ({tried})")
    if isinstance(record, Failed) and record.meaning:
        print_foreign(f"  {stated_cause(record)}")
    written = _write_case(small, folder)
    repeat = record.model_copy(update={"suite": str(written), "case_id": small.case.id})
    environment = process.backend.info.required_environment
    print_foreign(f"  repeat: {repro_command(repeat, environment=environment)}")
    answer = write_stand_alone(process, small, written.with_suffix(".py"))
    if answer.written:
        words = f"with {answer.needs}" if answer.needs else "without attncheck"
        print_foreign(f"  {words}: {assignments(environment)}python {written.with_suffix('.py')}")
    else:
        print_foreign(f"  no stand-alone file: {answer.reason}")
    is_ours = isinstance(record, Errored) and record.stage == OURSELVES
    return 3 if is_ours else 1


def _write_case(failure: Failure, folder: Path) -> Path:
    path = folder / f"{failure.record.check}-{failure.case.hash}.yaml"
    try:
        path.write_text(case_yaml(failure.case), encoding="utf-8")
    except OSError as error:
        raise unwritable(str(path), error) from error
    return path


# `attncheck fuzz`: draws cases that no suite has, shrinks failing ones and writes them to files. Loads no torch.

Budget = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="Time for cases and for reducing failures, such as 90s, 5m or 1h, once the backend is loaded. Writing the "
        "stand-alone file of a failure starts torch twice more.",
    ),
]
ShrinkTime = Annotated[
    float, typer.Option("--shrink-time", min=0, metavar="SECONDS", help="Seconds to reduce one failure.")
]
OutputFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="The folder for the reduced cases. Default: a new folder in results/ if that exists, else in the user's "
        "cache.",
    ),
]

_OF_PROCESSES = ("case_timeout", "memory_limit", "pass_env")
"""Options of the processes of backends."""


@with_options("backends", "seed", "checks", *_OF_PROCESSES, "device")
def fuzz(
    context: typer.Context,
    given: Given,
    *,
    budget: Budget = "60s",
    maxfail: Annotated[int, typer.Option(min=1, metavar="N", help="Stop after N different failures.")] = 10,
    shrink_time: ShrinkTime = 30.0,
    output: OutputFolder = None,
) -> int:
    """Examine a backend with random cases; reduce each failure.

    A case combines values of layer, cache, batch and path that the backend declares. The first cases cover every pair
    of values; later ones are random. Lengths lie next to page sizes, windows and constants in the backend's source. One
    case in ten has an undeclared value, which the backend must refuse or support correctly. Each different failure is
    reduced and written twice: as a case file for `attncheck run --suite FILE`, and as a Python file that needs no
    attncheck. The same seed draws the same cases. Exit code 1: a case failed.
    """
    context.with_resource(interruptible())
    limit_s = read_time("--budget", budget)
    options = read_options(given)
    refs, checks = options.backends, _backend_checks(options.checks)
    if len(refs) != 1:
        raise SelectionError(f"fuzz examines one backend, and {len(refs)} are given; name one as in `attncheck run`")
    outcomes = Counter[str]()
    with ExitStack() as stack:
        process = stack.enter_context(backend_process(refs[0], options))
        began = time.monotonic()
        ends = began + limit_s
        print_foreign(f"fuzz {process.backend.name} on {process.device}, seed {options.seed}")
        typer.echo(f"{limit_s:g} s for cases and for reducing failures, each for at most {shrink_time:g} s")

        def see(_question: "DrawnQuestion", examined: "ExaminedCase") -> None:
            is_examined = any(record.outcome != "unsupported" for record in examined.records)
            outcomes["blind" if examined.blind else "examined" if is_examined else "not examined"] += 1
            if sys.stderr.isatty():
                typer.echo(f"\r{plural(outcomes.total(), 'case')} drawn ", err=True, nl=False)

        code = 0
        shrinker = Shrinker(process)
        known = dict[str, Path]()
        for failure in search_failures(process, seed=options.seed, ends=ends, checks=checks, most=maxfail, see=see):
            folder = next(iter(known.values()), None) or folder_for(output, "fuzz")
            small = shrinker.make_small(failure, min(shrink_time, ends - time.monotonic()))
            if small.small.case.hash not in known:
                code = max(code, print_small(process, small, folder))
            known[small.small.case.hash] = folder
        drawn = f"{plural(outcomes.total(), 'case')} drawn"
        counts = ", ".join(f"{number} {word}" for word, number in sorted(outcomes.items()))
        seconds = time.monotonic() - began
        typer.echo(f"\n{drawn}: {counts or 'none'}; failures: {len(known)}; {seconds:.1f} s in all")
        if not outcomes["examined"]:
            raise SelectionError(f"no drawn case of backend {refs[0]!r} was examined")
        return code


def _backend_checks(chosen: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the checks to run, or None for all that apply.

    Raises:
        SelectionError: one of them does not run on drawn cases.
    """
    for name in chosen:
        if name not in DEFAULT_CHECKS:
            raise SelectionError(f"check {name!r} does not run on drawn cases; give one of {', '.join(DEFAULT_CHECKS)}")
    return chosen or None


# `attncheck shrink`: reduces a recorded failure to a small case, and writes it to files. Loads no torch.


@with_options(*_OF_PROCESSES)
def shrink(
    context: typer.Context,
    given: Given,
    *,
    record: Annotated[
        str,
        typer.Argument(
            metavar="[RUN][::CASE[::CHECK]]",
            help="Run, case and check, as run.jsonl::smoke/decode::lse or last~1. Default: the newest kept run, its "
            "smallest failing case, and the first check that failed.",
            show_default=False,
        ),
    ] = "",
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The backend, if a case did not pass for several, or if a run file from elsewhere names its code.",
            autocompletion=common.backends,
        ),
    ] = None,
    shrink_time: ShrinkTime = 30.0,
    output: OutputFolder = None,
) -> int:
    """Reduce a failure of a run to a small case.

    The result has few requests and heads, short lengths and default values. A smaller case is accepted if the same
    check has the same outcome. The smallest one is written twice: as a case file for `attncheck run --suite FILE`, and
    as a Python file that needs no attncheck. Exit code 1: the case still fails; 0: it passes now, or fails in another
    way.
    """
    context.with_resource(interruptible())

    word, _, rest = record.partition("::")
    case_id, _, check = rest.partition("::")
    run = read_run(run_path(word or "last"))
    failure = recorded_failure(run, case_id, check, backend)
    if failure.record.backend_ref != backend and not is_kept(Path(run.path)):
        refuse_unnamed(failure.record.backend_ref, run.path, "shrink")
    options = read_options(given, device=run.header.device, seed=failure.record.seed)
    with backend_process(failure.record.backend_ref, options) as process:
        print_foreign(f"reducing {failure.case.key} {failure.record.check} of {run.path}")
        small = Shrinker(process).make_small(failure, shrink_time)
        if small.shrunk is None:
            print_foreign(f"{failure.case.key} {failure.record.check}: passes now, or fails in another way")
            return 0
        return print_small(process, small, folder_for(output, "shrink"))


def refuse_unnamed(ref: str, path: str, command: str) -> None:
    """Raise SelectionError if a file that may be foreign chooses code that is neither registered nor named.

    The author of a run file or statement chooses its references; loading one runs its code.
    """
    family, _, name = ref.partition(":")
    if family not in known_names() or (name and not name.isidentifier()):
        quoted = shlex.quote(ref)
        raise SelectionError(
            f"{path} names the code {ref}, which {command} would run; to allow it, add --backend {quoted}"
        )


def recorded_failure(run: Run, case_id: str, check: str, backend: str | None) -> Failure:
    """Return the first failure in ``run`` that matches, with its case as loaded from the suite now.

    ``case_id``: if empty, the smallest case that failed. ``check``: if empty, the first that failed.

    Raises:
        SelectionError: no failure matches, or those of several backends do; the suite has changed; the backend has no
            reference.
        CaseFileError, UnknownNameError: the suite no longer exists.
    """
    short = [each for each in run.records if isinstance(each, Failed | Errored | Ended)]
    short = [each for each in short if each.check != UTILITIES and each.check not in ENGINE_CHECKS]
    meant = [each for each in short if case_id in ("", each.case_id, each.case) and check in ("", each.check)]
    meant = [each for each in meant if backend in (None, each.backend, each.backend_ref)]
    if not meant:
        known = ", ".join(dict.fromkeys(f"{each.case}::{each.check}" for each in short[:8])) or "none"
        what = "it" if not case_id else f"{case_id} in check {check}" if check else case_id
        raise SelectionError(f"{run.path}: {what} has no failure; failures of this run: {known}")
    backends = tuple(dict.fromkeys(each.backend for each in meant))
    if case_id and len(backends) > 1:
        raise SelectionError(f"{run.path}: {case_id} did not pass for {', '.join(backends)}; choose one with --backend")
    named = [each for each in meant if not each.backend_ref.startswith("<")]
    if not named:
        raise SelectionError(f"{backends[0]} was handed over in Python, and cannot be loaded by name; run its file")
    cases = _recorded_cases(run, named)
    if not case_id:  # cases that have changed since the run come last
        named.sort(key=lambda record: num_keys(cases[record.case]) if record.case in cases else math.inf)
    record = named[0]
    if record.case not in cases:
        ref = run.header.suite_ref(record.suite)
        raise SelectionError(
            f"{run.path}: case {record.case} has changed in suite {ref} since the run; run the suite again"
        )
    return Failure(cases[record.case], record)


def _recorded_cases(run: Run, records: Sequence["Record"]) -> dict[str, "Case"]:
    """Return the cases of the records by ``suite/id``, as loaded now, without those that have changed since the run."""
    hashes = {record.case: record.case_hash for record in records}
    suites = {run.header.suite_ref(record.suite) for record in records}
    loaded = (case for ref in suites for case in load_suite(ref))
    return {case.key: case for case in loaded if hashes.get(case.key) == case.hash}
