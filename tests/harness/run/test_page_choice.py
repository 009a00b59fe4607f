"""Where backends do not take the pages of a suite, others are chosen that most of them take; cases keep their own."""

import pytest
from inline_snapshot import snapshot

from attncheck.harness.run.outcomes import BackendDescription
from attncheck.harness.run.selection import Selection, fit_pages, select_cases
from attncheck.reports.run_file.header import BackendInfo

SUITE = """
suite: own
defaults:
  layer: {num_heads: 2, num_kv_heads: 1, head_size: 16, dtype: float32}
  cache: {block_size: 16, layout: NHD}
cases:
  - {id: left, batch: q1s40}
  - {id: sized, batch: q1s40, cache: {block_size: 8}}
  - {id: laid, batch: q1s40, matrix: {cache.layout: [NHD, HND]}}
"""


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(SUITE)
    return str(path)


def backend(name="a", **declared):
    reasons = declared.pop("reasons", ())
    info = BackendInfo(name=name, ref=name)
    return BackendDescription(info=info, unavailable_reasons=reasons, **declared)


def pages(selection: Selection) -> dict[str, tuple[int, str]]:
    return {case.id: (case.cache.block_size, case.cache.layout) for case in selection.cases}


def test_what_the_suite_leaves_open_is_chosen_and_what_a_case_sets_is_kept(suite):
    selection = select_cases([suite])
    fitted, notes = fit_pages(selection, [backend(page_multiples=(32,), layouts=("HND",))], {})
    assert pages(fitted) == {"left": (32, "HND"), "sized": (8, "HND"), "laid.NHD": (32, "NHD"), "laid.HND": (32, "HND")}
    assert notes == snapshot(
        ("suite own: cache.block_size=32 instead of 16, cache.layout=HND instead of NHD, for a; --set chooses others",)
    )
    again = select_cases(fitted.refs)
    assert (again.cases, again.suites[0].hash) == (fitted.cases, fitted.suites[0].hash)


def test_a_suite_that_fits_stays_as_it_is(suite):
    selection = select_cases([suite])
    for declared in (
        {},
        {"page_multiples": (1,)},
        {"page_sizes": (16, 32), "layouts": ("HND", "NHD")},
        {"page_sizes": (64,), "reasons": ("no GPU",)},
    ):
        assert fit_pages(selection, [backend(**declared)], {}) == (selection, ())


def test_what_the_user_sets_is_never_changed(suite):
    selection = select_cases([suite], settings=["cache.block_size=64"])
    fitted, notes = fit_pages(selection, [backend(page_sizes=(32,), layouts=("HND",))], {})
    assert pages(fitted)["left"] == (64, "HND")
    assert "block_size" not in notes[0]


def test_most_backends_decide_and_the_suite_where_as_many_take_its_own(suite):
    selection = select_cases([suite])
    small, large, any_size = backend("s", page_sizes=(16,)), backend("l", page_sizes=(128,)), backend("x")
    kept, notes = fit_pages(selection, [small, large, any_size], {})
    assert pages(kept)["left"] == (16, "NHD")
    assert notes == snapshot(
        ("suite own: l does not take cache.block_size=16, cache.layout=NHD; in a run of its own others are chosen",)
    )
    fitted, _ = fit_pages(selection, [large, any_size], {})
    assert pages(fitted)["left"] == (128, "NHD")


def test_a_backend_decides_on_the_suites_it_is_examined_on(suite):
    selection = select_cases([suite])
    assert fit_pages(selection, [backend(page_sizes=(32,))], {"a": "another"}) == (selection, ())


def test_filters_stay(suite):
    fitted, _ = fit_pages(select_cases([suite], ["left"]), [backend(page_sizes=(32,))], {})
    assert pages(fitted) == {"left": (32, "NHD")}
    assert len(fitted.suites[0]) == 4
