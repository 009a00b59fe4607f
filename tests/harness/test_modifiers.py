"""A modifier that the table gains is examined by every reader of the table, or refused with its name."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.backends.declarations import required_features
from attncheck.errors import SpecError
from attncheck.harness.checks.cudagraph.probes import traits_of
from attncheck.harness.checks.refusals import other_layers, undeclared_forms
from attncheck.harness.fuzz.search import all_axes
from attncheck.harness.fuzz.shrink import shrink
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.recording.recorder import described_modifiers
from attncheck.harness.truth.faults import toggles
from attncheck.harness.truth.truth import params_of, rows_of
from attncheck.reference import AttentionParams
from attncheck.reference.spec import MODIFIERS, LayerSpec, Modifier, option

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Extended(LayerSpec):
    """A layer with one more modifier of each kind."""

    reach: int | None = option(None, "most keys")
    floor: float | None = option(None, "least score")
    gains: bool | tuple[float, ...] = option(False, "one factor per head")

    @property
    def head_gains(self):
        return tuple(1.0 + head for head in range(self.num_heads)) if self.gains is True else self.gains or None


@dataclass(frozen=True)
class ExtendedParams(AttentionParams):
    """The parameters of such a layer."""

    floor: float | None = None
    gains: tuple[float, ...] | None = None


@pytest.fixture(autouse=True)
def extended(monkeypatch):
    added = {
        "reach": Modifier(feature="reach", kind="keys", ordinary=5, drawn=(None, 5, 9), argument="reach"),
        "floor": Modifier(
            feature="floor", kind="number", ordinary=0.5, drawn=(None, 0.5), argument="floor", ignored="no floor"
        ),
        "gains": Modifier(
            feature="gains",
            kind="per head",
            ordinary=True,
            drawn=(False, True, (2.0, 3.0)),
            argument="gains",
            resolved="head_gains",
            ignored="no gains",
        ),
    }
    for name, modifier in added.items():
        monkeypatch.setitem(MODIFIERS, name, modifier)
        # The layers that fixtures make are of the base class.
        monkeypatch.setattr(LayerSpec, name, Extended.__dataclass_fields__[name].default, raising=False)


def layer(**fields):
    return Extended(**{"num_heads": 2, "num_kv_heads": 2, "head_size": 64} | fields)


@pytest.mark.parametrize(
    ("fields", "moved"),
    [({"reach": 5}, {6, 4}), ({"floor": 0.5}, {0.75}), ({"gains": (2.0, 3.0)}, {(3.0, 2.0)})],
)
def test_another_layer_has_it_off_and_moved(fields, moved):
    (name,) = fields
    groups = [list(other_layers(layer(**fields), number)) for number in range(2)]
    assert {getattr(off[0].layer, name) for off, _ in groups} == {Extended.__dataclass_fields__[name].default}
    assert {getattr(other[0].layer, name) for _, other in groups} == moved


def test_an_undeclared_one_is_tried(make_case):
    class Bare(ReferenceBackend):
        features = frozenset()

    case = replace(make_case(), layer=layer())
    tried = {form.changes for form in undeclared_forms(Bare, case, "cpu")}
    assert {"reach 5", "floor 0.5", "gains True"} <= tried


def test_a_case_needs_its_feature(make_case):
    case = make_case()
    needed = required_features(layer(reach=5, gains=True), case.cache, case.batch, frozenset())
    assert {"reach", "gains"} <= needed
    assert ("floor", True) in traits_of(layer(floor=0.5), case.cache)


def test_a_case_must_notice_it(make_case):
    problem = build_problem(make_case(), 0)
    params = ExtendedParams(**vars(params_of(problem)), floor=0.5, gains=(1.0,) * problem.layer.num_heads)
    assert [toggle.subject for toggle in toggles(params, rows_of(problem, CPU))] == ["floor", "gains"]


def test_a_value_per_head_must_fit_and_shrinks_with_the_heads(make_case):
    with pytest.raises(SpecError, match="3 values for 2 query heads"):
        layer(gains=(1.0, 2.0, 3.0))
    with pytest.raises(SpecError, match="float32"):
        layer(floor=1e300)
    case = replace(make_case(), layer=layer(gains=(2.0, 3.0)))
    shrunk = shrink(case, lambda smaller: isinstance(smaller.layer.gains, tuple), limit_s=10)
    assert shrunk.case.layer.gains == (2.0,)


def test_fuzz_draws_it_and_a_recording_has_it():
    assert all_axes()["layer.reach"][:3] == (None, 5, 9)
    impl = SimpleNamespace(floor=0.5, gains=[2.0, 3.0], logits_soft_cap=0)
    found = described_modifiers(SimpleNamespace(reach=5), impl)
    assert {name: value for name, value in found.items() if value} == {"reach": 5, "floor": 0.5, "gains": True}
