"""Faults of caches that scale each row by itself: right codes with a wrong scale, or in a wrong place."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attncheck.harness.problem.coded_rows import CodedRows
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.storage import key_storage, value_storage
from attncheck.harness.truth.faults import Hypothesis, altered, of_parts
from attncheck.harness.truth.truth import Truth

Rows = tuple[Tensor, Tensor]
"""Keys and values, ``[n, Hkv, D]`` each."""


def coded_row_explanations(problem: Problem, truth: Truth) -> Iterator[Hypothesis]:
    """Yield the faults of reading such a cache; there are none for other caches."""
    forms = key_storage(problem.layer, problem.cache).coded_rows, value_storage(problem.layer, problem.cache).coded_rows
    if forms[0] is None or forms[1] is None:
        return
    rows, params = truth.rows, truth.params
    stored = rows.keys.double(), rows.values.double()
    for meaning, (keys, values) in faulty_coded_rows(stored, (forms[0], forms[1])):
        for part, made in of_parts(rows, keys, values):
            yield altered(f"{meaning}, for {part} alone" if part else meaning, made, params)
    for meaning, others in exchanged_scales(stored, (forms[0], forms[1])):
        yield altered(meaning, replace(rows, keys=others[0], values=others[1]), params)


def faulty_coded_rows(rows: Rows, forms: tuple[CodedRows, CodedRows]) -> Iterator[tuple[str, Rows]]:
    """Yield (fault, the float64 rows that are then read), for rows that the cache stores exactly."""
    scales = _scales(rows, forms)
    for where, shift in (("before", 1), ("after", -1)):
        for axis, name in enumerate(("row", "head")):
            moved = [each.roll(shift, axis) for each in scales]
            yield f"a {name} has the scale of the {name} {where}", _scaled(rows, forms, moved)
        if scales[0].shape[2] > 1:
            meaning = f"a group of numbers has the scale of the group {where}"
            yield meaning, _scaled(rows, forms, [each.roll(shift, 2) for each in scales])
    yield "the scale of KV head 0 is used for all heads", _scaled(rows, forms, [each[:, :1] for each in scales])
    row_format = forms[0].row_format
    if row_format.bits == 4:
        key, value = (part.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) for part in rows)
        yield "the two codes of a byte are exchanged", (key, value)
    if row_format.code == "int":
        beyond = [2.0**row_format.bits * scale / row_format.largest for scale in scales]
        grouped = [form.grouped(part) for part, form in zip(rows, forms, strict=True)]
        key, value = (
            torch.where(part < 0, part + wrap, part).flatten(-2) for part, wrap in zip(grouped, beyond, strict=True)
        )
        yield "negative codes are read as positive ones, without a sign", (key, value)


def exchanged_scales(rows: Rows, forms: tuple[CodedRows, CodedRows]) -> Iterator[tuple[str, Rows]]:
    """Yield (fault, the float64 rows that are then read), for keys or values with the scales of the others."""
    key, value = _scales(rows, forms)
    if key.shape == value.shape:
        yield "keys have the scales of values", _scaled(rows, forms, [value, value])
        yield "values have the scales of keys", _scaled(rows, forms, [key, key])
        yield "the scales of keys and values are exchanged", _scaled(rows, forms, [value, key])


def _scales(rows: Rows, forms: tuple[CodedRows, CodedRows]) -> list[Tensor]:
    """Return the largest magnitude of each group: ``[n, Hkv, groups, 1]``. Its scale is a fixed share of that."""
    return [form.grouped(part).abs().amax(dim=-1, keepdim=True) for part, form in zip(rows, forms, strict=True)]


def _scaled(rows: Rows, forms: tuple[CodedRows, CodedRows], others: Sequence[Tensor]) -> Rows:
    """Return the rows with other scales."""
    made = []
    for part, form, own, other in zip(rows, forms, _scales(rows, forms), others, strict=True):
        factor = other / own.masked_fill(own == 0, 1.0)
        made.append((form.grouped(part) * factor).flatten(-2))
    return made[0], made[1]
