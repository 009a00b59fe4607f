"""``attncheck run``: put the cases of suites to backends, write a run file, print the table."""

import contextlib
import faulthandler
import io
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attncheck.errors import QuestionError, SelectionError
from attncheck.harness.cli.output import use_color

if TYPE_CHECKING:
    from attncheck.harness.cli.preparation import RunResult
    from attncheck.harness.cli.progress import RunProgress
    from attncheck.harness.providers.plan import ProviderPlan
    from attncheck.harness.run.expectations import Expectations
    from attncheck.harness.run.selection import Selection
    from attncheck.reports.run_file.header import RunHeader
    from attncheck.reports.run_file.records import Record

RESULTS = Path("results")


def run(
    context: typer.Context,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REF",
            help="A backend: its name, vllm:NAME, module:NAME, or file.py:NAME of a class or function. May be "
            "repeated. Default: all built-in ones.",
        ),
    ] = None,
    provider: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REF",
            help="A provider of metadata utilities: vllm, a module, or file.py. May be repeated. Without --backend, "
            "no backend is examined.",
        ),
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE",
            help="A built-in suite, or a YAML file. May be repeated. Default: smoke, or interpreted for backends whose "
            "kernels are interpreted; for providers alone also named_batches and padding.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Replace a default of the suites, such as cache.block_size=32, cache.layout=HND, layer.head_size=96. "
            "Cases that say otherwise for themselves keep what they say. May be repeated.",
        ),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Only cases whose id, or suite/id, matches this shell pattern (*, ?, [...]). May be repeated.",
        ),
    ] = None,
    check: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this check. May be repeated. Default: all, but for timing."),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Take the times of the check timing in N fresh processes of each backend, in turn. Default: 10.",
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            metavar="S", help="Seconds that the check timing may sample a part of a step in a process. Default: 0.25."
        ),
    ] = None,
    warm_cache: Annotated[
        bool,
        typer.Option("--warm-cache", help="Time without flushing the GPU's L2 cache before each sample."),
    ] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Name the kernels of each timed step, as the profiler sees them.")
    ] = False,
    function: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Only functions of providers whose name matches this shell pattern. May be repeated.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu, cuda or cuda:N. Default: cuda where a GPU is.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the inputs.")] = 0,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The run file; must not exist. Default: results/<time>.jsonl.")
    ] = None,
    exitfirst: Annotated[bool, typer.Option("--exitfirst", help="Stop at the first record that falls short.")] = False,
    expect: Annotated[Path | None, typer.Option(metavar="FILE", help="Expected failures, as YAML.")] = None,
    dump: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the tensors of each failing case into this folder.")
    ] = None,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process",
            help="Examine backends in this process, not each in one of its own, and without a progress display: for "
            "debuggers, profilers, sanitizers.",
        ),
    ] = False,
) -> int:
    """Examine backends, or providers of metadata utilities, and print what they are worth.

    Without options: suite smoke (interpreted, where kernels are), every built-in backend, the best device. Each
    backend is examined in a process of its own: one that kills its process loses a case, and the others nothing. Times
    (--check timing) are taken in rounds, each in a fresh process that is alone. Every record goes into a run file,
    which `attncheck report` reads.
    """
    from attncheck.harness.providers.request import ProviderRequest
    from attncheck.harness.run.backend_choice import asked_first
    from attncheck.harness.run.selection import choose_rounds, choose_timing, select_cases
    from attncheck.harness.workers.worker_pool import WorkerPool

    began = time.monotonic()
    request = ProviderRequest(tuple(provider or ()), tuple(function or ()), tuple(check or ()), bool(backend))
    selection = select_cases(request.suites(suite or ()), case or (), request.backend_checks, settings or ())
    refs = None if request.are_alone else tuple(backend or ())
    timing = choose_timing(selection, limit_s=time_limit, warm=warm_cache, kernels=kernels)
    is_timed = refs is not None and selection.is_timed
    rounds = choose_rounds(rounds, is_timed=is_timed, in_process=in_process)
    _make_folder(dump)
    with WorkerPool() as workers:
        if refs is not None and not in_process:
            workers.start(asked_first(refs, selection.suites))  # they import torch while this process does

        from attncheck.harness.cli.nothing_examined import refuse_empty_run
        from attncheck.harness.cli.preparation import prepare_run
        from attncheck.harness.cli.progress import progress_for
        from attncheck.harness.providers.plan import plan_providers
        from attncheck.harness.providers.records import announced, examine_providers
        from attncheck.harness.run.evaluation import OURSELVES
        from attncheck.harness.run.outcomes import Circumstances
        from attncheck.harness.run.run_header import make_header
        from attncheck.harness.run.timing_rounds import count_questions
        from attncheck.reports.run_file.records import FALLEN_SHORT
        from attncheck.reports.terminal import run as terminal

        prepared = prepare_run(
            selection,
            refs,
            device=device,
            seed=seed,
            dump=dump,
            patterns=case or (),
            workers=None if in_process else workers,
            timing=timing,
            rounds=rounds,
        )
        selection, plan, examination = prepared.selection, prepared.plan, prepared.examination
        functions = plan_providers(request.refs, request.patterns, plan.cases, plan.device, seed)
        infos = [each.info for each in prepared.backends]
        header = make_header(
            selection, plan, infos, prepared.environment, command=context.obj or (), notes=prepared.notes
        )
        header = announced(header, functions)
        circumstances = Circumstances(seed, prepared.environment.digest, prepared.environment.attncheck)
        found = itertools.chain(examination.run(), examine_providers(functions, circumstances))
        expectations = _expectations(expect, selection, functions, header)
        path = output or _free_path()
        typer.echo(terminal.opening(header))
        with contextlib.suppress(io.UnsupportedOperation):  # a captured stderr has no descriptor to write to
            faulthandler.enable()  # a kernel that kills the process says at least where
        try:
            with progress_for(
                count_questions(plan, [info.ref for info in infos]) + functions.count,
                rounds=plan.rounds,
                silent=in_process,
                is_timed=is_timed,
            ) as watcher:
                records, unmet, stopped = _examine(
                    found, examination, header, path, expectations, watcher, exitfirst=exitfirst
                )
        except KeyboardInterrupt:
            typer.echo(f"what was found so far is in {path}", err=True)
            raise
    typer.echo()
    errors = [*map(str, examination.blind), *unmet]
    typer.echo(terminal.render(header, records, errors=errors, color=use_color()))
    for line in expectations.unseen() if expectations and not stopped else ():
        typer.echo(line)
    if stopped:
        typer.echo("stopped at the first record that fell short (--exitfirst): what follows it was not examined")
    typer.echo(f"{time.monotonic() - began:.1f} s, run file: {path}")
    ours = [record for record in records if record.outcome == "errored" and record.stage == OURSELVES]
    if ours:
        typer.echo(f"attncheck itself failed at {ours[0].case}: {ours[0].error_type}: {ours[0].message}", err=True)
        return 3
    if unmet or any(record.outcome in FALLEN_SHORT for record in records):
        return 1
    if examination.blind:
        raise SelectionError("a case that cannot see what it asks about proves nothing; mend it (errors above)")
    refuse_empty_run(records, header, by_name=bool(backend or provider))
    return 0


def _expectations(
    file: Path | None, selection: "Selection", functions: "ProviderPlan", header: "RunHeader"
) -> "Expectations | None":
    if file is None:
        return None
    from attncheck.harness.providers.records import asked_names, every_name
    from attncheck.harness.run.expectations import Expectations, load_expectations

    return Expectations(
        load_expectations(file),
        cases=(*selection.all_cases, *every_name(functions)),
        selected=(*selection.cases, *asked_names(functions)),
        backends=[backend.name for backend in header.backends],
        checks=header.checks,
    )


def _make_folder(dump: Path | None) -> None:
    """Before the run, so that the first failure does not end it."""
    if dump is None:
        return
    try:
        dump.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QuestionError(f"--dump {dump} cannot be a folder: {error.strerror}") from error


def _free_path() -> Path:
    """A run file named by the time and the process, since two runs may begin in one second; numbered within one."""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := RESULTS / f"{name}.jsonl").exists())


def _examine(
    found: "Iterator[Record]",
    examination: "RunResult",
    header: "RunHeader",
    path: Path,
    expectations: "Expectations | None",
    watcher: "RunProgress",
    *,
    exitfirst: bool,
) -> "tuple[list[Record], list[str], bool]":
    """Every record, written as it comes; the expectations that nothing bore out; whether it stopped early."""
    from attncheck.reports.run_file.records import FALLEN_SHORT
    from attncheck.reports.run_file.store import RunWriter

    records: list[Record] = []
    stopped = False
    with RunWriter(path, header) as writer:
        for each in found:
            record = each if expectations is None else expectations.apply(each)
            writer.add(record)
            records.append(record)
            watcher.see(record)
            if exitfirst and record.outcome in FALLEN_SHORT:
                stopped = True
                break
        unmet = expectations.unmet(stopped_early=stopped) if expectations else []
        for error in (*map(str, examination.blind), *unmet):
            writer.fail(error)
    return records, unmet, stopped
