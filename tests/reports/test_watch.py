"""What a watch shows of a round: the verdict, what changed, and the first finding alone."""

from attncheck.reports.terminal.watch import render_record, render_round


def test_the_first_round_has_nothing_to_compare_with(make, header):
    text = render_round(header, [make("passed"), make("failed", case_id="b")], ())
    assert "FAILED" in text
    assert "broken" not in text


def test_what_changed_since_the_round_before(make, header):
    before = [make("failed", case_id=name) for name in ("a", "b")] + [make("passed", case_id="c")]
    now = [
        make("passed", case_id="a"),
        make("errored", case_id="b"),
        make("crashed", case_id="c"),
        make("failed", case_id="new", summary="other rows"),
    ]
    lines = render_round(header, now, before).splitlines()
    assert "fixed: smoke/a numerics" in lines
    assert "still failing: smoke/b numerics" in lines
    assert "broken: smoke/c numerics, smoke/new numerics" in lines


def test_many_changes_are_counted_and_one_finding_is_shown(make, header):
    names = [f"case{number}" for number in range(8)]
    before = [make("passed", case_id=name) for name in names]
    now = [make("errored", case_id=name, error_type=f"Error{name}") for name in names]
    text = render_round(header, now, before, errors=["an entry is stale"])
    assert "smoke/case5 numerics and 2 more" in " ".join(text.split())
    assert "finding 1 of 8" in text
    assert "finding 2 of 8" not in text
    assert text.endswith("error: an entry is stale")


def test_a_record_is_one_line(make):
    assert render_record(make("passed", case_id="a")) == "smoke/a numerics: passed"
    assert render_record(make("failed", case_id="a", summary="7 of\n40")).startswith("smoke/a numerics: failed: 7 of")
    assert "\n" not in render_record(make("failed", case_id="a", summary="7 of\n40"))
