"""The check ``bitwise``: the first change of a step that changes a bit, what a declaration promises, and digests."""

import math
from dataclasses import replace

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.candidates.torch_sdpa import SDPABackend, SDPABuilder, SDPAImpl
from attncheck.backends.conventions import Conventions
from attncheck.backends.mutants.catalogue import catalogue
from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite
from attncheck.harness.checks.findings import Broken, Holds
from attncheck.reports.run_file.bits import CLAIMED, RUNGS

DECLARED = Conventions(padded_rows="untouched", batch_invariant=True)

PROMPTS = (9, 9), (5, 5), (12, 12)


def moved(rows):
    """Move the small values of ``rows`` to the next one towards 0, in place, which the budget allows."""
    is_small = rows.abs() < rows.abs().amax(-1, keepdim=True) / 4
    rows.copy_(torch.where(is_small, torch.nextafter(rows, torch.zeros_like(rows)), rows))


@pytest.fixture
def examine(judge, backend_of):
    """Return a function from ``is_moved(metadata)`` and a case to the finding; the rows of such steps are moved."""

    def run(is_moved, case, conventions=DECLARED):
        class Impl(ReferenceImpl):
            def attend(self, *args):
                super().attend(*args)
                if is_moved(args[5]):
                    moved(args[6][: args[5].num_rows])

        return judge("bitwise", backend_of(Impl, conventions=conventions), case)

    return run


def outcomes(found):
    return {rung.name: rung.outcome for rung in found.bits.rungs}


def test_a_right_backend_that_declares_it_passes_every_rung(examine, make_case):
    found = examine(lambda _metadata: False, make_case(*PROMPTS, dtype="float32"))
    assert isinstance(found, Holds)
    unknown = {"graph": "not examined", "splits": "not examined"}
    assert outcomes(found) == dict.fromkeys(RUNGS, "equal") | unknown
    assert found.bits.level == "decode"
    assert found.figures == {"rows": 26, "rungs_equal": 7}


LIARS = {
    "sums-in-turn": "repetition",
    "sums-in-the-order-of-pages": "pages",
    "sums-by-the-place": "order",
    "splits-by-the-batch": "neighbours",
    "splits-by-padding": "padding",
}


@pytest.mark.parametrize("mutant", [each for each in catalogue() if each.kind == "bits"], ids=lambda each: each.name)
def test_a_liar_is_found_at_its_own_rung(judge, mutant):
    what = f"bits depend on {LIARS[mutant.name]}"
    case = next(case for case in load_suite("smoke").cases if case.key == mutant.case)
    found = judge("bitwise", load(mutant.ref).backend, case)
    assert isinstance(found, Broken)
    assert found.summary.startswith(f"{what}: ")
    assert found.finding == f"{what}; the backend declares batch_invariant"
    assert isinstance(judge("numerics", load(mutant.ref).backend, case), Holds)


def has_context(metadata):
    return any(seq_len > rows > 1 for _, rows, seq_len in requests(metadata))


def is_decode(metadata):
    return all(rows == 1 for _, rows, _ in requests(metadata))


def requests(metadata):
    starts = metadata.common.query_start_loc_cpu.tolist()
    lens = metadata.common.seq_lens_cpu.tolist()
    return [(i, starts[i + 1] - starts[i], seq_len) for i, seq_len in enumerate(lens)]


@pytest.mark.parametrize(
    ("is_moved", "rung", "level"), [(has_context, "chunks", "padding"), (is_decode, "decode", "chunks")]
)
def test_how_a_prompt_is_cut_is_measured_and_not_promised(examine, make_case, is_moved, rung, level):
    found = examine(is_moved, make_case(*PROMPTS, dtype="float32"))
    assert isinstance(found, Holds)
    assert found.bits.first_broken.name == rung
    assert found.bits.level == level
    assert rung not in CLAIMED


def test_a_graph_with_another_kernel_breaks_its_rung(judge):
    class Builder(SDPABuilder):
        def build_for_cudagraph_capture(self, common_attn_metadata):
            metadata = super().build_for_cudagraph_capture(common_attn_metadata)
            object.__setattr__(metadata, "is_for_capture", True)
            return metadata

    class Impl(SDPAImpl):
        def attend(self, *args):
            super().attend(*args)
            if getattr(args[5], "is_for_capture", False):
                moved(args[6])

    class Backend(SDPABackend):
        conventions = replace(SDPABackend.conventions, batch_invariant=True)
        get_impl_cls = staticmethod(lambda: Impl)
        get_builder_cls = staticmethod(lambda: Builder)

    case = next(case for case in load_suite("smoke").cases if case.key == "smoke/decode.float16")
    found = judge("bitwise", Backend, case)
    assert isinstance(found, Broken)
    assert found.bits.first_broken.name == "graph"
    assert found.bits.first_broken.rows_moved == 6
    found = judge("cudagraph", Backend, case)
    assert isinstance(found, Holds), found.summary


def test_a_difference_is_counted_in_units_in_the_last_place_at_its_row_and_head(judge, backend_of, make_case):
    class Impl(ReferenceImpl):
        def attend(self, *args):
            super().attend(*args)
            if args[5].common.num_reqs == 1:
                for _ in range(3):
                    moved(args[6][args[5].num_rows - 1, 2])

    found = judge("bitwise", backend_of(Impl, conventions=DECLARED), make_case((1, 37), (2, 40)))
    broken = found.bits.first_broken
    assert (broken.name, broken.rows, broken.rows_moved, broken.ulps, broken.head) == ("neighbours", 9, 2, 3, 2)
    assert found.figures["ulps"] == 3
    assert found.summary == snapshot(
        "bits depend on neighbours: 2 of 9 compared rows have other bits; the largest difference is 3 units in the last place, at row 0, head 2 (request 0, position 36); the backend declares batch_invariant"
    )


@pytest.mark.parametrize("conventions", [Conventions(), Conventions(deterministic=False, batch_invariant=True)])
def test_who_declares_nothing_passes_with_the_level(examine, make_case, conventions):
    calls = []
    found = examine(lambda _metadata: calls.append(0) or len(calls) % 2, make_case(), conventions)
    assert isinstance(found, Holds)
    assert found.bits.level == "none"
    assert found.bits.first_broken.name == "repetition"


def test_what_a_case_has_no_step_for_is_not_examined(examine, make_case):
    found = examine(lambda _metadata: False, make_case((1, 9)))
    reasons = {rung.name: rung.reason for rung in found.bits.rungs if rung.outcome == "not examined"}
    assert reasons == snapshot(
        {
            "order": "the batch has one request",
            "graph": "the builder declares NEVER",
            "chunks": "every request has one row",
            "decode": "every request has one row",
            "splits": "no member of vLLM's contract sets the number of splits",
        }
    )


def test_a_value_beside_nan_has_no_distance_and_two_nan_are_equal(judge, backend_of, make_case):
    def impl(value_of):
        class Impl(ReferenceImpl):
            def attend(self, *args):
                super().attend(*args)
                if math.isnan(value := value_of(args[5].common.num_reqs)):
                    args[6][: args[5].num_rows] = value

        return backend_of(Impl, conventions=Conventions())

    case = make_case((1, 9), (1, 5), dtype="float32")  # other dtypes keep no sign of NaN
    broken = judge("bitwise", impl(lambda count: math.nan if count == 1 else 1), case).bits.first_broken
    assert (broken.name, broken.ulps) == ("neighbours", None)
    nans = judge("bitwise", impl(lambda count: -math.nan if count == 1 else math.nan), case)
    assert nans.bits.first_broken is None


def test_digests_are_equal_for_equal_bits_and_count_rows(judge, backend_of, make_case):
    class Impl(ReferenceImpl):
        def attend(self, *args):
            super().attend(*args)
            moved(args[6][1:3])

    case = make_case((2, 37), (2, 40))
    one, same = (judge("bitwise", ReferenceBackend, case).bits for _ in range(2))
    other = judge("bitwise", backend_of(Impl), case).bits
    assert one.digest == same.digest
    assert one.differing_rows(same) == 0
    assert one.differing_rows(other) == 2
    assert one.model_copy(update={"row_digests": ""}).differing_rows(other) is None
