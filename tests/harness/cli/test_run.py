"""``attncheck run`` as a person types it: what is printed where, what the run file holds, what options do."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.cases.loader import suite_names
from attncheck.harness.cli import app as cli
from attncheck.harness.cli.common import STEP_SUMMARY
from attncheck.harness.cli.run_files import only_failed
from attncheck.harness.run.options import RunOptions, read_size
from attncheck.reference.spec import DEFAULT_CHECKS
from attncheck.reports.run_file.store import read_run

Attncheck = Callable[..., int]
TheRun = Callable[[Path], Path]


def keys(path: Path | str) -> list[tuple[str, str, str]]:
    return [(each.backend, each.case_id, each.check) for each in read_run(path).records]


def test_a_right_backend_is_exit_code_0_with_a_table_and_a_run_file(
    the_run: TheRun, run: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--backend", "reference") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("attncheck ")
    assert out[0].endswith("suite small: 2 cases, seed 0")
    cells = [line.split() for line in out]
    assert ["backend", "reference"] in cells
    assert all([check, "2/2" if check == "numerics" else "1/1"] in cells for check in DEFAULT_CHECKS)
    assert str(the_run(folder).relative_to(folder)) in out[-1]
    stored = read_run(the_run(folder))
    assert stored.complete
    assert len(stored.records) == len(DEFAULT_CHECKS) + 1  # the second case asks for numerics alone
    assert stored.header.command[:4] == ("attncheck", "run", "--suite", "small.yaml")


def test_a_wrong_answer_has_a_line_for_ci_its_tensors_and_a_command_that_repeats_it(
    plain: Callable[[str], str], run: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--case", "decode", "--check", "numerics", "--seed", "5", "--dump", "dumps")
    assert run("--backend", "./wrong.py:Wrong", *words) == 1
    printed = capsys.readouterr()
    assert "\033" not in printed.out + printed.err
    assert plain(printed.err.splitlines()[0]) == snapshot(
        "failed  Wrong  small/decode  numerics: 2 of 2 rows are wrong, the first is row 0 (request 0, position 19), in all heads; the largest error is ..."
    )
    (path,) = (folder / "dumps").iterdir()
    content = torch.load(path, weights_only=True)
    # A quarter more than the truth was put out, up to float32's rounding.
    assert torch.allclose(content["output"].double(), 1.25 * content["truth"], rtol=1e-4)
    line = next(line.strip() for line in printed.out.splitlines() if line.strip().startswith("repeat: "))
    repeat = line.removeprefix("repeat: ").split()
    assert repeat[:4] == ["attncheck", "run", "--backend", "./wrong.py:Wrong"]
    done = subprocess.run([sys.executable, "-m", *repeat], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "finding 1 of 1, Wrong: " in done.stdout
    assert "case: small/decode, check numerics" in done.stdout
    assert "seed 5" in done.stdout.splitlines()[0]


def test_an_exception_of_a_backend_is_a_record_and_all_fits_100_columns_in_the_colours_of_choice(
    here: Attncheck, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("./wrong.py:Wrong", "./wrong.py:Raising", "torch_sdpa", "reference", "--output", "a.jsonl")
    assert here(*words, "--check", "numerics,lse") == 1
    printed = capsys.readouterr()
    assert "RuntimeError in forward: no such kernel" in printed.out
    assert "Traceback" not in printed.err
    for line in printed.out.splitlines():
        assert len(line) <= 100 or line.strip().startswith(("repeat: ", "File "))
    raised = {record.outcome for record in read_run("a.jsonl").records if record.backend == "Raising"}
    assert raised == {"errored"}

    def is_coloured(*words: str) -> bool:
        assert cli.main(["report", "a.jsonl", *words]) == 0
        return "\033[" in capsys.readouterr().out

    assert not is_coloured()
    assert is_coloured("--color", "always")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert is_coloured()
    assert not is_coloured("--color", "never")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not is_coloured()


def test_backends_are_arguments(here: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "one.py").write_text((folder / "wrong.py").read_text().partition("class Raising")[0])
    words = ("--case", "prefill", "--check", "num*", "--output", "a.jsonl", "--color", "always")
    assert here("./one.py", "reference", "--backend", "torch_sdpa", *words) == 1
    assert keys("a.jsonl") == [(name, "prefill", "numerics") for name in ("Wrong", "reference", "torch_sdpa")]
    printed = capsys.readouterr().out
    assert "repeat: attncheck run --backend ./one.py " in printed
    assert "\033[32m1/1" in printed


def test_defaults_of_the_suites_can_be_set(here: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--backend", "reference", "--suite", "small.yaml", "--set", "layer.head_size=64", "--set"]
    assert here(*words, "cache.block_size=8", "--output", "set.jsonl") == 0
    run = read_run(folder / "set.jsonl")
    needs = {need for record in run.records for need in record.needs}
    assert {"head_size=64", "block_size=8"} <= needs
    assert "head_size=32" not in needs
    (suite,) = run.header.suites
    assert suite.ref == "small.yaml{layer.head_size: 64, cache.block_size: 8}"
    assert here(*words, "cache.block_size") == 2
    assert "KEY=VALUE" in capsys.readouterr().err


def test_without_a_backend_all_built_in_ones_run(here: Attncheck, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("--check", "numerics", "--dry-run") == 0
    planned = re.findall(r"^(\w+): numerics 2 cases$", capsys.readouterr().out, re.MULTILINE)
    assert {"reference", "torch_sdpa", "flex_attention"} <= set(planned)


def test_expected_failures(here: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"backend": "Wrong", "case": "small/*", "check": "numerics", "outcome": "failed", "reason": "issue 17"}
    (folder / "expect.yaml").write_text(json.dumps([entry]))
    assert here("--backend", "./wrong.py:Wrong", "--check", "numerics", "--expect", "expect.yaml") == 0
    assert "PASSED WITH 1 KNOWN FAULT: 2 cases failed as expected" in capsys.readouterr().out
    stale = entry | {"case": "small/dekode"}
    (folder / "expect.yaml").write_text(json.dumps([entry, stale]))
    assert here("--backend", "./wrong.py:Wrong", "--check", "numerics", "--expect", "expect.yaml") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "error: expect.yaml:1: Wrong, small/dekode, numerics: failed expected, but " in printed
    (folder / "expect.yaml").write_text(json.dumps([entry | {"backend": "reference"}]))
    assert here("--backend", "reference", "--check", "numerics", "--expect", "expect.yaml") == 1
    assert "2 right against expectation" in capsys.readouterr().out


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


def test_sizes_are_read_with_their_units() -> None:
    sizes = {"512MiB": 2**29, "4GiB": 2**32, "1.5GiB": 3 * 2**29, "4G": 4 * 10**9, "4294967296": 2**32}
    assert {text: read_size("--memory-limit", text) for text in sizes} == sizes


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


def test_reports_are_written_at_the_end_and_one_that_fails_leaves_the_others(
    here: Attncheck, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "file").touch()
    monkeypatch.setenv(STEP_SUMMARY, str(folder / "summary.md"))
    words = ("./wrong.py:Wrong", "--case", "decode", "--check", "numerics", "--no-output")
    reports = ("--report", "junit=new/j.xml,json=file/r.json,github", "--report", "csv=r.csv")
    assert here(*words, *reports) == 2
    assert (folder / "new" / "j.xml").read_text().count("<testcase ") == 1
    assert (folder / "r.csv").read_text().count("\n") == 2
    assert (folder / "summary.md").read_text().startswith("## attncheck: failed: 1 backend, 1 case: 1 failed")
    printed = capsys.readouterr()
    assert "\n::error " in printed.out
    assert "error: --report json=file/r.json" in printed.err
    assert here(*words, "--report", "csv=again.csv") == 1
