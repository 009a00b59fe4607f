"""The repro line, parsed by a shell's rules, has exactly the values of the record."""

import shlex
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from attncheck.reports.analysis.repro import repro_command
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import Record

Make = Callable[..., Record]


def test_the_line_names_one_backend_case_and_check(make: Make, header: RunHeader) -> None:
    line = repro_command(make("failed", backend="Wrong", case_id="edge.bfloat16-16"), header)
    assert line == (
        "attncheck run --backend ./wrong.py:Wrong --suite smoke --case edge.bfloat16-16 --check numerics "
        "--device cpu --in-process"
    )


def test_a_time_of_any_round_is_taken_again_in_one_process(make: Make, header: RunHeader) -> None:
    record = make("failed", check="timing", round=7)
    line = repro_command(record, header.model_copy(update={"rounds": 10}))
    assert line.endswith("--check timing --device cpu --in-process")
    assert "rounds" not in line


def test_a_seed_other_than_the_default_is_in_the_command(make: Make) -> None:
    assert " --seed 7 " in repro_command(make("failed", seed=7))
    assert "--seed" not in repro_command(make("failed"))


def test_variables_that_the_run_passed_are_passed_again(make: Make, header: RunHeader) -> None:
    words = ("attncheck", "run", "--pass-env", "A,B", "--suite=x", "--pass-env=C*")
    line = repro_command(make("failed"), header.model_copy(update={"command": words}))
    assert line.endswith("--device cpu '--pass-env=C*' --pass-env A,B --in-process")


def test_the_required_environment_comes_first(make: Make, header: RunHeader) -> None:
    required = {"TRITON_INTERPRET": "1", "FLAGS": "a b;c"}
    backends = (header.backends[0], header.backends[1].model_copy(update={"required_environment": required}))
    run_header = header.model_copy(update={"backends": backends})
    line = repro_command(make("failed", backend="Wrong"), run_header)
    assert line.startswith("TRITON_INTERPRET=1 FLAGS='a b;c' attncheck run --backend ./wrong.py:Wrong ")
    assert repro_command(make("failed"), run_header).startswith("attncheck run --backend reference ")


def test_a_crash_on_a_gpu_is_repeated_with_launches_that_wait(make: Make, header: RunHeader) -> None:
    on_gpu = header.model_copy(update={"device": "cuda:0"})
    assert repro_command(make("crashed"), on_gpu).startswith("CUDA_LAUNCH_BLOCKING=1 attncheck run --backend ")
    assert repro_command(make("crashed"), header).startswith("attncheck run ")
    assert repro_command(make("failed"), on_gpu).startswith("attncheck run ")


def test_what_ran_out_of_memory_is_repeated_where_a_run_watches_it(make: Make, header: RunHeader) -> None:
    line = repro_command(make("crashed", cause="out of memory (limit 4 GiB, it took 4.13 GiB)"), header)
    assert line.endswith("--check numerics --device cpu")
    assert repro_command(make("crashed"), header).endswith("--device cpu --in-process")


def test_a_suite_file_is_named_by_its_path_and_quoted(make: Make, header: RunHeader) -> None:
    words = shlex.split(repro_command(make("failed", suite="mine"), header))
    assert words[words.index("--suite") + 1] == "./my suite.yaml"


def test_what_a_stranger_named_reaches_no_shell(make: Make) -> None:
    name = "a'; echo $(id) `id` *.py"
    line = repro_command(make("failed", backend_ref=name))
    done = subprocess.run(["sh", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[3] == name


@pytest.mark.parametrize(
    ("outcome", "cause", "end"),
    [
        ("timed_out", "not finished within the time limit; the limit was 3 s (--case-timeout 3)", " --case-timeout 3"),
        (
            "timed_out",
            "the case did not run, because earlier cases used up the time of the backend by --backend-timeout 8",
            " --backend-timeout 8",
        ),
        ("timed_out", "late; the limit was 5.4 s (what was left of --backend-timeout 8)", " --backend-timeout 8"),
        ("crashed", "exited with code 0", " --device cpu"),
        ("crashed", "killed by SIGSEGV", " --in-process"),
    ],
)
def test_a_repetition_has_the_limits_and_the_process_that_show_the_failure(
    make: Make, header: RunHeader, outcome: Any, cause: str, end: str
) -> None:
    assert repro_command(make(outcome, cause=cause), header).endswith(end)
