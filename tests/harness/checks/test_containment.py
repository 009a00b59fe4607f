"""Who is accused of reading foreign memory: those who do, and not those who forget, remember or waver."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.conventions import Conventions
from attncheck.harness.checks import containment
from attncheck.harness.checks.findings import Broken, Finding, FindingError, Holds
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of

CPU = torch.device("cpu")
STATE = "state is kept between calls, or the backend is not deterministic"


def backend_with(change: Any, **members: Any) -> Any:
    """The reference, whose output ``change(call, rows of the output, K/V caches, metadata)`` adds to in place."""

    class Impl(ReferenceImpl):
        calls = 0

        def attend(self, *args: Any) -> None:
            super().attend(*args)
            self.calls += 1
            change(self.calls, args[6][: args[5].num_rows], args[4], args[5])

    return type("Wrong", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl)} | members)


def examine(backend: Any, case: Any) -> Finding:
    problem = build_problem(case, 0)
    session = Session(backend, problem, CPU)
    seen = session.run()
    try:
        return containment.check_containment(problem, truth_of(problem, CPU), session, seen)
    except FindingError as ended:
        return ended.finding


def broken(backend: Any, case: Any) -> Broken:
    finding = examine(backend, case)
    assert isinstance(finding, Broken)
    return finding


def noisy(amount: float) -> Any:
    generator = torch.Generator().manual_seed(0)

    def change(_call: int, output: torch.Tensor, *_: Any) -> None:
        output *= 1 + amount * torch.randn(output.shape, generator=generator)

    return change


def test_an_honest_backend_runs_once_a_poisoning(make_case: Any) -> None:
    calls = []
    finding = examine(backend_with(lambda call, *_: calls.append(call)), make_case())
    assert isinstance(finding, Holds)
    assert len(calls) == 1 + finding.figures["poisonings"]


def test_an_honest_backend_is_compared_bit_for_bit(make_case: Any) -> None:
    finding = examine(ReferenceBackend, make_case())
    assert isinstance(finding, Holds)
    assert (finding.figures["bitwise"], finding.notes) == (1, ())


def test_a_backend_that_declares_different_bits_does_not_leak_by_them(make_case: Any) -> None:
    def change(call: int, output: torch.Tensor, *_: Any) -> None:
        output *= 1 + 2**-22 * (call in (2, 5))  # two poisoned calls, by chance

    declared, case = {"conventions": Conventions(deterministic=False)}, make_case(dtype="float32")
    assert isinstance(examine(backend_with(change), case), Broken)
    assert isinstance(examine(backend_with(change, **declared), case), Holds)


ALL = snapshot(
    "a second, identical call is wrong: 40 of 40 rows are wrong, the first is row 0 (request 0, position 36), in all heads; the largest error is ..."
)


@pytest.mark.parametrize(
    ("is_wrong", "rows", "summary"),
    [
        (lambda call: call > 1, slice(None), ALL),
        (lambda call: call > 3, slice(None), ALL),  # first in a poisoned step; the clean one after it differs, too
        (lambda call: call % 2 == 0, slice(None), ALL),
        (
            lambda call: call == 2,
            3,
            snapshot(
                "a second, identical call is wrong: 1 of 40 rows is wrong, the first is row 3 (request 1, position 37), in all heads; the largest error is ..."
            ),
        ),
        (lambda call: call == 1, slice(None), snapshot("the first call is wrong, a second, identical one is right")),
    ],
)
def test_a_fault_of_some_calls_is_state_and_no_matter_of_memory(
    plain: Callable[[str], str], make_case: Any, is_wrong: Callable[[int], bool], rows: Any, summary: str
) -> None:
    def change(call: int, output: torch.Tensor, *_: Any) -> None:
        output[rows] *= 0.9 if is_wrong(call) else 1.0

    finding = broken(backend_with(change), make_case())
    assert (plain(finding.summary), finding.meaning) == (summary, STATE)


def test_a_single_slip_in_a_poisoned_step_is_no_finding(make_case: Any) -> None:
    def change(call: int, output: torch.Tensor, *_: Any) -> None:
        output[3] *= 0.9 if call == 4 else 1.0

    finding = examine(backend_with(change), make_case())
    assert isinstance(finding, Holds)
    assert finding.notes == snapshot(("compared within the allowed error: equal input gives different bits",))


def test_noise_is_compared_within_the_budget(make_case: Any) -> None:
    finding = examine(backend_with(noisy(1e-4)), make_case(dtype="float16"))
    assert isinstance(finding, Holds)
    assert finding.figures["bitwise"] == 0
    assert finding.notes == snapshot(("compared within the allowed error: equal input gives different bits",))


def test_noise_outside_of_the_budget_is_left_to_numerics(make_case: Any) -> None:
    finding = examine(backend_with(noisy(0.05)), make_case())
    assert isinstance(finding, Holds)
    assert "4 times its clean error" in finding.notes[0]


def test_noise_hides_no_leak(make_case: Any) -> None:
    noise = noisy(0.05)

    def change(call: int, output: torch.Tensor, caches: Any, metadata: Any) -> None:
        noise(call, output)
        output += 0.0 * caches[1][0].amax()

    finding = broken(backend_with(change), make_case())
    assert finding.summary == snapshot(
        "NaN in the null page reaches 40 of 40 rows, the first is row 0 (request 0, position 36)"
    )
    assert "40 of 40" in finding.summary


def test_weights_of_zero_are_distinguished_from_values_that_count(make_case: Any) -> None:
    def null_page(factor: float) -> Any:
        def change(_call: int, output: torch.Tensor, caches: Any, _metadata: Any) -> None:
            output += factor * caches[1][0].float().amax().to(output.dtype)

        return backend_with(change)

    only_nan = broken(null_page(0.0), make_case())
    assert only_nan.summary == snapshot(
        "NaN in the null page reaches 40 of 40 rows, the first is row 0 (request 0, position 36)"
    )
    assert "40 of 40" in only_nan.summary
    assert only_nan.meaning == (
        snapshot(
            "memory that no request owns is read; only NaN and Inf leak, a large finite value does not: a weight of 0 is multiplied by the value there (a backend may declare needs_finite_pool)"
        )
    )
    assert broken(null_page(1e-20), make_case()).meaning == snapshot("memory that no request owns is read")


def test_a_declared_need_for_finite_numbers_is_respected(make_case: Any) -> None:
    def change(_call: int, output: torch.Tensor, caches: Any, _metadata: Any) -> None:
        output += 0.0 * caches[1][0].amax()

    finding = examine(backend_with(change, conventions=Conventions(needs_finite_pool=True)), make_case())
    assert isinstance(finding, Holds)


def one_slot(page: Any) -> Any:
    """Adds a little of one slot of each request's pages: ``page(seq_len, block size)`` gives (page, offset)."""

    def change(_call: int, output: torch.Tensor, caches: Any, metadata: Any) -> None:
        for request, start, end, seq_len in metadata.requests():
            index, offset = page(seq_len, caches[1].shape[1])
            slot = caches[1][metadata.common.block_table_tensor[request, index].long(), offset]
            output[start:end] += 1e-20 * slot.amax()

    return backend_with(change)


def test_the_tail_of_a_page_is_called_by_its_name(make_case: Any) -> None:
    finding = broken(one_slot(divmod), make_case((1, 37), (5, 41)))
    assert finding.summary == snapshot(
        "NaN in the unused tail of a last page reaches 6 of 6 rows, the first is row 0 (request 0, position 36)"
    )
    assert "6 of 6" in finding.summary
    assert finding.meaning == snapshot("slots behind the last key of a request are read")


def test_what_a_window_left_behind_is_the_requests_own(make_case: Any) -> None:
    finding = broken(one_slot(lambda *_: (0, 0)), make_case((1, 137), (5, 141), sliding_window=16))
    assert finding.summary == snapshot(
        "NaN in pages the window has left behind reaches 6 of 6 rows, the first is row 0 (request 0, position 136)"
    )
    assert "6 of 6" in finding.summary
    assert finding.meaning == (
        snapshot(
            "keys before the windows of all rows are read: a cache manager may have given their pages to other requests"
        )
    )


def test_padding_rows_that_matter_are_called_so(make_case: Any) -> None:
    class Impl(ReferenceImpl):
        def attend(self, *args: Any) -> None:
            super().attend(*args)
            args[6][: args[5].num_rows] += torch.isnan(args[1][args[5].num_rows :]).any().to(args[6].dtype)

    backend = type("Wrong", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl)})
    finding = broken(backend, make_case((1, 20), (3, 9), padding=(0, 2)))
    assert finding.summary == snapshot(
        "the output depends on padding rows of the inputs: with zeros instead of NaN, it changes in 4 of 4 rows, the first is row 0 (request 0, position 19)"
    )
    assert "4 of 4" in finding.summary


def test_beside_foreign_slots_that_leak_padding_is_examined_all_the_same(make_case: Any) -> None:
    class Impl(ReferenceImpl):
        def attend(self, *args: Any) -> None:
            super().attend(*args)
            args[6][: args[5].num_rows] += 0.0 * args[4][1][0].amax()
            args[6][: args[5].num_rows] += torch.isnan(args[1][args[5].num_rows :]).any().to(args[6].dtype)

    backend = type("Wrong", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl)})
    finding = broken(backend, make_case((1, 20), (3, 9), padding=(0, 2)))
    assert finding.summary == snapshot(
        "the output depends on padding rows of the inputs: with zeros instead of NaN, it changes in 4 of 4 rows, the first is row 0 (request 0, position 19)"
    )
    assert any(detail.startswith("NaN in the null page reaches 4 of 4 rows") for detail in finding.details)


def padding_filled(value: Callable[[Any], Any], real: Callable[[Any], Any] = lambda _: 0.0) -> Any:
    """Writes ``value(caches)`` to padding rows, and adds ``real(caches)`` to the others."""

    class Impl(ReferenceImpl):
        def attend(self, *args: Any) -> None:
            super().attend(*args)
            output, rows = args[6], args[5].num_rows
            output[:rows] += real(args[4])
            output[rows:] = value(args[4])

    finite = {"conventions": Conventions(), "get_impl_cls": staticmethod(lambda: Impl)}
    return type("Wrong", (ReferenceBackend,), finite)


HOLD_NAN = "padding rows of the output hold NaN or Inf"


@pytest.mark.parametrize(
    ("value", "summary"),
    [
        (lambda _: torch.nan, f"2 of 2 {HOLD_NAN}"),
        (lambda caches: caches[1][0].amax(), f"2 of 2 {HOLD_NAN}, with NaN in slots that no request owns"),
    ],
)
def test_nan_in_padding_rows_is_one_finding_beside_memory_that_no_row_reads(
    make_case: Any, value: Any, summary: str
) -> None:
    finding = broken(padding_filled(value), make_case((1, 20), (3, 9), padding=(0, 2)))
    assert (finding.summary, finding.finding) == (summary, HOLD_NAN)
    assert finding.details == snapshot(("harmless unless a later layer reduces over all rows",))


def test_nan_in_padding_rows_hides_no_leak(make_case: Any) -> None:
    backend = padding_filled(lambda _: torch.nan, lambda caches: 0.0 * caches[1][0].amax())
    finding = broken(backend, make_case((1, 20), (3, 9), padding=(0, 2)))
    assert finding.summary.startswith("NaN in the null page reaches 4 of 4 rows")


def test_padding_rows_that_are_declared_untouched_must_keep_their_contents(make_case: Any) -> None:
    backend = padding_filled(lambda _: 0.0)
    case = make_case((1, 20), (3, 9), padding=(0, 2))
    assert isinstance(examine(backend, case), Holds)
    backend.conventions = Conventions(padded_rows="untouched")
    assert broken(backend, case).summary == (
        "2 of 2 padding rows of the output were written, although declared untouched"
    )


def test_a_finite_pool_that_was_not_needed_is_a_note(make_case: Any) -> None:
    members = {"conventions": Conventions(needs_finite_pool=True)}
    finding = examine(backend_with(lambda *_: None, **members), make_case())
    assert isinstance(finding, Holds)
    assert finding.notes == snapshot(
        ("needs_finite_pool is declared, and NaN in foreign slots does not reach the output here",)
    )
