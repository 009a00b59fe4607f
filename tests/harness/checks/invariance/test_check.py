"""Changes that must not matter: the smallest one that does is reported; right backends of other shapes pass."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.conventions import Conventions
from attncheck.backends.registry import LoadedBackend, load
from attncheck.harness.checks.again import Change, Variation, changed_step
from attncheck.harness.checks.findings import Broken, Holds
from attncheck.harness.checks.interface import CheckedCase, SharedByChecks
from attncheck.harness.checks.invariance import CHECKS
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of
from attncheck.reports.run_file.causes import UNKNOWN

CPU = torch.device("cpu")


def examine(backend: Any, case: Any) -> Any:
    problem = build_problem(case, 0)
    loaded = LoadedBackend(name="candidate", ref="./x.py:X", backend=backend, version="", origin="test")
    truth = truth_of(problem, CPU, refuse_blindness=False)
    return CHECKS["invariance"].run(CheckedCase(loaded, problem, truth, CPU, (), SharedByChecks()))


def with_attend(change: Any, **members: Any) -> Any:
    """The reference, whose ``attend`` is followed by ``change(query, key, metadata, rows of the output)``."""

    class Impl(ReferenceImpl):
        def attend(self, *args: Any) -> None:
            super().attend(*args)
            change(args[1], args[2], args[5], args[6][: args[5].num_rows])

    return type("Variant", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl)} | members)


FAULTS = [
    ("takes-heads-for-a-run", {}, "strides.key: transposed:", "stride of key"),
    ("takes-query-heads-for-a-run", {}, "strides.query: transposed:", "stride of query"),
    ("writes-rows-without-room", {}, "strides.output: ", "stride of output"),
    ("loses-the-cap-alone", {"logits_soft_cap": 5.0}, "alone:", "beside it in the batch"),
    ("plans-once-per-lengths", {"sliding_window": 16}, "in other pages of a pool:", "kept from an earlier step"),
    ("plans-once-per-process", {"alibi": True}, "in other pages of a pool:", "block table"),
]


@pytest.mark.parametrize(
    ("mutant", "layer", "what", "meaning"), FAULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_finding_names_the_one_thing_that_matters(
    make_case: Any, mutant: str, layer: dict[str, Any], what: str, meaning: str
) -> None:
    found = examine(load(f"mutants:{mutant}").backend, make_case((1, 37), (5, 40), (33, 43), (1, 130), **layer))
    assert isinstance(found, Broken)
    assert found.summary.startswith("right at first, wrong with ")
    assert what in found.summary
    assert " and " not in found.summary.partition(":")[0]
    assert meaning in (found.meaning or "")


@pytest.mark.parametrize(
    ("mutant", "what"),
    [
        (
            "splits-by-max-seq-len",
            snapshot(
                "right at first, wrong with max_seq_len above the batch's: 3 of 3 rows are wrong, the first is row 0 (request 0, position 36), in all heads; the largest error is ..."
            ),
        ),
        (
            "steps-over-narrow-tables",
            snapshot(
                "right at first, wrong with 5 more columns of null pages in the block table: 2 of 3 rows are wrong, the first is row 1 (request 1, position 39), in all heads; the largest error is ..."
            ),
        ),
    ],
)
def test_a_batch_of_decodes_stays_one_while_its_room_grows(
    plain: Callable[[str], str], make_case: Any, mutant: str, what: str
) -> None:
    found = examine(load(f"mutants:{mutant}").backend, make_case((1, 37), (1, 40), (1, 130)))
    assert isinstance(found, Broken)
    assert plain(found.summary) == what


def test_a_backend_of_rows_alone_is_handed_no_other_strides(make_case: Any) -> None:
    seen = []
    declared = Conventions(operand_strides="rows", padded_rows="untouched")
    case = make_case(dtype="float32")
    backend = with_attend(
        lambda query, key, _metadata, rows: seen.append(
            (query.stride(1) / query.shape[2], key.stride(1) / key.shape[2], rows.is_contiguous())
        ),
        conventions=declared,
    )
    assert isinstance(examine(backend, case), Holds)
    assert set(seen) == {(1, 1, True)}
    seen.clear()
    backend.conventions = replace(declared, operand_strides="any")
    assert isinstance(examine(backend, case), Holds)
    assert len(set(seen)) > 2


def test_an_exception_is_reported_with_the_change(make_case: Any) -> None:
    def refuse(_query: Any, _key: Any, metadata: Any, _rows: Any) -> None:
        if metadata.common.max_seq_len > int(metadata.common.seq_lens.max()):
            raise ValueError("max_seq_len must be exact")

    with pytest.raises(StageError) as failure:
        examine(with_attend(refuse), make_case())
    assert failure.value.raised.stage == "forward of the step with max_seq_len above the batch's"


@pytest.mark.parametrize("is_wrong_at_once", [False, True])
def test_no_cause_is_named_where_the_first_step_has_wrong_rows(make_case: Any, is_wrong_at_once: bool) -> None:
    def attend(_query: Any, _key: Any, metadata: Any, rows: torch.Tensor) -> None:
        if is_wrong_at_once:
            rows[:1] *= 3
        if metadata.common.max_seq_len > int(metadata.common.seq_lens.max()):
            rows[1:] *= 3

    found = examine(with_attend(attend), make_case())
    assert isinstance(found, Broken)
    assert (found.meaning or "").startswith(UNKNOWN) is is_wrong_at_once


def test_heads_that_are_not_packed_may_be_refused(make_case: Any) -> None:
    seen = []

    def refuse(_query: Any, key: Any, _metadata: Any, rows: Any) -> None:
        if key.stride(1) != key.shape[2] or not rows.is_contiguous():
            raise ValueError("heads must be packed")
        seen.append(key.stride(0) > key.shape[1] * key.shape[2])

    found = examine(with_attend(refuse), make_case())
    assert isinstance(found, Holds)
    assert any("transposed raised ValueError: heads must be packed" in note for note in found.notes)
    assert any(seen)


def test_batch_invariance_is_held_to_the_bits(make_case: Any) -> None:
    def depends(_query: Any, _key: Any, metadata: Any, rows: torch.Tensor) -> None:
        if metadata.common.num_reqs == 1:
            rows *= 1 + 2.0**-20

    case = make_case(dtype="float32")
    honest = Conventions(padded_rows="untouched")
    assert isinstance(examine(with_attend(depends, conventions=honest), case), Holds)
    found = examine(with_attend(depends, conventions=replace(honest, batch_invariant=True)), case)
    assert isinstance(found, Broken)
    assert found.summary == snapshot(
        "right at first, wrong with request 3 alone: 1 of 1 rows have other bits, the first is row 39 (request 3, position 129); the backend declares batch_invariant"
    )
    assert "batch_invariant" in found.summary
    assert "alone" in found.summary


def test_rows_that_are_wrong_at_once_are_left_to_other_checks(make_case: Any) -> None:
    def halve(_query: Any, _key: Any, _metadata: Any, rows: torch.Tensor) -> None:
        rows *= 0.5

    found = examine(with_attend(halve), make_case())
    assert isinstance(found, Holds)
    assert found.figures["rows"] == 0


def test_a_cache_that_differs_is_found_though_the_answer_is_right(make_case: Any) -> None:
    class Impl(ReferenceImpl):
        def write(self, layer: Any, key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any) -> None:
            super().write(layer, key, value, key_cache, value_cache, slot_mapping)
            if not key.is_contiguous() and key.stride(1) != key.shape[2]:
                value_cache[0, 0] = 1.0

    backend = type("Variant", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl)})
    found = examine(backend, make_case())
    assert isinstance(found, Broken)
    assert found.summary == snapshot(
        "right at first, wrong with strides.key: transposed: the cache holds other bytes than after the first step"
    )


def variation(judge: Any) -> Variation:
    changes = tuple(Change(name, f"meaning of {name}", lambda put, name=name: put | {name}) for name in "abcd")
    return changed_step(frozenset(), changes, lambda put: Broken("wrong") if judge(put) else None)


def test_the_smallest_set_of_changes_is_named() -> None:
    def summary(judge: Any) -> Any:
        wrong = variation(judge).wrong()
        return wrong.summary if isinstance(wrong, Broken) else wrong

    assert summary(lambda put: False) is None
    assert summary(lambda put: "c" in put) == snapshot("right at first, wrong with c: wrong")
    assert summary(lambda put: {"a", "d"} <= put) == snapshot("right at first, wrong with a and d: wrong")
    assert summary(lambda put: True) == snapshot("right at first, wrong when it is repeated unchanged: wrong")


@pytest.mark.parametrize(
    ("lengths", "refused", "handed"),
    [(((1, 37), (1, 40)), (2, 3), (2, 2)), (((3, 37), (1, 40)), (2, 3), (2, 6)), (((1, 37), (1, 40)), (), (2, 3))],
)
def test_padding_that_is_not_declared_is_not_handed_out(
    make_case: Any, lengths: Any, refused: Any, handed: tuple[int, int]
) -> None:
    seen = set()

    class Backend(ReferenceBackend):
        @classmethod
        def unsupported_reasons(cls, layer: Any, cache: Any, batch: Any) -> list[str]:
            padding = (batch.padding.requests, batch.padding.tokens)
            if any(padding):
                seen.add(padding)
            return ["padding"] if padding == refused else []

    class Impl(ReferenceImpl):
        def forward(self, *args: Any, **keywords: Any) -> Any:
            common = args[5].common
            starts = common.query_start_loc_cpu.tolist()
            empty = sum(a == b for a, b in pairwise(starts))
            handed_out.add((empty, common.num_actual_tokens - starts[-1]))
            return super().forward(*args, **keywords)

    handed_out: set[tuple[int, int]] = set()
    Backend.get_impl_cls = staticmethod(lambda: Impl)  # type: ignore[method-assign]
    assert isinstance(examine(Backend, make_case(*lengths, dtype="float32")), Holds)
    assert seen
    assert handed_out == {(0, 0), handed}
