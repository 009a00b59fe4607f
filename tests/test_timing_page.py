"""docs/timing.md and docs/comparing.md are true: their commands work, and their figures are those of the code.

Commands that time are run in one round and for a moment: how long they take proves nothing about the page.
"""

import random
import re
from pathlib import Path

import pytest

from attncheck.harness.checks.timing import neighbours
from attncheck.harness.checks.timing.settings import TimingSettings
from attncheck.reports.comparison import significance
from attncheck.reports.comparison.power import ProcessNoise, smallest_slowdown
from attncheck.reports.run_file.store import RunWriter, read_run
from attncheck.reports.speeds.tables import FASTEST_ROUNDS

pytestmark = pytest.mark.xdist_group("timing-page")

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("timing.md", "timing-defences.md", "comparing.md")
TEXT = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in PAGES)
PROSE = " ".join(TEXT.split())
FIRST, *COMMANDS = re.findall(r"^\$ (.*)$", TEXT, re.MULTILINE)
((COMPARISON, COMPARED),) = re.findall(r"^\$ (attncheck compare .*)\n((?:(?!```).*\n)+)^```$", TEXT, re.MULTILINE)
PYTEST_OPTIONS = "-p no:cacheprovider --benchmark-max-time=0.01 --benchmark-min-rounds=1"
IN_BRIEF = "--rounds 1 --time-limit 0.01"


def in_brief(command):
    if not command.startswith("attncheck run"):
        return command
    return f"{re.sub(r' --(rounds|time-limit) [0-9.]+', '', command)} {IN_BRIEF}"


@pytest.fixture(scope="module")
def run(shell):
    return lambda command, folder: shell(command, folder, PYTEST_ADDOPTS=PYTEST_OPTIONS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, run):
    """Two kernels of one's own, and two runs of the suite that is compared."""
    made = tmp_path_factory.mktemp("timing")
    for name in ("old", "new"):
        run(f"attncheck new backend {name}", made)
        (made / f"test_{name}.py").unlink()  # which pytest would collect
    code, printed = run(f"{in_brief(FIRST)} --output base.jsonl", made)
    assert code == 0, printed
    (made / "base.jsonl").rename(made / "one-round.jsonl")
    for name, is_new in (("base", False), ("new", True)):
        write_ten_rounds(made / "one-round.jsonl", made / f"{name}.jsonl", is_new=is_new)
    return made


def write_ten_rounds(found, path, *, is_new):
    """As ``found``, with the cases and times of the page: a slower one, a faster one, one of much noise."""
    cases = {"long": (9e5, 1.1, 0.01), "ragged": (2.5e5, 1, 0.01), "many": (8e4, 1, 0.12), "single": (6e4, 0.9, 0.01)}
    run, luck = read_run(found), random.Random(path.stem)
    with RunWriter(path, run.header.model_copy(update={"rounds": 10})) as writer:
        for number in range(10):
            for case, (time, factor, spread) in cases.items():
                forward = time * (factor if is_new else 1) * luck.lognormvariate(0, spread)
                writer.add(timed(run.records[0], case, number, forward, 2e4 * luck.lognormvariate(0, 0.01)))


def timed(record, case, number, *medians):
    latencies = tuple(
        latency.model_copy(
            update={"median_ns": time, "low_ns": time, "high_ns": time, "samples_ns": (round(time), round(time) + 1)}
        )
        for latency, time in zip(record.timing.latencies, medians, strict=True)
    )
    timing = record.timing.model_copy(update={"latencies": latencies})
    return record.model_copy(update={"case_id": case, "case_hash": case, "round": number, "timing": timing})


def test_a_comparison_prints_what_the_page_shows(run, folder, assert_printed):
    code, printed = run(COMPARISON, folder)
    assert code == 1, printed
    assert_printed(COMPARED, printed)


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != COMPARISON])
def test_a_command_works(run, folder, command):
    code, printed = run(in_brief(command), folder)
    assert code == 0, printed


def test_how_many_samples_are_taken_is_what_is_taken():
    own = TimingSettings()
    assert own.limit_s == 0.25
    assert f"no wider than {own.relative_width:.0%} of it".replace("%", " %") in PROSE
    assert f"at least {own.min_samples}, at most {own.max_samples}, and for a quarter of a second at most" in PROSE


def test_what_counts_in_a_comparison_is_what_counts():
    assert f"lies beyond {significance.EFFECT:.0%}".replace("%", " %") in PROSE
    assert f"lies within {significance.MARGIN:.0%}".replace("%", " %") in PROSE
    assert f"a {1 - significance.FAMILY_LEVEL:.0%} interval".replace("%", " %") in PROSE
    assert f"fewer than {significance.MIN_ROUNDS} rounds a side" in PROSE
    assert (FASTEST_ROUNDS, neighbours.TOO_FAST, neighbours.NOTABLE) == (5, 2.0, 1.25)  # stated in words


def test_the_slowdowns_that_are_found_are_those_of_the_theory():
    (pairs,) = re.findall(r"where (\d+) pairs of two runs are compared", PROSE)
    (heading,) = re.findall(r"^\| noise between processes \|(.*)\|$", TEXT, re.MULTILINE)
    rounds = [int(number) for number in re.findall(r"(\d+) rounds", heading)]
    rows = re.findall(r"^\| (\d+) % \|(.*)\|$", TEXT, re.MULTILINE)
    assert len(rounds) == len(rows) == 4
    for spread, cells in rows:
        level = significance.FAMILY_LEVEL / int(pairs)
        found = [smallest_slowdown(ProcessNoise(int(spread) / 100), number, level=level) for number in rounds]
        assert [cell.strip() for cell in cells.split("|")] == [f"{share:.1%}" for share in found]


def test_every_module_that_is_named_is_there():
    named = re.findall(r"`((?:harness|reports|tests)/[\w/.]*)`", TEXT)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
