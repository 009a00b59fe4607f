"""How a step is handed over must not matter: the strides of its operands, and maxima that are only upper bounds.

One maximum at a time: with ``max_query_len`` above 1 a batch of decodes leaves a backend's path for decodes. No engine
transposes heads, so a backend may raise for them: it then gets the strides of rows. A wrong answer is a failure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from attncheck.harness.checks.findings import Broken
from attncheck.harness.checks.invariance.changes import Change, Variation
from attncheck.harness.checks.invariance.right_rows import RightRows
from attncheck.harness.driver.observation import Raised
from attncheck.harness.driver.session import Session
from attncheck.harness.driver.step import strides_of
from attncheck.harness.driver.turn import Fill
from attncheck.reference.spec import StrideForm, StridesSpec

_BOUNDS = "the maxima of the metadata may be upper bounds; lengths are in query_start_loc and seq_lens"

_FORMS: tuple[tuple[StrideForm, ...], ...] = (
    ("transposed", "transposed", "contiguous", "padded"),
    ("contiguous", "contiguous", "transposed", "transposed"),
    ("transposed", "transposed", "padded", "offset"),
    ("padded", "padded", "transposed", "transposed"),
)
"""Of query, key, value and output: of any two that follow each other, one has each of them transposed."""

_ROW_FORMS: tuple[tuple[StrideForm, ...], ...] = (
    ("padded", "contiguous", "offset"),
    ("contiguous", "offset", "padded"),
    ("offset", "padded", "contiguous"),
)
"""Of query, key and value: the heads of a row lie one behind the other."""


def same_step(rows: RightRows, session: Session) -> Iterator[Variation[Fill]]:
    """Yield the step handed over with some strides and a larger ``max_seq_len``, others and ``max_query_len``."""
    number = int(rows.problem.case.hash, 16)

    def judge(fill: Fill) -> Broken | Raised | None:
        return rows.wrong_in(session.run(fill))

    for turn, maximum in enumerate(("max_seq_len", "max_query_len")):
        loosened = Change(f"{maximum} above the batch's", _BOUNDS, partial(_loosened, maximum))
        by_rows = Variation(Fill(), (*_stride_changes(rows, _ROW_FORMS, number + turn), loosened), judge)
        if rows.conventions.operand_strides == "rows":
            yield by_rows
        else:
            yield replace(by_rows, changes=(*_stride_changes(rows, _FORMS, number + turn), loosened), instead=by_rows)


def _loosened(maximum: str, fill: Fill) -> Fill:
    return replace(fill, loose=(*fill.loose, maximum))


def _stride_changes(rows: RightRows, known: Sequence[tuple[StrideForm, ...]], number: int) -> Iterator[Change[Fill]]:
    problem, plain = rows.problem, strides_of(rows.problem)
    forms = known[number % len(known)]
    heads = {"query": problem.query, "key": problem.keys, "value": problem.values}
    for name, usual in zip(("query", "key", "value", "output"), forms, strict=False):
        if name in ("key", "value") and problem.writes_nothing:
            continue
        form = usual
        if form == "contiguous" and name in heads and 1 in heads[name].shape[:2]:
            form = "odd"
        elif form == "transposed" and name == "output" and problem.layer.mla is not None:
            form = "padded"  # an impl of a latent layer gets ``[T, H * V]``
        if form != getattr(plain, name):
            meaning = f"a stride of {name} is taken for granted"
            yield Change(
                f"strides.{name}: {form}", meaning, partial(_with_strides, replace(plain, **{name: form}), name)
            )


def _with_strides(wanted: StridesSpec, name: str, fill: Fill) -> Fill:
    return replace(fill, strides=replace(fill.strides or wanted, **{name: getattr(wanted, name)}))
