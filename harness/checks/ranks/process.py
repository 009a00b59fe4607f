"""The process of one rank: runs one step of the backend on the keys that the rank holds, and writes what it saw.

The ranks are processes of one machine. Their collectives are gloo's, through the memory of the host, on a GPU too.
"""

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor, distributed

from attncheck.backends.context_parallel import set_dcp_group
from attncheck.backends.registry import load
from attncheck.cases.model import Case
from attncheck.errors import AttncheckError, BackendUnavailableError
from attncheck.harness.checks.cache_write import judge_pool
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.driver.observation import Raised, capture_exception, passes_foreign_code
from attncheck.harness.driver.session import Session
from attncheck.harness.host import end_with, is_refused_memory
from attncheck.harness.problem.problem import build_problem, rank_problem
from attncheck.reference.step_spec import PathSpec
from attncheck.reports.run_file.records import OURSELVES


@dataclass(frozen=True)
class RankQuestion:
    """What each rank runs. ``limit_s``: seconds that a collective waits for another rank.

    ``parent``: id of the process that starts the ranks, and with which they end.
    """

    ref: str
    case: Case
    seed: int
    device: str
    size: int
    limit_s: float
    parent: int


@dataclass(frozen=True)
class RankAnswer:
    """What one rank saw. ``ended_at``: seconds since the epoch. ``not_examined``: why this machine cannot run it."""

    ended_at: float
    not_examined: str = ""
    raised: Raised | None = None
    protocol: tuple[str, ...] = ()
    cache: Broken | Holds | NotExamined | None = None


class GlooGroup:
    """The group that a backend gets. Each collective first compares what the ranks call, so that none waits in vain."""

    def __init__(self, question: RankQuestion, rank: int, folder: Path) -> None:
        self.world_size, self.rank_in_group = question.size, rank
        self._call = folder / f"rank-{rank}.call"
        if sys.platform == "linux":  # else gloo looks up the name of the host, which may have no address
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        limit = timedelta(seconds=question.limit_s)
        place = (folder / "store").resolve().as_uri()
        distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=question.size, timeout=limit)

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """See :class:`~attncheck.backends.context_parallel.DCPGroup`, as for the other collectives."""
        return torch.cat(self._gathered("all_gather", input_, dim), dim)

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Raise ValueError if ``dim`` is no multiple of the ranks."""
        total = torch.stack(self._gathered("reduce_scatter", input_, dim)).sum(0)
        if total.shape[dim] % self.world_size:
            raise ValueError(f"reduce_scatter of {list(total.shape)} along {dim}: not a multiple of {self.world_size}")
        return total.chunk(self.world_size, dim)[self.rank_in_group].contiguous()

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Return the sum in the dtype of ``input_``."""
        return torch.stack(self._gathered("all_reduce", input_, 0)).sum(0)

    def agree(self, call: str) -> None:
        """Raise RuntimeError unless all ranks make the same ``call``."""
        calls: list[str] = [""] * self.world_size
        self._call.write_text(call)
        distributed.all_gather_object(calls, call)
        if len(set(calls)) > 1:
            made = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(calls))
            raise RuntimeError(f"the ranks do not make the same calls of the group ({made})")

    def _gathered(self, name: str, input_: Tensor, dim: int) -> list[Tensor]:
        dtype = str(input_.dtype).removeprefix("torch.")
        self.agree(f"{name} of {dtype} {list(input_.shape)} along {dim}")
        # As bytes, because gloo does not have every dtype.
        own = input_.detach().cpu().contiguous()
        flat = own.flatten().view(torch.uint8)
        parts = [torch.empty_like(flat) for _ in range(self.world_size)]
        distributed.all_gather(parts, flat)
        self._call.unlink()
        return [part.view(own.dtype).view(own.shape).to(input_.device) for part in parts]


def run_rank(question: RankQuestion, rank: int, folder: Path) -> RankAnswer:
    """Return what the rank saw; its output is then in ``folder``. Raise StageError if the backend raised."""
    try:
        backend = load(question.ref).backend
    except AttncheckError as error:
        return RankAnswer(time.time(), not_examined=f"another process cannot load the backend: {error}")
    problem, device = rank_problem(build_problem(question.case, question.seed), rank), torch.device(question.device)
    # The cache is filled before there is a group, because the backend's own writer may fill it.
    paged = replace(problem.case, batch=replace(problem.case.batch, path=PathSpec()))
    filler = Session(backend, replace(problem, case=paged, dcp_local_seq_lens=None), device)
    if filler.pool is None:
        raise RuntimeError("a decoder layer has a pool")
    pool = filler.pool.beside(problem)
    try:
        group = GlooGroup(question, rank, folder)
    except (RuntimeError, ValueError) as error:  # no backend has run in the group yet
        return RankAnswer(time.time(), not_examined=f"gloo: {error}")
    with set_dcp_group(group):
        session = Session(backend, problem, device, pool=pool)
        seen = session.run()
    with suppress(RuntimeError):  # another rank waits in a collective, and raises this error there
        group.agree("the end of the step")
    torch.save({"output": seen.output.cpu(), "unwritten": seen.unwritten.cpu()}, folder / f"rank-{rank}.pt")
    rows = problem.keys, problem.values
    if pool.codec is None:
        cache: Finding = NotExamined((pool.no_codec,))
    elif not session.impl.brings_writer:
        cache = NotExamined(("the backend has no cache writer: attncheck writes the new K and V",))
    else:
        cache = judge_pool(problem, pool, seen, rows, [rows])
    return RankAnswer(time.time(), protocol=seen.protocol, cache=cache)


def answer_of(question: RankQuestion, rank: int, folder: Path) -> RankAnswer:
    """Return the answer of :func:`run_rank`, or one that states what it raised: the backend, or attncheck itself."""
    try:
        return run_rank(question, rank, folder)
    except StageError as failure:
        return RankAnswer(time.time(), raised=failure.raised)
    except BackendUnavailableError as error:
        return RankAnswer(time.time(), not_examined=str(error))
    except Exception as error:  # noqa: BLE001 (ours, or a backend's outside of guarded calls)
        stage = "step" if passes_foreign_code(error) else OURSELVES
        raised = capture_exception(stage, error)
        if is_refused_memory(raised.error_type, raised.message):
            return RankAnswer(time.time(), not_examined=f"out of memory in rank {rank}: {raised.message}")
        return RankAnswer(time.time(), raised=raised)


def main(folder: Path, rank: int) -> None:
    """Answer the question of ``folder``."""
    question = TypeAdapter(RankQuestion).validate_json((folder / "question.json").read_bytes())
    if not end_with(question.parent):
        return
    torch.set_float32_matmul_precision("highest")
    answer = answer_of(question, rank, folder)
    written = folder / f"rank-{rank}.tmp"
    written.write_bytes(TypeAdapter(RankAnswer).dump_json(answer))
    written.rename(folder / f"rank-{rank}.json")
    os._exit(0)  # gloo's threads wait for ranks that have ended


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
