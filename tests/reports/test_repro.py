"""The repro line, parsed by a shell's rules, has exactly the values of the record."""

import subprocess

import pytest

from attncheck.reports.analysis.places import place_to_show
from attncheck.reports.analysis.repro import repro_command
from attncheck.reports.run_file.header import SuiteInfo


def test_variables_that_a_run_needs_or_passed_are_in_the_line(make, header):
    words = ("attncheck", "run", "--pass-env", "A,B", "--suite=x", "--pass-env=C*")
    required = {"TRITON_INTERPRET": "1", "FLAGS": "a b;c"}
    backends = (header.backends[0], header.backends[1].model_copy(update={"required_environment": required}))
    stated = header.model_copy(update={"command": words, "backends": backends})
    line = repro_command(make("failed", backend="Wrong"), stated)
    assert line.startswith("TRITON_INTERPRET=1 FLAGS='a b;c' attncheck run --backend ./wrong.py:Wrong ")
    line = repro_command(make("failed"), stated)
    assert line.startswith("attncheck run --backend reference ")
    assert line.endswith("--device cpu '--pass-env=C*' --pass-env A,B --in-process")


def test_what_a_stranger_named_reaches_no_shell(make):
    name = "a'; echo $(id) `id` *.py"
    line = repro_command(make("failed", backend_ref=name))
    done = subprocess.run(["sh", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[3] == name


ONE = "attncheck run --backend reference --suite smoke --case edge --check"
CPU = "--device cpu"
WATCHED = f"{ONE} numerics {CPU}"
ALONE = f"{WATCHED} --in-process"
STOPPED = "the case did not run, because earlier cases used up the time of the backend by --backend-timeout 8"


@pytest.mark.parametrize(
    ("outcome", "fields", "device", "line"),
    [
        ("failed", {}, "cpu", ALONE),
        ("failed", {"seed": 7}, "cpu", f"{ONE} numerics --seed 7 {CPU} --in-process"),
        ("failed", {"suite": "mine"}, "cpu", ALONE.replace("smoke", "'./my suite.yaml'")),
        ("failed", {}, "cuda:0", ALONE.replace("cpu", "cuda:0")),
        ("crashed", {}, "cuda:0", f"CUDA_LAUNCH_BLOCKING=1 {ALONE.replace('cpu', 'cuda:0')}"),
        ("crashed", {"cause": "killed by SIGSEGV"}, "cpu", ALONE),
        ("crashed", {"cause": "exited with code 0"}, "cpu", WATCHED),
        ("crashed", {"cause": "out of memory (limit 4 GiB, it took 4.13 GiB)"}, "cpu", WATCHED),
        ("timed_out", {"cause": "late; the limit was 3 s (--case-timeout 3)"}, "cpu", f"{WATCHED} --case-timeout 3"),
        ("timed_out", {"cause": STOPPED}, "cpu", f"{WATCHED} --backend-timeout 8"),
        (
            "timed_out",
            {"cause": "late; the limit was 5.4 s (what was left of --backend-timeout 8)"},
            "cpu",
            f"{WATCHED} --backend-timeout 8",
        ),
    ],
)
def test_the_line_has_the_limits_and_the_process_that_show_the_failure(make, header, outcome, fields, device, line):
    assert repro_command(make(outcome, **fields), header.model_copy(update={"device": device, "rounds": 10})) == line


TRACEBACK = """Traceback (most recent call last):
  File "/work/mine.py", line 9, in attend
  File "/usr/lib/python3.12/site-packages/torch/functional.py", line 4, in einsum
"""
DIED = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/work/src/kernel.py", line 31 in launch
  File "/work/mine.py", line 9 in attend
"""


def test_the_line_is_shown_else_the_backend_else_the_suite(make, header):
    suite = SuiteInfo(name="smoke", ref="./cases/edge.yaml{seed: 1}", cases=1)
    own = {"backend_ref": "./other.py:Mine"}
    for record, expected in (
        (make("errored", traceback=TRACEBACK, **own), ("mine.py", 9)),
        (make("errored", traceback=TRACEBACK.replace("/work", "/workshop"), **own), ("other.py", None)),
        (make("crashed", output=DIED, **own), ("src/kernel.py", 31)),
        (make("failed", backend_ref="../sibling.py:Mine"), ("cases/edge.yaml", None)),
    ):
        assert place_to_show(record, header.model_copy(update={"suites": (suite,)}), "/work") == expected
