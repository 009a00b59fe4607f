"""Faults of scales: left out, applied twice, exchanged, that of one head for all, or applied where there are no codes.

The keys and values of the rows are numbers, ``code * scale``, so each fault is a factor per head on them.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.storage import Storage, key_storage, value_storage
from attncheck.harness.truth.hypotheses import Hypothesis, Toggle, keys_seen
from attncheck.harness.truth.unpaged import UnpagedAttention
from attncheck.reference import AttentionParams


def scale_toggles(problem: Problem, params: AttentionParams, rows: UnpagedAttention) -> Iterator[Toggle]:
    """Yield the changes that a case with an FP8 cache must notice: each scale left out, and one scale for all heads."""
    key, value = key_storage(problem.layer, problem.cache), value_storage(problem.layer, problem.cache)
    if not key.is_fp8:
        return
    seen = keys_seen(rows, params)
    if problem.layer.mla is not None:  # keys and values come from the same codes
        if bool((key.scale != 1).any()):
            unscaled = 1 / key.scale.double()
            yield Toggle("k_scale", _both("k_scale is left out", params, rows, unscaled, unscaled), seen > 0, True)
        return
    rivals = seen > (0 if params.sinks is not None else 1)
    parts = (("k_scale", key.scale.double(), rivals), ("v_scale", value.scale.double(), seen > 0))
    for name, scale, acts in parts:
        if bool((scale != 1).any()):
            yield Toggle(name, _scaled(f"{name} is left out", params, rows, name, 1 / scale), acts, True)
        if bool((scale != scale[0]).any()):
            yield Toggle(f"{name} per head", _of_first_head(params, rows, name, scale), acts, False)


def scale_explanations(problem: Problem, params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    """Yield faults of scales, for explaining a wrong output."""
    storages = key_storage(problem.layer, problem.cache), value_storage(problem.layer, problem.cache)
    key, value = (storage.scale.double() for storage in storages)
    if storages[0].is_fp8 and problem.layer.mla is not None:
        yield from (toggle.hypothesis for toggle in scale_toggles(problem, params, rows))
        yield _both("k_scale is applied twice", params, rows, key, key)
        other = torch.tensor(problem.cache.v_scale, dtype=torch.float64).reshape(-1, 1) / key
        yield _both("v_scale is used for the latent cache", params, rows, other, other)
    elif storages[0].is_fp8:
        yield from (toggle.hypothesis for toggle in scale_toggles(problem, params, rows))
        yield _both("k_scale and v_scale are left out", params, rows, 1 / key, 1 / value)
        yield _both("the scales of KV head 0 are used for all heads", params, rows, key[:1] / key, value[:1] / value)
        yield _scaled("k_scale is applied twice", params, rows, "k_scale", key)
        yield _scaled("v_scale is applied twice", params, rows, "v_scale", value)
        yield _both("k_scale and v_scale are applied twice", params, rows, key, value)
        yield _both("k_scale and v_scale are exchanged", params, rows, value / key, key / value)
        yield _scaled("k_scale divides the codes", params, rows, "k_scale", key**-2)
        yield _scaled("v_scale divides the codes", params, rows, "v_scale", value**-2)
        yield _both("k_scale and v_scale divide the codes", params, rows, key**-2, value**-2)
        yield _scaled("k_scale is used for values, instead of v_scale", params, rows, "v_scale", key / value)
        yield _scaled("v_scale is used for keys, instead of k_scale", params, rows, "k_scale", value / key)
        yield from _lost_subnormals(params, rows, storages)
        for how, shift in (("in reversed order of heads", 0), ("of the next head", -1), ("of the head before", 1)):
            k_other, v_other = (each.roll(shift, 0) if shift else each.flip(0) for each in (key, value))
            if len(key) > 1 or len(value) > 1:
                yield _both(f"the scales are used {how}", params, rows, k_other / key, v_other / value)
    else:
        yield _scaled("k_scale multiplies keys that are no codes", params, rows, "k_scale", key)
        yield _scaled("v_scale multiplies values that are no codes", params, rows, "v_scale", value)
        yield _both("k_scale and v_scale multiply keys and values that are no codes", params, rows, key, value)
    q_scale = problem.cache.q_scale
    factor = torch.tensor(q_scale if isinstance(q_scale, tuple) else (q_scale,), dtype=torch.float64)[:, None]
    yield _scaled("q_scale multiplies a query that is no codes", params, rows, "q_scale", factor)


def _lost_subnormals(
    params: AttentionParams, rows: UnpagedAttention, storages: tuple[Storage, Storage]
) -> Iterator[Hypothesis]:
    """Yield the faults of reading codes below the smallest normal number as 0."""
    flushed = [
        part.masked_fill(
            part.abs() < float(torch.finfo(storage.held).tiny) * storage.scale.double().to(part.device), 0.0
        )
        for part, storage in zip((rows.keys, rows.values), storages, strict=True)
    ]
    for which, keys, values in (
        ("", flushed[0], flushed[1]),
        ("of keys ", flushed[0], rows.values),
        ("of values ", rows.keys, flushed[1]),
    ):
        made = replace(rows, keys=keys, values=values)
        yield Hypothesis(f"subnormal codes {which}are read as 0", partial(made.attend, params))


def _scaled(meaning: str, params: AttentionParams, rows: UnpagedAttention, name: str, factor: Tensor) -> Hypothesis:
    """Return the fault of multiplying keys, values or query by ``factor`` (``[1 or Hkv, 1]``)."""
    part = {"k_scale": "keys", "v_scale": "values", "q_scale": "query"}[name]
    per_head = factor.repeat_interleave(params.group_size, 0) if name == "q_scale" and len(factor) > 1 else factor

    def compute() -> tuple[Tensor, Tensor]:
        was: Tensor = getattr(rows, part)
        return replace(rows, **{part: was.double() * per_head.to(was.device)}).attend(params)

    return Hypothesis(meaning, compute)


def _both(meaning: str, params: AttentionParams, rows: UnpagedAttention, key: Tensor, value: Tensor) -> Hypothesis:
    """Return the fault of multiplying keys and values by one factor each."""

    def compute() -> tuple[Tensor, Tensor]:
        device = rows.keys.device
        keys, values = rows.keys.double() * key.to(device), rows.values.double() * value.to(device)
        return replace(rows, keys=keys, values=values).attend(params)

    return Hypothesis(meaning, compute)


def _of_first_head(params: AttentionParams, rows: UnpagedAttention, name: str, scale: Tensor) -> Hypothesis:
    return _scaled(f"the {name} of KV head 0 is used for all heads", params, rows, name, scale[:1] / scale)
