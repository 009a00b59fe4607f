"""The page: one file that fetches nothing, has its sections in order, and is readable without a script."""

import base64
import hashlib
import re
import sys
from typing import Any

import matplotlib as mpl
import pytest

from attncheck.errors import MissingExtraError
from attncheck.reports.html import environment, render_runs
from attncheck.reports.run_file.records import Failed, Passed, Unavailable, Unsupported

LENGTHS = (512, 1024, 2048, 4096)


@pytest.fixture
def two(timed: Any, run_with: Any) -> list[Any]:
    base, new = timed(["one", "two"], LENGTHS, rounds=6), timed(["one", "two"], LENGTHS, rounds=6, slower=1.3, seed=1)
    return [run_with(base, path="base.jsonl"), run_with(new, path="new.jsonl")]


def test_sections_come_in_the_order_of_a_reader(parse: Any, timed: Any, run_with: Any, record_of: Any) -> None:
    failed = record_of(Failed, case_id="bad", backend="one", summary="3 of 8 rows", needs=("lse",))
    parsed = parse(run_with([*timed(["one", "two"], LENGTHS, rounds=2), failed]))
    headings = [attributes["id"] for tag, attributes in parsed.elements if tag == "h2"]
    assert headings == [
        *(f"run-0-{name}" for name in ("answer", "findings", "checks", "support", "speeds", "budgets", "gaps")),
        "run-0-circumstances",
        "records",
        "all-speeds",
    ]
    assert "failed" in parsed.texts["p"]
    assert "2 backends (1 failed, 1 passed), 9 cases (the worst of 2 rounds counts)" in parsed.shown
    for text in ("a gpu, compute capability 9.0, driver 580.1", "3 of 8 rows", "feature 'lse' is not declared"):
        assert text in parsed.shown
    assert "attncheck run --backend one --suite decode --case bad --check numerics --device cuda" in parsed.shown


def test_the_answer_has_a_line_a_backend_and_the_fastest(parse: Any, timed: Any, run_with: Any, record_of: Any) -> None:
    failed = record_of(Failed, case_id="bad", backend="quick", suite="lengths", summary="3 of 8 rows", needs=("sinks",))
    absent = record_of(Unavailable, case_id="bad", backend="absent", suite="lengths", reasons=("needs a moon",))
    left = record_of(Unsupported, case_id="bad", backend="slow", suite="lengths", reasons=("no sinks",))
    run = run_with([*timed(["quick", "right", "slow"], LENGTHS, rounds=5), failed, absent, left], command=("a", "b *"))
    parsed = parse(run)
    lines = [" ".join(text.split()) for text in parsed.texts["p"]]
    assert lines.index("8 cases right, 1 not applicable") < lines.index(
        "1 finding in 1 of 9 cases; 8 right"
    )  # the right ones come first
    covered = [text for text in parsed.texts["span"] if " of 9" in text]
    assert covered[:2] == ["8 of 9", "9 of 9"]  # slow did not run the case that needs sinks
    assert "sinks (1 of 1 case wrong)" in parsed.texts["span"]
    assert parsed.texts["p"].count("Fastest of the right ones in ") == 1
    assert {"lengths", "right"} <= set(parsed.texts["strong"])
    assert not any("not certain" in text for text in parsed.texts["span"])
    assert "Not examined: absent" in [" ".join(text.split()) for text in parsed.texts["summary"]]
    assert ": needs a moon" in parsed.texts["li"]
    assert "a 'b *'" in parsed.texts["code"]  # a command that is shown is quoted for a shell


@pytest.mark.parametrize("count", [1, 12])
def test_the_page_is_well_formed_with_one_backend_and_with_twelve(
    parse: Any, timed: Any, run_with: Any, count: int
) -> None:
    parsed = parse(run_with(timed([f"backend_{index}" for index in range(count)], LENGTHS, rounds=5)))
    assert parsed.faults == []
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"] for attributes in parsed.all("a")]
    assert {link.removeprefix("#") for link in links} <= set(ids)
    assert len(parsed.all("svg")) >= 5


def test_nothing_is_fetched_and_no_other_script_may_run(parse: Any, timed: Any, run_with: Any) -> None:
    parsed = parse(run_with(timed(["one"], LENGTHS)))
    for tag, attributes in parsed.elements:
        assert tag not in ("link", "img", "iframe", "object", "base")
        assert not {"src", "srcset", "action"} & set(attributes)
        assert all(value.startswith("#") for name, value in attributes.items() if name in ("href", "xlink:href"))
        assert not [name for name in attributes if name.startswith("on")]
    style = "".join(parsed.texts["style"])
    assert "url(" not in style
    assert "@import" not in style
    (policy,) = [each["content"] for each in parsed.all("meta") if "content-security-policy" in str(each).lower()]
    digest = base64.b64encode(hashlib.sha256(parsed.texts["script"][1].encode()).digest()).decode()
    assert policy.split("; ")[:2] == ["default-src 'none'", f"script-src 'sha256-{digest}'"]


def test_the_same_runs_are_the_same_page_and_leave_matplotlib_as_it_was(two: Any) -> None:
    def settings() -> dict[str, object]:
        return {name: mpl.rcParams[name] for name in mpl.rcParams if name != "backend"}  # which is chosen when read

    before = settings()
    assert render_runs(two) == render_runs(two)
    assert settings() == before
    assert "matplotlib.pyplot" not in sys.modules


def test_runs_are_compared_with_the_first(parse: Any, two: Any) -> None:
    parsed = parse(*two)
    assert parsed.faults == []
    assert "Comparison: new.jsonl with base.jsonl" in parsed.shown
    assert "regression" in parsed.shown.replace("no regression", "")
    assert re.search(r" of BASE is \d\.\d+ \u00b1 \d\.\d+ times as fast as \w+ of NEW in ", parsed.shown)
    assert [each["id"] for each in parsed.all("h2")][:2] == ["comparison-1", "run-0"]
    assert parsed.texts["td"].count("slower") == 8  # forward of every case of the first backend, and nothing else


def test_runs_that_cannot_be_compared_are_shown_with_the_reason(parse: Any, run_with: Any, record_of: Any) -> None:
    runs = [run_with([record_of(backend=name, case_id=name)], path=f"{name}.jsonl") for name in ("one", "other")]
    parsed = parse(*runs)
    assert "These runs cannot be compared" in parsed.shown
    assert [each["id"] for each in parsed.all("h2")] == ["comparison-1", "run-0", "run-1", "records", "all-speeds"]


def test_runs_of_one_file_name_have_distinct_labels(parse: Any, run_with: Any, record_of: Any) -> None:
    runs = [run_with([record_of()], path=f"{folder}/run.jsonl") for folder in ("a", "b", "b")]
    assert parse(*runs).data["runs"] == ["1: a/run.jsonl", "2: b/run.jsonl", "3: b/run.jsonl"]
    assert parse(*runs[:2]).data["runs"] == ["a/run.jsonl", "b/run.jsonl"]


def test_a_page_of_an_unfinished_run_states_so_first(parse: Any, run_with: Any, record_of: Any) -> None:
    parsed = parse(run_with([record_of()], is_complete=False))
    assert "unfinished" in parsed.texts["p"]
    assert parsed.shown.index("run.jsonl was cut off") < parsed.shown.index("compute capability")


def test_a_run_without_any_answer_is_a_page_too(parse: Any, run_with: Any, record_of: Any) -> None:
    nothing = record_of(Unavailable, reasons=("needs a GPU",))
    left_out = record_of(Unsupported, check="lse", reasons=("no",), by="attncheck")
    parsed = parse(run_with([nothing, left_out]))
    assert parsed.faults == []
    assert "needs a GPU" in parsed.shown
    assert "unsupported by attncheck" in parsed.shown
    assert parse(run_with([])).faults == []


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_what_is_missing_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, run_with: Any, record_of: Any, package: str
) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(
        MissingExtraError, match=rf"{package}, which is not installed; pip install 'attncheck\[report\]'"
    ):
        render_runs([run_with([record_of()])])


def test_kernels_that_a_library_chose_stand_below_the_table(parse: Any, run_with: Any, record_of: Any) -> None:
    one = record_of(Passed, case_id="a", backend="one", chosen_kernels=("<flash>",))
    assert "Kernels of one: <flash> (1 case)" in parse(run_with([one])).shown
    assert "Kernels of" not in parse(run_with([record_of(Passed, case_id="a", backend="one")])).shown
