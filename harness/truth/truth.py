"""The float64 truth of a problem: computed on a device, and kept in a cache."""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain, product
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from attncheck.cases.model import Case
from attncheck.errors import BlindCaseError
from attncheck.harness.device import accelerator_of
from attncheck.harness.problem.problem import Problem, ranks_of
from attncheck.harness.problem.sizes import judging_device, naive_layer, operations
from attncheck.harness.problem.storage import (
    OutputCodes,
    key_storage,
    output_codes,
    output_error,
    query_storage,
    value_storage,
)
from attncheck.harness.truth.faults import (
    LATENT_ROUNDINGS,
    Answer,
    Attend,
    CacheRows,
    absorbed_rows,
    cache_rows,
    causal_toggle,
    latent_answers,
    naive_rows,
    scale_toggles,
    toggles,
)
from attncheck.harness.truth.shared_folder import MOST_BYTES, SharedFolder
from attncheck.harness.truth.unpaged import ROUNDINGS, Budget, UnpagedAttention, budget_of, share_of_budget
from attncheck.reference import AttentionParams, Precision, layer_params, merge_many, mla_params
from attncheck.reference.spec import AttentionType
from attncheck.reference.step_spec import REGISTERED, ROW_FORMATS

# Choose where a truth is computed: on the device of the run, or on the host if that takes less time.
#
# A consumer GPU computes float64 at 1/64 of its float32 rate, so a host with many cores is faster. Times are estimated
# from the case and the GPU's properties, never measured, so that equal machines make the same choice.

_SHARE_OF_PEAK = 0.5
"""Share of a GPU's peak float64 rate that attention in torch reaches; ``_HOST_RATE`` includes that of the host."""

_HOST_RATE = 16e9
"""Float64 operations per second of one core."""

_BYTES_A_SECOND, _LATENCY = 10e9, 0.0002
"""Bandwidth, and latency in seconds, of copying a truth from the host to the device."""


def truth_device(case: Case, device: torch.device) -> torch.device:
    """Return where the truth of ``case`` is computed: on ``device``, where it is judged, or on the CPU.

    It is the CPU if that is estimated to deliver the truth to ``device`` sooner.
    """
    accelerator = accelerator_of(device)
    rate = None if accelerator is None else accelerator.facts().float64_rate
    if rate is None:
        return device
    on_host = host_seconds(case, _num_cores())
    return torch.device("cpu") if on_host < device_seconds(case, rate) else device


def device_seconds(case: Case, rate: float) -> float:
    """Return the estimated seconds of a truth on a GPU, without work that takes equally long on the host.

    ``rate``: the GPU's peak of float64 operations per second.
    """
    return operations(case, 2) / (_SHARE_OF_PEAK * rate)


def host_seconds(case: Case, cores: int) -> float:
    """Return the estimated seconds of a truth on ``cores`` cores, including its copies to a GPU.

    Work that takes equally long on the GPU is left out.
    """
    layer = naive_layer(case.layer)
    # Two float32 operations take as long as one of float64. Output, LSE and three budgets are copied.
    work = operations(case, 2) + operations(case, 1) / 2
    num_bytes = 8 * case.batch.num_tokens * layer.num_heads * (layer.value_head_size + 4)
    return work / (_HOST_RATE * cores) + num_bytes / _BYTES_A_SECOND + _LATENCY


def truth_notes(case: Case, device: torch.device) -> tuple[str, ...]:
    """Return the notes of a record on where its truth was computed; empty if where it is judged on ``device``."""
    judged_on = judging_device(case, device)
    if truth_device(case, judged_on) == judged_on:
        return ()
    return ("the float64 truth was computed on the CPU: by estimate, this GPU takes longer",)


@contextmanager
def all_cores() -> Iterator[None]:
    """Use every core of the host for torch's CPU operators."""
    before = torch.get_num_threads()
    torch.set_num_threads(_num_cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# The right answer to a problem, the error budget around it, and a check that the case can notice wrong answers.
#
# The truth is computed without pages, from contiguous keys: a formulation independent of the paged one that backends
# are driven through. A backend may hold keys in other forms: as codes, as latent rows, or in parts whose results are
# merged. The functions below :func:`truth_of` return the exact meaning of such a form, and what a good kernel of the
# layer's dtype loses on it.

RANK_ROUNDINGS = 4
"""Roundings of the output that are always allowed on ranks: two as for any layer, one of products, one of their sum."""

_FP8_PROB_FACTORS = (256.0, 448.0)
"""Factors of softmax weights before they are rounded to FP8: those of vLLM's Triton kernel and of FlashInfer."""

NOTICEABLE = 10.0
"""Budgets by which a change must move the truth to count as noticed."""


@dataclass(frozen=True)
class Truth:
    """The right answer: ``out`` float64 ``[T, H, Dv]``, ``lse`` float64 ``[T, H]``, and the budget around them."""

    params: AttentionParams
    rows: UnpagedAttention
    out: Tensor
    lse: Tensor
    budget: Budget
    codes: OutputCodes | None = None
    """How the output is quantised, or None; ``out`` itself is not quantised."""
    computed_s: float = 0.0
    """Seconds that computing it took; 0 if not measured."""

    def to(self, device: torch.device) -> "Truth":
        """Return the truth on ``device``."""
        return replace(
            self,
            rows=self.rows.to(device),
            out=self.out.to(device),
            lse=self.lse.to(device),
            budget=self.budget.to(device),
        )

    def of_requests(self, first: int, end: int) -> "Truth":
        """Return the truth of requests ``first .. end - 1``; the tensors share memory."""
        rows = slice(int(self.rows.cu_seqlens_q[first]), int(self.rows.cu_seqlens_q[end]))
        return replace(self.of_rows(rows), rows=self.rows.of_requests(first, end))

    def of_rows(self, rows: Tensor | slice) -> "Truth":
        """Return the truth with outputs, LSEs and budgets of some rows; ``self.rows`` stays that of all."""
        return replace(self, out=self.out[rows], lse=self.lse[rows], budget=self.budget.of_rows(rows))


def truth_of(problem: Problem, device: torch.device, *, refuse_blindness: bool = True) -> Truth:
    """Return the truth of ``problem``, where results on ``device`` are judged (:func:`judging_device`).

    :func:`truth_device` chooses where it is computed.

    With ``refuse_blindness``, raises BlindCaseError if turning off a modifier of the layer, or moving a window's edge
    by one, hardly moves the truth. A pass would then prove nothing about the modifier. Always raises BlindCaseError if
    a good kernel overflows, because no output can then be expected.
    """
    judged_on = judging_device(problem.case, device)
    place = truth_device(problem.case, judged_on)
    if place == judged_on:
        return _truth_on(problem, place, refuse_blindness)
    with all_cores():
        return _truth_on(problem, place, refuse_blindness).to(judged_on)


def _truth_on(problem: Problem, device: torch.device, refuse_blindness: bool) -> Truth:
    params, rows = params_of(problem), rows_of(problem, device)
    out, lse, weighted = rows.attend_weighted(params)
    honest, forms = honest_answers(problem, rows, params), other_forms(problem, rows)
    budget = budget_of(rows, params, problem.dtype, out, lse, weighted, honest, forms, roundings_of(problem))
    if problem.case.tolerance is not None:
        budget = budget.scaled(problem.case.tolerance.factor)
    if not math.isfinite(float((budget.norm + budget.peak + budget.lse).sum())):
        raise BlindCaseError(
            problem.case.key,
            "any error",
            f"what a good kernel keeps in {problem.layer.dtype} overflows; raise layer.scale, which makes the queries "
            "smaller, or change layer.dtype",
        )
    truth = Truth(params, rows, out, lse, budget, output_codes(problem.layer))
    if refuse_blindness:
        _refuse_blindness(problem, truth)
    return truth


def _refuse_blindness(problem: Problem, truth: Truth) -> None:
    if "needles" not in problem.inputs:
        return  # the case chose plain inputs, which cannot show every fault
    _refuse_equal_codes(problem, truth)
    layer = problem.layer
    all_toggles = [toggles(truth.params, truth.rows), scale_toggles(problem, truth.params, truth.rows)]
    if layer.attn_type == AttentionType.DECODER and not layer.is_causal:
        all_toggles.append(iter([causal_toggle(truth.params, truth.rows)]))
    for toggle in chain.from_iterable(all_toggles):
        able = int(toggle.acts.sum())
        if not able:
            if toggle.mostly:
                raise BlindCaseError(
                    problem.case.key,
                    toggle.subject,
                    "no row of the batch has a key it could act on; lengthen a request",
                )
            continue
        out, _ = toggle.hypothesis.compute()
        seen = out if truth.codes is None else truth.codes.of(out)
        moved = share_of_budget(output_error(seen, truth.out, truth.codes), truth.budget).amax(dim=1)
        noticed = int(((moved >= NOTICEABLE) & toggle.acts).sum())
        if noticed < (able // 2 + 1 if toggle.mostly else 1):
            raise BlindCaseError(
                problem.case.key,
                toggle.subject,
                f"only {noticed} of {able} rows move by {NOTICEABLE:g} times the allowed error when it changes "
                f"(largest: {float(moved.max()):.3g}); use longer requests, larger scores, or a stronger modifier",
            )


def _refuse_equal_codes(problem: Problem, truth: Truth) -> None:
    if truth.codes is None or not bool(truth.out.any()):
        return
    twice = output_error(truth.codes.of(2 * truth.out), truth.out, truth.codes)
    if not bool((share_of_budget(twice, truth.budget) >= NOTICEABLE).any()):
        raise BlindCaseError(
            problem.case.key,
            "output_quant",
            "an answer twice as large has the same codes; give a scale that leaves outputs between the smallest code "
            "and the largest",
        )


def params_of(problem: Problem) -> AttentionParams:
    """Return the parameters of the attention over :func:`rows_of`."""
    return layer_params(naive_layer(problem.layer))


def rows_of(problem: Problem, device: torch.device) -> UnpagedAttention:
    """Return the problem's query, keys and values in exact numbers."""
    if problem.up_projections is not None:
        return naive_rows(problem, problem.up_projections, cache_rows(problem, device))
    layer, cache = problem.layer, problem.cache
    return UnpagedAttention(
        query_storage(layer, cache).exact(problem.query),
        key_storage(layer, cache).exact(problem.keys),
        value_storage(layer, cache).exact(problem.values),
        problem.cu_seqlens_q,
        problem.cu_seqlens_k,
        problem.tree,
        problem.prefixes,
        problem.topk_indices,
    ).to(device)


def other_forms(problem: Problem, rows: UnpagedAttention) -> tuple[tuple[UnpagedAttention, AttentionParams], ...]:
    """Return formulations other than :func:`rows_of` that kernels may compute, with the same scores.

    The float32 rounding of a score of products ``a_i b_i`` is bounded by roundings of ``sum |a_i b_i| <= |a| |b|``. A
    latent query and a cache row are longer than query and key, by about ``sqrt(L / P)``, though their product is equal.
    The bound of the absorbed form is therefore larger.
    """
    if problem.up_projections is None:
        return ()
    absorbed = absorbed_rows(problem.up_projections, cache_rows(problem, rows.query.device), rows)
    return ((absorbed, mla_params(problem.layer).latent),)


def roundings_of(problem: Problem) -> int:
    """Return how many roundings of the output are always allowed."""
    if problem.case.batch.path.name == "ranks":
        return RANK_ROUNDINGS
    return ROUNDINGS if problem.up_projections is None else LATENT_ROUNDINGS


def honest_answers(problem: Problem, rows: UnpagedAttention, params: AttentionParams) -> Iterator[Answer]:
    """Yield outputs and LSEs of low-precision runs, one for each way in which a good kernel may compute the problem."""
    precision = Precision.kernel(problem.dtype)

    def attend(reading: UnpagedAttention, how: AttentionParams, rounding: Precision = precision) -> Answer:
        if problem.layout.part_of_key is None:
            return reading.attend(how, rounding)
        return _merged(problem, problem.layout.part_of_key, reading, how, rounding)

    if problem.layer.query_quant:  # tensor cores multiply codes of values by codes of weights
        maxima = (False,) if params.sinks is None else (False, True)  # that of vLLM's Triton kernel starts at the sink
        for factor, from_sinks in product(_FP8_PROB_FACTORS, maxima):
            coarse = replace(precision, prob=torch.float8_e4m3fn, prob_factor=factor, max_from_sinks=from_sinks)
            yield attend(rows, params, coarse)
    coded_values = value_storage(problem.layer, problem.cache).coded_rows
    if coded_values is not None and coded_values.row_format.group is None and problem.dtype == torch.float16:
        largest = coded_values.row_format.largest
        if problem.cache.kv_cache_dtype == REGISTERED:  # the largest code is unknown; this one loses most
            largest = ROW_FORMATS["fp8_per_token_head"].largest
        yield _with_scaled_weights(rows, params, precision, largest, attend)
    if problem.case.batch.path.name == "ranks":  # the new keys may be spread, too
        spread = [each for r in problem.requests for each in range(r.num_keys)]
        holders = torch.tensor(spread) // ranks_of(problem.case).interleave % ranks_of(problem.case).size
        for read in _readings(problem, rows):
            yield _merged(problem, holders, read, params, precision)
    if problem.up_projections is None:
        for read in _readings(problem, rows):
            yield attend(read, params)
    else:
        yield from _latent_answers(problem, cache_rows(problem, rows.query.device), rows, params, attend)
        if key_storage(problem.layer, problem.cache).is_fp8:  # read rounded to the dtype
            device = rows.query.device
            cached = CacheRows(problem.keys.to(device).double(), problem.values.to(device).double())
            read = naive_rows(problem, problem.up_projections, cached)
            yield from _latent_answers(problem, cached, read, params, attend)


def _latent_answers(
    problem: Problem, cached: CacheRows, rows: UnpagedAttention, params: AttentionParams, attend: Attend
) -> Iterator[Answer]:
    assert problem.up_projections is not None
    mla = problem.layer.mla
    return latent_answers(
        problem.up_projections,
        cached,
        rows,
        (params, mla_params(problem.layer).latent),
        problem.dtype,
        attend,
        workspace=None if mla is None else mla.workspace,
        merges_context=mla is not None and not problem.parts and problem.topk_indices is None,
    )


def _readings(problem: Problem, rows: UnpagedAttention) -> Iterator[UnpagedAttention]:
    """Yield the rows as kernels may read them: exactly, and for codes, also rounded to the layer's dtype."""
    yield rows
    if key_storage(problem.layer, problem.cache).is_fp8:
        device = rows.keys.device
        query, keys, values = (each.to(device) for each in (problem.query, problem.keys, problem.values))
        yield replace(rows, query=query, keys=keys, values=values)


def _with_scaled_weights(
    rows: UnpagedAttention,
    params: AttentionParams,
    precision: Precision,
    largest: float,
    attend: Callable[[UnpagedAttention, AttentionParams, Precision], Answer],
) -> Answer:
    """Round the products of softmax weights and scales of value rows, and multiply codes by them.

    vLLM's Triton kernel does so. Scales are powers of two, so only float16, whose small numbers have fewer bits, loses
    more than by rounding the weights themselves. ``largest``: the largest code.
    """
    scales = rows.values.double().abs().amax(dim=-1, keepdim=True) / largest
    outs: list[Tensor] = []
    for scale in scales.unique().tolist():  # the output is the sum of those of rows of equal scale
        of_scale = replace(rows, values=rows.values.masked_fill(scales != scale, 0.0))
        how = replace(precision, out=None, prob_factor=scale or 1.0, max_from_sinks=True)
        out, lse = attend(of_scale, params, how)
        outs.append(out)
    return torch.stack(outs).sum(dim=0).to(precision.out), lse


def _merged(
    problem: Problem, part_of_key: Tensor, rows: UnpagedAttention, params: AttentionParams, precision: Precision
) -> Answer:
    """Attend to each part separately, round its output to the dtype, and merge the results.

    The merge loses nothing more, except on the path ``ranks``.
    """
    by_request = part_of_key.to(rows.keys.device).split(rows.num_keys.tolist())
    bare = replace(params, sinks=None)  # only the first part counts the sinks

    def state(part: int) -> Answer:
        return rows.attend(params if part == 0 else bare, precision, lambda r, _q, k: by_request[r][k] != part)

    states = [state(part) for part in range(len(problem.parts))]
    if problem.case.batch.path.name == "ranks":
        size = ranks_of(problem.case).size
        states = [_summed_over_ranks(states[:size], problem.dtype), *states[size:]]
    return merge_many([out for out, _ in states], [lse for _, lse in states])


def _summed_over_ranks(states: Sequence[Answer], dtype: torch.dtype) -> Answer:
    """Return the sum of the ranks' weighted outputs; as in vLLM, each product and the sum are rounded to ``dtype``."""
    lses = torch.stack([lse for _, lse in states])
    weights = (lses - lses.logsumexp(0)).exp().nan_to_num()
    products = [(out * weight[..., None]).to(dtype) for (out, _), weight in zip(states, weights, strict=True)]
    out: Tensor = torch.stack(products).sum(0)
    return out.double(), lses.logsumexp(0)


# A cache of truths on disk, shared by the processes of a machine.
#
# An entry is a file named by a digest of all that the truth depends on: the case and the bytes of its inputs, seed,
# tolerance, attncheck's sources, torch, machine and number of threads. It holds a checksum and plain float64 numbers,
# so that loading it executes nothing. Entries that are damaged, or that belong to another user, are not used.

SOURCES = (
    "cases",
    "harness/device.py",
    "harness/host.py",
    "harness/problem",
    "harness/truth",
    "reference",
    "backends/dtypes.py",
)
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
        truth = _from_bytes(problem, content, judging_device(problem.case, self._device)) if content else None
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
    computed_s = float(numbers[-1])
    numbers = numbers[:-1].to(device)
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
