"""The current results of a backend on a device, and what changed from run to run."""

import re
from collections.abc import Callable
from dataclasses import replace

from attncheck.reports.site.current import history, subjects
from attncheck.reports.site.model import SiteLevel, SiteRun, slug
from attncheck.reports.site.pages import badge, badge_text


def test_the_newest_result_of_each_case_of_the_newest_version_counts(run_of: Callable[..., SiteRun]) -> None:
    old = run_of(1, {"a": "failed", "gone": "failed"}, version="1")
    whole = run_of(2, {"a": "failed", "b": "passed"}, version="2")
    part = run_of(3, {"a": "passed"}, version="2")
    (subject,) = subjects([whole, part, old])
    assert {name: (each.case.count, each.run.key) for name, each in subject.cases.items()} == {
        "smoke/a": ("right", part.key),
        "smoke/b": ("right", whole.key),
    }
    assert (subject.version, subject.counts, subject.failing) == ("2", (2, 0, 0), ())
    assert [each.run.key for each in subject.current] == [part.key, whole.key]


def test_a_finding_counts_while_a_case_of_it_is_current(run_of: Callable[..., SiteRun]) -> None:
    runs = [run_of(1, {"a": "failed", "b": "failed"}), run_of(2, {"a": "passed"})]
    (subject,) = subjects(runs)
    assert [(finding.cases, run.key) for finding, run in subject.findings] == [(("smoke/a", "smoke/b"), runs[0].key)]
    (repaired,) = subjects([*runs, run_of(3, {"b": "passed"})])
    assert repaired.findings == ()


def test_a_backend_on_two_devices_is_two_subjects(run_of: Callable[..., SiteRun]) -> None:
    found = subjects([run_of(1, {"a": "passed"}, device="one"), run_of(1, {"a": "failed"}, device="two")])
    assert [(each.device, len(each.failing)) for each in found] == [("one", 0), ("two", 1)]
    assert len({each.badge for each in found}) == 2


def test_history_names_what_appeared_and_what_is_gone(run_of: Callable[..., SiteRun]) -> None:
    window, scale = "the window is ignored", "the scale is ignored"
    (subject,) = subjects(
        [
            run_of(1, {"a": "failed", "b": "passed"}, finding=window),
            run_of(2, {"b": "passed"}),
            run_of(3, {"a": "passed", "b": "failed"}, finding=scale),
        ]
    )
    changes = history(subject.runs)
    assert [each.measured.run.started[8:10] for each in changes] == ["03", "02", "01"]
    assert [[len(each.appeared), len(each.gone)] for each in changes] == [
        [1, 1],
        [0, 0],  # the case of the finding was not examined
        [1, 0],
    ]


def test_runs_with_equal_results_are_one_change(run_of: Callable[..., SiteRun]) -> None:
    days = [
        {"a": "failed"},
        {"a": "failed"},
        {"a": "passed"},
        {"a": "passed"},
        {"a": "passed"},
        {"a": "passed", "b": "passed"},
    ]
    runs = [run_of(day, outcomes) for day, outcomes in enumerate(days, 1)]
    (subject,) = subjects(runs)
    changes = history(subject.runs)
    assert [(each.measured.run, each.newest.run) for each in changes] == [
        (runs[5], runs[5]),
        (runs[2], runs[4]),
        (runs[0], runs[1]),
    ]


def test_a_badge_counts_cases_and_findings(run_of: Callable[..., SiteRun]) -> None:
    (right,) = subjects([run_of(1, {"a": "passed", "b": "passed"}, device="<script>&")])
    assert badge_text(right) == "2 cases right"
    assert "<script" not in badge(right)
    assert "&lt;script&gt;&amp;" in badge(right)
    (wrong,) = subjects([run_of(1, {"a": "failed", "b": "passed"})])
    assert badge_text(wrong) == "1 case right, 1 finding"
    (known,) = subjects([run_of(1, {"a": "xfailed", "b": "passed"})])
    assert badge_text(known) == "1 case right, 1 known fault"
    (refusing,) = subjects([run_of(1, {"a": "passed"}, check="refusals", notes=("refused at forward: no",))])
    assert badge_text(refusing) == "0 cases right"
    subjects_by_colour = (right, wrong, known, refusing)
    assert len({re.findall('fill="(#[0-9a-f]{6})"', badge(each))[0] for each in subjects_by_colour}) == 4


def test_an_expected_finding_has_an_example(run_of: Callable[..., SiteRun]) -> None:
    (subject,) = subjects([run_of(1, {"a": "xfailed"}, summary="4 of 16 rows are wrong")])
    assert [finding.example for finding, _ in subject.findings] == ["4 of 16 rows are wrong"]


def test_file_names_of_different_names_differ() -> None:
    names = ["mine", "Mine", "mine.", "../mine", "mi ne", "mi/ne", "", "...", "x" * 300, "x" * 301, "é", "CON"]
    slugs = [slug(name) for name in names]
    assert len(set(slugs)) == len(names)
    assert slugs[0] == "mine"
    for each in slugs:
        assert each[0] not in ".-"
        assert "/" not in each
        assert each.isascii()
        assert each.lower() == each
        assert len(each) < 80


def test_the_level_is_the_lowest_of_the_current_cases(run_of: Callable[..., SiteRun]) -> None:
    run = run_of(1, {"a": "passed", "b": "passed", "c": "passed"})
    (backend,) = run.backends

    def level(**levels: str) -> str:
        cases = {
            name: replace(case, declared_level="ALWAYS", level=levels[name[-1]]) if name[-1] in levels else case
            for name, case in backend.cases.items()
        }
        (subject,) = subjects([replace(run, backends=(replace(backend, cases=cases),))])
        return subject.level

    assert level() == ""
    assert level(a="ALWAYS", b="UNIFORM_BATCH") == "UNIFORM_BATCH"
    assert level(a="ALWAYS", b="") == ""


def test_levels_come_from_the_newest_run_that_has_some(run_of: Callable[..., SiteRun]) -> None:
    level = SiteLevel("ALWAYS", "ALWAYS", "", "", cases=1, is_emulated=False, falls_short=False)
    old, new = run_of(1, {"a": "passed", "b": "passed"}), run_of(2, {"a": "passed"})
    (backend,) = old.backends
    old = replace(old, backends=(replace(backend, levels=(level,)),))
    (subject,) = subjects([old, new])
    assert subject.levels == ((level,), old)
    assert subject.broadest.run is old
    (subject,) = subjects([new])
    assert subject.levels is None
