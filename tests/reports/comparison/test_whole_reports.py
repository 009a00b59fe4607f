"""A whole comparison, as each text format shows it; `pytest --inline-snapshot=fix -n 0 FILE` writes it again."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from inline_snapshot import snapshot

from attncheck.reports.comparison.compare import ComparisonTerms, RunComparison, compare_runs
from attncheck.reports.comparison.thresholds import parse_thresholds
from attncheck.reports.formats import FORMATS
from attncheck.reports.run_file.records import Record
from attncheck.reports.run_file.store import Run
from attncheck.reports.terminal.columns import Style

Make = Callable[..., Record]


@pytest.fixture
def found(
    run_of: Callable[..., Run], make: Make, timed: Callable[..., list[Record]], around: Callable[..., list[float]]
) -> RunComparison:
    """Times slower, faster, the same and undecided; sinks lost in two cases, one case repaired, one left out."""
    base, new = [], []
    for index, (case, factor, spread) in enumerate(
        [("slow", 1.1, 0.01), ("fast", 0.8, 0.01), ("same", 1.0, 0.01), ("loud", 1.0, 0.2)]
    ):
        base += timed(around(1e6, spread=spread, seed=index), case_id=case)
        new += timed(around(factor * 1e6, spread=spread, seed=10 + index), case_id=case)
    for case in ("a", "b"):
        base.append(make("passed", case_id=case))
        new.append(make("unsupported", case_id=case, reasons=["no sinks"]))
    base += [make("failed", case_id="d"), make("passed", case_id="gone")]
    new += [make("passed", case_id="d")]
    runs = [
        replace(run_of(records, **fields), path=name)
        for name, records, fields in (("base.jsonl", base, {}), ("new.jsonl", new, {"seed": 1}))
    ]
    terms = ComparisonTerms(thresholds=parse_thresholds(["5%"], least=0.01))
    return compare_runs(*runs, terms=terms)


def shown(comparison: RunComparison, name: str) -> tuple[str, str]:
    render = FORMATS[name].render_comparison
    assert render is not None
    return render(comparison, Style())


def test_terminal(found: RunComparison) -> None:
    assert "".join(shown(found, "terminal")) == snapshot("""\
BASE: base.jsonl: 2026-01-01T00:00:00+00:00, attncheck 0.1.0, torch 2.13.0+cpu, a cpu, 10 rounds
NEW: new.jsonl: 2026-01-01T00:00:00+00:00, attncheck 0.1.0, torch 2.13.0+cpu, a cpu, 10 rounds

reference of BASE and reference of NEW: no difference above 11.4 % was found in smoke

Outcomes that changed

        backend    cases             checks    BASE -> NEW            what
worse   reference  smoke/a, smoke/b  numerics  passed -> unsupported  no sinks
better  reference  smoke/d           numerics  failed -> passed

Times

part     slower  faster  same  cannot tell
forward  1       1       1     1

Noise between processes: 1.0% (median of 4 pairs); with 10 rounds a side, a slowdown of 3.1% is
  found in 80 % of tries. Intervals hold for all pairs at once.

Slower

fails  backend    case        part     time   interval         BASE    NEW
yes    reference  smoke/slow  forward  +9.8%  +8.6% to +11.1%  996 us  1,094 us

Faster

backend    case        part     time    interval          BASE    NEW
reference  smoke/fast  forward  -20.1%  -21.3% to -18.9%  999 us  798 us

Cannot tell

1: processes differ by 17.5% over 10 rounds; 611 a side would find 5.0%, reference, smoke/loud,
  forward

What differs

      BASE  NEW
seed  0     1

Not in both runs

in BASE only: 1 case of reference: smoke/gone

regression: 2 outcomes worse, 1 outcome better; of 4 times 1 slower (1 beyond --fail-on), 1 faster,
  1 same, 1 TOO NOISY TO COMPARE; 7 of 8 cases of 1 of 1 backend compared; missing: 1 case of
  reference: smoke/gone
""")


def test_markdown(found: RunComparison) -> None:
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


def test_github_adds_annotations_to_markdown(found: RunComparison) -> None:
    summary, log = shown(found, "github")
    assert (summary, "") == shown(found, "markdown")
    assert log == snapshot("""\
::error title=reference%3A smoke/a and 1 more case%2C numerics%3A passed -> unsupported::no sinks
::error title=reference%3A smoke/slow%2C forward%3A +9.8%25 time::996 us -> 1,094 us (interval +8.6%25 to +11.1%25)
::error title=missing::1 case of reference: smoke/gone
::warning title=1 of 4 times too noisy to compare::such as reference, smoke/loud, forward: processes differ by 17.5%25 over 10 rounds; 611 a side would find 5.0%25
""")
