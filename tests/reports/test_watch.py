"""What a watch shows of a round: the verdict, what changed, and the first finding alone."""

from attncheck.reports.terminal.watch import render_record, render_round


def test_what_changed_since_the_round_before(make, header):
    before = [make("failed", case_id=name) for name in ("a", "b")] + [make("passed", case_id="c")]
    now = [
        make("passed", case_id="a"),
        make("errored", case_id="b"),
        make("crashed", case_id="c"),
        make("failed", case_id="new", summary="other\nrows"),
    ]
    lines = render_round(header, now, before).splitlines()
    assert "fixed: smoke/a numerics" in lines
    assert "still failing: smoke/b numerics" in lines
    assert "broken: smoke/c numerics, smoke/new numerics" in lines
    first = render_round(header, now, ())
    assert "FAILED" in first
    assert "broken" not in first
    assert render_record(now[0]) == "smoke/a numerics: passed"
    assert render_record(now[3]).startswith("smoke/new numerics: failed: other")
    assert "\n" not in render_record(now[3])


def test_many_changes_are_counted_and_one_finding_is_shown(make, header):
    names = [f"case{number}" for number in range(8)]
    before = [make("passed", case_id=name) for name in names]
    now = [make("errored", case_id=name, error_type=f"Error{name}") for name in names]
    text = render_round(header, now, before, errors=["an entry is stale"])
    assert "smoke/case5 numerics and 2 more" in " ".join(text.split())
    assert "finding 1 of 8" in text
    assert "finding 2 of 8" not in text
    assert text.endswith("error: an entry is stale")
