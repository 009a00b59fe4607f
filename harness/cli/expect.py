"""``attncheck expect``: writes the expectation file under which a run would have passed. Loads no torch."""

from pathlib import Path
from typing import Annotated

import typer

from attncheck.harness.cli.output import refuse_input, write_output


def expect(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run file written by `attncheck run`.")],
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write to this file instead of stdout.")] = None,
) -> int:
    """Write a file of expected failures from a run: an entry for each finding, for `attncheck run --expect FILE`.

    Above each entry a comment says what happened. Replace the reasons by your own; `until` and `issue` may be added.
    """
    from attncheck.harness.run.expectation_writing import expectations_text
    from attncheck.reports.run_file.store import read_run

    found = read_run(run)
    refuse_input(output, [run])
    write_output(expectations_text(found), output)
    return 0
