"""``attncheck expect``: writes the expectation file under which a run would have passed. Loads no torch."""

from pathlib import Path
from typing import Annotated

import typer

from attncheck.harness.cli.output import refuse_input, write_output


def expect(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run file written by `attncheck run`.")],
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write to this file instead of stdout.")] = None,
) -> int:
    """Write the failures of a run as expected failures.

    The file is for `attncheck run --expect FILE`, and has one entry for each finding. A comment above each entry
    describes the failure. Replace the reasons with your own; `until` and `issue` are optional.
    """
    from attncheck.harness.run.expectation_writing import expectations_text
    from attncheck.reports.run_file.store import read_run

    found = read_run(run)
    refuse_input(output, [run])
    write_output(expectations_text(found), output)
    return 0
