"""``attncheck merge``: shards of one run become one run file. Needs no torch."""

from pathlib import Path
from typing import Annotated

import typer


def merge(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="The run files of all shards of a run.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The run file to write.")],
) -> int:
    """Join the run files of `attncheck run --shard I/N` into one, as of a run that was not divided.

    Exit code 2: a shard is missing or was cut off, the runs are of different questions or machines, or two of them
    contradict each other. The message names the file and the difference. `attncheck report FILE` shows the result.
    """
    from attncheck.reports.analysis.phrases import plural
    from attncheck.reports.run_file.merging import merge_runs
    from attncheck.reports.run_file.store import RunWriter, read_run

    merged = merge_runs([read_run(path) for path in runs])
    with RunWriter(output, merged.header) as writer:
        for record in merged.records:
            writer.add(record)
        for error in merged.errors:
            writer.fail(error)
    typer.echo(f"{plural(len(merged.records), 'record')} of {plural(len(runs), 'run')}, run file: {output}")
    return 0
