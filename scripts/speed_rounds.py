"""Rounds of ``kernel_speed.py``: every candidate once a round, each round a process of its own.

Medians differ from process to process, so that a comparison takes several; candidates stand in another order in each,
so that what drifts drifts for all. One that ends its process, or takes too long, is not asked again, and what was to
follow it is asked in a new process. Must not know: how a candidate is timed.
"""

import json
import math
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evidence_jobs import Job, run_job

ROUNDS = 5
"""Processes of each: fewer cannot tell two candidates apart."""

LIMIT_S = 120
"""What a candidate may take in a process; flashinfer has its kernels compiled in that time."""

TIMER = "scripts/kernel_speed.py"

OVERDUE = f"exit code {-signal.SIGALRM}"

CONTENDERS = (
    "triton_unified/16",
    "triton_unified/256",
    "torch_varlen/256",
    "torch_sdpa/16",
    "flex_attention/16",
    "xformers/16",
    "flash_attn/256",
    "flashinfer/16",
)
"""Names, each with the tokens of a page: of FlashAttention's those that it reads in place."""

CEILINGS = {"decode": ("copy/0", "bytes"), "prefill": ("matmul/0", "operations")}
"""By question: what the device can do at most, and what of a candidate's work is held against it."""


@dataclass(frozen=True)
class Timing:
    """What was found of one ``unit`` (``question/name/page``): the median of each process, in seconds.

    work: what of its work is held against the ceiling, bytes or operations. error: the largest relative one. trouble:
    why there is no time, or none of some process.
    """

    unit: str
    medians: tuple[float, ...]
    work: float = 0.0
    error: float = 0.0
    trouble: str = ""

    @property
    def seconds(self) -> float:
        """The median of the processes' medians."""
        return statistics.median(self.medians)

    @property
    def rate(self) -> float:
        """Bytes or operations a second."""
        return self.work / self.seconds


def measure(
    contenders: Sequence[str], device: str, scratch: Path, *, rounds: int, deadline: float
) -> tuple[list[Job], list[dict[str, object]]]:
    """The processes, and the lines they wrote, in order; all are stopped at ``deadline``."""
    jobs: list[Job] = []
    lines: list[dict[str, object]] = []
    given_up: set[str] = set()
    for number in range(rounds):
        turn = number % max(1, len(contenders))
        order = [*contenders[turn:], *contenders[:turn]]
        units = [f"{question}/{each}" for question, (top, _) in CEILINGS.items() for each in (top, *order)]
        while units := [unit for unit in units if unit not in given_up]:
            file = scratch / f"speed-{len(jobs)}.jsonl"
            words = ("python", "-P", TIMER, str(file), device, str(number), str(LIMIT_S), *units)
            job = run_job(Job("speed", words, file), deadline, LIMIT_S * len(units))
            jobs.append(job)
            found = _read(file)
            lines += found
            told = {str(line["unit"]) for line in found if "begun" not in line}
            broken = [str(line["unit"]) for line in found if line["unit"] not in told]
            ended = f"took longer than {LIMIT_S} s" if job.status == OVERDUE else job.status
            lines += [{"unit": unit, "seed": number, "ended": ended} for unit in broken]
            given_up |= {*broken, *(str(line["unit"]) for line in found if {"refused", "raised"} & line.keys())}
            units = [unit for unit in units if unit not in told]
            if time.monotonic() >= deadline or not found:
                left = [unit for unit in units if unit not in given_up]
                lines += [{"unit": unit, "seed": number, "ended": "not begun"} for unit in left]
                return jobs, lines
    return jobs, lines


def timings(lines: Sequence[Mapping[str, object]]) -> list[Timing]:
    """What the lines come to, unit by unit, as they first came."""
    return [_timing(unit, [line for line in lines if line["unit"] == unit]) for unit in _units(lines)]


def _timing(unit: str, lines: Sequence[Mapping[str, object]]) -> Timing:
    _, kind = CEILINGS[unit.split("/", maxsplit=1)[0]]
    timed = [line for line in lines if "seconds" in line]
    troubles = [f"{word}: {line[word]}" for line in lines for word in ("refused", "raised", "ended") if word in line]
    return Timing(
        unit=unit,
        medians=tuple(float(str(line["seconds"])) for line in timed),
        work=float(str(timed[0].get(kind, 0))) if timed else 0.0,
        error=max((float(str(line.get("error", 0))) for line in timed), key=_nan_last, default=0.0),
        trouble="; ".join(dict.fromkeys(troubles)),
    )


def _nan_last(number: float) -> float:
    return math.inf if math.isnan(number) else number


def _units(lines: Sequence[Mapping[str, object]]) -> list[str]:
    """Questions one after another, ceilings first."""
    found = dict.fromkeys(str(line["unit"]) for line in lines)
    return sorted(found, key=lambda unit: (list(CEILINGS).index(unit.split("/")[0]), not unit.endswith("/0")))


def _read(file: Path) -> list[dict[str, object]]:
    """The lines of a process; the last one may be cut off."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
