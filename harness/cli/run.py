"""``attncheck run``: put the cases of suites to backends, write a run file, print the table."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attncheck.errors import SelectionError
from attncheck.harness.cli.output import use_color

if TYPE_CHECKING:
    from attncheck.harness.cli.run_execution import FinishedRun
    from attncheck.reports.run_file.header import RunHeader
    from attncheck.reports.run_file.records import Record


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
    case_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Kill the process of a backend that finishes no check of a case for so long; the check is crashed. It "
            "covers the compiling of kernels, and of the check timing all samples. 0: no limit. Default: 600.",
        ),
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
    show_output: Annotated[
        bool,
        typer.Option(
            "--show-output",
            "-s",
            help="Show what backends print as it comes, each line with the backend's name. Without it, the end of it "
            "is told with each failure.",
        ),
    ] = False,
    no_warm: Annotated[
        bool,
        typer.Option(
            "--no-warm",
            help="On a GPU, start no other processes that compile kernels ahead of the run (see `attncheck warm`).",
        ),
    ] = False,
) -> int:
    """Examine backends, or providers of metadata utilities, and print what they are worth.

    Without options: suite smoke (interpreted, where kernels are), every built-in backend, the best device. Each
    backend is examined in a process of its own: one that kills its process loses a case, and the others nothing. Times
    (--check timing) are taken in rounds, each in a fresh process that is alone. Every record goes into a run file,
    which `attncheck report` reads.
    """
    from attncheck.harness.cli.run_execution import execute_run
    from attncheck.harness.cli.run_options import RunOptions

    began = time.monotonic()
    options = RunOptions(
        backends=tuple(backend or ()),
        providers=tuple(provider or ()),
        suites=tuple(suite or ()),
        settings=tuple(settings or ()),
        cases=tuple(case or ()),
        checks=tuple(check or ()),
        functions=tuple(function or ()),
        rounds=rounds,
        time_limit=time_limit,
        warm_cache=warm_cache,
        kernels=kernels,
        device=device,
        case_timeout=case_timeout,
        seed=seed,
        output=output,
        exitfirst=exitfirst,
        expect=expect,
        dump=dump,
        in_process=in_process,
        show_output=show_output,
        warm=not no_warm,
        command=tuple(context.obj or ()),
    )
    finished = execute_run(options, _print_opening)
    _print_report(finished)
    typer.echo(f"{time.monotonic() - began:.1f} s, run file: {finished.path}")
    if finished.ended_by is not None:
        raise finished.ended_by
    return _exit_code(finished, by_name=bool(backend or provider))


def _print_opening(header: "RunHeader") -> None:
    from attncheck.reports.terminal import run as terminal

    typer.echo(terminal.opening(header))


def _print_report(finished: "FinishedRun") -> None:
    from attncheck.reports.terminal import run as terminal

    typer.echo()
    errors = [*finished.blind, *finished.unmet]
    is_whole = finished.ended_by is None
    shown = terminal.render(finished.header, finished.records, errors=errors, complete=is_whole, color=use_color())
    typer.echo(shown)
    for line in finished.unseen:
        typer.echo(line)
    if finished.ended_by is not None:
        typer.echo(f"{finished.stopped}; what follows was not examined")
    elif finished.stopped:
        typer.echo(f"stopped {finished.stopped}: what follows was not examined")


def _exit_code(finished: "FinishedRun", *, by_name: bool) -> int:
    """Return 0, 1 or 3; ``by_name``: a backend or provider was named on the command line.

    Raises:
        SelectionError: a case proves nothing, or a backend, or the whole run, had nothing examined.
    """
    from attncheck.harness.run.outcomes import OURSELVES
    from attncheck.reports.run_file.records import FALLEN_SHORT

    records = finished.records
    ours = [record for record in records if record.outcome == "errored" and record.stage == OURSELVES]
    if ours:
        typer.echo(f"attncheck itself failed at {ours[0].case}: {ours[0].error_type}: {ours[0].message}", err=True)
        return 3
    if finished.unmet or any(record.outcome in FALLEN_SHORT for record in records):
        return 1
    if finished.blind:
        raise SelectionError("a case that cannot see what it asks about proves nothing; mend it (errors above)")
    _refuse_empty_run(records, finished.header, by_name=by_name)
    return 0


def _refuse_empty_run(records: "Sequence[Record]", header: "RunHeader", *, by_name: bool) -> None:
    """Refuse a run that examined nothing, or, ``by_name``, nothing of one of its backends or providers.

    A case that was refused as declared (``refusals``) counts as examined only where no other check was asked for.

    Raises:
        SelectionError: nothing was examined.
    """
    from attncheck.reports.analysis import phrases
    from attncheck.reports.analysis.summary import summarise

    only_refusals = header.checks == ("refusals",)
    summary = summarise([record for record in records if only_refusals or record.check != "refusals"])
    for backend in header.backends if by_name else ():
        tally = summary.by_backend.get(backend.name)
        if tally is None or not tally.examined:
            gap = next((gap for gap in summary.gaps if gap.backend == backend.name), None)
            why = f": {phrases.gap_reasons(gap)}" if gap else ""
            if backend.name in summary.providers:
                raise SelectionError(f"provider {backend.name!r} offers none of these functions")
            raise SelectionError(f"not one case of backend {backend.name!r} was examined{why}")
    if not summary.total.examined:
        raise SelectionError("nothing was examined; the table says why")
