"""The same question, the same bits; or within the budget, for a backend that declares that it is not deterministic."""

from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.conventions import Conventions
from attncheck.harness.checks.findings import Broken, Holds

WAVERING = Conventions(padded_rows="untouched", deterministic=False)


def moved_by(amount):
    """The reference's impl, whose output grows by the share ``amount`` with every call."""

    class Impl(ReferenceImpl):
        calls = 0

        def attend(self, *args):
            super().attend(*args)
            self.calls += 1
            args[6][: args[5].num_rows] *= 1 + amount * (self.calls - 1)

    return Impl


def test_a_right_backend_has_the_same_bits(judge, make_case):
    found = judge("determinism", ReferenceBackend, make_case((5, 3), (1, 20), padding=(1, 2)))
    assert isinstance(found, Holds)
    assert found.figures["bitwise"] == 1


def test_a_backend_that_declares_it_must_stay_within_the_budget(judge, backend_of, make_case):
    case, slightly = make_case(dtype="float32"), moved_by(2.0**-22)
    found = judge("determinism", backend_of(slightly), case)
    assert isinstance(found, Broken)
    assert "of the output have other bits" in found.summary
    assert "when the step is repeated on the same impl" in found.summary
    found = judge("determinism", backend_of(slightly, conventions=WAVERING), case)
    assert isinstance(found, Holds)
    assert found.notes == snapshot(("compared within the allowed error: the backend declares deterministic=False",))
    found = judge("determinism", backend_of(moved_by(0.1), conventions=WAVERING), case)
    assert isinstance(found, Broken)
    assert found.summary.startswith(
        "right at first, wrong when the step is repeated on the same impl: 40 of 40 rows are wrong"
    )


def test_a_cache_that_wavers_is_found_whatever_is_declared(judge, backend_of, make_case):
    class Impl(ReferenceImpl):
        calls = 0

        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            super().write(layer, key, value, key_cache, value_cache, slot_mapping)
            self.calls += 1
            value_cache[0, 0] = self.calls

    found = judge("determinism", backend_of(Impl, conventions=WAVERING), make_case())
    assert isinstance(found, Broken)
    assert found.summary.endswith("the cache holds other bytes than after the first step")
