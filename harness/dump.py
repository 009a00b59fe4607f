"""A failing case as one file of plain tensors, for a debugger or a notebook: ``torch.load(path, weights_only=True)``.

Must not know: checks, records.
"""

from pathlib import Path

import torch

from attncheck.harness.observation import Observation, Raised
from attncheck.harness.problem import Problem
from attncheck.harness.truth import Truth


def dump_case(folder: Path, problem: Problem, truth: Truth, backend: str, seen: Observation | Raised | None) -> Path:
    """Write inputs, truth, budget and what the backend gave; returns the file. An older dump is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    case = problem.case
    path = folder / f"{case.suite}.{case.id}.{backend}.seed{problem.seed}.pt"
    content: dict[str, object] = {
        "case": case.key,
        "case_hash": case.hash,
        "seed": problem.seed,
        "query": problem.query,
        "keys": problem.keys,
        "values": problem.values,
        "cu_seqlens_q": problem.cu_seqlens_q,
        "cu_seqlens_k": problem.cu_seqlens_k,
        "block_table": problem.block_table,
        "key_slots": problem.key_slots,
        "block_size": problem.cache.block_size,
        "truth": truth.out.cpu(),
        "truth_lse": truth.lse.cpu(),
        "budget_norm": truth.budget.norm.cpu(),
        "budget_peak": truth.budget.peak.cpu(),
        "budget_lse": truth.budget.lse.cpu(),
    }
    if isinstance(seen, Observation):
        content["output"] = seen.output.cpu()
        content["lse"] = None if seen.lse is None else seen.lse.cpu()
    torch.save(content, path)
    return path
