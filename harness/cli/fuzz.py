"""``attncheck fuzz``: draws cases that no suite has, shrinks failing ones and writes them to files. Loads no torch."""

import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attncheck.errors import SelectionError
from attncheck.harness.cli import process_arguments as processes
from attncheck.harness.cli import run_arguments as arguments
from attncheck.harness.cli.interruption import interruptible

if TYPE_CHECKING:
    from attncheck.harness.fuzz.examination import ExaminedCase
    from attncheck.harness.fuzz.search import DrawnQuestion

Budget = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="Time for drawing and examining cases, such as 90s, 5m or 1h. Reducing failures takes time of its own.",
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

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def fuzz(
    context: typer.Context,
    backends: arguments.BackendArguments = None,
    backend: arguments.BackendOptions = None,
    budget: Budget = "60s",
    seed: arguments.Seed = None,
    check: arguments.Checks = None,
    device: arguments.Device = None,
    maxfail: Annotated[int, typer.Option(min=1, metavar="N", help="Stop after N different failures.")] = 10,
    shrink_time: ShrinkTime = 30.0,
    output: OutputFolder = None,
    case_timeout: processes.CaseTimeout = None,
    memory_limit: processes.MemoryLimit = None,
    pass_env: processes.PassEnv = None,
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
    refs = (*(backends or ()), *(backend or ()))
    if len(refs) != 1:
        raise SelectionError(f"fuzz examines one backend, and {len(refs)} are given; name one as in `attncheck run`")

    from attncheck.harness.cli.small_failures import backend_process, folder_for, print_small
    from attncheck.harness.fuzz.failures import Shrinker, search_failures
    from attncheck.harness.run.patterns import choose_checks
    from attncheck.harness.run.selection import check_seed
    from attncheck.reports.analysis.phrases import plural

    checks = _backend_checks(choose_checks(check or ()))
    began, outcomes = time.monotonic(), Counter[str]()
    with ExitStack() as stack:
        process = stack.enter_context(
            backend_process(
                refs[0],
                device=device,
                seed=check_seed(seed or 0),
                case_timeout=case_timeout,
                memory_limit=memory_limit,
                pass_env=pass_env,
            )
        )
        typer.echo(f"fuzz {process.backend.name} on {process.device}, seed {seed or 0}")
        typer.echo(f"drawing cases for {limit_s:g} s; reducing each failure for at most {shrink_time:g} s more")

        def see(_question: "DrawnQuestion", examined: "ExaminedCase") -> None:
            is_examined = any(record.outcome != "unsupported" for record in examined.records)
            outcomes["blind" if examined.blind else "examined" if is_examined else "not examined"] += 1
            if sys.stderr.isatty():
                typer.echo(f"\r{plural(outcomes.total(), 'case')} drawn ", err=True, nl=False)

        code, shrinker, known = 0, Shrinker(process, shrink_time), dict[str, Path]()
        for failure in search_failures(process, seed=seed or 0, budget_s=limit_s, checks=checks, most=maxfail, see=see):
            folder = next(iter(known.values()), None) or folder_for(output, "fuzz")
            small = shrinker.make_small(failure)
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


def read_time(option: str, text: str) -> float:
    """Return the seconds that ``text`` gives, such as ``90s``, ``5m``, ``1h`` or ``90``.

    Raises:
        SelectionError: the text is not a positive, finite time.
    """
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        seconds = float(number) * _UNITS[unit]
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise SelectionError(f"{option} {text!r}: give a time, such as 90s, 5m or 1h")
    return seconds


def _backend_checks(chosen: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the checks to run, or None for all that apply.

    Raises:
        SelectionError: one of them does not run on drawn cases.
    """
    from attncheck.reference.spec import DEFAULT_CHECKS

    for name in chosen:
        if name not in DEFAULT_CHECKS:
            raise SelectionError(f"check {name!r} does not run on drawn cases; give one of {', '.join(DEFAULT_CHECKS)}")
    return chosen or None
