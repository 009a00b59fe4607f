"""``attncheck mutants``: which faults the suites catch in deliberately broken backends. Loads no torch."""

import json
import tempfile
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attncheck.errors import QuestionError, SelectionError
from attncheck.harness.cli import process_arguments as processes
from attncheck.harness.cli import run_arguments as arguments
from attncheck.harness.cli.interruption import interruptible
from attncheck.harness.cli.output import print_stderr
from attncheck.harness.cli.recommend import AnswerFormat

if TYPE_CHECKING:
    from attncheck.backends.mutants.catalogue import Mutant
    from attncheck.harness.cli.kill_matrix import KillMatrix
    from attncheck.harness.cli.run_options import RunOptions
    from attncheck.harness.run.sharding import Shard
    from attncheck.reports.run_file.store import Run


def mutants(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Names, or shell patterns of them. Default: all.", show_default=False),
    ] = None,
    suite: arguments.Suites = None,
    case: arguments.Cases = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND", help="Examine only mutants of this kind of fault, such as window. May be repeated."
        ),
    ] = None,
    shard: Annotated[str | None, typer.Option(metavar="I/N", help="Examine shard I of N of the mutants.")] = None,
    jobs: processes.Jobs = None,
    device: arguments.Device = None,
    seed: arguments.Seed = None,
    output: arguments.Output = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Show run files of this command, such as those of its shards; examine nothing.",
        ),
    ] = None,
    form: Annotated[AnswerFormat, typer.Option("--format", help="Text, or JSON.")] = AnswerFormat.terminal,
) -> int:
    """Show which checks detect which mutants.

    A mutant is a correct backend with one deliberate fault. The result shows how many faults the suites detect. Each
    check of a mutant runs until its first failure. The correct backends are examined as well. Exit code 0: every mutant
    is caught, and every correct backend passes; 1: a mutant survives, or a correct backend fails.
    """
    from attncheck.backends.mutants.catalogue import catalogue
    from attncheck.harness.cli.kill_matrix import as_json, as_text
    from attncheck.harness.cli.run_options import RunOptions, read_jobs
    from attncheck.harness.run.patterns import split_commas
    from attncheck.harness.run.sharding import read_shard
    from attncheck.reports.run_file.store import read_run

    began = time.monotonic()
    chosen = choose_mutants(catalogue(), names or (), kind or (), read_shard(shard))
    if runs:
        matrix = _matrix([read_run(path) for path in runs], chosen, {}, is_part=True)
    else:
        context.with_resource(interruptible())
        options = RunOptions(
            suites=split_commas(suite or ()),
            cases=split_commas(case or ()),
            device=device,
            seed=seed or 0,
            until_failure="check",
            command=tuple(context.obj or ()),
        )
        matrix = _examined(chosen, options, read_jobs(jobs), output)
    typer.echo(json.dumps(as_json(matrix), indent=2) if form == AnswerFormat.json else as_text(matrix))
    if form != AnswerFormat.json and not runs:
        typer.echo(f"\n{time.monotonic() - began:.0f} s" + (f", run file: {output}" if output else ""))
    if not matrix.examined:
        raise SelectionError("no mutant was examined; see the reasons above")
    return 0 if matrix.is_clean else 1


def choose_mutants(
    known: Sequence["Mutant"], patterns: Sequence[str], kinds: Sequence[str], shard: "Shard | None"
) -> list["Mutant"]:
    """Return the mutants that match the names or patterns and the kinds, and are in the shard.

    Raises:
        SelectionError: no mutant matches a pattern or a kind, or none is left.
    """
    for pattern in patterns:
        if not any(fnmatchcase(mutant.name, pattern) for mutant in known):
            raise SelectionError(f"no mutant matches {pattern!r}; the names are in backends/mutants/*.yaml")
    all_kinds = sorted({mutant.kind for mutant in known})
    for kind in kinds:
        if kind not in all_kinds:
            raise SelectionError(f"no mutant is of kind {kind!r}; known are {', '.join(all_kinds)}")
    found = [
        mutant
        for mutant in known
        if (not patterns or any(fnmatchcase(mutant.name, pattern) for pattern in patterns))
        and (not kinds or mutant.kind in kinds)
    ]
    found = found if shard is None else found[shard.number - 1 :: shard.count]
    if not found:
        raise SelectionError("no mutant is left; give fewer filters, or fewer parts")
    return found


def _examined(chosen: Sequence["Mutant"], options: "RunOptions", jobs: int | None, output: Path | None) -> "KillMatrix":
    from attncheck.harness.cli.mutant_groups import examine_groups, groups_of, joined
    from attncheck.harness.workers.warming import most_processes
    from attncheck.reports.run_file.store import RunWriter

    options.select()  # raise errors of the options before any process starts
    runs: list[Run] = []
    missing: dict[str, str] = {}
    done = 0
    with tempfile.TemporaryDirectory(prefix="attncheck-mutants-") as folder:
        groups = groups_of(chosen)
        for group in examine_groups(groups, options, jobs or most_processes("cpu"), Path(folder)):
            if group.run is None:
                missing |= dict.fromkeys(group.refs, group.reason)
            else:
                runs.append(group.run)
            done += 0 if group.are_right else len(group.refs)
            print_stderr(f"{done} of {len(chosen)} mutants")
    if (run := joined(runs)) is not None and output is not None:
        with RunWriter(output, run.header) as writer:
            for record in run.records:
                writer.add(record)
            for error in (error for each in runs for error in each.errors):
                writer.fail(error)
    return _matrix(runs, chosen, missing)


def _matrix(
    runs: Sequence["Run"], chosen: Sequence["Mutant"], missing: dict[str, str], *, is_part: bool = False
) -> "KillMatrix":
    """Return the matrix of ``runs``; ``is_part``: only of the mutants that they examined.

    Raises:
        QuestionError: a case of the suites cannot be examined.
    """
    from attncheck.backends.mutants.catalogue import PREFIX
    from attncheck.harness.cli.kill_matrix import kill_matrix
    from attncheck.reference.spec import CHECKS

    for error in (error for run in runs for error in run.errors):
        raise QuestionError(error)
    refs = [backend.ref for run in runs for backend in run.header.backends]
    made = {check for run in runs for check in run.header.checks}
    return kill_matrix(
        [record for run in runs for record in run.records],
        [mutant for mutant in chosen if mutant.ref in refs or not is_part],
        [ref for ref in dict.fromkeys(refs) if not ref.startswith(PREFIX)],
        [check for check in CHECKS if check in made],
        missing,
    )
