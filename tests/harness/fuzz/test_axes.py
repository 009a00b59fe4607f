"""Every key of a layer, a cache and the padding is drawn, or has a reason why not; every path, too."""

from dataclasses import fields

import pytest

from attncheck.cases.model import Case
from attncheck.harness.fuzz.search import NOT_DRAWN, VALUES, all_axes, few_and_small, plain
from attncheck.reference.spec import PATHS, BatchSpec, CacheSpec, LayerSpec, PaddingSpec, RequestSpec

SPECS = {
    "layer.": LayerSpec,
    "cache.": CacheSpec,
    "padding.": PaddingSpec,
    "batch.": BatchSpec,
    "batch.requests.": RequestSpec,
    "": Case,
}
NAMES = {"suite", "id", "description", "notes", "origin", "layer", "cache", "batch"}
"""Fields without an effect on the question, and those that have entries of their own here."""


@pytest.mark.parametrize("prefix", SPECS)
def test_every_field_is_drawn_or_has_a_reason(prefix: str) -> None:
    own = {f"{prefix}{field.name}" for field in fields(SPECS[prefix])} - NAMES
    assert own <= all_axes().keys() | NOT_DRAWN.keys()


def test_every_path_is_drawn_or_implied_by_the_layer() -> None:
    drawn = {path.name for path in VALUES["path"] if path is not None}
    assert drawn | {"paged", "encoder_only", "cross", "mla"} == set(PATHS)


def test_a_field_of_few_values_gets_all_of_them() -> None:
    assert set(all_axes()["cache.layout"]) == {"NHD", "HND"}
    assert set(all_axes()["layer.kv_sharing"]) == {False, True}
    assert set(all_axes()["layer.causal"]) == {None, False, True}


@pytest.mark.parametrize("name", ["layer", "cache"])
def test_the_plain_value_is_the_default(name: str) -> None:
    first = plain(all_axes())
    with_default = [field for field in fields(SPECS[f"{name}."]) if f"{name}.{field.name}" in first]
    for field in with_default:
        if isinstance(field.default, int | str | float | None.__class__):
            assert first[f"{name}.{field.name}"] == field.default


def test_numbers_of_the_code_come_with_their_neighbours_where_they_can_be_a_size() -> None:
    sizes = all_axes([48, 2000])["cache.block_size"]
    assert {47, 48, 49} <= set(sizes)
    assert not {1999, 2000, 2001} & set(sizes)
    assert {1999, 2000, 2001} <= set(all_axes([2000])["layer.sliding_window"])


def test_no_value_is_drawn_twice() -> None:
    for key, values in (all_axes() | VALUES).items():
        assert len(set(values)) == len(values), key


def test_interpreted_kernels_get_small_sizes_and_what_they_cannot_do_without() -> None:
    small = few_and_small(
        {"layer.head_size": (128, 64, 256), "batch.contexts": ("mixed", "long"), "cache.layout": ("NHD",)}
    )
    assert small == {"layer.head_size": (128, 64), "batch.contexts": ("mixed",), "cache.layout": ("NHD",)}
