"""A run whose disk is full or read-only, or whose streams are closed: exit code 3, and what was written stays valid."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from attncheck.errors import WriteError
from attncheck.harness.cli.run_files import open_run
from attncheck.reports.run_file.store import read_run

CHECKS = "--check numerics,lse,cache_write,containment,determinism"
TYPED = f"attncheck run reference --suite small.yaml --device cpu {CHECKS}"
FRESH = f"{sys.executable} -m {TYPED}"
IN_PROCESS = [*TYPED.split()[1:], "--in-process"]
LIMITED = """\
import resource, sys
sys.dont_write_bytecode = True  # it would be cut off as well
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
from attncheck.__main__ import main
sys.exit(main())
"""  # a process that writes no file of more bytes than its first argument


def limited(size):
    """A run whose file may grow to ``size`` bytes."""
    command = [sys.executable, "-c", LIMITED, str(size), *IN_PROCESS, "--output", "cut.jsonl"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def outcomes(path):
    return [(record.case_id, record.check, record.outcome) for record in read_run(path).records]


def test_a_file_that_cannot_grow_keeps_whole_records_and_is_resumed(here, folder, preloaded):
    assert here(f"reference {CHECKS} --output whole.jsonl").code == 0
    header, *rest = (folder / "whole.jsonl").read_bytes().splitlines(keepends=True)
    done = limited(len(header) + int(len(b"".join(rest)) * 0.6))
    assert done.returncode == 3
    safe = len(read_run("cut.jsonl").records)
    assert done.stderr.splitlines()[-1] == (
        f"error: cut.jsonl cannot be written: File too large; its first {safe} records can be read, as by "
        "`attncheck report`"
    )
    assert re.search(r"^reference: PASSED: [12] cases? right$", done.stdout, re.MULTILINE)  # what was found
    assert re.search(r"^stopped, since cut.jsonl cannot be written: [12] of 2 cases", done.stdout, re.MULTILINE)
    assert outcomes("cut.jsonl") == outcomes("whole.jsonl")[:safe]
    assert not read_run("cut.jsonl").complete
    # Another process than this one, which has loaded files of the tests beside those of the backend.
    rest = [sys.executable, "-m", "attncheck", *IN_PROCESS, "--resume", "cut.jsonl"]
    assert subprocess.run(rest, capture_output=True, check=False).returncode == 0
    assert outcomes("cut.jsonl") == outcomes("whole.jsonl")
    assert read_run("cut.jsonl").complete


def test_a_file_that_cannot_hold_the_header_is_removed(folder, preloaded):
    done = limited(100)
    assert (done.returncode, done.stderr) == (3, "error: cut.jsonl cannot be written: File too large\n")
    assert not (folder / "cut.jsonl").exists()


def in_mount(options, command):
    """Run ``command`` where the folder ``small`` is a file system of its own, mounted with ``options``."""
    Path("small").mkdir()
    isolated = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o {options} none small"
    if subprocess.run([*isolated, mount], capture_output=True, check=False).returncode:
        pytest.skip("this user may mount nothing")
    return subprocess.run([*isolated, f"{mount} && {command}"], capture_output=True, text=True, check=False)


def test_a_full_disk_ends_the_run_and_what_it_holds_can_be_read(folder):
    command = f"{FRESH} --in-process --output small/run.jsonl; code=$?; cat small/run.jsonl > kept.jsonl; exit $code"
    done = in_mount("size=4k", command)
    assert done.returncode == 3, done.stderr
    assert "error: small/run.jsonl cannot be written: No space left on device; its first " in done.stderr
    assert len(read_run("kept.jsonl").records) > 0
    assert not read_run("kept.jsonl").complete


def test_a_read_only_folder_is_an_error(folder):
    done = in_mount("ro", f"{FRESH} --in-process --output small/run.jsonl")
    assert (done.returncode, done.stderr) == (3, "error: small/run.jsonl cannot be written: Read-only file system\n")


ALL_READ_ONLY = """\
for place in $(awk '$3 != "proc" { print $2 }' /proc/mounts); do
    mount -o remount,bind,ro "$place" 2>/dev/null
done
! touch small.yaml 2>/dev/null || exit 77
exec "$@"
"""


def test_a_host_without_a_writable_folder_is_enough(folder, preloaded):
    isolated = ["unshare", "--mount", "sh", "-c"]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may mount nothing")
    command = [*isolated, ALL_READ_ONLY, "sh", *FRESH.split(), "--no-output"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("this machine mounts nothing")
    assert (done.returncode, "passed: 1 backend, 2 cases" in done.stdout) == (0, True), done.stderr


def test_without_a_temporary_folder_the_error_names_what_would_be_right(folder, monkeypatch, header):
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **_: Path("nothing", "here").mkdir())
    with pytest.raises(WriteError) as refused, open_run(None, folder / "small.yaml", header, 1):
        pass
    assert str(refused.value).replace(f"{folder}/", "") == snapshot(
        "a run file in small.yaml, or in a temporary folder, cannot be written: No such file or directory; --output FILE names another place, --no-output writes none"
    )


def test_a_closed_stdout_is_an_error_before_anything_is_examined(folder):
    done = subprocess.run(["bash", "-c", f"exec {FRESH} >&-"], stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == snapshot(
        (3, "error: stdout is closed; send it to a file, or to /dev/null\n")
    )
    assert not list((folder / "results").iterdir())


def test_closed_streams_leave_their_numbers_to_no_pipe(the_run, folder):
    done = subprocess.run(["bash", "-c", f"exec {FRESH} <&- 2>&-"], stdout=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, "passed: 1 backend, 2 cases" in done.stdout) == (0, True)
    assert the_run().complete


def test_a_stderr_that_takes_no_more_ends_no_run(the_run, folder, shell):
    code, printed = shell(f"{TYPED} --verbose 2> /dev/full", folder)
    assert (code, "passed: 1 backend, 2 cases" in printed) == (0, True)
    assert the_run().complete


def test_a_reader_that_leaves_gets_no_verdict_and_the_run_is_whole(the_run, folder, shell):
    code, printed = shell(f"set -o pipefail; {TYPED} | head -1", folder)
    opening, error = printed.splitlines()
    assert code == 3
    assert opening.startswith("attncheck ")
    assert error == f"error: stdout cannot be written: Broken pipe; the run file is {the_run().path}"
    assert the_run().complete


def test_a_reader_that_is_gone_before_the_run_ends_it_at_once(folder, preloaded):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", *TYPED.split()]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (3, "error: stdout cannot be written: Broken pipe\n")
    (path,) = (folder / "results").iterdir()
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["kind"] == "header"
