"""A comparison in each text format, whole and in what depends on its runs; `pytest --inline-snapshot=fix -n 0 FILE` writes it again."""

import pytest
from inline_snapshot import snapshot

from attncheck.reports import github
from attncheck.reports.comparison.compare import ComparisonTerms, compare_runs
from attncheck.reports.comparison.summary import change_text, closing, grouped_outcomes, power_of
from attncheck.reports.comparison.thresholds import parse_thresholds
from attncheck.reports.document.comparison import SHOWN
from attncheck.reports.formats import FORMATS
from attncheck.reports.markdown import run as md
from attncheck.reports.terminal import run as terminal
from attncheck.reports.terminal.columns import Style


@pytest.fixture
def found(run_of, make, rounds_of, around):
    """Times slower, faster, the same and undecided; sinks lost in two cases, one case repaired, one left out."""
    base, new = [], []
    for index, (case, factor, spread) in enumerate(
        [("slow", 1.1, 0.01), ("fast", 0.8, 0.01), ("same", 1.0, 0.01), ("loud", 1.0, 0.2)]
    ):
        base += rounds_of(around(1e6, spread=spread, seed=index), case_id=case)
        new += rounds_of(around(factor * 1e6, spread=spread, seed=10 + index), case_id=case)
    for case in ("a", "b"):
        base.append(make("passed", case_id=case))
        new.append(make("unsupported", case_id=case, reasons=["no sinks"]))
    base += [make("failed", case_id="d"), make("passed", case_id="gone")]
    new += [make("passed", case_id="d")]
    runs = [
        run_of(records, path=name, **fields)
        for name, records, fields in (("base.jsonl", base, {}), ("new.jsonl", new, {"seed": 1}))
    ]
    terms = ComparisonTerms(thresholds=parse_thresholds(["5%"], least=0.01))
    return compare_runs(*runs, terms=terms)


def shown(comparison, name):
    render = FORMATS[name].render_comparison
    assert render is not None
    return render(comparison, Style())


def test_markdown(found):
    assert "".join(shown(found, "markdown")) == snapshot("""\
# attncheck comparison

**regression: 2 outcomes worse, 1 outcome better; of 4 times 1 slower (1 beyond --fail-on), 1 faster, 1 same, 1 TOO NOISY TO COMPARE; 7 of 8 cases of 1 of 1 backend compared; missing: 1 case of reference: smoke/gone**

- BASE: base.jsonl: 2026-01-01T00:00:00+00:00, attncheck 0.1.0, torch 2.13.0+cpu, a cpu, 10 rounds
- NEW: new.jsonl: 2026-01-01T00:00:00+00:00, attncheck 0.1.0, torch 2.13.0+cpu, a cpu, 10 rounds

- reference of BASE and reference of NEW: no difference above 11.4 % was found in smoke

## Outcomes that changed

|  | backend | cases | checks | BASE -> NEW | what |
| --- | --- | --- | --- | --- | --- |
| **worse** | reference | smoke/a, smoke/b | numerics | passed -> unsupported | no sinks |
| better | reference | smoke/d | numerics | failed -> passed |  |

## Times

| part | slower | faster | same | cannot tell |
| --- | --- | --- | --- | --- |
| forward | 1 | 1 | 1 | 1 |

Noise between processes: 1.0% (median of 4 pairs); with 10 rounds a side, a slowdown of 3.1% is found in 80 % of tries. Intervals hold for all pairs at once.

### Slower

| fails | backend | case | part | time | interval | BASE | NEW |
| --- | --- | --- | --- | --- | --- | --- | --- |
| yes | reference | smoke/slow | forward | **+9.8%** | +8.6% to +11.1% | 996 us | 1,094 us |

### Faster

| backend | case | part | time | interval | BASE | NEW |
| --- | --- | --- | --- | --- | --- | --- |
| reference | smoke/fast | forward | -20.1% | -21.3% to -18.9% | 999 us | 798 us |

### Cannot tell

| times | why, of one of them | which |
| --- | --- | --- |
| 1 | processes differ by 17.5% over 10 rounds; 611 a side would find 5.0% | reference, smoke/loud, forward |

## What differs

|  | BASE | NEW |
| --- | --- | --- |
| seed | 0 | 1 |

## Not in both runs

- in BASE only: 1 case of reference: smoke/gone
""")


def test_github_adds_annotations_to_markdown(found, monkeypatch):
    summary, log = shown(found, "github")
    monkeypatch.setattr(github, "MAX_SUMMARY_BYTES", 600)
    cut = github.comparison_summary(found)
    assert len(cut.encode()) <= 600
    assert summary.startswith(cut.split("\n\nThe rest")[0])
    assert (summary, "") == shown(found, "markdown")
    assert log == snapshot("""\
::error title=reference%3A smoke/a and 1 more case%2C numerics%3A passed -> unsupported::no sinks
::error title=reference%3A smoke/slow%2C forward%3A +9.8%25 time::996 us -> 1,094 us (interval +8.6%25 to +11.1%25)
::error title=missing::1 case of reference: smoke/gone
::warning title=1 of 4 times too noisy to compare::such as reference, smoke/loud, forward: processes differ by 17.5%25 over 10 rounds; 611 a side would find 5.0%25
""")


def test_the_terminal_has_the_tables_of_markdown_and_its_verdict_last(found, compare, rounds_of):
    text = terminal.render_comparison(found, color=True)
    headings = ("Outcomes that changed", "Times", "Slower", "Faster", "Cannot tell", "What differs", "Not in both runs")
    places = [text.index(heading) for heading in (*headings, "regression")]
    assert places == sorted(places)
    for coloured in ("\033[31mSlower\033[0m", "\033[32mFaster\033[0m", "\033[31mregression\033[0m"):
        assert coloured in text
    unclear_alone = compare(rounds_of([1e6] * 3), rounds_of([9e6] * 3))
    assert "\033" not in terminal.render_comparison(unclear_alone, color=True)


def test_long_names_and_many_changes_keep_to_the_width(compare, rounds_of, around):
    names = [f"{'long-' * 12}{index}" for index in range(SHOWN + 2)]
    base = [record for name in names for record in rounds_of(around(1e6, rounds=5), case_id=name)]
    new = [record for name in names for record in rounds_of(around(2e6, rounds=5, seed=1), case_id=name)]
    found = compare(base, new)
    text = terminal.render_comparison(found)
    assert max(map(len, text.splitlines())) <= 100
    assert sum("long-long" in line for line in text.splitlines()) == SHOWN
    assert "and 2 more (`--format markdown` lists all)" in text
    page = md.render_comparison(found)
    assert all(name in page for name in names)


def test_slower_within_the_threshold_is_a_warning(compare, rounds_of, around):
    terms = ComparisonTerms(thresholds=parse_thresholds(["20%"], least=0.01))
    mild = compare(rounds_of(around(1e6)), rounds_of(around(1.1e6, seed=1)), terms=terms)
    (line,) = github.comparison_annotations(mild)
    assert line.startswith("::warning title=1 time slower that --fail-on lets pass::reference, smoke/edge, forward: +")
    assert "fails" in terminal.render_comparison(mild)
    assert closing(mild).startswith("no regression: outcomes as before; of 1 time 1 slower (0 beyond --fail-on")


def test_the_last_line_states_what_was_not_compared(compare, rounds_of, make):
    noisy = compare(rounds_of([1e6] * 3), rounds_of([9e6] * 3))
    assert closing(noisy).startswith("cannot tell: outcomes as before; 1 time: ALL TOO NOISY TO COMPARE")
    assert power_of(noisy) is None
    without = compare([make("passed")], [make("passed")])
    whole = "1 of 1 case of 1 of 1 backend compared"
    assert closing(without) == f"no regression: outcomes as before; no times to compare; {whole}"
    assert "times of" not in terminal.render_comparison(without)


def test_what_new_lacks_and_is_allowed_is_a_warning(compare, make):
    base = [make("passed", case_id=case, check=check) for case in "ab" for check in ("numerics", "cudagraph")]
    found = compare(base, base[:1], terms=ComparisonTerms(allow_missing=True))
    assert closing(found).startswith("no regression: ")
    assert closing(found).endswith("missing, accepted by --allow-missing: 1 case of reference: smoke/b and 1 more")
    assert github.comparison_annotations(found) == [
        "::warning title=missing%2C accepted by --allow-missing::1 case of reference: smoke/b",
        "::warning title=missing%2C accepted by --allow-missing::check cudagraph of 1 case of reference: smoke/a",
    ]


def test_changes_that_differ_in_figures_alone_are_one_group(compare, make):
    base = [make("passed", case_id=case) for case in "ab"]
    new = [make("failed", case_id=case, summary=f"{count} of 40 rows", figures={}) for count, case in enumerate("ab")]
    (group,) = grouped_outcomes(compare(base, new).outcomes)
    assert (group.cases, group.what) == (("smoke/a", "smoke/b"), "for example smoke/a: 0 of 40 rows")


def test_a_change_is_a_share_or_where_it_is_large_a_factor():
    assert [change_text(ratio) for ratio in (0.9, 23.25, 0.0401, 1.0)] == ["-10.0%", "x23.2", "x0.0401", "+0.0%"]
