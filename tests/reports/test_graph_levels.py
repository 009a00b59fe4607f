"""CUDA-graph levels in reports: one row for what is alike, every probe listed, nothing listed twice."""

import pytest
from inline_snapshot import snapshot

from attncheck.reports.analysis.graph_levels import level_rows
from attncheck.reports.markdown import run as markdown
from attncheck.reports.run_file.graph_levels import GraphProbe
from attncheck.reports.terminal import run as terminal

SINGLE = "UNIFORM_SINGLE_TOKEN_DECODE"
PROBES = {"decode, one bucket": SINGLE, "decode, fewer requests": SINGLE, "1+K tokens": "UNIFORM_BATCH"}
READ = "host read: .item() at wrong.py:9 in forward"


def levels(declared, measured, *outcomes, reason=READ, **fields):
    """Levels with one probe an outcome; whatever did not pass did so for ``reason``."""
    probes = [
        {"name": name, "level": level, "outcome": outcome, "reason": "" if outcome == "passed" else reason}
        for (name, level), outcome in zip(PROBES.items(), outcomes, strict=False)
    ]
    return {"declared": declared, "measured": measured, "recorder": "emulated", "probes": probes} | fields


GOOD = levels(SINGLE, SINGLE, "passed", "passed", "failed")
ROOMY = levels(SINGLE, "UNIFORM_BATCH", "passed", "passed", "passed")
BROKEN = levels("UNIFORM_BATCH", SINGLE, "passed", "passed", "failed")
UNSEEN = levels(SINGLE, None, "passed", "not examined", "not run", reason="a Triton launch outside a custom op")
HIDDEN = levels("NEVER", None, "passed", "passed", "not examined", reason="hidden work")


def test_what_is_alike_is_one_row_and_most_cases_come_first(make, graph):
    records = [
        make("passed", backend="Wrong"),
        graph("passed", ROOMY, case_id="a"),
        graph("passed", GOOD, case_id="b"),
        graph("passed", GOOD, case_id="c"),
        graph("failed", BROKEN, backend="Wrong", case_id="a"),
    ]
    rows = level_rows(records)
    assert [(row.backend, row.graph.declared, row.graph.measured, row.cases) for row in rows] == [
        ("Wrong", "UNIFORM_BATCH", SINGLE, 1),
        ("reference", SINGLE, SINGLE, 2),
        ("reference", SINGLE, "UNIFORM_BATCH", 1),
    ]
    assert rows[1].results[0].cases == ("smoke/b", "smoke/c")
    assert rows[1].broke_at == GraphProbe(name="1+K tokens", level="UNIFORM_BATCH", outcome="failed", reason=READ)
    assert [row.head_room for row in rows] == [None, None, "UNIFORM_BATCH"]
    assert [row.falls_short for row in rows] == [True, False, False]
    assert [row.probes for row in (rows[1], *level_rows([graph("unsupported", UNSEEN)]))] == ["2/3", "1/1"]


def test_rows_differ_in_levels_and_in_outcomes_of_probes(graph):
    for other, rows in (
        (levels(SINGLE, SINGLE, "passed", "passed", "failed", reason="another"), 1),
        (levels(SINGLE, "NEVER", "passed", "passed", "failed"), 2),
        (levels("NEVER", SINGLE, "passed", "passed", "failed"), 2),
        (levels(SINGLE, SINGLE, "passed", "passed", "not examined"), 2),
    ):
        assert len(level_rows([graph("passed", GOOD), graph("passed", other, case_id="b")])) == rows


def test_what_passed_is_proven_though_the_level_is_undecided(graph):
    for declared, measured, outcomes, proven, head_room in (
        ("NEVER", None, ("passed", "passed", "not examined"), SINGLE, SINGLE),
        (SINGLE, None, ("passed", "passed", "not examined"), SINGLE, None),
        (SINGLE, None, ("passed", "not examined", "not run"), "NEVER", None),
        ("NEVER", SINGLE, ("passed", "passed", "failed"), SINGLE, SINGLE),
        ("ALWAYS", None, (), "NEVER", None),
    ):
        (row,) = level_rows([graph("passed", levels(declared, measured, *outcomes))])
        assert (row.proven, row.head_room) == (proven, head_room)


def test_figures_of_a_share_are_not_shown_beside_those_of_all_probes(graph):
    reasons = ("1 requests: a host read", "1 requests: a host copy", "8 requests: a host read")
    found = [levels(SINGLE, SINGLE, "passed", "passed", "failed", reason=reason) for reason in reasons]
    found = [*(each | {"played_in_full": "smoke/a"} for each in found[:2]), found[2]]
    (row,) = level_rows([graph("passed", each, case_id=name) for each, name in zip(found, "bca", strict=True)])
    assert [result.cases for result in row.results] == [("smoke/b", "smoke/a"), ("smoke/c",)]
    assert row.broke_at.reason == reasons[2]


PLACES = "host read: .item() at wrong.py:9 in forward; host read: .item() at wrong.py:12 in forward"


def broken(declared, reason="figures 7", *, behind=3, **fields):
    """Levels of a backend that is right in ``decode``, breaks at ``verify``, and ``behind`` probes are not run."""
    probes = [
        {"name": "decode", "level": SINGLE, "outcome": "passed"},
        {"name": "verify", "level": "UNIFORM_BATCH", "outcome": "failed", "reason": reason},
    ]
    for number in range(behind):
        level = "UNIFORM_BATCH" if number == 0 else "ALWAYS"
        probes.append({"name": f"probe {number}", "level": level, "outcome": "not run", "reason": "'verify' broke"})
    return {"declared": declared, "measured": SINGLE, "recorder": "emulated", "probes": probes} | fields


@pytest.fixture
def run(graph, run_of):
    """Levels that differ in all that a report joins: reasons, figures, notes, padding rows, shares of the probes."""
    _, second, third = GOOD["probes"]
    share = {"played_in_full": "smoke/whole"}
    note = "over huge numbers, since NaN | leaks"
    reasons = [*(f"worst {number}.5e+03 budgets" for number in range(6)), "no row written"]
    records = [
        graph("passed", ROOMY, case_id="room"),
        graph("unsupported", UNSEEN, case_id="unseen"),
        graph("passed", HIDDEN, case_id="hidden"),
        graph("passed", GOOD | share | {"probes": [second, third]}, case_id="share"),
        graph("passed", GOOD | share, case_id="whole"),
        graph("errored", None, case_id="raises"),
        graph("xfailed", None, case_id="known", underlying="errored"),
        graph("unsupported", None, case_id="refused"),
        graph("crashed", None, case_id="dies"),
        *(graph("passed", broken("NEVER", why), backend="Wrong", case_id=f"w{n}") for n, why in enumerate(reasons)),
        graph("failed", broken("ALWAYS", PLACES), backend="Wrong", case_id="places", summary=f"declared: {PLACES}"),
        *(
            graph("passed", broken(level, notes=[note], padding_rows=rows), backend="third", case_id=case)
            for level, rows, case in (
                (SINGLE, "NaN or Inf", "a"),
                ("NEVER", "finite", "b"),
                ("NEVER", "not examined", "c"),
            )
        ),
        graph("passed", broken("NEVER", "figures 9", behind=1), backend="third", case_id="d"),
    ]
    return run_of(records, path="graphs.jsonl")


def test_markdown_gives_every_reason_with_its_cases_and_joins_what_is_alike(run):
    assert markdown.render_sections(run, ["graph-levels"]) == snapshot("""\
## CUDA-graph levels

emulated: no GPU, the operators of forward are recorded and replayed on the CPU; probes: passed / run; head-room: the backend may declare this higher level.

| backend | declared | measured | cases | recorder | probes | why no higher | head-room |
| --- | --- | --- | --- | --- | --- | --- | --- |
| reference | UNIFORM_SINGLE_TOKEN_DECODE | UNIFORM_SINGLE_TOKEN_DECODE | 2 | emulated | 2/3 | broke at 1+K tokens (UNIFORM_BATCH): host read: .item() at wrong.py:9 in forward | - |
| reference | UNIFORM_SINGLE_TOKEN_DECODE | UNIFORM_BATCH | 1 | emulated | 3/3 | - | could declare UNIFORM_BATCH |
| reference | UNIFORM_SINGLE_TOKEN_DECODE | cannot tell | 1 | emulated | 1/1 | stopped at decode, fewer requests (UNIFORM_SINGLE_TOKEN_DECODE): a Triton launch outside a custom op | - |
| reference | NEVER | cannot tell | 1 | emulated | 2/2 | at least UNIFORM_SINGLE_TOKEN_DECODE; stopped at 1+K tokens (UNIFORM_BATCH): hidden work | could declare UNIFORM_SINGLE_TOKEN_DECODE |
| reference | - | **errored** | 2 | - | - | - | - |
| reference | - | **crashed** | 1 | - | - | - | - |
| Wrong | NEVER | UNIFORM_SINGLE_TOKEN_DECODE | 7 | emulated | 1/2 | broke at verify (UNIFORM_BATCH): worst 0.5e+03 budgets (other figures or reasons in 6 of 7 cases) | could declare UNIFORM_SINGLE_TOKEN_DECODE |
| Wrong | ALWAYS | **UNIFORM_SINGLE_TOKEN_DECODE** | 1 | emulated | 1/2 | broke at verify (UNIFORM_BATCH): host read: .item() at wrong.py:9, 12 in forward | - |
| third | NEVER | UNIFORM_SINGLE_TOKEN_DECODE | 3 | emulated | 1/2 | broke at verify (UNIFORM_BATCH): figures 7 (other figures or reasons in 1 of 3 cases) | could declare UNIFORM_SINGLE_TOKEN_DECODE |
| third | UNIFORM_SINGLE_TOKEN_DECODE | UNIFORM_SINGLE_TOKEN_DECODE | 1 | emulated | 1/2 | broke at verify (UNIFORM_BATCH): as above | - |

- reference: probes are shared out over layers and caches; that of smoke/whole played all of them.
- third: over huge numbers, since NaN \\| leaks; padding rows of the output hold NaN or Inf; harmless unless a later layer reduces over all rows.

### reference: declared UNIFORM_SINGLE_TOKEN_DECODE, measured UNIFORM_SINGLE_TOKEN_DECODE, 2 cases

| probe | level | outcome | reason |
| --- | --- | --- | --- |
| decode, one bucket | UNIFORM_SINGLE_TOKEN_DECODE | passed | - |
| decode, fewer requests | UNIFORM_SINGLE_TOKEN_DECODE | passed | - |
| 1+K tokens | UNIFORM_BATCH | failed | host read: .item() at wrong.py:9 in forward |

Cases: smoke/share, smoke/whole

### reference: declared UNIFORM_SINGLE_TOKEN_DECODE, measured UNIFORM_BATCH, 1 case

| probe | level | outcome | reason |
| --- | --- | --- | --- |
| decode, one bucket | UNIFORM_SINGLE_TOKEN_DECODE | passed | - |
| decode, fewer requests | UNIFORM_SINGLE_TOKEN_DECODE | passed | - |
| 1+K tokens | UNIFORM_BATCH | passed | - |

Cases: smoke/room

### reference: declared UNIFORM_SINGLE_TOKEN_DECODE, measured cannot tell, 1 case

| probe | level | outcome | reason |
| --- | --- | --- | --- |
| decode, one bucket | UNIFORM_SINGLE_TOKEN_DECODE | passed | - |
| decode, fewer requests | UNIFORM_SINGLE_TOKEN_DECODE | not examined here | a Triton launch outside a custom op |
| 1+K tokens | UNIFORM_BATCH | not run | a Triton launch outside a custom op |

Cases: smoke/unseen

### reference: declared NEVER, measured cannot tell, 1 case

| probe | level | outcome | reason |
| --- | --- | --- | --- |
| decode, one bucket | UNIFORM_SINGLE_TOKEN_DECODE | passed | - |
| decode, fewer requests | UNIFORM_SINGLE_TOKEN_DECODE | passed | - |
| 1+K tokens | UNIFORM_BATCH | not examined here | hidden work |

Cases: smoke/hidden

### Wrong: declared NEVER or ALWAYS, measured UNIFORM_SINGLE_TOKEN_DECODE, 8 cases

| probe | level | outcome | reason |
| --- | --- | --- | --- |
| decode | UNIFORM_SINGLE_TOKEN_DECODE | passed | - |
| verify | UNIFORM_BATCH | failed | see below |
| 3 probes behind it | UNIFORM_BATCH to ALWAYS | not run | 'verify' broke |

| reason | cases |
| --- | --- |
| worst 0.5e+03 budgets | smoke/w0 |
| no row written | smoke/w6 |
| host read: .item() at wrong.py:9, 12 in forward | smoke/places |
| worst 1.5e+03 budgets | smoke/w1 |
| worst 2.5e+03 budgets | smoke/w2 |
| 3 more that differ in figures alone | smoke/w3, smoke/w4, smoke/w5 |

- Cases that declare NEVER: smoke/w0, smoke/w1, smoke/w2, smoke/w3, smoke/w4, smoke/w5, smoke/w6
- Cases that declare ALWAYS: smoke/places

### third: declared NEVER or UNIFORM_SINGLE_TOKEN_DECODE, measured UNIFORM_SINGLE_TOKEN_DECODE, 4 cases

| probe | level | outcome | reason |
| --- | --- | --- | --- |
| decode | UNIFORM_SINGLE_TOKEN_DECODE | passed | - |
| verify | UNIFORM_BATCH | failed | see below |
| 3 probes behind it | UNIFORM_BATCH to ALWAYS | not run | 'verify' broke |

| reason | cases |
| --- | --- |
| figures 7 | smoke/b, smoke/c, smoke/a |
| figures 9 | smoke/d |

- Cases that declare NEVER: smoke/b, smoke/c, smoke/d
- Cases that declare UNIFORM_SINGLE_TOKEN_DECODE: smoke/a
""")


def test_the_terminal_lists_the_backends_of_each_level(run):
    brief = terminal.render_run(run)
    assert brief.partition("CUDA-graph levels (recorder: emulated)\n")[2].split("\n\n")[0] == snapshot("""\
  UNIFORM_SINGLE_TOKEN_DECODE: reference, third
  declared UNIFORM_SINGLE_TOKEN_DECODE, measured UNIFORM_BATCH: reference
  declared UNIFORM_SINGLE_TOKEN_DECODE, measured cannot tell: reference
  declared NEVER, measured cannot tell: reference
  declared NEVER, measured UNIFORM_SINGLE_TOKEN_DECODE: Wrong, third
  declared ALWAYS, measured UNIFORM_SINGLE_TOKEN_DECODE: Wrong
  errored in 2 cases: reference
  crashed in 1 case: reference\
""")
    coloured = terminal.render_run(run, color=True)
    assert "\033[32mUNIFORM_BATCH\033[0m" in coloured
    assert f"\033[31m{SINGLE}\033[0m" in coloured


def test_real_graphs_need_no_word_about_the_emulation(graph, graph_header):
    text = terminal.render(graph_header, [graph("passed", GOOD | {"recorder": "cuda"})])
    assert "CUDA-graph levels (recorder: cuda)" in text
    assert "emulated" not in text
