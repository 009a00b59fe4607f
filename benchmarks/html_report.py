"""How long the HTML report of a large run takes, reading included, and how large the page is.

    python benchmarks/html_report.py RUN [--records 10000] [--samples 200] [--rounds 10]

RUN is a run file without times, such as those under docs/evidence. Its records are repeated under other ids until there
are ``--records``. Half of them are times, of each case and backend in every round, with ``--samples`` samples.
The file is written, and a fresh process reads and renders it as `attncheck report --format html` does. Prints the wall
time and the size, and fails where it took five seconds or more.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from attncheck.reports.run_file.records import Passed, Record
from attncheck.reports.run_file.store import Run, RunWriter, read_run
from attncheck.reports.run_file.timings import TIMING, Ceilings, Latency, StepPart, Timing

SECONDS = 5.0
CEILINGS = Ceilings(copy_bytes_per_s=4e12, matmul_flops_per_s=6e14, dtype="bfloat16")


def repeated(run: Run, count: int) -> Iterator[Record]:
    """Yield ``count`` copies of the run's records, under new case ids once each was used."""
    for index in range(count):
        turn, place = divmod(index, len(run.records))
        record = run.records[place]
        yield record.model_copy(update={"case_id": f"{record.case_id}.{turn}"}) if turn else record


def timed(run: Run, count: int, rounds: int, samples: int) -> Iterator[Record]:
    """Yield ``count`` records with timings, ``rounds`` for each pair of case and backend."""
    luck = random.Random(0)  # noqa: S311
    passed = list({(r.backend, r.case): r for r in run.records if isinstance(r, Passed)}.values())
    for index in range(count):
        turn, place = divmod(index // rounds, len(passed))
        record = passed[place]
        case_id = f"{record.case_id}.{turn}" if turn else record.case_id
        size = 2 ** (10 + place % 12)
        parts = tuple(latency(luck, part, size, samples) for part in ("forward", "build"))
        new = {"case_id": case_id, "check": TIMING, "round": index % rounds, "figures": {}, "notes": (), "graph": None}
        yield record.model_copy(update={**new, "timing": Timing(latencies=parts, ceilings=CEILINGS)})


def latency(luck: random.Random, part: StepPart, size: int, samples: int) -> Latency:
    """Return the latency of one part in one process, with samples around ``size`` microseconds."""
    times = tuple(int(size * 1000 * luck.lognormvariate(0, 0.05)) for _ in range(samples))
    work = {"moved_bytes": size * 10**6, "flops": size * 10**8} if part == "forward" else {}
    middle = sorted(times)[samples // 2]
    return Latency(
        part=part,
        clock="host",
        median_ns=middle,
        low_ns=middle * 0.99,
        high_ns=middle * 1.01,
        samples_ns=times,
        is_settled=True,
        **work,
    )


def main() -> None:
    """Write the run file, render it in a fresh process, and print the time and the page size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    run = read_run(options.run)
    header = run.header.model_copy(update={"checks": (*run.header.checks, TIMING), "rounds": options.rounds})
    half = options.records // 2
    with tempfile.TemporaryDirectory() as folder:
        file, page = Path(folder) / "run.jsonl", Path(folder) / "report.html"
        with RunWriter(file, header) as writer:
            for record in (*repeated(run, options.records - half), *timed(run, half, options.rounds, options.samples)):
                writer.add(record)
        words = [sys.executable, "-m", "attncheck", "report", str(file), "--format", "html", "--output", str(page)]
        start = time.perf_counter()
        subprocess.run(words, check=True)
        seconds = time.perf_counter() - start
        print(
            f"{options.records} records, {file.stat().st_size / 1e6:.1f} MB: {seconds:.2f} s, "
            f"page of {page.stat().st_size / 1e6:.1f} MB"
        )
    assert seconds < SECONDS, f"took {seconds:.2f} s, and is to take less than {SECONDS:g} s"


if __name__ == "__main__":
    main()
