"""Ways of passing one step that must not matter: strides of operands, and maxima that are only upper bounds.

Only one maximum is raised at a time, because ``max_query_len`` above 1 takes a batch of decodes off a backend's decode
path. No engine transposes heads, so a backend may raise for that, and then gets strides that keep the heads of a row
together. A wrong output is a failure in any case.
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

_BOUNDS = (
    "a maximum is taken for a length: the maxima of the metadata may be upper bounds; "
    "lengths are in query_start_loc and seq_lens"
)

_FORMS: tuple[tuple[StrideForm, ...], ...] = (
    ("transposed", "transposed", "contiguous", "padded"),
    ("contiguous", "contiguous", "transposed", "transposed"),
    ("transposed", "transposed", "padded", "offset"),
    ("padded", "padded", "transposed", "transposed"),
)
"""Forms of query, key, value and output. Each two consecutive rows transpose every operand once."""

_ROW_FORMS: tuple[tuple[StrideForm, ...], ...] = (
    ("padded", "contiguous", "offset"),
    ("contiguous", "offset", "padded"),
    ("offset", "padded", "contiguous"),
)
"""Forms of query, key and value in which the heads of a row are contiguous."""


def same_step(rows: RightRows, session: Session) -> Iterator[Variation[Fill]]:
    """Yield two variations, with different strides: one raises ``max_seq_len``, the other ``max_query_len``."""
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
            form = "padded"  # the output of a latent layer is ``[T, H * V]``
        if form != getattr(plain, name):
            meaning = f"a stride of {name} is taken for granted"
            yield Change(
                f"strides.{name}: {form}", meaning, partial(_with_strides, replace(plain, **{name: form}), name)
            )


def _with_strides(wanted: StridesSpec, name: str, fill: Fill) -> Fill:
    return replace(fill, strides=replace(fill.strides or wanted, **{name: getattr(wanted, name)}))
