"""What ends with which exit code, and the line that states why."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from inline_snapshot import snapshot

from attncheck.harness.cli import app as cli
from attncheck.harness.cli.common import print_foreign, print_stderr, show_printed

SLOW = """\
from attncheck.backends.candidates.reference import ReferenceBackend
class Slow(ReferenceBackend):
    default_suite = classmethod(lambda cls, device: 'interpreted')
"""


def test_each_mistake_of_a_case_file_is_an_error_of_its_own(typed, plain, folder):
    layer = "{num_heads: 0, num_kv_heads: 1, head_size: 8}"
    cases = f"  - {{id: a, batch: q1, layer: {layer}}}\n  - {{id: b, bach: q1}}\n"
    (folder / "bad.yaml").write_text(f"suite: bad\ncases:\n{cases}")
    done = typed("list cases --suite bad.yaml")
    assert done.code == 2
    assert plain(done.err) == snapshot("""\
error: bad.yaml:3:43: cases[0].layer.num_heads: num_heads must be above 0 (found 0); meaning of num_heads: query heads
error: bad.yaml:4:13: cases[1].bach: a case has no key 'bach'; did you mean 'batch'? (known: ...)
""")


def test_a_backend_requested_by_name_must_have_been_examined(here, typed, folder, the_run):
    done = here("--backend ./wrong.py:Nothing")
    assert done.code == 2
    assert done.err == snapshot(
        "error: no case of backend 'Nothing' was examined by a check other than refusals: cannot; select cases and checks that it supports\n"
    )
    assert "1 not applicable" in done.out
    assert the_run().complete
    (folder / "slow.py").write_text(SLOW)
    words = "--case decode.float16 --check numerics --device cpu --in-process --no-output"
    done = typed(f"run reference ./slow.py:Slow {words}")
    assert "passed: 2 backends (1 passed, 1 not examined), 1 case" in done.out
    assert done.code == 2
    assert done.err == snapshot(
        "error: no case of backend 'Slow' was examined; no selected case is in its default suite: add --suite smoke\n"
    )


def test_our_own_fault_is_exit_code_3_and_its_message_states_how_to_see_more(monkeypatch, capsys):
    def fall():
        raise ZeroDivisionError("of ours")

    def exit_code():
        with pytest.raises(typer.Exit) as left:
            cli.with_exit_code(fall)()
        return left.value.exit_code

    assert exit_code() == 3
    assert capsys.readouterr().err == snapshot("""\
attncheck itself failed: ZeroDivisionError: of ours
set ATTNCHECK_TRACEBACK=1 to see where; please report it with that output
""")
    monkeypatch.setenv("ATTNCHECK_TRACEBACK", "1")
    assert exit_code() == 3
    assert "in fall" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (RuntimeError("can't start new thread"), "no further process or thread can be started; raise `ulimit -u`"),
        (BlockingIOError(errno.EAGAIN, "busy"), "no further process or thread can be started; raise `ulimit -u`"),
        (OSError(errno.EMFILE, "Too many open files"), "no further file can be opened; raise `ulimit -n`"),
        (BlockingIOError(errno.EAGAIN, "write would block", 5), "stdout cannot be written: write would block"),
    ],
)
def test_a_limit_of_the_machine_is_no_fault_of_ours(limit, message, monkeypatch, capsys):
    monkeypatch.setattr(cli, "drop_stdout", lambda: None)  # stdout is the next test's, too
    assert cli.exit_code_of(limit) == 3
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_what_foreign_code_prints_controls_no_terminal(capsys):
    show_printed("mine", "a\x1b]8;;http://x\x07b\x9b31mc\u202ed\0e")
    print_foreign("f\x1b[2Jg")
    print_stderr("h\x1bi")
    assert capsys.readouterr() == ("f?[2Jg\n", "mine | a?]8;;http://x?b?31mc?d?e\nh?i\n")


def test_foreign_code_cannot_choose_the_exit_code(here, folder):
    assert here("--backend ./wrong.py:Leaving --check numerics").code == 1
    (folder / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    done = here("--backend ./leaves.py:X")
    assert (done.code, "SystemExit" in done.err) == (2, True)


def test_what_ends_a_run_in_this_process_ends_with_the_table_too(here, folder):
    interrupts = "if len(args[1]) == 17: raise KeyboardInterrupt"
    (folder / "stopped.py").write_text((folder / "wrong.py").read_text().replace("result.mul_(1.25)", interrupts))
    done = here("--backend ./stopped.py:Wrong --check numerics")
    assert done.code == 130
    assert "Wrong    1/1" in done.out
    assert "interrupted by SIGINT: 1 of 2 cases begun; the remaining cases were not examined" in done.out
    assert done.err.splitlines() == ["interrupted by SIGINT"]


def test_a_dump_that_cannot_be_written_is_a_note_and_the_verdict_stays(here, monkeypatch, the_run):
    def write_bytes(path, data):
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    done = here("--backend ./wrong.py:Wrong --check numerics --dump dumps")
    assert done.code == 1
    assert [record.outcome for record in the_run().records] == ["failed", "failed"]
    note = "--dump dumps: No space left on device; the tensors of this case are not there"
    assert " ".join(done.out.split()).count(note) == 1
    assert list(Path("dumps").iterdir()) == []


MAIN = "from attncheck.__main__ import main; sys.exit(main())"


def started(code, *words, **how):
    how = {"stdout": subprocess.PIPE} | how
    command = [sys.executable, "-c", f"import os, sys\n{code}\n{MAIN}", *words]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **how)
    return done.returncode, done.stderr


def test_what_python_and_the_system_lack_has_an_exit_code(folder):
    missing = "attncheck itself failed: ModuleNotFoundError: import of typer halted; None in sys.modules\n"
    assert started("sys.modules['typer'] = None") == (3, missing)
    with Path("/dev/full").open("w") as full:
        no_room = "error: stdout cannot be written: No space left on device\n"
        assert started("", "list", "cases", stdout=full) == (3, no_room)
    no_reader = "r, w = os.pipe(); os.close(r); os.dup2(w, 1)"
    assert started(no_reader, "list", "cases") == (0, "")


def test_a_name_that_the_locale_cannot_decode_is_printed_with_a_replacement(folder, the_run):
    (folder / "small.yaml").rename(folder / "fälle.yaml")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = ["run", "reference", "--suite", "fälle.yaml", "--case", "prefill", "--in-process", "--device", "cpu"]
    assert started("", *words, env=os.environ | locale) == (0, "")
    assert the_run().complete
    assert the_run().header.suites[0].ref == "f??lle.yaml"


def test_every_command_has_a_short_help_that_fits_80_columns_and_a_summary_in_the_list(typed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def shown(command):
        done = typed(f"{command} -h")
        assert done.code == 0
        assert done.out.startswith(f"Usage: {f'attncheck {command}'.strip()} ")
        assert max(map(len, done.out.splitlines())) <= 80
        return done.out

    listed = " ".join(shown("").partition("Commands:\n")[2].split())
    assert "..." not in listed  # no summary is cut off
    shown("new backend")
    for name in typer.main.get_command(cli.app).commands:
        summary = " ".join(shown(name).split("\n\n")[1].split())
        assert name in ("warm", "mutants") or f"{name} {summary}" in listed
