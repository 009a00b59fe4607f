"""``attncheck run`` as a person types it: what is printed where, what the run file holds, what options do."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.cases.loader import suite_names
from attncheck.harness.cli.common import STEP_SUMMARY
from attncheck.harness.run.options import read_size
from attncheck.reference.spec import DEFAULT_CHECKS
from attncheck.reports.run_file.store import read_run


def keys(run):
    return [(each.backend, each.case_id, each.check) for each in run.records]


def test_a_right_backend_is_exit_code_0_with_a_table_and_a_run_file(run, the_run):
    done = run("--backend reference")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].startswith("attncheck ")
    assert lines[0].endswith("suite small: 2 cases, seed 0")
    cells = [line.split() for line in lines]
    assert ["backend", "reference"] in cells
    assert all([check, "2/2" if check == "numerics" else "1/1"] in cells for check in DEFAULT_CHECKS)
    stored = the_run()
    assert stored.path in lines[-1]
    assert stored.complete
    assert len(stored.records) == len(DEFAULT_CHECKS) + 1  # the second case asks for numerics alone
    assert stored.header.command[:4] == ("attncheck", "run", "--suite", "small.yaml")


def test_a_wrong_answer_has_a_line_for_ci_its_tensors_and_a_command_that_repeats_it(run, plain):
    done = run("--backend ./wrong.py:Wrong --case decode --check numerics --seed 5 --dump dumps")
    assert done.code == 1
    assert "\033" not in done.out + done.err
    assert plain(done.err.splitlines()[0]) == snapshot(
        "failed  Wrong  small/decode  numerics: 2 of 2 rows are wrong, the first is row 0 (request 0, position 19), in all heads; the largest error is ..."
    )
    (path,) = Path("dumps").iterdir()
    content = torch.load(path, weights_only=True)
    # A quarter more than the truth was put out, up to float32's rounding.
    assert torch.allclose(content["output"].double(), 1.25 * content["truth"], rtol=1e-4)
    (repeat,) = re.findall(r"repeat: (attncheck run --backend ./wrong.py:Wrong .*)", done.out)
    again = subprocess.run([sys.executable, "-m", *repeat.split()], capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert "finding 1 of 1, Wrong: " in again.stdout
    assert "case: small/decode, check numerics" in again.stdout
    assert "seed 5" in again.stdout.splitlines()[0]


def test_an_exception_is_a_record_and_all_fits_100_columns_in_the_colours_of_choice(here, typed, monkeypatch):
    words = "./wrong.py:Wrong ./wrong.py:Raising torch_sdpa reference --check numerics,lse --output a.jsonl"
    done = here(words)
    assert done.code == 1
    assert "RuntimeError in forward: no such kernel" in done.out
    assert "Traceback" not in done.err
    for line in done.out.splitlines():
        assert len(line) <= 100 or line.strip().startswith(("repeat: ", "File "))
    raised = {record.outcome for record in read_run("a.jsonl").records if record.backend == "Raising"}
    assert raised == {"errored"}

    def is_coloured(words=""):
        return "\033[" in typed(f"report a.jsonl {words}").out

    assert not is_coloured()
    assert is_coloured("--color always")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert is_coloured()
    assert not is_coloured("--color never")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not is_coloured()


def test_backends_are_arguments(here, folder):
    (folder / "one.py").write_text((folder / "wrong.py").read_text().partition("class Raising")[0])
    words = "--case prefill --check num* --output a.jsonl --color always"
    done = here(f"./one.py reference --backend torch_sdpa {words}")
    assert done.code == 1
    assert keys(read_run("a.jsonl")) == [(name, "prefill", "numerics") for name in ("Wrong", "reference", "torch_sdpa")]
    assert "repeat: attncheck run --backend ./one.py " in done.out
    assert "\033[32m1/1" in done.out


def test_defaults_of_the_suites_can_be_set(here, the_run):
    assert here("reference --set layer.head_size=64 --set cache.block_size=8 --case decode").code == 0
    needs = {need for record in the_run().records for need in record.needs}
    assert {"head_size=64", "block_size=8"} <= needs
    assert "head_size=32" not in needs
    (suite,) = the_run().header.suites
    assert suite.ref == "small.yaml{layer.head_size: 64, cache.block_size: 8}"


def test_expected_failures(here, folder):
    def expecting(backend, *cases):
        known = {
            "backend": Path(backend).suffix[4:] or backend,
            "check": "numerics",
            "outcome": "failed",
            "reason": "17",
        }
        (folder / "expect.yaml").write_text(json.dumps([known | {"case": case} for case in cases]))
        return here(f"{backend} --check numerics --expect expect.yaml")

    done = expecting("./wrong.py:Wrong", "small/*")
    assert (done.code, "PASSED WITH 1 KNOWN FAULT: 2 cases failed as expected" in done.out) == (0, True)
    done = expecting("./wrong.py:Wrong", "small/*", "small/dekode")
    assert done.code == 1
    assert "error: expect.yaml:1: Wrong, small/dekode, numerics: failed expected, but " in " ".join(done.out.split())
    done = expecting("reference", "small/*")
    assert (done.code, "2 right against expectation" in done.out) == (1, True)


def test_a_check_is_skipped_and_others_are_listed(here, the_run):
    assert here("reference --case decode --check numerics,l* --check cudagraph --skip cuda*").code == 0
    assert keys(the_run()) == [("reference", "decode", "numerics"), ("reference", "decode", "lse")]


@pytest.mark.parametrize(
    ("option", "outcomes", "message"),
    [
        ("--maxfail 3", ["failed", "errored", "failed"], "stopped after 3 records that did not pass (--maxfail 3)"),
        ("-x", ["failed"], "stopped at the first record that did not pass (-x); the remaining"),
    ],
)
def test_a_run_stops_after_so_many_failures(here, the_run, option, outcomes, message):
    done = here(f"./wrong.py:Wrong ./wrong.py:Raising --check numerics {option}")
    assert done.code == 1
    assert [each.outcome for each in the_run().records] == outcomes
    assert message in done.out


def test_last_failed_selects_what_fell_short_in_the_newest_kept_run(here, folder):
    fails = (folder / "wrong.py").read_text().replace("mul_(1.25)", "mul_(1.25 if len(result) > 2 else 1)")
    (folder / "wrong.py").write_text(fails)
    setting = "--set cache.block_size=8"
    assert here(f"reference ./wrong.py:Wrong --check numerics {setting}").code == 1
    assert here("reference --check numerics --output not-kept.jsonl").code == 0
    assert here(f"--lf {setting} --output again.jsonl").code == 1  # with the check that failed
    assert keys(read_run("again.jsonl")) == [("Wrong", "prefill", "numerics")]
    done = here("reference --lf")
    assert (done.code, "these backends and suites passed in the newest run" in done.err) == (2, True)
    (folder / "wrong.py").write_text(fails.replace("1.25", "1.0"))
    assert here(f"--lf {setting} --check numerics").code == 0
    done = here("--lf")
    assert (done.code, "everything passed in the newest run, results/" in done.err) == (2, True)


def test_quiet_prints_what_fell_short_and_the_last_lines(here):
    done = here("reference --check numerics -q")
    verdict, unproven, _, counts, last = done.out.splitlines()
    assert verdict == "reference: PASSED: 2 cases right"
    assert unproven.startswith("  declared, but needed by no examined case: alibi, ")
    assert counts == "passed: 1 backend, 2 cases: 2 right"
    assert "run file: results/" in last
    verdict, _, _, finding, *_ = here("./wrong.py:Wrong --case decode --check numerics --quiet").out.splitlines()
    assert verdict == "Wrong: FAILED: 1 finding in 1 of 1 case"
    assert finding.startswith("finding 1 of 1, Wrong: ")


def test_the_slowest_checks_are_listed(here):
    done = here("reference --check numerics,lse --durations 2 -v")
    title, *rows, _ = done.out.splitlines()[-4:]
    assert title == snapshot("slowest 2 of 3 checks of cases")
    seconds = [float(row.split()[0]) for row in rows]
    assert seconds == sorted(seconds, reverse=True)
    assert all(re.fullmatch(r" +[\d.]+ s  reference  small/\w+  (numerics|lse)", row) for row in rows)
    assert len(re.findall(r"^passed  reference  small/", done.err, re.MULTILINE)) == 3


def test_a_dry_run_examines_nothing_and_takes_all_built_in_backends_unless_some_are_named(here, folder, the_run):
    assert here("reference --check numerics").code == 0
    kept = the_run()
    done = here("reference torch_sdpa --check numerics,timing --dry-run --dump tensors")
    *lines, estimate = done.out.splitlines()[-4:]
    assert lines == [
        "reference: numerics 2 cases, timing 2 cases",
        "torch_sdpa: numerics 2 cases, timing 2 cases",
        "cases: small/decode, small/prefill",
    ]
    assert re.fullmatch(
        r"time: about \d+ s, an estimate from 2 of 8 checks in kept runs; without starts of processes, and timing",
        estimate,
    )
    assert the_run() == kept
    assert not (folder / "tensors").exists()
    planned = re.findall(r"^(\w+): numerics 2 cases$", here("--check numerics --dry-run").out, re.MULTILINE)
    assert {"reference", "torch_sdpa", "flex_attention"} <= set(planned)


def test_every_suite_is_selected_by_one_name(typed):
    lines = typed("list cases --suite all --case decode.float16").out.splitlines()
    assert {"smoke", "sinks"} <= {line.partition("/")[0] for line in lines} <= set(suite_names())


def test_sizes_are_read_with_their_units():
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


def test_a_variable_that_a_backend_reads_and_does_not_get_is_named(here, folder, monkeypatch):
    """With --in-process, too, so that a repeat line runs under the conditions of its run."""
    monkeypatch.setenv("A_FLAG", "1")
    (folder / "mine.py").write_text(READS_FLAG)
    done = here("./mine.py:Mine --check numerics")
    assert done.code == 0
    assert "read by ./mine.py and not passed to it: A_FLAG; add --pass-env A_FLAG" in done.out
    assert os.environ["A_FLAG"] == "1"
    done = here("./mine.py:Mine --check numerics --pass-env A_FLAG")
    assert done.code == 2
    assert "flag" in done.err
    assert "not passed" not in done.out


def test_reports_are_written_at_the_end_and_one_that_fails_leaves_the_others(here, folder, monkeypatch):
    (folder / "file").touch()
    monkeypatch.setenv(STEP_SUMMARY, str(folder / "summary.md"))
    words = "./wrong.py:Wrong --case decode --check numerics --no-output"
    done = here(f"{words} --report junit=new/j.xml,json=file/r.json,github --report csv=r.csv")
    assert done.code == 2
    assert (folder / "new" / "j.xml").read_text().count("<testcase ") == 1
    assert (folder / "r.csv").read_text().count("\n") == 2
    assert (folder / "summary.md").read_text().startswith("## attncheck: failed: 1 backend, 1 case: 1 failed")
    assert "\n::error " in done.out
    assert "error: --report json=file/r.json" in done.err
    assert here(f"{words} --report csv=again.csv").code == 1
