"""Who is accused of reading foreign memory: those who do, and not those who forget, remember or waver."""

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.backends.conventions import Conventions
from attncheck.harness.checks.findings import Broken, Holds


@pytest.fixture
def examine(judge, backend_of, make_case):
    """Return a function from a change of the reference's output to the finding; ``case``: arguments of make_case."""

    def run(change, *requests, members=None, **case):
        class Impl(ReferenceImpl):
            calls = 0

            def attend(self, *args):
                super().attend(*args)
                self.calls += 1
                change(self.calls, args[6][: args[5].num_rows], args[4], args[5])

        return judge("containment", backend_of(Impl, **(members or {})), make_case(*requests, **case))

    return run


def times(factor, rows=slice(None)):
    """Multiply rows by a factor that depends on the number of the call."""

    def change(call, output, *_):
        output[rows] *= factor(call)

    return change


def noisy(amount):
    generator = torch.Generator().manual_seed(0)

    def change(_call, output, *_):
        output *= 1 + amount * torch.randn(output.shape, generator=generator)

    return change


def null_page(factor):
    def change(_call, output, caches, _metadata):
        output += factor * caches[1][0].float().amax().to(output.dtype)

    return change


def one_slot(page):
    """Add a little of one slot of each request's pages: ``page(seq_len, block size)`` gives (page, offset)."""

    def change(_call, output, caches, metadata):
        for request, start, end, seq_len in metadata.requests():
            index, offset = page(seq_len, caches[1].shape[1])
            slot = caches[1][metadata.common.block_table_tensor[request, index].long(), offset]
            output[start:end] += 1e-20 * slot.amax()

    return change


def test_an_honest_backend_runs_once_a_poisoning_and_is_compared_bit_for_bit(examine):
    calls = []
    finding = examine(lambda call, *_: calls.append(call))
    assert isinstance(finding, Holds)
    assert len(calls) == 1 + finding.figures["poisonings"]
    assert (finding.figures["bitwise"], finding.notes) == (1, ())


def test_a_backend_that_declares_different_bits_does_not_leak_by_them(examine):
    change = times(lambda call: 1 + 2**-22 * (call in (2, 5)))  # two poisoned calls, by chance
    assert isinstance(examine(change, dtype="float32"), Broken)
    declared = {"conventions": Conventions(deterministic=False)}
    assert isinstance(examine(change, members=declared, dtype="float32"), Holds)


@pytest.mark.parametrize(
    ("is_wrong", "rows", "summary"),
    [
        (lambda call: call > 1, slice(None), "a second, identical call is wrong: 40 of 40 rows are wrong"),
        # First in a poisoned step; the clean one after it differs, too.
        (lambda call: call > 3, slice(None), "a second, identical call is wrong: 40 of 40 rows are wrong"),
        (lambda call: call % 2 == 0, slice(None), "a second, identical call is wrong: 40 of 40 rows are wrong"),
        (lambda call: call == 2, 3, "a second, identical call is wrong: 1 of 40 rows is wrong, the first is row 3 "),
        (lambda call: call == 1, slice(None), "the first call is wrong, a second, identical one is right"),
    ],
)
def test_a_fault_of_some_calls_is_state_and_no_matter_of_memory(examine, is_wrong, rows, summary):
    finding = examine(times(lambda call: 0.9 if is_wrong(call) else 1.0, rows))
    assert finding.summary.startswith(summary)
    assert finding.meaning == "something is kept from an earlier call, or the backend is not deterministic"


@pytest.mark.parametrize(
    ("change", "note"),
    [
        pytest.param(times(lambda call: 0.9 if call == 4 else 1.0, 3), "within the allowed error", id="a single slip"),
        pytest.param(noisy(1e-4), "within the allowed error: equal input gives different bits", id="noise"),
        pytest.param(noisy(0.05), "4 times its clean error", id="noise that numerics reports"),
    ],
)
def test_what_differs_by_chance_is_no_finding(examine, change, note):
    finding = examine(change, dtype="float16")
    assert isinstance(finding, Holds)
    assert finding.figures["bitwise"] == 0
    assert note in finding.notes[0]


NULL_PAGE = "NaN in the null page reaches 40 of 40 rows, the first is row 0 "
FOREIGN = "memory that no request owns is read"


@pytest.mark.parametrize(
    ("changes", "requests", "layer", "summary", "meaning"),
    [
        pytest.param(
            [null_page(0.0)],
            (),
            {},
            NULL_PAGE,
            f"{FOREIGN}; only NaN and Inf leak, a large finite value does not: a weight of 0 is multiplied by the "
            "value there (a backend may declare needs_finite_pool)",
            id="a weight of 0",
        ),
        pytest.param([null_page(1e-20)], (), {}, NULL_PAGE, FOREIGN, id="values that count"),
        pytest.param([noisy(0.05), null_page(0.0)], (), {}, NULL_PAGE, FOREIGN, id="noise hides no leak"),
        pytest.param(
            [one_slot(divmod)],
            ((1, 37), (5, 41)),
            {},
            "NaN in the unused tail of a last page reaches 6 of 6 rows",
            "slots behind the last key of a request are read",
            id="a tail",
        ),
        pytest.param(
            [one_slot(lambda *_: (0, 0))],
            ((1, 137), (5, 141)),
            {"sliding_window": 16},
            "NaN in pages the window has left behind reaches 6 of 6 rows",
            "keys before the windows of all rows are read: ",
            id="behind a window",
        ),
    ],
)
def test_what_is_read_is_called_by_its_name(examine, changes, requests, layer, summary, meaning):
    finding = examine(lambda *args: [change(*args) for change in changes], *requests, **layer)
    assert finding.summary.startswith(summary)
    assert (finding.meaning or "").startswith(meaning)


def test_a_declared_need_for_finite_numbers_is_respected(examine):
    members = {"conventions": Conventions(needs_finite_pool=True)}
    assert examine(null_page(0.0), members=members).notes == ()
    assert examine(lambda *_: None, members=members).notes == snapshot(
        ("needs_finite_pool is declared, and NaN in foreign slots does not reach the output here",)
    )


@pytest.fixture
def padded(judge, backend_of, make_case):
    """Return a function from changes of the output to the finding, on a batch with two padding rows.

    ``padding``: value of the padding rows; ``real``: added to the others. Both get query, caches and number of rows.
    """

    def run(padding=lambda *_: 0.0, real=lambda *_: 0.0, **members):
        class Impl(ReferenceImpl):
            def attend(self, *args):
                super().attend(*args)
                rows = args[5].num_rows
                args[6][:rows] += real(args[1], args[4], rows)
                args[6][rows:] = padding(args[1], args[4], rows)

        backend = backend_of(Impl, **{"conventions": Conventions()} | members)
        return judge("containment", backend, make_case((1, 20), (3, 9), padding=(0, 2)))

    return run


def of_padding(query, _caches, rows):
    return torch.isnan(query[rows:]).any().to(query.dtype)


def of_null_page(_query, caches, _rows):
    return 0.0 * caches[1][0].amax()


def test_padding_rows_that_matter_are_called_so_beside_foreign_slots_too(padded):
    both = padded(real=lambda *args: of_padding(*args) + of_null_page(*args))
    assert both.summary == snapshot(
        "the output depends on padding rows of the inputs: with zeros instead of NaN, it changes in 4 of 4 rows, the first is row 0 (request 0, position 19)"
    )
    assert any(detail.startswith("NaN in the null page reaches 4 of 4 rows") for detail in both.details)


HOLD_NAN = "padding rows of the output hold NaN or Inf"


@pytest.mark.parametrize(
    ("value", "summary"),
    [
        (lambda *_: torch.nan, f"2 of 2 {HOLD_NAN}"),
        (of_null_page, f"2 of 2 {HOLD_NAN}, with NaN in slots that no request owns"),
    ],
)
def test_nan_in_padding_rows_is_a_finding_that_hides_no_leak(padded, value, summary):
    finding = padded(value)
    assert (finding.summary, finding.finding) == (summary, HOLD_NAN)
    assert finding.details == snapshot(("harmless unless a later layer reduces over all rows",))
    assert padded(value, of_null_page).summary.startswith("NaN in the null page reaches 4 of 4 rows")


def test_padding_rows_that_are_declared_untouched_must_keep_their_contents(padded):
    assert isinstance(padded(), Holds)
    assert padded(conventions=Conventions(padded_rows="untouched")).summary == (
        "2 of 2 padding rows of the output were written, although declared untouched"
    )
