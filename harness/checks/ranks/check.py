"""Start a process for each rank, and judge what the ranks return against the truth of the whole batch.

A rank has some query heads of every row. The outputs of the ranks side by side are those of all heads. Cannot see: the
order in which a rank waits for others, and collectives of NCCL.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor

from attncheck.backends.registry import LoadedBackend
from attncheck.harness.checks.findings import Broken, Finding, FindingError, Holds, NotExamined
from attncheck.harness.checks.interface import dump_case
from attncheck.harness.checks.numerics import check_numerics
from attncheck.harness.checks.ranks.process import RankAnswer, RankQuestion
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.driver.observation import Observation
from attncheck.harness.host import MARK, folder_prefix, remove_folders
from attncheck.harness.problem.problem import Problem, ranks_of
from attncheck.harness.truth.truth import Truth
from attncheck.reports.run_file.records import OURSELVES

LIMIT_S = 120.0
"""Seconds in which all ranks must end, with the start of their processes."""

_LEFT_S = 10 * LIMIT_S
"""Age in seconds from which on no rank uses a folder."""

GRACE_S = 5.0
"""Seconds for which the other ranks go on when one has died."""

_HOW = "the ranks are processes of this machine; their collectives are gloo's, through the memory of the host"


Results = tuple[tuple[RankAnswer, ...], Observation]
"""The answers of all ranks, in their order, and the observation of all heads."""


class RankChecks:
    """One case of the path ``ranks`` on one backend. ``reasons``: why its declarations exclude the case."""

    def __init__(
        self, loaded: LoadedBackend, problem: Problem, truth: Truth, device: torch.device, reasons: tuple[str, ...]
    ) -> None:
        self._loaded, self._problem, self._truth, self._device = loaded, problem, truth, device
        self._reasons = reasons
        self._ended: Results | NotExamined | StageError | FindingError | None = None

    def find(self, check: str) -> Callable[[], Finding] | NotExamined:
        """Return the function that runs a check, or why it examines nothing."""
        if self._reasons:
            return NotExamined(self._reasons)
        judges = {"numerics": self._numerics, "cache_write": self._cache_write}
        if check not in judges:
            reason = f"the path ranks has a process for each rank, in which {check} is not examined"
            return NotExamined((reason,), "attncheck")
        return partial(self._judged, judges[check])

    def dump(self, folder: Path, backend: str) -> None:
        """Write the case to a file in ``folder``, with the outputs of the ranks."""
        seen = self._ended[1] if isinstance(self._ended, tuple) else None
        dump_case(folder, self._problem, self._truth, backend, seen)

    def _judged(self, judge: Callable[[Results], Finding]) -> Finding:
        """Judge the results of the ranks, which run once. Raise StageError or FindingError if a rank has none."""
        if self._ended is None:
            try:
                self._ended = self._run()
            except (StageError, FindingError) as failure:
                self._ended = failure
        if isinstance(self._ended, Exception):
            raise self._ended
        return self._ended if isinstance(self._ended, NotExamined) else judge(self._ended)

    def _run(self) -> Results | NotExamined:
        case, size = self._problem.case, ranks_of(self._problem.case).size
        question = RankQuestion(
            self._loaded.ref, case, self._problem.seed, str(self._device), size, LIMIT_S, os.getpid()
        )
        remove_folders("*", older_than_s=_LEFT_S)  # of attncheck processes that were killed with their workers
        with tempfile.TemporaryDirectory(prefix=folder_prefix(os.environ.get(MARK, "none"))) as name:
            answers = run_ranks(question, Path(name))
            if reason := next((answer.not_examined for answer in answers if answer.not_examined), ""):
                return NotExamined((reason,), "attncheck")
            raised = [(answer.ended_at, rank, answer.raised) for rank, answer in enumerate(answers) if answer.raised]
            if raised:  # the first one is the cause: the others wait for it
                _, rank, first = min(raised, key=lambda each: each[0])
                named = first.stage if first.stage == OURSELVES else f"{first.stage} of rank {rank}"
                raise StageError(replace(first, stage=named))
            parts = [torch.load(Path(name) / f"rank-{rank}.pt", weights_only=True) for rank in range(size)]
        return answers, self._observation(answers, parts)

    def _observation(self, answers: Sequence[RankAnswer], parts: Sequence[Mapping[str, Tensor]]) -> Observation:
        """Return the outputs of the ranks side by side, as if one call had computed all heads."""
        rows = [torch.arange(request.rows) for request in self._problem.requests]
        positions = [r.first_position + nth for r, nth in zip(self._problem.requests, rows, strict=True)]
        return Observation(
            output=torch.cat([part["output"] for part in parts], dim=1),
            lse=None,
            unwritten=torch.stack([part["unwritten"] for part in parts]).any(0),
            lse_unwritten=None,
            nth=torch.cat(rows),
            position=torch.cat(positions),
            protocol=tuple(dict.fromkeys(each for answer in answers for each in answer.protocol)),
        )

    def _numerics(self, results: Results) -> Finding:
        answers, seen = results
        finding = check_numerics(self._problem, self._truth, seen)
        if isinstance(finding, Holds):
            return replace(finding, notes=(*finding.notes, _HOW))
        heads = self._problem.layer.num_heads // len(answers)
        owner = f"rank r has the heads {heads}r to {heads}r + {heads - 1}"
        return replace(finding, details=(*finding.details, owner, _HOW))

    def _cache_write(self, results: Results) -> Finding:
        """Return the finding of the first rank whose cache is wrong or not examined, else that of the last."""
        finding: Finding = NotExamined(("no rank has answered",), "attncheck")
        for rank, answer in enumerate(results[0]):
            finding = answer.cache or finding
            if isinstance(finding, Broken):
                return replace(finding, summary=f"on rank {rank}: {finding.summary}")
            if isinstance(finding, NotExamined):
                return finding
        return finding


def run_ranks(question: RankQuestion, folder: Path) -> tuple[RankAnswer, ...]:
    """Run the step on all ranks, and return their answers in order; no process is left.

    Raises:
        FindingError: a rank died, or did not end within ``LIMIT_S``, or ``GRACE_S`` after the death of one.
    """
    (folder / "question.json").write_bytes(TypeAdapter(RankQuestion).dump_json(question))
    words = [sys.executable, "-P", "-m", "attncheck.harness.checks.ranks.process", str(folder)]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(question.size):
            command = [*words, str(rank)]
            processes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))  # noqa: S603 (words of ours)
        limit_s = _wait(processes)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    paths = [folder / f"rank-{rank}.json" for rank in range(question.size)]
    for rank, (code, path) in enumerate(zip(codes, paths, strict=True)):
        if code is not None and not path.exists():
            raise FindingError(Broken(f"rank {rank} died: {_ending(code)}"))
    if None in codes:
        raise FindingError(Broken(f"the ranks did not end within {limit_s:.3g} s: {_waiting(codes, folder)}"))
    return tuple(TypeAdapter(RankAnswer).validate_json(path.read_bytes()) for path in paths)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> float:
    """Wait until all processes have ended, or until the time is over, which a death shortens; return this time."""
    begin = time.monotonic()
    end = begin + LIMIT_S
    has_death = False
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if None not in codes:
            break
        if any(codes) and not has_death:
            has_death, end = True, min(end, time.monotonic() + GRACE_S)
        time.sleep(0.02)
    return end - begin


def _ending(code: int) -> str:
    """Return how a process ended, in words."""
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"


def _waiting(codes: Sequence[int | None], folder: Path) -> str:
    """Return, for each rank that has not ended, the collective in which it waits for others."""
    calls = [folder / f"rank-{rank}.call" for rank in range(len(codes))]
    states = [f"waits in {call.read_text()}" if call.exists() else "does not wait for others" for call in calls]
    return "; ".join(
        f"rank {r} {state}" for r, (code, state) in enumerate(zip(codes, states, strict=True)) if code is None
    )
