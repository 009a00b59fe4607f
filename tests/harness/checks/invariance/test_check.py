"""Changes that must not matter: the smallest one that does is reported; right backends of other shapes pass."""

from dataclasses import replace
from itertools import pairwise

import pytest
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBuilder, ReferenceImpl
from attncheck.backends.conventions import Conventions
from attncheck.backends.registry import load
from attncheck.harness.checks.again import Change, changed_step
from attncheck.harness.checks.findings import Broken, Holds
from attncheck.harness.driver.foreign_code import StageError
from attncheck.reports.run_file.causes import UNKNOWN

HONEST = Conventions(padded_rows="untouched")


@pytest.fixture
def examine(judge, backend_of):
    """Return a function from ``change(query, key, metadata, rows of the output)`` and a case to the finding."""

    def run(change, case, **members):
        class Impl(ReferenceImpl):
            def attend(self, *args):
                super().attend(*args)
                change(args[1], args[2], args[5], args[6][: args[5].num_rows])

        return judge("invariance", backend_of(Impl, **members), case)

    return run


@pytest.mark.parametrize(
    ("mutant", "layer", "what", "meaning"),
    [
        ("takes-heads-for-a-run", {}, "strides.key: transposed:", "stride of key"),
        ("writes-rows-without-room", {}, "strides.output: ", "stride of output"),
        ("loses-the-cap-alone", {"logits_soft_cap": 5.0}, "alone:", "beside it in the batch"),
        ("plans-once-per-lengths", {"sliding_window": 16}, "in other pages of a pool:", "kept from an earlier step"),
        ("plans-once-per-process", {"alibi": True}, "in other pages of a pool:", "block table"),
    ],
)
def test_a_finding_names_the_one_thing_that_matters(judge, make_case, mutant, layer, what, meaning):
    case = make_case((1, 37), (5, 40), (33, 43), (1, 130), **layer)
    found = judge("invariance", load(f"mutants:{mutant}").backend, case)
    assert found.summary.startswith("right at first, wrong with ")
    assert what in found.summary
    assert " and " not in found.summary.partition(":")[0]
    assert meaning in (found.meaning or "")


@pytest.mark.parametrize(
    ("mutant", "what"),
    [
        ("splits-by-max-seq-len", "with max_seq_len above the batch's: 3 of 3 rows are wrong, the first is row 0 "),
        (
            "steps-over-narrow-tables",
            "with 5 more columns of null pages in the block table: 2 of 3 rows are wrong, the first is row 1 ",
        ),
    ],
)
def test_a_batch_of_decodes_stays_one_while_its_room_grows(judge, make_case, mutant, what):
    found = judge("invariance", load(f"mutants:{mutant}").backend, make_case((1, 37), (1, 40), (1, 130)))
    assert what in found.summary


@pytest.mark.parametrize("declared", ["rows", "any"])
def test_a_backend_of_rows_alone_is_handed_no_other_strides(examine, make_case, declared):
    seen = set()

    def note(query, key, _metadata, rows):
        seen.add((query.stride(1) / query.shape[2], key.stride(1) / key.shape[2], rows.is_contiguous()))

    conventions = replace(HONEST, operand_strides=declared)
    assert isinstance(examine(note, make_case(dtype="float32"), conventions=conventions), Holds)
    assert (seen == {(1, 1, True)}) is (declared == "rows")


class HostLens(ReferenceBuilder):
    """Builder that takes the lengths on the host for those of the device."""

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        common = replace(common_attn_metadata, seq_lens=common_attn_metadata.seq_lens_cpu.clone())
        return super().build(common_prefix_len, common, fast_build)


@pytest.mark.parametrize("host_lens", ["upper_bound", "exact"])
def test_lengths_on_the_host_are_exact_only_if_declared(judge, backend_of, make_case, host_lens):
    members = {"get_builder_cls": staticmethod(lambda: HostLens), "conventions": replace(HONEST, host_lens=host_lens)}
    found = judge("invariance", backend_of(ReferenceImpl, **members), make_case((1, 37), (5, 40)))
    assert isinstance(found, Broken) is (host_lens == "upper_bound")
    if isinstance(found, Broken):
        how = "wrong with seq_lens_cpu and num_computed_tokens_cpu of decodes above those of the device: "
        assert found.summary.startswith(f"right at first, {how}1 of 6 rows is wrong, the first is row 0 ")
        assert 'declare host_lens="exact"' in (found.meaning or "")


def test_a_plan_for_equal_totals_and_maxima_is_not_that_of_the_batch(judge, backend_of, make_case):
    class Builder(ReferenceBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            common = common_attn_metadata
            key = (
                common.num_reqs,
                common.num_actual_tokens,
                common.max_query_len,
                int(common.seq_lens.max()),
                int(common.seq_lens.sum()),
            )
            lens = vars(self).setdefault("plans", {}).setdefault(key, common.seq_lens.clone())
            return super().build(common_prefix_len, replace(common, seq_lens=lens), fast_build)

    members = {"get_builder_cls": staticmethod(lambda: Builder)}
    cases = [make_case((1, 37), (1, 20), (1, longest)) for longest in range(90, 94)]
    findings = [judge("invariance", backend_of(ReferenceImpl, **members), case) for case in cases]
    wrong = [found for found in findings if isinstance(found, Broken)]
    assert wrong
    assert all("something is kept from an earlier" in (found.meaning or "") for found in wrong)
    assert all(isinstance(judge("invariance", backend_of(ReferenceImpl), case), Holds) for case in cases)


def test_an_exception_is_reported_with_the_change(examine, make_case):
    def refuse(_query, _key, metadata, _rows):
        if metadata.common.max_seq_len > int(metadata.common.seq_lens.max()):
            raise ValueError("max_seq_len must be exact")

    with pytest.raises(StageError) as failure:
        examine(refuse, make_case())
    assert failure.value.raised.stage == "forward of the step with max_seq_len above the batch's"


@pytest.mark.parametrize("is_wrong_at_once", [False, True])
def test_no_cause_is_named_where_the_first_step_has_wrong_rows(examine, make_case, is_wrong_at_once):
    def attend(_query, _key, metadata, rows):
        if is_wrong_at_once:
            rows[:1] *= 3
        if metadata.common.max_seq_len > int(metadata.common.seq_lens.max()):
            rows[1:] *= 3

    found = examine(attend, make_case())
    assert isinstance(found, Broken)
    assert (found.meaning or "").startswith(UNKNOWN) is is_wrong_at_once


def test_heads_that_are_not_packed_may_be_refused(examine, make_case):
    has_room = []

    def refuse(_query, key, _metadata, rows):
        if key.stride(1) != key.shape[2] or not rows.is_contiguous():
            raise ValueError("heads must be packed")
        has_room.append(key.stride(0) > key.shape[1] * key.shape[2])

    found = examine(refuse, make_case())
    assert isinstance(found, Holds)
    assert any("transposed raised ValueError: heads must be packed" in note for note in found.notes)
    assert any(has_room)


def test_batch_invariance_is_held_to_the_bits(examine, make_case):
    def depends(_query, _key, metadata, rows):
        if metadata.common.num_reqs == 1:
            rows *= 1 + 2.0**-20

    case = make_case(dtype="float32")
    assert isinstance(examine(depends, case, conventions=HONEST), Holds)
    found = examine(depends, case, conventions=replace(HONEST, batch_invariant=True))
    assert found.summary == snapshot(
        "right at first, wrong with request 3 alone: 1 of 1 rows have other bits, the first is row 39 (request 3, position 129); the backend declares batch_invariant"
    )


def test_rows_that_are_wrong_at_once_are_left_to_other_checks(examine, make_case):
    def halve(_query, _key, _metadata, rows):
        rows *= 0.5

    found = examine(halve, make_case())
    assert isinstance(found, Holds)
    assert found.figures["rows"] == 0


def test_a_cache_that_differs_is_found_though_the_answer_is_right(judge, backend_of, make_case):
    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            super().write(layer, key, value, key_cache, value_cache, slot_mapping)
            if not key.is_contiguous() and key.stride(1) != key.shape[2]:
                value_cache[0, 0] = 1.0

    found = judge("invariance", backend_of(Impl), make_case())
    assert found.summary.endswith(
        "wrong with strides.key: transposed: the cache holds other bytes than after the first step"
    )


@pytest.mark.parametrize(
    ("is_wrong", "how"),
    [
        (lambda put: False, None),
        (lambda put: "c" in put, "with c"),
        (lambda put: {"a", "d"} <= put, "with a and d"),
        (lambda put: True, "when it is repeated unchanged"),
    ],
)
def test_the_smallest_set_of_changes_is_named(is_wrong, how):
    changes = tuple(Change(name, f"meaning of {name}", lambda put, name=name: put | {name}) for name in "abcd")
    wrong = changed_step(frozenset(), changes, lambda put: Broken("wrong") if is_wrong(put) else None).wrong()
    assert (wrong and wrong.summary) == (how and f"right at first, wrong {how}: wrong")


@pytest.mark.parametrize(
    ("lengths", "refused", "handed"),
    [(((1, 37), (1, 40)), (2, 3), (2, 2)), (((3, 37), (1, 40)), (2, 3), (2, 6)), (((1, 37), (1, 40)), (), (2, 3))],
)
def test_padding_that_is_not_declared_is_not_handed_out(examine, make_case, lengths, refused, handed):
    def unsupported_reasons(_cls, _layer, _cache, batch):
        return ["padding"] if (batch.padding.requests, batch.padding.tokens) == refused else []

    handed_out = set()

    def note(_query, _key, metadata, _rows):
        starts = metadata.common.query_start_loc_cpu.tolist()
        empty = sum(a == b for a, b in pairwise(starts))
        handed_out.add((empty, metadata.common.num_actual_tokens - starts[-1]))

    case = make_case(*lengths, dtype="float32")
    assert isinstance(examine(note, case, unsupported_reasons=classmethod(unsupported_reasons)), Holds)
    assert handed_out == {(0, 0), handed}
