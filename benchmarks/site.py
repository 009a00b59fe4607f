"""Measure how long `attncheck site` takes for many runs, its memory, and the weight of its pages.

    python benchmarks/site.py FOLDER [--runs 200] [--records 5000] [--of RUN]

``FOLDER`` gets made-up run files in ``runs`` and the site in ``site``. They derive from the kept run of the candidates:
five GPUs, four versions of each backend. Some backends get a wrong output on one GPU. The third version repairs it.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import Failed, Passed, Record, RunFooter, format_line
from attncheck.reports.run_file.store import count_outcomes, read_run
from attncheck.reports.run_file.timings import Latency, Timing

KEPT = Path(__file__).parent.parent / "docs/evidence/cpu-2026-11-23/candidates.jsonl.xz"
GPUS = {
    "NVIDIA H200": "9.0",
    "NVIDIA B200": "10.0",
    "NVIDIA L40S": "8.9",
    "NVIDIA A100-SXM4-80GB": "8.0",
    "NVIDIA GeForce RTX 4090": "8.9",
}
VERSIONS = ("0.1", "0.2", "0.3", "0.4")
FIRST_DAY = datetime(2026, 1, 5, 6, tzinfo=UTC)
ROUNDS = 3


@dataclass(frozen=True)
class MadeUp:
    """A made-up run: ``header`` for its day, and the lines of its records and footer."""

    header: RunHeader
    lines: str


def made_up(kept: Path, gpu: str, version: str, most: int) -> MadeUp:
    """Return the kept run as if it were of another device and version, with at most ``most`` records.

    All records of some cases are left out.
    """
    run = read_run(kept)
    random = Random(f"{gpu}{version}")  # noqa: S311
    torch = {"0.1": "2.11.0", "0.2": "2.12.0"}.get(version, "2.13.0")
    environment = run.header.environment.model_copy(
        update={"device": "cuda", "device_name": gpu, "capability": GPUS[gpu], "driver": "580.65", "torch": torch}
    )
    backends = tuple(
        each.model_copy(update={"version": f"{version}, torch {torch}", "required_environment": {}})
        for each in run.header.backends
    )
    header = run.header.model_copy(
        update={"environment": environment, "backends": backends, "device": "cuda", "rounds": ROUNDS}
        | {"checks": (*run.header.checks, "timing")}
    )
    records = _cut(list(_records(run.records, header, gpu, version, random)), most)
    footer = RunFooter(finished=run.footer.finished if run.footer else "", counts=count_outcomes(records))
    return MadeUp(header, "".join(f"{format_line(each)}\n" for each in (*records, footer)))


def _cut(records: list[Record], most: int) -> list[Record]:
    sizes = Counter(record.case for record in records)
    excess = len(records) - most
    left_out = set()
    for case in Random(0).sample(list(sizes), len(sizes)):  # noqa: S311
        if excess > 0:
            left_out.add(case)
            excess -= sizes[case]
    return [record for record in records if record.case not in left_out]


def _records(
    records: tuple[Record, ...], header: RunHeader, gpu: str, version: str, random: Random
) -> Iterator[Record]:
    speed = {backend.name: random.uniform(0.7, 1.5) for backend in header.backends}
    wrong = {"xformers": "NVIDIA L40S", "flex_attention": "NVIDIA B200"}
    versions = {backend.name: backend.version for backend in header.backends}
    for record in records:
        changed: dict[str, Any] = {"environment": header.environment.digest}
        changed["backend_version"] = versions[record.backend]
        graph = getattr(record, "graph", None)
        if graph is not None:
            changed["graph"] = graph.model_copy(update={"recorder": "cuda"})
        is_wrong = wrong.get(record.backend) == gpu and version < "0.3" and "sliding_window" in record.needs
        if is_wrong and record.check == "numerics" and isinstance(record, Passed):
            kept = record.model_dump(exclude={"outcome", "notes", "kind"}) | changed
            yield Failed(
                **kept,
                summary="4 of 16 rows are wrong, the first is row 0; worst 512 times the allowed error",
                meaning="likely cause: the sliding window is one key too long",
                concerns=("sliding_window",),
            )
            continue
        yield record.model_copy(update=changed)
        if record.check == "numerics" and isinstance(record, Passed):
            size = 20_000 + int(hashlib.sha256(record.case.encode()).hexdigest()[:4], 16)
            for number in range(ROUNDS):
                median = size * speed[record.backend] * random.uniform(0.98, 1.02)
                latency = Latency(
                    part="forward",
                    clock="events",
                    median_ns=median,
                    low_ns=0.99 * median,
                    high_ns=1.01 * median,
                    samples_ns=(),
                    is_settled=True,
                )
                kept = record.model_dump(exclude={"outcome", "figures", "notes", "kind", "graph"}) | changed
                kept |= {"check": "timing", "round": number, "timing": Timing(latencies=(latency,))}
                yield Passed(**kept)


def write_runs(folder: Path, kept: Path, count: int, most: int) -> None:
    """Write ``count`` run files of at most ``most`` records into ``folder``, hours apart."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [(gpu, version) for version in VERSIONS for gpu in GPUS]
    share = -(-count // len(pairs))
    day = 0
    for gpu, version in pairs:
        run = made_up(kept, gpu, version, most)
        for _ in range(min(share, count - day)):
            started = (FIRST_DAY + timedelta(hours=7 * day)).isoformat(timespec="seconds")
            header = run.header.model_copy(update={"started": started})
            name = f"{gpu.split()[-1].lower()}-{version}-{day}.jsonl"
            (folder / name).write_text(f"{format_line(header)}\n{run.lines}", encoding="utf-8")
            day += 1


def measure(folder: Path) -> None:
    """Build the site, and print its time, memory and weights."""
    runs, site = folder / "runs", folder / "site"
    command = [sys.executable, "-m", "attncheck", "site", "--runs", str(runs), "--output", str(site), "--jobs", "2"]
    began = time.monotonic()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    took = time.monotonic() - began
    memory = usage.ru_maxrss / 2**10
    print(f"{took:.1f} s, {usage.ru_utime + usage.ru_stime:.1f} s of CPU, at most {memory:.0f} MiB a process")
    weights = {path.relative_to(site).as_posix(): path.stat().st_size for path in site.rglob("*") if path.is_file()}
    heaviest = sorted(weights, key=weights.__getitem__, reverse=True)[:8]
    print(f"{len(weights)} files, {sum(weights.values()) / 1e6:.1f} MB; the heaviest:")
    for name in heaviest:
        print(f"  {weights[name] / 1e3:8.1f} kB  {name}")


def main() -> None:
    """Write run files and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--records", type=int, default=10**9, metavar="N", help="the maximum of each run")
    parser.add_argument("--of", type=Path, default=KEPT, metavar="RUN", help="the run file to derive them from")
    options = parser.parse_args()
    write_runs(options.folder / "runs", options.of, options.runs, options.records)
    measure(options.folder)


if __name__ == "__main__":
    main()
