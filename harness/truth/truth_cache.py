"""A cache of truths on disk, shared by the processes of a machine.

An entry is a file named by a digest of all that the truth depends on: the case and the bytes of its inputs, seed,
tolerance, attncheck's sources, torch, machine and number of threads. It holds a checksum and plain float64 numbers, so
that loading it executes nothing. Entries that are damaged, or that belong to another user, are not used.
"""

import json
import math
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from attncheck.harness.problem.output_quantisation import output_codes
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.shared_folder import MOST_BYTES, SharedFolder
from attncheck.harness.truth.tolerance import Budget
from attncheck.harness.truth.truth import Truth, params_of, rows_of, truth_of

SOURCES = ("cases", "harness/problem", "harness/truth", "reference", "backends/dtypes.py")
"""Sources that compute truths, relative to the package; an edit to one invalidates all entries."""


class TruthCache:
    """Truths of problems on ``device``, read from ``folder`` or computed; all are computed if ``folder`` is None.

    ``machine``: names what affects the rounding of float64 sums: versions, processor, device. ``stores``: whether
    truths computed here are stored. Only a process without foreign code may store them, since a backend may change how
    torch behaves in its process.
    """

    def __init__(
        self, device: torch.device, folder: Path | None = None, *, machine: str = "", stores: bool = False
    ) -> None:
        self._device, self._machine = device, machine
        self._folder = None if folder is None else SharedFolder(folder)
        self._sources = ""
        if self._folder is not None:
            try:  # now rather than when a truth is stored, since the sources may be edited in between
                self._sources = digest_of_sources()
            except OSError:
                self._folder = None
        if self._folder is not None and self._folder.fault() is not None:
            self._folder = None
        self._stores = stores
        self._until_trim = 0

    def truth_of(self, problem: Problem, *, refuse_blindness: bool = True) -> Truth:
        """Return the truth of ``problem``; see :func:`~attncheck.harness.truth.truth.truth_of`.

        Raises:
            BlindCaseError: as there; such a case has no entry.
        """
        folder = self._folder
        if folder is None:
            return _timed_truth_of(problem, self._device, refuse_blindness=refuse_blindness)
        key = self._key(problem, refuse_blindness=refuse_blindness)
        content = folder.read(key, _num_bytes(problem))
        truth = _from_bytes(problem, content, self._device) if content else None
        if truth is None:
            truth = _timed_truth_of(problem, self._device, refuse_blindness=refuse_blindness)
            if self._stores:
                self._store(folder, key, truth)
        return truth

    def _store(self, folder: SharedFolder, key: str, truth: Truth) -> None:
        content = _to_bytes(truth)
        if self._until_trim <= 0:
            folder.trim()
            self._until_trim = MOST_BYTES // 16
        self._until_trim -= len(content)
        self._stores = folder.write(key, content)  # a full disk is not tried again

    def _key(self, problem: Problem, *, refuse_blindness: bool) -> str:
        case = problem.case
        inputs = {
            "case": case.hash,
            "seed": problem.seed,
            "tolerance": None if case.tolerance is None else case.tolerance.factor,
            "refuse_blindness": refuse_blindness,
            "machine": self._machine,
            "torch": [str(torch.__version__), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()],
            "device": self._device.type,
            "sources": self._sources,
        }
        digest = sha256(json.dumps(inputs, sort_keys=True).encode())
        for rows in (problem.query, problem.keys, problem.values):
            digest.update(rows.flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def digest_of_sources() -> str:
    """Return a digest of the files below :data:`SOURCES`. Raises OSError if one cannot be read."""
    package = Path(__file__).resolve().parents[2]
    digest = sha256()
    for name in SOURCES:
        place = package / name
        for file in [place] if place.suffix else sorted(place.rglob("*.py")):
            content = file.read_bytes()
            digest.update(f"{file.relative_to(package)} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _shape(problem: Problem) -> tuple[int, int, int]:
    """``T``, ``H``, ``Dv``."""
    return sum(request.rows for request in problem.requests), problem.layer.num_heads, problem.output_size


def _num_bytes(problem: Problem) -> int:
    rows, heads, size = _shape(problem)
    return 8 * (rows * heads * (size + 4) + 1)


def _to_bytes(truth: Truth) -> bytes:
    budget = truth.budget
    parts = (
        truth.out,
        truth.lse,
        budget.norm,
        budget.peak,
        budget.lse,
        torch.tensor(truth.computed_s, dtype=torch.float64),
    )
    return torch.cat([part.double().flatten().cpu() for part in parts]).numpy().astype("<f8", copy=False).tobytes()


def _from_bytes(problem: Problem, content: bytearray, device: torch.device) -> Truth | None:
    """Return the truth that an entry holds, or None if its numbers cannot be those of a truth."""
    rows, heads, size = _shape(problem)
    numbers = torch.frombuffer(content, dtype=torch.float64)
    computed_s, numbers = float(numbers[-1]), numbers[:-1].to(device)
    out = numbers[: rows * heads * size].view(rows, heads, size)
    lse, *allowed = numbers[rows * heads * size :].view(4, rows, heads)
    if not (_may_be_truth(out, lse, numbers[-3 * rows * heads :]) and 0 <= computed_s < math.inf):
        return None
    codes = output_codes(problem.layer)
    return Truth(params_of(problem), rows_of(problem, device), out, lse, Budget(*allowed), codes, computed_s)


def _timed_truth_of(problem: Problem, device: torch.device, *, refuse_blindness: bool) -> Truth:
    began = perf_counter()
    truth = truth_of(problem, device, refuse_blindness=refuse_blindness)
    return replace(truth, computed_s=perf_counter() - began)


def _may_be_truth(out: Tensor, lse: Tensor, budgets: Tensor) -> bool:
    """Return whether outputs are finite, no LSE is NaN or +inf, and all budgets are finite and above 0."""
    inf = math.inf
    (lowest, highest), (least, most) = out.aminmax(), budgets.aminmax()  # NaN if any number is
    return bool((-inf < lowest) & (highest < inf) & (lse.max() < inf) & (least > 0) & (most < inf))
