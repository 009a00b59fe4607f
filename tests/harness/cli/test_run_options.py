"""Options of ``attncheck run`` as users of pytest know them: how much is selected, when it stops, what is printed."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from attncheck.cases.loader import suite_names
from attncheck.harness.cli import app as cli
from attncheck.harness.cli.common import STEP_SUMMARY
from attncheck.harness.cli.run_files import only_failed
from attncheck.harness.run.options import RunOptions, read_size
from attncheck.reports.run_file.store import read_run

Attncheck = Callable[..., int]
TheRun = Callable[[Path], Path]


def keys(path: Path) -> list[tuple[str, str, str]]:
    return [(each.backend, each.case_id, each.check) for each in read_run(path).records]


def test_backends_are_arguments(the_run: TheRun, here: Attncheck, folder: Path) -> None:
    (folder / "one.py").write_text((folder / "wrong.py").read_text().partition("class Raising")[0])
    assert here("./one.py", "reference", "--backend", "torch_sdpa", "--case", "prefill", "--check", "num*") == 1
    assert keys(the_run(folder)) == [(name, "prefill", "numerics") for name in ("Wrong", "reference", "torch_sdpa")]
    assert "repeat: attncheck run --backend ./one.py " in cli_output(folder)


def cli_output(folder: Path) -> str:
    from attncheck.reports.terminal.run import render_run

    (path,) = (folder / "results").iterdir()
    return render_run(read_run(path))


def test_a_check_is_skipped_and_others_are_listed(the_run: TheRun, here: Attncheck, folder: Path) -> None:
    words = ("--check", "numerics,l*", "--check", "cudagraph", "--skip", "cuda*")
    assert here("reference", "--case", "decode", *words) == 0
    assert keys(the_run(folder)) == [("reference", "decode", "numerics"), ("reference", "decode", "lse")]


def test_maxfail_counts_records_and_x_is_one(here: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = ("./wrong.py:Wrong", "./wrong.py:Raising", "--check", "numerics")
    assert here(*both, "--maxfail", "3", "--output", "three.jsonl") == 1
    assert [each.outcome for each in read_run("three.jsonl").records] == ["failed", "errored", "failed"]
    assert "stopped after 3 records that did not pass (--maxfail 3)" in capsys.readouterr().out
    assert here(*both, "-x", "--output", "one.jsonl") == 1
    assert "stopped at the first record that did not pass (-x); the remaining" in capsys.readouterr().out
    assert len(read_run("one.jsonl").records) == 1


def test_last_failed_selects_what_fell_short_in_the_newest_kept_run(
    here: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = (folder / "wrong.py").read_text().replace("mul_(1.25)", "mul_(1.25 if len(result) > 2 else 1)")
    (folder / "wrong.py").write_text(fails)
    assert here("reference", "./wrong.py:Wrong", "--check", "numerics") == 1
    assert here("reference", "--output", "not-kept.jsonl") == 0
    assert here("--lf", "--output", "again.jsonl") == 1  # with the check that failed
    assert keys(Path("again.jsonl")) == [("Wrong", "prefill", "numerics")]
    capsys.readouterr()
    assert here("reference", "--lf") == 2
    assert "these backends and suites passed in the newest run" in capsys.readouterr().err
    (folder / "wrong.py").write_text(fails.replace("1.25", "1.0"))
    assert here("--lf", "--check", "numerics") == 0
    capsys.readouterr()
    assert here("--lf") == 2
    assert "everything passed in the newest run, results/" in capsys.readouterr().err


def test_last_failed_keeps_the_settings_of_the_suite(here: Attncheck, folder: Path) -> None:
    assert here("./wrong.py:Wrong", "--set", "cache.block_size=8", "--case", "decode", "--check", "numerics") == 1
    (path,) = (folder / "results").iterdir()
    narrowed = only_failed(RunOptions(settings=("cache.block_size=8",)), path)
    assert (narrowed.suites, narrowed.keys) == (("small.yaml{cache.block_size: 8}",), ("small/decode",))
    assert here("--lf", "--set", "cache.block_size=8", "--check", "numerics") == 1


def test_quiet_prints_what_fell_short_and_the_last_lines(here: Attncheck, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("reference", "--check", "numerics", "-q") == 0
    verdict, unproven, _, counts, last = capsys.readouterr().out.splitlines()
    assert verdict == "reference: PASSED: 2 cases right"
    assert unproven.startswith("  declared, but needed by no examined case: alibi, ")
    assert counts == "passed: 1 backend, 2 cases: 2 right"
    assert "run file: results/" in last
    assert here("./wrong.py:Wrong", "--case", "decode", "--check", "numerics", "--quiet") == 1
    verdict, _, _, finding, *_ = capsys.readouterr().out.splitlines()
    assert verdict == "Wrong: FAILED: 1 finding in 1 of 1 case"
    assert finding.startswith("finding 1 of 1, Wrong: ")


def test_the_slowest_checks_are_listed(here: Attncheck, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("reference", "--check", "numerics,lse", "--durations", "2", "-v") == 0
    printed = capsys.readouterr()
    title, *rows, _ = printed.out.splitlines()[-4:]
    assert title == snapshot("slowest 2 of 3 checks of cases")
    seconds = [float(row.split()[0]) for row in rows]
    assert seconds == sorted(seconds, reverse=True)
    assert all(re.fullmatch(r" +[\d.]+ s  reference  small/\w+  (numerics|lse)", row) for row in rows)
    assert len(re.findall(r"^passed  reference  small/", printed.err, re.MULTILINE)) == 3


def test_a_dry_run_examines_nothing(here: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("reference", "--check", "numerics") == 0
    kept = list((folder / "results").iterdir())
    capsys.readouterr()
    assert here("reference", "torch_sdpa", "--check", "numerics,timing", "--dry-run", "--dump", "tensors") == 0
    *lines, estimate = capsys.readouterr().out.splitlines()[-4:]
    assert lines == [
        "reference: numerics 2 cases, timing 2 cases",
        "torch_sdpa: numerics 2 cases, timing 2 cases",
        "cases: small/decode, small/prefill",
    ]
    assert re.fullmatch(
        r"time: about \d+ s, an estimate from 2 of 8 checks in kept runs; without starts of processes, and timing",
        estimate,
    )
    assert list((folder / "results").iterdir()) == kept
    assert not (folder / "tensors").exists()


def test_every_suite_is_selected_by_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "cases", "--suite", "all", "--case", "decode.float16"]) == 0
    suites = {line.partition("/")[0] for line in capsys.readouterr().out.splitlines()}
    assert {"smoke", "sinks"} <= suites <= set(suite_names())


def test_colours_are_a_choice(
    here: Attncheck, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert here("reference", "--case", "prefill", "--color", "always", "--output", "a.jsonl") == 0
    assert "\033[32m1/1" in capsys.readouterr().out
    assert cli.main(["report", "a.jsonl", "--color", "always"]) == 0
    assert "\033[" in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    for words, expected in ([], True), (["--color", "never"], False):
        assert cli.main(["report", "a.jsonl", *words]) == 0
        assert ("\033[" in capsys.readouterr().out) == expected
    monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(["report", "a.jsonl"]) == 0
    assert "\033[" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 2**29), ("4GiB", 2**32), ("1.5GiB", 3 * 2**29), ("4G", 4 * 10**9), ("4294967296", 2**32)],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert read_size("--memory-limit", text) == size


READS_FLAG = """
import os
from attncheck.backends.candidates.reference import ReferenceBackend

class Mine(ReferenceBackend):
    @classmethod
    def unsupported_reasons(cls, layer, cache, batch):
        return ["flag"] if os.environ.get("A_FLAG") else []
"""


def test_a_variable_that_a_backend_reads_and_does_not_get_is_named(
    here: Attncheck, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --in-process, too, so that a repeat line runs under the conditions of its run."""
    monkeypatch.setenv("A_FLAG", "1")
    (folder / "mine.py").write_text(READS_FLAG)
    words = ("./mine.py:Mine", "--check", "numerics", "--no-output")
    assert here(*words) == 0
    line = "read by ./mine.py and not passed to it: A_FLAG; add --pass-env A_FLAG"
    assert line in capsys.readouterr().out
    assert os.environ["A_FLAG"] == "1"
    assert here(*words, "--pass-env", "A_FLAG") == 2
    printed = capsys.readouterr()
    assert "flag" in printed.err
    assert "not passed" not in printed.out


def test_reports_are_written_at_the_end(
    here: Attncheck, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(STEP_SUMMARY, str(folder / "summary.md"))
    words = ("./wrong.py:Wrong", "--case", "decode", "--check", "numerics", "--no-output")
    assert here(*words, "--report", "junit=new/j.xml,github", "--report", "csv=r.csv") == 1
    assert (folder / "new" / "j.xml").read_text().count("<testcase ") == 1
    assert (folder / "r.csv").read_text().count("\n") == 2
    assert (folder / "summary.md").read_text().startswith("## attncheck: failed: 1 backend, 1 case: 1 failed")
    assert "\n::error " in capsys.readouterr().out


def test_a_report_that_fails_leaves_the_others(here: Attncheck, folder: Path) -> None:
    (folder / "file").touch()
    words = ("reference", "--case", "decode", "--check", "numerics", "--no-output")
    assert here(*words, "--report", "csv=file/r.csv,json=r.json") == 2
    assert (folder / "r.json").exists()
