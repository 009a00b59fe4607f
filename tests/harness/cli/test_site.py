"""``attncheck site``: its exit codes, and the server that writes the site again when a run file grows."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from attncheck.harness.cli import app as cli
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import Record


@pytest.fixture
def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    header: RunHeader,
    make_record: Callable[..., Record],
    write_run: Callable[..., Path],
) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_run(tmp_path / "runs" / "a.jsonl", header, make_record("passed"))


def test_a_site_is_written_from_files_and_folders(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["site", str(run), "--runs", "runs", "--output", "out"]) == 0
    assert capsys.readouterr().out == "out/index.html: 1 run, 1 backend, 1 device\n"
    assert "reference" in Path("out/index.html").read_text(encoding="utf-8")
    assert cli.main(["site", str(run), "--output", "out"]) == 0  # an earlier site is written again


def test_planted_faults_are_no_backends_of_a_site(
    run: Path, header: RunHeader, make_record: Callable[..., Record], write_run: Callable[..., Path]
) -> None:
    for folder in ("faults", "miniatures"):
        Path("runs", folder).mkdir()
        write_run(Path("runs", folder, "b.jsonl"), header, make_record("failed", backend="Wrong"))
    assert cli.main(["site", "--runs", "runs", "--skip", "faults, miniatures", "--output", "out"]) == 0
    assert "Wrong" not in Path("out/index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["notes"], "no run file can be read"),
        (["missing.jsonl"], "no run file can be read"),
        (["runs/a.jsonl", "--output", "runs"], "--output runs has other files"),
    ],
)
def test_what_cannot_be_a_site_is_refused(
    run: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("notes").write_text("no run")
    assert cli.main(["site", *words]) == 2
    assert message in capsys.readouterr().err
    assert not Path("site").exists()


def test_the_server_shows_a_run_as_it_grows_and_ends_with_a_signal(
    run: Path, make_record: Callable[..., Record]
) -> None:
    lines = run.read_text(encoding="utf-8").splitlines(keepends=True)
    run.write_text("".join(lines[:2]), encoding="utf-8")  # no footer yet
    command = [sys.executable, "-m", "attncheck", "site", "--runs", "runs", "--serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            match = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
            assert match is not None

            def page(name: str) -> str:
                with urlopen(match[0] + name, timeout=30) as answer:
                    return str(answer.read().decode())

            for path, headers in (
                ("index.html", {"Host": "evil.example"}),  # a name of another site that resolves to this machine
                ("index.html", {"Origin": "http://evil.example"}),
                ("data/", {}),  # a folder is not listed
            ):
                with pytest.raises(HTTPError, match=r"40[34]"):
                    urlopen(Request(match[0] + path, headers=headers), timeout=30)
            forwarded = {"Host": "localhost:9000", "Origin": "http://localhost:9000"}
            for headers in (forwarded, {"Host": "127.0.0.1"}):  # as by `ssh -L`, and on port 80
                with urlopen(Request(f"{match[0]}index.html", headers=headers), timeout=30) as answer:
                    assert answer.status == 200
            assert ">stopped<" in page("runs.html")
            assert "data/written.txt" in page("index.html")
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
