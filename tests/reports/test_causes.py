"""The frame that is shown is the author's; the output of a dead process is shown, and cannot drive a terminal."""

import subprocess
import sys

import pytest

from attncheck.reports.run_file.causes import (
    UNEXPLAINED,
    cause_line,
    cause_of_end,
    cause_of_error,
    cause_of_failure,
    died_at,
    last_words,
    raised_at,
)
from attncheck.reports.terminal import run as terminal

HARNESS = "/src/attncheck/harness/driver/foreign_code.py"
TORCH = "/venv/lib/python3.12/site-packages/torch/_ops.py"
STANDARD = "/usr/lib/python3.12/threading.py"
WATCH = "/src/attncheck/harness/checks/cudagraph/emulation.py"
BRIDGE = "/src/attncheck/backends/candidates/vllm/state_layers.py"
LIBRARY64 = "/usr/lib64/python3.12/contextlib.py"
MINE = "/home/me/mine.py"
HOW = "--check numerics --device cpu --in-process"

ABORTING = """
import faulthandler, os, threading, time
faulthandler.enable()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
def launch():
    os.abort()
def forward():
    launch()
print("free(): invalid pointer", flush=True)
forward()
"""


def stack(heading, *paths):
    frames = [f'  File "{path}", line {number} in call' for number, path in enumerate(paths, start=1)]
    return "\n".join([f"{heading} 0x00007fae5c82fb80 (most recent call first):", *frames, ""])


def dump(*stacks):
    head = "loading kernels\nfree(): invalid pointer\nFatal Python error: Aborted\n"
    return "\n".join([head, *stacks, "Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)"])


def test_a_real_death(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(ABORTING)
    done = subprocess.run(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    places = ((6, "launch"), (8, "forward"), (10, "<module>"))
    assert died_at(done.stdout) == tuple(f'File "{path}", line {line} in {name}' for line, name in places)
    assert last_words(done.stdout) == ("free(): invalid pointer", "Fatal Python error: Aborted")
    assert died_at("") == died_at("Killed\n") == last_words(" \n\n") == ()
    assert last_words("\n".join("abcdef")) == ("c", "d", "e", "f")


def test_the_innermost_frames_of_the_author_come_first():
    for paths, lines in (
        ((MINE, HARNESS), [1]),
        ((TORCH, MINE, TORCH, MINE, MINE, MINE, HARNESS), [2, 4, 5]),
        ((TORCH, "<string>", HARNESS, STANDARD), [1, 2, 3]),
    ):
        output = dump(stack("Thread", "/home/me/other.py"), stack("Current thread", *paths))
        assert died_at(output) == tuple(f'File "{paths[line - 1]}", line {line} in call' for line in lines)


def test_of_several_stacks_that_of_the_death_counts():
    for stacks, path, line in (
        ([("Current thread", TORCH), ("Thread", "/home/me/other.py")], TORCH, 1),
        ([("Current thread", "/home/me/first.py"), ("Current thread", MINE)], MINE, 1),
        ([("Thread", STANDARD), ("Thread", TORCH, MINE)], MINE, 2),
    ):
        assert died_at(dump(*(stack(*each) for each in stacks))) == (f'File "{path}", line {line} in call',)


def test_the_terminal_shows_cause_place_last_output_and_how_to_repeat_it(header, make):
    output = dump(stack("Current thread", TORCH, MINE, HARNESS))
    text = terminal.render(header, [make("crashed", output=output), make("crashed", check="lse", output=output)])
    (paragraph,) = (part for part in text.split("\n\n") if part.startswith("finding "))
    assert "mine.py:2 in call\n  1 case, checks numerics and lse" in paragraph
    assert paragraph.splitlines()[3:] == [
        "    killed by SIGABRT during check numerics",
        f'    File "{MINE}", line 2 in call',
        "    printed last:",
        "      loading kernels",
        "      free(): invalid pointer",
        "      Fatal Python error: Aborted",
        f"    repeat: attncheck run --backend reference --suite smoke --case edge {HOW}",
    ]
    text = terminal.render(header, [make("crashed", output="x" * 9000)])
    assert max(len(line) for line in text.splitlines() if "repeat: " not in line) < 300


WRONG = "9 of 40 rows are wrong, the first is row 1"
SINKS = "the sinks are ignored"
SAME = "a reference with this fault gives the same output in"


@pytest.mark.parametrize(
    ("check", "summary", "meaning", "cause"),
    [
        ("numerics", "7 of 40 rows, first: row 3 (request 0), head 1; worst 18.4 budgets", None, UNEXPLAINED),
        ("numerics", "no row was written", None, "no row was written"),
        ("numerics", WRONG, f"{SINKS}: {SAME} the 3 wrong rows", SINKS),
        # texts of earlier versions, which kept run files hold
        ("numerics", "7 of 40 rows, first: row 3", f"{SINKS}: its truth fits 3 rows", SINKS),
        ("numerics", WRONG, f"{SINKS}; it may also be that the cap is 5", SINKS),
        ("numerics", "", "the window is 129 (1, 2, 3) instead of 128", "the window is N (N) instead of N"),
        ("lse", "3 of 40 rows are wrong, the first is row 9 (request 2)", None, "N of N rows are wrong"),
        ("cache_write", "3 slots are wrong, the first: slot 9 (page 4)", None, "N slots are wrong"),
        ("containment", "NaN at row 3 of the output", None, "NaN"),
        ("containment", "poison reaches 3 of 40 rows", None, "poison"),
        ("numerics", WRONG, "not known; wrong are rows with context", UNEXPLAINED),
        ("numerics", WRONG, f"the cap is 30, not 50: {SAME} all rows; also possible: no cap", "the cap is N, not N"),
    ],
)
def test_a_failure_has_the_cause_that_is_named_or_the_pattern_of_its_summary(check, summary, meaning, cause):
    assert cause_of_failure(check, summary, meaning) == cause


def test_an_end_is_named_by_the_line_of_the_author_or_by_its_message():
    for error, cause in (
        (("forward", "index 9", traceback(WATCH, MINE, TORCH)), "IndexError at mine.py:2 in call"),
        (("forward", "index 9\nof 8", ""), "IndexError in forward: index N"),
        (("build", "", ""), "IndexError in build"),
    ):
        assert cause_of_error("IndexError", *error) == cause
    output = dump(stack("Current thread", TORCH, MINE))
    killed = "killed by SIGKILL; out of memory? its peak was 3.1 GiB"
    assert cause_of_end(killed, "check lse", output) == "killed by SIGKILL at mine.py:2 in call"
    assert cause_of_end(killed, "check lse", "") == "killed by SIGKILL"
    assert cause_of_end(killed, "the import", "") == "killed by SIGKILL during the import"


def test_a_line_of_a_library_or_the_harness_is_no_cause():
    """A fault of a GPU is noticed where the harness next waits for it."""
    cuda = "/venv/lib/python3.12/site-packages/torch/cuda/__init__.py"
    session = HARNESS.replace("foreign_code", "session")
    waiting = f'  File "{cuda}", line 1162 in synchronize\n  File "{session}", line 296 in _forward'
    output = f"Current thread 0x00007fae5c82fb80 (most recent call first):\n{waiting}\n"
    late = "not finished within the time limit; the limit was 15 s (--case-timeout 15)"
    assert cause_of_end(late, "check lse", output) == (
        "not finished within the time limit: work of the backend on the GPU goes on"
    )
    named = output.replace(f'{session}", line 296 in _forward', f'{HARNESS}", line 60 in do_kv_cache_update')
    assert cause_of_end(late, "check lse", named) == (
        "not finished within the time limit: work of do_kv_cache_update on the GPU goes on"
    )
    assert cause_of_end("killed by SIGSEGV", "check lse", output) == "killed by SIGSEGV"
    assert cause_of_end(late, "check lse", dump(stack("Current thread", TORCH, HARNESS))) == (
        "not finished within the time limit"
    )
    installed = "/venv/lib/python3.12/site-packages/their_kernels/impl.py"
    assert cause_line(f'File "{installed}", line 40, in forward') == "impl.py:40 in forward"
    broken = f'  File "{MINE}", line 3\n    def\nSyntaxError: invalid syntax'
    assert (
        cause_of_error("SyntaxError", "forward", "invalid syntax", broken) == "SyntaxError in forward: invalid syntax"
    )
    trace = f"{traceback(WATCH, TORCH)}\nValueError: no"
    assert cause_of_error("ValueError", "forward", "no", trace) == "ValueError in forward: no"


def traceback(*paths):
    frames = [
        f'  File "{path}", line {number}, in call\n    work()\n    ~~~~^^' for number, path in enumerate(paths, start=1)
    ]
    return "\n".join(["Traceback (most recent call last):", *frames, "RuntimeError: no"])


@pytest.mark.parametrize(
    ("paths", "line"),
    [
        ((WATCH, TORCH), 2),
        ((WATCH, TORCH, LIBRARY64), 3),
        ((WATCH, MINE, WATCH, TORCH), 2),
        ((WATCH, MINE, "/home/me/helper.py", LIBRARY64, TORCH), 3),
        ((WATCH, MINE, "/usr/lib/python3/dist-packages/triton/runtime.py"), 2),
        ((WATCH, MINE, "<string>", "<frozen importlib._bootstrap>"), 2),
        ((WATCH, "/venv/lib/python3.12/site-packages/attncheck/backends/candidates/torch_sdpa.py", TORCH), 2),
        ((WATCH, "/venv/lib/python3.12/site-packages/attncheck/harness/driver/foreign_code.py", MINE, TORCH), 3),
        ((WATCH, BRIDGE, "/venv/lib/python3.12/site-packages/vllm/model_executor/layer.py"), 3),
        ((WATCH, BRIDGE, MINE, TORCH), 3),
        (("/home/me/attncheck/.venv/lib/python3.12/site-packages/torch/_ops.py", "/home/me/attncheck/mine.py"), 2),
        ((MINE, "/home/me/attncheck/.venv/lib/python3.12/site-packages/torch/_ops.py"), 1),
    ],
)
def test_the_innermost_frame_of_the_author_is_shown_else_the_last(paths, line):
    assert raised_at(traceback(*paths)) == f'File "{paths[line - 1]}", line {line}, in call'


def test_the_last_of_chained_errors_counts():
    chained = f"{traceback(MINE, TORCH)}\n\nDuring handling of this another came:\n\n{traceback(WATCH, WATCH, MINE)}"
    assert raised_at(chained) == f'File "{MINE}", line 3, in call'
    assert raised_at("RuntimeError: killed by signal 9") == ""
