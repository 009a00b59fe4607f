"""Other layers of the process: which are examined, and findings about values that one layer fixes for all."""

from dataclasses import replace

import pytest

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.harness.checks.findings import Broken, Holds
from attncheck.harness.checks.refusals import other_layers
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import BlockTableSpec


@pytest.fixture
def examine(judge, backend_of):
    """Return a function from ``change(kept, params)`` to the finding; ``kept``: one dictionary for all impls."""

    def run(change, case):
        kept = {}

        class Impl(ReferenceImpl):
            def params(self, metadata):
                return change(kept, super().params(metadata))

        return judge("features", backend_of(Impl), case)

    return run


def layer(**fields):
    return LayerSpec(**{"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": "float32"} | fields)


@pytest.mark.parametrize(
    ("fields", "name", "values"),
    [
        ({"sliding_window": 16}, "sliding_window", {None, 15, 17}),
        ({"sliding_window": 1}, "sliding_window", {None, 2}),
        ({"logits_soft_cap": 20.0}, "logits_soft_cap", {None, 30.0}),
        ({"attn_chunk_size": 8}, "attn_chunk_size", {None, 7, 9}),
        ({"num_heads": 2, "alibi": (0.5, 0.25)}, "alibi", {False, (0.25, 0.5)}),
        ({"num_heads": 2, "sinks": (1.0, 2.0)}, "sinks", {False, (2.0, 1.0)}),
    ],
)
def test_a_modifier_is_turned_off_and_moved(fields, name, values):
    others = [list(other_layers(layer(**fields), number)) for number in range(4)]
    assert all(len(groups) == 2 for groups in others)
    assert {getattr(group[0].layer, name) for groups in others for group in groups} == values


def test_a_layer_without_modifiers_gets_another_scale_group_or_mask():
    found = [next(other_layers(layer(), number))[0] for number in range(3)]
    assert [other.layer.softmax_scale for other in found] == [0.75 / 8, 1 / 8, 1 / 8]
    assert [other.layer.num_heads for other in found] == [8, 2, 8]
    assert [other.layer.is_causal for other in found] == [True, True, False]


@pytest.mark.parametrize("fields", [{}, {"logits_soft_cap": 20.0, "sinks": True}])
def test_a_right_backend_passes(judge, make_case, fields):
    found = judge("features", ReferenceBackend, make_case(**fields))
    assert isinstance(found, Holds)
    assert len(found.notes) == found.figures["layers"] == (2 if fields else 1)


@pytest.mark.parametrize(
    ("name", "fields"),
    [("window", {"sliding_window": 16}), ("logits_soft_cap", {"logits_soft_cap": 20.0}), ("sinks", {"sinks": True})],
)
def test_a_value_that_the_first_layer_fixes_is_found(examine, make_case, name, fields):
    def frozen(kept, params):
        return replace(params, **{name: kept.setdefault(name, getattr(params, name))})

    found = examine(frozen, make_case(**fields))
    assert found.summary.startswith(f"a layer without {name.replace('window', 'sliding_window')}, in the same process")
    assert "fixed at a first call" in (found.meaning or "")
    assert "it has the output of the first layer" in found.details


def test_of_a_first_layer_that_is_wrong_nothing_is_kept(examine, make_case):
    found = examine(lambda _kept, params: replace(params, logits_soft_cap=None), make_case(logits_soft_cap=20.0))
    assert found.meaning is None


def case_with(word, make_case):
    """Return a case whose first other layer is one ``with`` this word."""
    cases = [make_case((4, length)) for length in range(30, 60)]
    return next(case for case in cases if word in next(other_layers(case.layer, int(case.hash, 16)))[0].what)


@pytest.mark.parametrize(("word", "changed"), [("scale", {"scale": 0.125}), ("causal", {"window": (-1, 0)})])
def test_what_no_layer_reads_is_named(examine, make_case, word, changed):
    found = examine(lambda _kept, params: replace(params, **changed), case_with(word, make_case))
    assert isinstance(found, Broken)
    assert (found.meaning or "").startswith(f"{word} of the layer is ignored; also possible:")


def test_a_value_that_the_latest_layer_leaves_to_all_is_found(judge, backend_of, make_case):
    """An impl writes to a global when it is constructed, and earlier impls read it."""
    latest = {}

    class Impl(ReferenceImpl):
        def __init__(self, *args, **keywords):
            super().__init__(*args, **keywords)
            latest["cap"] = self.logits_soft_cap

        def params(self, metadata):
            return replace(super().params(metadata), logits_soft_cap=latest["cap"])

    found = judge("features", backend_of(Impl), make_case(logits_soft_cap=20.0))
    assert found.summary.startswith(
        "right at first, wrong after a layer without logits_soft_cap was run: 38 of 40 rows are wrong"
    )


def test_an_undeclared_layer_is_replaced_by_the_next(judge, make_case):
    case = case_with("causal", make_case)
    assert judge("features", ReferenceBackend, case).notes == ("a layer with causal False in between",)
    narrow = type("Narrow", (ReferenceBackend,), {"features": ReferenceBackend.features - {"non_causal"}})
    assert judge("features", narrow, case).notes == ("a layer with scale 0.09375 instead of 0.125 in between",)


@pytest.mark.parametrize("heads", [2, 4, 6, 8])
def test_a_wider_window_is_not_examined_where_pages_behind_it_are_gone(judge, make_case, heads):
    """Pages that every row's window has left behind may be page 0: a wider one would read them."""
    case = make_case((2, 329), sliding_window=8, num_heads=heads, scale=0.03)
    batch = replace(case.batch, block_table=BlockTableSpec(null_pages=True))
    assert not isinstance(judge("features", ReferenceBackend, replace(case, batch=batch)), Broken)
