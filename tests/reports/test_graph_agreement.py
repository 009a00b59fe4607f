"""Two runs of the check cudagraph, by hand: where they agree, where they do not, and what is said about it."""

from collections.abc import Callable
from typing import Any

import pytest

from attncheck.reports.markdown.graph_agreement import compare, render, tally
from attncheck.reports.run_file.records import Record

Make = Callable[..., Record]

SINGLE, UNIFORM = "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH"


def levels(declared: str, measured: str | None, *probes: str, recorder: str = "cuda") -> dict[str, Any]:
    """Levels whose probes are named ``name:outcome``."""
    told = [dict(zip(("name", "outcome"), probe.split(":"), strict=True)) for probe in probes]
    probes_told = [{"level": SINGLE, "reason": f"{recorder} says why", **probe} for probe in told]
    return {"declared": declared, "measured": measured, "recorder": recorder, "probes": probes_told}


def pair(make: Make, left: tuple[str, Any], right: tuple[str, Any] | None) -> tuple[list[Record], list[Record]]:
    """One record on each side, ``(outcome, levels or None)``."""

    def record(outcome: str, found: dict[str, Any] | None) -> Record:
        return make(outcome, check="cudagraph", **({"graph": found} if found else {}))

    return [record(*left)], [record(*right)] if right else []


BROKEN = levels(SINGLE, "NEVER", "decode:passed", "padded:failed")
SAME = levels(SINGLE, "NEVER", "decode:passed", "padded:failed", recorder="emulated")
ELSEWHERE = levels(SINGLE, "NEVER", "decode:failed", recorder="emulated")
GOOD = levels(SINGLE, SINGLE, "decode:passed", recorder="emulated")
DECLARES_MORE = levels(UNIFORM, SINGLE, "decode:passed", recorder="emulated")
UNSEEN = levels(SINGLE, None, "decode:not examined", recorder="emulated")


@pytest.mark.parametrize(
    ("left", "right", "agreement"),
    [
        (("failed", BROKEN), ("failed", SAME), "yes"),
        (("failed", BROKEN), ("failed", ELSEWHERE), "yes, at another probe"),
        (("failed", BROKEN), ("passed", GOOD), "no"),
        (("passed", GOOD), ("passed", DECLARES_MORE), "no"),
        (("failed", BROKEN), ("passed", SAME), "no"),
        (("passed", GOOD), ("errored", None), "no"),
        (("errored", None), ("errored", None), "yes"),
        (("passed", GOOD), ("crashed", None), "no"),
        (("errored", None), ("crashed", None), "no"),
        (("failed", BROKEN), ("unsupported", UNSEEN), "cannot tell"),
        (("unsupported", None), ("unsupported", None), "cannot tell"),
        (("failed", BROKEN), ("unavailable", None), "cannot tell"),
        (("failed", BROKEN), None, "cannot tell"),
    ],
)
def test_what_counts_as_agreement(make: Make, left: Any, right: Any, agreement: str) -> None:
    (row,) = compare(*pair(make, left, right))
    assert row.agreement == agreement
    (mirrored,) = compare(*reversed(pair(make, left, right)))
    assert mirrored.agreement == agreement


def test_errors_that_differ_do_not_agree(make: Make) -> None:
    left, right = ([make("errored", check="cudagraph", message=words)] for words in ("out of memory", "no such kernel"))
    assert [row.agreement for row in compare(left, right)] == ["no"]


def test_cases_that_come_out_alike_share_a_row_and_other_checks_are_left_out(make: Make) -> None:
    def run(found: dict[str, Any], *more: Record) -> list[Record]:
        many = [make("failed", check="cudagraph", case_id=f"c{i}", graph=found) for i in range(3)]
        return [make("passed", case_id="c0"), make("passed", check="cudagraph", case_id="d", graph=GOOD), *many, *more]

    rows = compare(run(BROKEN), run(SAME, make("passed", check="cudagraph", backend="Wrong", graph=GOOD)))
    assert [(row.backend, row.cases) for row in rows] == [
        ("reference", ("smoke/c0", "smoke/c1", "smoke/c2")),
        ("reference", ("smoke/d",)),
        ("Wrong", ("smoke/edge",)),
    ]
    assert tally(rows) == "5 cases of all backends: 4 agree, 0 differ, 1 cannot be compared"


def test_the_page_has_a_row_for_each_and_the_story_of_what_differs(make: Make) -> None:
    left, right = pair(make, ("failed", BROKEN), ("passed", GOOD))
    left.append(make("failed", check="cudagraph", case_id="same", graph=BROKEN))
    right.append(make("failed", check="cudagraph", case_id="same", graph=SAME))
    text = render(compare(left, right), "real", "emulated")
    assert text.startswith("2 cases of all backends: 1 agree, 1 differ, 0 cannot be compared.")
    assert "| backend | cases | declared | measured, real | measured, emulated | agree |" in text
    assert f"| reference | smoke/edge | {SINGLE} | NEVER<br>padded | {SINGLE} | **no** |" in text
    assert f"| reference | smoke/same | {SINGLE} | NEVER<br>padded | NEVER<br>padded | yes |" in text
    assert "### reference: no\n\nCases: smoke/edge\n\n- real: failed; measured NEVER; broke at padded" in text
    assert f"- emulated: passed; measured {SINGLE}" in text
    assert text.count("###") == 1


def test_what_backends_say_stays_text(make: Make) -> None:
    text = render(compare([make("errored", check="cudagraph", message="<b> | c")], []), "real", "emulated")
    assert "<b>" not in text
    assert "\\| c" in text
    assert "| no record | cannot tell |" in text


def test_nothing_to_compare_is_said() -> None:
    assert "Nothing was recorded." in render(compare([], []), "real", "emulated")
