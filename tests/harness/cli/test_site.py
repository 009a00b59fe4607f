"""``attncheck site``: its exit codes, and the server that writes the site again when a run file grows."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest


@pytest.fixture
def run(folder, header, make_record, write_run):
    """A run, and one of planted faults."""
    write_run(folder / "runs" / "faults" / "b.jsonl", header, make_record("failed", backend="Wrong"))
    return write_run(folder / "runs" / "a.jsonl", header, make_record("passed"))


def test_a_site_is_written_from_files_and_folders_without_those_to_skip(run, typed):
    done = typed("site runs/a.jsonl --runs runs --skip 'faults, miniatures' --output out")
    assert (done.code, done.out) == (0, "out/index.html: 1 run, 1 backend, 1 device\n")
    page = Path("out/index.html").read_text(encoding="utf-8")
    assert "reference" in page
    assert "Wrong" not in page
    assert typed("site runs/a.jsonl --output out").code == 0  # an earlier site is written again
    done = typed("site runs/a.jsonl --output runs")
    assert (done.code, "--output runs has other files" in done.err) == (2, True)
    done = typed("site missing.jsonl")
    assert (done.code, "no run file can be read" in done.err) == (2, True)


def test_the_server_shows_a_run_as_it_grows_and_ends_with_a_signal(run):
    lines = run.read_text(encoding="utf-8").splitlines(keepends=True)
    run.write_text("".join(lines[:2]), encoding="utf-8")  # no footer yet
    command = [sys.executable, "-m", "attncheck", "site", str(run), "--serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            process.stdout.readline()
            match = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())

            def page(name, **headers):
                with urlopen(Request(match[0] + name, headers=headers), timeout=30) as answer:
                    return answer.read().decode()

            for path, headers in (
                ("index.html", {"Host": "evil.example"}),  # a name of another site that resolves to this machine
                ("index.html", {"Origin": "http://evil.example"}),
                ("data/", {}),  # a folder is not listed
            ):
                with pytest.raises(HTTPError, match=r"40[34]"):
                    page(path, **headers)
            assert page("index.html", Host="localhost:9000", Origin="http://localhost:9000")  # as by `ssh -L`
            assert "data/written.txt" in page("index.html", Host="127.0.0.1")  # on port 80
            assert ">stopped<" in page("runs.html")
            written = page("data/written.txt")
            run.write_text("".join(lines), encoding="utf-8")
            limit = time.monotonic() + 60
            while page("data/written.txt") == written and time.monotonic() < limit:
                time.sleep(0.2)
            assert ">stopped<" not in page("runs.html")
            process.terminate()
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
