"""The interface of a check, the calls of functions that a backend offers, and dumps of failing cases."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.model import Case
from attncheck.harness.checks.findings import Broken, Finding, FindingError, NotExamined
from attncheck.harness.driver.foreign_code import (
    StageError,
    as_plain,
    call_backend,
    has_its_memory,
    kind_of,
    require_memory,
)
from attncheck.harness.driver.observation import Observation, Raised
from attncheck.harness.driver.pool import flat_bytes
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.chosen_keys import loose_form
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.truth import Truth, TruthCache
from attncheck.harness.truth.unpaged import Budget, share_of_budget

# What a check is, and what it receives. Start here to add a check.
#
# A check is one row of `CHECKS` in `reference/spec.py` plus one module here with the row's name. The row sits there
# because case files, the schema and `list` need it without importing the harness. Everything that only the harness
# needs is in the module's `CHECKS`.

T = TypeVar("T")


class SharedByChecks:
    """Objects shared by all checks of a run, such as measurements that many cases use. Holds at most one per class."""

    def __init__(self, *given: object) -> None:
        self._objects: dict[type, object] = {type(each): each for each in given}

    def get(self, kind: type[T], make: Callable[[], T]) -> T:
        """Return the run's object of class ``kind``; the first call creates it with ``make``."""
        if kind not in self._objects:
            self._objects[kind] = make()
        return cast(T, self._objects[kind])


@dataclass(frozen=True)
class SelectedCases:
    """The cases of a run. ``cases_with(ref, check)`` returns those that run ``check`` on backend ``ref``, in order."""

    cases_with: Callable[[str, str], tuple[Case, ...]] = lambda _ref, _check: ()


class CheckedCase:
    """One case on one backend. The session and the first step are created on first use and shared by all checks.

    ``undeclared``: why the backend's declarations exclude the case. Empty if they include it.
    ``is_output_explained``: whether ``numerics`` named the fault of a wrong output, or tried all on several cases.
    """

    def __init__(
        self,
        loaded: LoadedBackend,
        problem: Problem,
        truth: Truth,
        device: torch.device,
        undeclared: tuple[str, ...],
        shared: SharedByChecks,
    ) -> None:
        self.loaded = loaded
        self.problem, self.truth = _in_form_of(loaded.backend, problem, truth)
        self.device = device
        self.undeclared, self.shared = undeclared, shared
        self.is_output_explained = False
        self._first: tuple[Session, Observation] | Raised | None = None

    @property
    def backend(self) -> type[AttentionBackend]:
        """The class under test."""
        return self.loaded.backend

    @property
    def seen(self) -> Observation | None:
        """The first step. None if the backend raised, or if no check has needed it so far."""
        return self._first[1] if isinstance(self._first, tuple) else None

    @property
    def truths(self) -> TruthCache:
        """The truths of the run, for problems that a check derives from the case's own."""
        return self.shared.get(TruthCache, lambda: TruthCache(self.device))

    def first_step(self) -> tuple[Session, Observation]:
        """Return the session and the observation of its first step. Raise StageError if the backend raised."""
        if self._first is None:
            try:
                session = Session(self.backend, self.problem, self.device)
                self._first = session, session.run()
            except StageError as failure:
                self._first = failure.raised  # the error itself would keep the session alive, by its frames
        if isinstance(self._first, Raised):
            raise StageError(self._first)
        return self._first


def _in_form_of(backend: type[AttentionBackend], problem: Problem, truth: Truth) -> tuple[Problem, Truth]:
    """Return both with the form of ``topk_indices`` that the backend takes. The chosen keys stay the same."""
    if problem.topk_indices is None or not backend.conventions.any_topk_indices:
        return problem, truth
    indices = loose_form(problem.topk_indices)
    rows = replace(truth.rows, topk_indices=indices.to(truth.rows.query.device))
    return replace(problem, topk_indices=indices), replace(truth, rows=rows)


def _always_applies(_case: Case, _features: frozenset[str]) -> NotExamined | None:
    return None


@dataclass(frozen=True)
class Check:
    """How a check runs.

    ``run`` returns the finding for a case, or raises FindingError or StageError. ``not_applicable`` returns why the
    check has nothing to examine, based only on the case and the backend's features. ``tries_undeclared`` selects
    whether the check also runs on cases that the backend does not declare.
    """

    run: Callable[[CheckedCase], Finding]
    not_applicable: Callable[[Case, frozenset[str]], NotExamined | None] = _always_applies
    tries_undeclared: bool = False


Function = Callable[..., Any]


def call(
    name: str, function: Function, arguments: Mapping[str, Tensor | None], options: Mapping[str, object], *written: str
) -> tuple[object, tuple[str, ...]]:
    """Return what ``function`` returns, and the names of the arguments whose memory it changed.

    ``arguments`` are passed by position, ``options`` by keyword. The memory around a view counts as part of it.
    Arguments named in ``written`` may change. Raise StageError, under the function's name, if the function raises.
    """
    watched = {key: value for key, value in arguments.items() if value is not None and key not in written}
    before = {key: flat_bytes(tensor).clone() for key, tensor in watched.items()}

    def enter() -> object:
        # Detached aliases, so that the function cannot change attributes of our tensor objects.
        given = [value if value is None else value.detach() for value in arguments.values()]
        with torch.no_grad():
            return function(*given, **options)

    devices = [value.device for value in arguments.values() if value is not None]
    returned = call_backend(name, enter, devices[0] if devices else None)
    for key, tensor in arguments.items():
        if tensor is not None:
            require_memory(tensor, key, name)
    return returned, tuple(key for key, tensor in watched.items() if not torch.equal(flat_bytes(tensor), before[key]))


def as_tensor(name: str, value: object, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``value`` in float64, if it is a tensor of the shape and device of ``like``.

    Its dtype must be ``dtype``, float32 or float64, since an unrounded result is allowed. Otherwise raise FindingError.
    """
    tensor = as_plain(value)
    if tensor is None:
        raise FindingError(Broken(f"{name} is {kind_of(value)}, not a torch.Tensor"))
    if not has_its_memory(tensor):
        raise FindingError(Broken(f"{name} is a tensor whose storage was resized: it holds too few bytes"))
    dtypes = tuple(dict.fromkeys((dtype, torch.float32, torch.float64)))
    *most, last = (str(wide).removeprefix("torch.") for wide in dtypes)
    allowed = f"{', '.join(most)} or {last}"
    facts: tuple[tuple[str, object, object, bool], ...] = (
        ("shape", tuple(tensor.shape), tuple(like.shape), tensor.shape == like.shape),
        ("device", tensor.device, like.device, tensor.device == like.device),
        ("dtype", str(tensor.dtype).removeprefix("torch."), allowed, tensor.dtype in dtypes),
    )
    for fact, got, wanted, fits in facts:
        if not fits:
            raise FindingError(Broken(f"{name} has {fact} {got}, expected {wanted}"))
    return tensor.double()


def is_answer(got: Tensor, answer: Tensor, budget: Budget, dtype: torch.dtype) -> bool:
    """Return whether ``got`` equals ``answer`` in every row and head, up to the budget or the rounding to ``dtype``.

    Both are float64 ``[T, H, Dv]``. ``budget`` is that of the truth; a wrong ``answer`` may be much larger than the
    truth, so an error of twice the machine epsilon of ``dtype`` relative to ``answer`` is allowed as well.
    """
    error = torch.linalg.vector_norm(got - answer, dim=-1)
    rounding = 2 * torch.finfo(dtype).eps * torch.linalg.vector_norm(answer, dim=-1)
    return bool(((share_of_budget(got - answer, budget) <= 1) | (error <= rounding)).all())


def dump_case(folder: Path, problem: Problem, truth: Truth, backend: str, seen: Observation | None) -> Path:
    """Write inputs, truth, budget and the backend's output to a file, and return its path. Replace an older dump."""
    content: dict[str, Tensor | int | None] = {
        "query": problem.query,
        "keys": problem.keys,
        "values": problem.values,
        **_weights(problem),
        "topk_indices": problem.topk_indices,
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
    if seen is not None:
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
