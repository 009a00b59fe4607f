"""Claims of vLLM's contract: each has a row with its state, and a class that claims what it cannot do is found."""

import json
import sys

import pytest
import torch

import attncheck
from attncheck.backends.claims import CLAIMS, UNKNOWN, declared_claims
from attncheck.backends.contract import Conventions
from attncheck.backends.mutants.geometry import Updates, UpdatesKeepTheSlots
from attncheck.backends.mutants.plain import Base, PlainImpl
from attncheck.backends.mutants.refusals_claims import with_first_scales


def yes(cls):
    return True


def states_of(backend, *cases, suite="smoke", checks="numerics"):
    """The state of each claim of a class, by member."""
    examination = attncheck.examine(backend, suite, cases=cases, checks=checks, device="cpu")
    return {each["member"]: each["state"] for each in json.loads(examination.render("audit-json"))["claims"]}


NOT_READ = {"supports_dtype", "supports_head_size", "supports_block_size", "supports_combination"}
NOT_READ |= {"supports_compute_capability", "supports_batch_invariance"}
"""Declarations that attncheck's own classes make in another form; a class with one of these ends with an error."""

BOOLEANS = [
    member
    for member, claim in CLAIMS.items()
    # A class of is_sparse serves no other layer.
    if claim.of == "backend"
    and member not in {*NOT_READ, "is_sparse"}
    and claim.form not in ("kv_cache_dtype", "attn_type")
]
ALL = {name: classmethod(yes) for name in [*BOOLEANS, "supports_telepathy"]}
ClaimsAll = type("ClaimsAll", (Updates,), {"conventions": Conventions(padded_rows="untouched"), **ALL})


def test_a_class_that_claims_everything_has_a_state_for_each_claim():
    states = states_of(ClaimsAll, "sinks*", "mixed*", checks=("numerics", "builder"))
    assert states.keys() >= {*ALL, "supports_update_block_table", "supports_quant_query_input"}
    assert states["supports_sink"].startswith("right (")
    assert states["supports_update_block_table"].startswith("right (")
    assert states["supports_per_head_quant_scales"] == "not tried"
    assert states["indexes_kv_by_block_stride"] == "not tried"
    assert states["supports_telepathy"] == f"declared, not examined: {UNKNOWN}"
    for member in ("supports_pcp", "supports_kv_connector"):
        assert states[member] == f"declared, not examined: {CLAIMS[member].unexamined}"


class NoSinks(Base):
    supports_sink = classmethod(yes)

    class Impl(PlainImpl):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            self.sinks = None


class NoWindow(Base):
    supports_sliding_window = classmethod(yes)

    class Impl(PlainImpl):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            self.sliding_window = (-1, -1)


class AlwaysCausal(Base):
    supports_non_causal = classmethod(yes)

    class Impl(PlainImpl):
        def seen(self, metadata, q_pos, k_pos):
            return super().seen(metadata, q_pos, k_pos) & (k_pos <= q_pos[:, None])


class FirstScales(Base):
    supports_per_head_quant_scales = classmethod(yes)

    class Impl(PlainImpl):
        def attend(self, layer, *operands):
            super().attend(with_first_scales(layer, "_k_scale", "_v_scale"), *operands)


class NoQueryScale(Base):
    class Impl(PlainImpl):
        def query_values(self, layer, query):
            return query.float()


class NoOutputScale(Base):
    class Impl(PlainImpl):
        def attend_quantised(self, *operands):
            super().attend_quantised(*operands[:-1], operands[-1].new_ones(1))


class DensePages(Base):
    """Reads pages as if each followed the one before, whatever the stride of blocks is."""

    indexes_kv_by_block_stride = classmethod(yes)

    class Impl(PlainImpl):
        def attend(self, layer, query, key, value, caches, *rest):
            own = [each.as_strided(each.shape, (each[0].numel(), *each.stride()[1:])) for each in caches]
            super().attend(layer, query, key, value, own, *rest)


LIARS = [
    ("supports_sink", NoSinks, ("sinks*",), {}),
    ("supports_sliding_window", NoWindow, ("window*",), {}),
    ("supports_non_causal", AlwaysCausal, ("non-causal*",), {}),
    ("supports_per_head_quant_scales", FirstScales, ("fp8-cache-per-head*",), {}),
    ("supports_quant_query_input", NoQueryScale, ("per-head*",), {"suite": "fp8_query"}),
    ("fused_output_quant_supported", NoOutputScale, ("output-quant*",), {}),
    ("indexes_kv_by_block_stride", DensePages, ("*",), {"suite": "hybrid"}),
    ("supports_update_block_table", UpdatesKeepTheSlots, ("mixed*",), {"checks": "builder"}),
]


@pytest.mark.parametrize(("member", "liar", "cases", "where"), LIARS, ids=[member for member, *_ in LIARS])
def test_a_class_that_claims_what_it_cannot_do_is_found(member, liar, cases, where):
    assert states_of(liar, *cases, **where)[member].startswith("wrong (")


class Theirs:
    """A class in vLLM's form, with a builder and impl of its own."""

    class Impl:
        supports_quant_query_input = False
        supports_pcp = True

        def __init__(self):
            self.supports_quant_query_input = True

        def fused_output_quant_supported(self, quant_key):
            return True

    class Builder:
        supports_update_block_table = False
        supports_draft_decode_metadata_update = True

    get_impl_cls = staticmethod(lambda: Theirs.Impl)
    get_builder_cls = staticmethod(lambda: Theirs.Builder)
    is_mla = classmethod(lambda cls: False)
    supports_sink = classmethod(yes)
    supports_sliding_window = classmethod(lambda cls: False)
    supports_dtype = classmethod(lambda cls, dtype: True)
    supports_rswa = classmethod(lambda cls: 1 / 0)
    supports_spelling = classmethod(lambda cls, text: True)
    supports_leaving = classmethod(lambda cls: sys.exit("no"))
    supports_tensors = torch.ones(2)


def test_claims_are_read_of_class_impl_and_builder():
    """Known claims with arguments have columns of their values; an unknown one is listed all the same."""
    assert declared_claims(Theirs) == {
        "supports_sink": "yes",
        "supports_quant_query_input": "set by the constructor of a layer",
        "supports_draft_decode_metadata_update": "yes",
        "supports_rswa": "raises ZeroDivisionError",
        "supports_pcp": "yes",
        "supports_leaving": "raises SystemExit",
        "supports_spelling": "depends on its arguments",
        "supports_tensors": "raises RuntimeError",
    }
    assert declared_claims(Theirs, {"fp8_query", "output_quant"})["supports_quant_query_input"] == "yes"
    assert "supports_quant_query_input" not in declared_claims(Theirs, {"sinks"})


def test_each_claim_has_a_measurement_or_a_reason():
    for claim in CLAIMS.values():
        assert claim.unexamined or bool(claim.feature) != bool(claim.form or claim.check), claim.member
