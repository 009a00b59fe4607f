"""Speeds in tables: figures with their units, no winner inside the noise, notes on doubtful figures."""

import json
import statistics

import pytest

from attncheck.reports.data import runs_document
from attncheck.reports.html.page import render_runs
from attncheck.reports.markdown import run as markdown
from attncheck.reports.run_file.header import CaseInfo
from attncheck.reports.run_file.store import Run
from attncheck.reports.speeds.notes import legend, speed_notes
from attncheck.reports.speeds.speed import speeds
from attncheck.reports.speeds.tables import rate_unit, share_text, speed_tables, summary_tables, time_unit, traffic
from attncheck.reports.terminal import run as terminal

CEILINGS = {"ceilings": {"copy_bytes_per_s": 1e12, "matmul_flops_per_s": 1e14, "dtype": "bfloat16"}}


def cells(records):
    (table,) = speed_tables(speeds(records))
    return [dict(zip(table.headings, row, strict=True)) for row in table.rows]


def test_figures_have_one_unit_and_few_digits():
    """Three digits of the smallest time, the unit of the largest rate, and two digits of a share."""
    for times, name, shown in (
        ([850.0, 4e6], "ns", "4,000,000"),
        ([2_345.0, 123_456.0], "us", "123.46"),
        ([23_456.0, 3e9], "us", "3,000,000.0"),
        ([234_567.0], "us", "235"),
        ([5.4e6], "ms", "5.40"),
        ([2.5e9], "s", "2.50"),
        ([0.4], "ns", "0.40"),
    ):
        unit = time_unit(times)
        assert (unit.name, unit.text(times[-1])) == (name, shown)
    unit = rate_unit([2.345e12, 1.2e9, None], "FLOP")
    assert unit.name == "TFLOP/s"
    assert [unit.text(rate) for rate in (2.345e12, 1.2e9, None)] == ["2.35", "0.0012", "-"]
    assert rate_unit([4.1e9], "B").name == "GB/s"
    assert rate_unit([], "B").text(None) == "-"
    shares = [share_text(share) for share in (0.734, 0.0834, 0.00123, 1.2, None)]
    assert shares == ["73%", "8.3%", "0.12%", "120%", "-"]


def test_a_row_has_its_build_beside_it_and_what_was_achieved(timed, rounds_of):
    work = {"moved_bytes": 200_000_000, "flops": 10_000_000_000}
    records = [timed({"forward": 1e6, "build": 50_000, "decode": 4e5}, work=work, timing=CEILINGS)]
    forward, decode = cells(records)
    # 200 MB in 1 ms are 200 GB/s; at 1 TB/s they take 0.2 ms at least, and 10 GFLOP at 100 TFLOP/s only 0.1 ms.
    assert forward == {
        "case": "edge",
        "part": "forward",
        "backend": "reference",
        "median (us)": "1,000.0",
        "95% interval": "980.0 to 1,020.0",
        "build (us)": "50.0",
        "rounds": "1",
        "GB/s": "200",
        "TFLOP/s": "10",
        "roofline": "20%",
    }
    own = [decode[name] for name in ("part", "median (us)", "build (us)", "roofline")]
    assert own == ["decode", "400.0", "-", "-"]
    (row,) = cells(rounds_of([1e6, 4e6]))
    # The geometric mean of 1 and 4 is 2; ln 4 = 1.386 apart is a deviation of 1.386 / sqrt 2 = 98.0 %.
    assert (row["median (ms)"], row["spread"], row["rounds"]) == ("2.00", "98.0%", "2")


def test_the_fastest_is_marked_where_all_its_rounds_lie_below_all_others(rounds_of):
    slow = [1.10e6, 1.20e6, 1.15e6, 1.12e6, 1.18e6]
    # With 1.11 ms, one round of the fast one is slower than one of the slow one: it may be luck.
    for fourth, marks in ((1.08e6, [False, True]), (1.11e6, [False, False])):
        fast = [1.0e6, 1.05e6, 1.02e6, fourth, 1.01e6]
        rows = cells([*rounds_of(slow), *rounds_of(fast, backend="Wrong")])
        assert [row["median (ms)"].endswith("*") for row in rows] == marks


def test_means_are_over_the_cases_that_all_were_timed_in(timed, timing_header):
    records = [
        timed({"forward": 1e6, "build": 1e4}, case_id="short"),
        timed({"forward": 4e6, "build": 1e4}, case_id="long"),
        timed({"forward": 9e9, "build": 9e9}, case_id="longest"),
        timed({"forward": 2e6, "build": 3e4}, case_id="short", backend="Wrong"),
        timed({"forward": 2e6, "build": 3e4}, case_id="long", backend="Wrong"),
    ]
    (table,) = summary_tables(speeds(records))
    assert table.averaged == 2
    rows = [dict(zip(table.headings, row, strict=True)) for row in table.rows]
    assert [(row["cases"], row["forward (us)"], row["build (us)"]) for row in rows] == [
        ("3", "2,000.0", "10.0"),
        ("2", "2,000.0", "30.0"),
    ]
    assert rows[0]["slowest case"] == "longest (9,000,000.0)"
    apart = [records[0], records[4]]  # they have no case in common
    (table,) = summary_tables(speeds(apart))
    assert (table.averaged, table.has_fastest) == (0, False)
    assert "do not compare them" in " ".join(terminal.render(timing_header, apart).split())


def test_the_fastest_of_a_suite_is_determined_by_the_means_of_each_round(rounds_of):
    # In each round one case is slow for Wrong and the other fast: the means of its rounds lie close together.
    records = [*rounds_of([2e6] * 5, case_id="a"), *rounds_of([2e6] * 5, case_id="b")]
    records += [*rounds_of([1e6, 4e6] * 2 + [2e6], backend="Wrong", case_id="a")]
    records += [*rounds_of([3e6, 0.75e6] * 2 + [1.5e6], backend="Wrong", case_id="b")]
    (table,) = summary_tables(speeds(records))
    means = [statistics.geometric_mean(pair) for pair in ((1e6, 3e6), (4e6, 0.75e6), (2e6, 1.5e6))]
    assert max(means) < 2e6
    assert [row[2].endswith("*") for row in table.rows] == [False, True]


def test_notes_state_what_makes_a_figure_doubtful(timed):
    device = {"sm_clock_mhz": 1200, "max_sm_clock_mhz": 1980, "throttle_reasons": ["SW power cap"]}
    calm = {"sm_clock_mhz": 1900, "max_sm_clock_mhz": 1980}
    records = [
        timed({"forward": 1e6}, timing={"device": device, "cache": "cold"} | CEILINGS, work={"is_settled": False}),
        timed(
            {"forward": 1e6},
            timing={"device": calm, "notes": ["odd\x1b[2J"], "overhead": {"empty_ns": 2140, "replay_ns": 1260}},
            backend="Wrong",
        ),
    ]
    notes = speed_notes(speeds(records))
    assert "forward by CUDA events" in notes
    assert "subtracted from samples: 2.1 us for a pair of events, 1.3 us for the replay of a graph" in notes
    assert "SM clock 1200 to 1900 of at most 1980 MHz" in notes
    assert "the device was held back (SW power cap) while these were timed: reference, smoke/edge" in notes
    assert "cold in some cases and warm in others: figures of the two are not to be compared" in notes
    assert "odd?[2J: Wrong, smoke/edge" in notes
    (ceilings,) = (note for note in notes if note.startswith("ceilings"))
    assert ceilings.endswith("copy 1 TB/s, product of bfloat16 matrices 100 TFLOP/s")
    (unsettled,) = (note for note in notes if note.startswith("too noisy"))
    assert unsettled.endswith(": reference, smoke/edge (forward)")


def test_notes_of_timings_that_differ_in_figures_are_listed_once(timed):
    records = [timed({"forward": 1e6}, timing={"notes": ["alone"]}, case_id="x")]
    for case in ("a", "b"):
        for number in range(2):
            note = f"forward: in {number + 3} of 10 calls the host fell behind"
            records.append(timed({"forward": 1e6}, timing={"notes": [note, "odd"]}, case_id=case, round=number))
    assert speed_notes(speeds(records))[-3:] == [
        "alone: reference, smoke/x",
        "forward: in 3 of 10 calls the host fell behind (one of 2 such notes): reference, smoke/a; reference, smoke/b",
        "odd: reference, smoke/a; reference, smoke/b",
    ]
    found = speeds([timed({"forward": 1e6}, case_id=f"c{i}", work={"is_settled": False}) for i in range(5)])
    (unsettled,) = (note for note in speed_notes(found) if note.startswith("too noisy"))
    assert unsettled.endswith("; reference, smoke/c2 (forward); and 2 more")


def test_notes_state_the_number_of_rounds_and_how_far_they_lie_apart(rounds_of):
    # ln 1.21 - ln 1 = 0.1906 over two rounds is a deviation of 0.1906 / sqrt 2; of the other case it is half that.
    found = speeds([*rounds_of([1e6, 1.21e6]), *rounds_of([1e6, 1.1e6], backend="Wrong")])
    assert speed_notes(found)[0] == (
        "2 rounds, each in a process of its own; their medians spread by 10.1% as a rule, by 13.5% at most"
    )
    mixed = speeds([*rounds_of([1e6, 1.1e6, 1e6]), *rounds_of([1e6, 1.1e6], backend="Wrong")])
    for each, start in ((found[:1], "2 rounds, "), (mixed, "2 to 3 rounds, "), (speeds(rounds_of([1e6])), "one round")):
        assert speed_notes(each)[0].startswith(start)


def test_reports_with_times_have_them_and_others_no_word_of_them(timed, make, timing_header):
    kernels = [{"name": "a|b<c>", "count": 2, "duration_ns": 3000}]
    records = [timed({"forward": 1e6, "build": 2e4}, timing={"kernels": kernels}, case_id="x" * 90)]
    assert all(len(line) <= 100 for line in terminal.render(timing_header, records).splitlines())
    page = markdown.render_run(Run("run.jsonl", timing_header, tuple(records)))
    assert "| `a\\|b<c>` | 2 | 3.00 |" in page
    for heading in legend(speed_tables(speeds(records))).split("; "):
        assert heading in page
    wrong = [records[0].model_copy(update={"round": 1}), make("failed", check="timing", case_id="x" * 90)]
    for others in ([make("passed")], wrong):  # a wrong answer has no time
        assert "peed" not in terminal.render(timing_header, others)
        assert "peed" not in markdown.render_run(Run("run.jsonl", timing_header, tuple(others)))


@pytest.fixture
def weighted(timing_header):
    def made(**weights):
        cases = tuple(CaseInfo(suite="smoke", id=name, shape="", weight=weight) for name, weight in weights.items())
        return timing_header.model_copy(update={"cases": cases})

    return made


def test_a_case_counts_as_often_as_it_came(timed, weighted):
    records = [
        timed({"forward": 1e6, "build": 7e6}, case_id="often"),
        timed({"forward": 4e6}, case_id="seldom"),
        timed({"forward": 3e6}, case_id="often", backend="Wrong"),
        timed({"forward": 1e6}, case_id="seldom", backend="Wrong"),
    ]
    (found,) = traffic(weighted(often=90.0, seldom=10.0), speeds(records))
    # 90 x 1 + 10 x 4 = 130 ms, and 90 x 3 + 10 x 1 = 280 ms: builds are not in it.
    assert found.table.headings == ("backend", "calls timed", "100.0% of calls (ms)", "times the least")
    assert found.table.rows == (("reference", "100.0%", "130", "1"), ("Wrong", "100.0%", "280", "2.15"))


def test_what_a_backend_was_not_timed_in_is_left_out_of_all(timed, weighted):
    records = [
        timed({"forward": 1e6}, case_id="often"),
        timed({"forward": 4e6}, case_id="seldom"),
        timed({"forward": 3e6}, case_id="often", backend="Wrong"),
    ]
    header = weighted(often=90.0, seldom=6.0, never=4.0)
    (found,) = traffic(header, speeds(records))
    assert found.table.headings[2] == "90.0% of calls (ms)"
    assert [row[:3] for row in found.table.rows] == [("reference", "96.0%", "90.0"), ("Wrong", "90.0%", "270.0")]
    text = " ".join(terminal.render(header, records).split())
    assert "On this traffic: forward of 1 case timed for every backend" in text
    run = Run("r", header, tuple(records), None)
    assert "On this traffic: forward of 1 case" in markdown.render_run(run)
    assert "On this traffic: forward of 1 case" in render_runs([run])
    (exported,) = json.loads(runs_document([run]))["runs"][0]["traffic"]
    assert (exported["suite"], exported["cases"], exported["calls_compared"]) == ("smoke", 1, 0.9)
    assert [(each["backend"], each["calls_timed"], each["forward_ns"]) for each in exported["times"]] == [
        ("reference", 0.96, 90e6),
        ("Wrong", 0.9, 270e6),
    ]


def test_backends_without_a_common_case_are_not_compared(timed, weighted):
    records = [timed({"forward": 1e6}, case_id="a"), timed({"forward": 3e6}, case_id="b", backend="Wrong")]
    header = weighted(a=1.0, b=1.0)
    (found,) = traffic(header, speeds(records))
    assert [row[2:] for row in found.table.rows] == [("-", "-"), ("-", "-")]
    assert "none is compared" in " ".join(terminal.render(header, records).split())
