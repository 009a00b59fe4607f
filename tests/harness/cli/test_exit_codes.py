"""What ends with which exit code, and the line that states why."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from inline_snapshot import snapshot

from attncheck.harness.cli import app as cli
from attncheck.harness.cli.common import print_foreign, print_stderr, show_printed
from attncheck.reports.run_file.store import read_run

Attncheck = Callable[..., int]
TheRun = Callable[[Path], Path]


def test_each_mistake_of_a_case_file_is_an_error_of_its_own(
    plain: Callable[[str], str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.yaml").write_text(
        "suite: bad\ncases:\n"
        "  - {id: a, batch: q1, layer: {num_heads: 0, num_kv_heads: 1, head_size: 8}}\n"
        "  - {id: b, bach: q1}\n"
    )
    assert cli.main(["list", "cases", "--suite", "bad.yaml"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert plain(first) == snapshot(
        "error: bad.yaml:3:43: cases[0].layer.num_heads: num_heads must be above 0 (found 0); meaning of num_heads: query heads"
    )
    assert "43" in first
    assert "num_heads" in first
    assert plain(second) == snapshot(
        "error: bad.yaml:4:13: cases[1].bach: a case has no key 'bach'; did you mean 'batch'? (known: ...)"
    )
    assert "13" in second
    assert "'bach'" in second


def test_a_backend_requested_by_name_must_have_been_examined(
    the_run: TheRun, here: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("--backend", "./wrong.py:Nothing") == 2
    printed = capsys.readouterr()
    assert printed.err == snapshot(
        "error: no case of backend 'Nothing' was examined by a check other than refusals: cannot; select cases and checks that it supports\n"
    )
    assert "'Nothing'" in printed.err
    assert "1 not applicable" in printed.out
    assert read_run(the_run(folder)).complete


def test_a_backend_whose_default_suite_lacks_the_cases_names_the_suite_that_has_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "slow.py").write_text(
        "from attncheck.backends.candidates.reference import ReferenceBackend\n"
        "class Slow(ReferenceBackend):\n"
        "    default_suite = classmethod(lambda cls, device: 'interpreted')\n"
    )
    words = ["--case", "decode.float16", "--check", "numerics", "--device", "cpu", "--in-process", "--no-output"]
    assert cli.main(["run", "reference", "./slow.py:Slow", *words]) == 2
    printed = capsys.readouterr()
    assert "passed: 2 backends (1 passed, 1 not examined), 1 case" in printed.out
    assert printed.err == snapshot(
        "error: no case of backend 'Slow' was examined; no selected case is in its default suite: add --suite smoke\n"
    )


def test_our_own_fault_is_exit_code_3_and_its_message_states_how_to_see_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fall() -> int:
        raise ZeroDivisionError("of ours")

    def exit_code() -> int:
        with pytest.raises(typer.Exit) as left:
            cli.with_exit_code(fall)()
        return left.value.exit_code

    assert exit_code() == 3
    err = capsys.readouterr().err
    assert err == snapshot("""\
attncheck itself failed: ZeroDivisionError: of ours
set ATTNCHECK_TRACEBACK=1 to see where; please report it with that output
""")
    assert "ATTNCHECK_TRACEBACK=1" in err
    assert "Traceback" not in err
    monkeypatch.setenv("ATTNCHECK_TRACEBACK", "1")
    assert exit_code() == 3
    assert "in fall" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limit", "advice"),
    [
        (RuntimeError("can't start new thread"), "raise `ulimit -u`"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "raise `ulimit -u`"),
        (OSError(errno.EMFILE, "Too many open files"), "raise `ulimit -n`"),
    ],
)
def test_a_limit_of_the_machine_is_no_fault_of_ours(
    limit: Exception, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.exit_code_of(limit) == 3
    message = capsys.readouterr().err
    assert message.startswith("error: no further ")
    assert advice in message


def test_a_stdout_that_does_not_block_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "drop_stdout", lambda: None)  # stdout is the next test's, too
    full = BlockingIOError(errno.EAGAIN, "write could not complete without blocking", 5)
    assert cli.exit_code_of(full) == 3
    assert capsys.readouterr().err == "error: stdout cannot be written: write could not complete without blocking\n"


def test_what_foreign_code_prints_controls_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show_printed("mine", "a\x1b]8;;http://x\x07b\x9b31mc\u202ed\0e")
    print_foreign("f\x1b[2Jg")
    print_stderr("h\x1bi")
    assert capsys.readouterr() == ("f?[2Jg\n", "mine | a?]8;;http://x?b?31mc?d?e\nh?i\n")


def test_foreign_code_cannot_choose_the_exit_code(
    run: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--backend", "./wrong.py:Leaving") != 0
    capsys.readouterr()
    (folder / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    assert cli.main(["run", "--suite", "small.yaml", "--backend", "./leaves.py:X"]) == 2
    assert "SystemExit" in capsys.readouterr().err


def test_a_missing_dependency_is_exit_code_3(folder: Path) -> None:
    code = "import sys; sys.modules['typer'] = None\nfrom attncheck.__main__ import main\nsys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr == snapshot(
        "attncheck itself failed: ModuleNotFoundError: import of typer halted; None in sys.modules\n"
    )


def test_what_ends_a_run_in_this_process_ends_with_the_table_too(
    here: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupts = "if len(args[1]) == 17: raise KeyboardInterrupt"
    (folder / "stopped.py").write_text((folder / "wrong.py").read_text().replace("result.mul_(1.25)", interrupts))
    assert here("--backend", "./stopped.py:Wrong", "--check", "numerics") == 130
    printed = capsys.readouterr()
    assert "Wrong    1/1" in printed.out
    assert "interrupted by SIGINT: 1 of 2 cases begun; the remaining cases were not examined" in printed.out
    assert printed.err.splitlines() == ["interrupted by SIGINT"]


def test_a_dump_that_cannot_be_written_is_a_note_and_the_verdict_stays(
    here: Attncheck, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_bytes(path: Path, data: object) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    assert here("--backend", "./wrong.py:Wrong", "--check", "numerics", "--dump", "dumps", "--output", "o.jsonl") == 1
    assert [record.outcome for record in read_run("o.jsonl").records] == ["failed", "failed"]
    note = "--dump dumps: No space left on device; the tensors of this case are not there"
    assert " ".join(capsys.readouterr().out.split()).count(note) == 1
    assert list(Path("dumps").iterdir()) == []


def test_a_stdout_that_takes_no_more_is_an_error(folder: Path) -> None:
    command = [sys.executable, "-m", "attncheck", "list", "cases"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (3, snapshot("error: stdout cannot be written: No space left on device\n"))


def test_a_reader_that_leaves_is_no_fault(folder: Path) -> None:
    code = "import os; r, w = os.pipe(); os.close(r); os.dup2(w, 1)\n"
    code += "import sys; from attncheck.__main__ import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "list", "cases"], capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_name_that_the_locale_cannot_decode_is_printed_with_a_replacement(folder: Path) -> None:
    (folder / "small.yaml").rename(folder / "fälle.yaml")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = ["run", "reference", "--suite", "fälle.yaml", "--case", "prefill", "--in-process", "--device", "cpu"]
    command = [sys.executable, "-m", "attncheck", *words]
    done = subprocess.run(command, env=os.environ | locale, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = (folder / "results").iterdir()
    run = read_run(path)
    assert run.complete
    assert run.header.suites[0].ref == "f??lle.yaml"


def test_every_command_has_a_short_help_that_fits_80_columns_and_a_summary_in_the_list(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    def shown(*command: str) -> str:
        assert cli.main([*command, "-h"]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"Usage: {' '.join(['attncheck', *command])} ")
        assert max(map(len, out.splitlines())) <= 80
        return out

    listed = " ".join(shown().partition("Commands:\n")[2].split())
    assert "..." not in listed  # no summary is cut off
    shown("new", "backend")
    for name in typer.main.get_command(cli.app).commands:
        summary = " ".join(shown(name).split("\n\n")[1].split())
        assert name in ("warm", "mutants") or f"{name} {summary}" in listed
