"""Write a failing case to one file of plain tensors, which ``torch.load(path, weights_only=True)`` reads."""

import re
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor

from attncheck.cases.model import Case
from attncheck.harness.driver.observation import Observation, Raised
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.truth import Truth


def dump_case(folder: Path, problem: Problem, truth: Truth, backend: str, seen: Observation | Raised | None) -> Path:
    """Write inputs, truth, budget and the backend's output to a file, and return its path. Replace an older dump."""
    content: dict[str, Tensor | int | None] = {
        "query": problem.query,
        "keys": problem.keys,
        "values": problem.values,
        **_weights(problem),
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
    return dump_tensors(folder, problem.case, problem.seed, backend, content)


def _weights(problem: Problem) -> dict[str, Tensor]:
    """Return ``W_UK`` and ``W_UV``, which turn latent rows into keys and values. Empty for a layer without them."""
    weights = problem.up_projections
    return {} if weights is None else {"w_uk": weights.w_uk, "w_uv": weights.w_uv}


def dump_tensors(folder: Path, case: Case, seed: int, backend: str, content: Mapping[str, Tensor | int | None]) -> Path:
    """Write ``content``, with its tensors on the CPU, and what identifies the case; return the path of the file.

    Raise OSError if the file cannot be written, leaving no partial file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^\w.:-]", "_", backend)  # the reference of a class in a file contains slashes
    path = folder / f"{case.suite}.{case.id}.{name}.seed{seed}.pt"
    named: dict[str, object] = {"case": case.key, "case_hash": case.hash, "seed": seed}
    # Saving a view would save its entire storage.
    plain = {name: value.cpu().clone() if isinstance(value, Tensor) else value for name, value in content.items()}
    written = BytesIO()  # torch.save hides the cause of an OSError if it writes to a path or file itself
    torch.save(named | plain, written)
    try:
        path.write_bytes(written.getbuffer())
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path
