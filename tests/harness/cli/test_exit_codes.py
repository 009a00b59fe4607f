"""What ends with which exit code, and the line that states why: wrong commands, full disks and closed streams too."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import typer
from inline_snapshot import snapshot

from attncheck.errors import WriteError
from attncheck.harness.cli import app as cli
from attncheck.harness.cli.common import print_foreign, print_stderr, show_printed
from attncheck.harness.cli.run_files import open_run
from attncheck.harness.workers.starting import ForkServer
from attncheck.reports.run_file.store import read_run

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


NO_MODULE = "it names a Python module, of letters, digits and underscores, a letter first"
REFUSED = {
    "run --in-process refrence": "error: unknown backend 'refrence'; did you mean 'reference'? (known: ...)",
    "run --in-process ./wrong.py": "error: backend './wrong.py': has 5 backends; write ./wrong.py:Wrong or ./wrong.py:Raising or ./wrong.py:Leaving or ./wrong.py:Nowhere or ./wrong.py:Nothing",
    "run small.yaml": "error: backend 'small.yaml' has the name of a case file; give --suite small.yaml",
    "run --in-process wrong:Missing": "error: backend 'wrong:Missing': importing it raised ModuleNotFoundError: No module named 'wrong'; for the file, write ./wrong.py:Missing",
    "run --in-process wrong": "error: backend 'wrong': no backend has this name; for the file, write ./wrong.py",
    "run --in-process ./broken.py:B": "error: backend './broken.py:B': importing it raised ModuleNotFoundError: No module named 'nothing_of_that_name' (TMP/broken.py:N: import nothing_of_that_name); nothing_of_that_name is neither installed nor beside broken.py",
    "run --in-process ./nothing.py:B": "error: backend './nothing.py:B': cannot read nothing.py: No such file or directory",
    "run --in-process ./wrong.py:Nowhere": "error: backend 'Nowhere' is unavailable here: needs a moon",
    "run --in-process reference --suite smoky": "error: unknown suite 'smoky'; did you mean 'smoke'? (known: ...)",
    "run reference --suite nothing.yaml": "error: nothing.yaml: there is no such file; built-in suites: ...",
    "run reference --suite bad.yaml": "error: bad.yaml:4:5: cases[0].bach: a case has no key 'bach'; did you mean 'batch'? (known: ...)",
    "run reference --suite again.yaml,small.yaml": "error: again.yaml and small.yaml are both called 'small'; give them two names",
    "run reference --suite small.yaml --suite 'small.yaml{cache.block_size: 32}'": "error: small.yaml and small.yaml{cache.block_size: 32} are both called 'small'; examine them in two runs",
    "run reference --set layer.num_head=4": "error: small.yaml with --set layer.num_head=4: layer.num_head: a layer has no key 'num_head'; did you mean 'num_heads'? (known: ...)",
    "run reference --set cache.block_size": "error: --set 'cache.block_size': give KEY=VALUE, such as cache.block_size=32",
    "run reference --case decod": "error: no case of small.yaml matches 'decod'; did you mean 'decode'?",
    "run reference --case 'zz*'": "error: no case of small.yaml matches 'zz*'; `attncheck list cases --suite small.yaml` shows the ids",
    "run reference --case prefill --check lse": "error: no case of small.yaml that matches asks for lse",
    "run reference --check numeric": "error: unknown check 'numeric'; did you mean 'numerics'? (known: ...)",
    "run reference --skip 'cuda*' --check cudagraph": "error: --skip cudagraph removes every selected check; leave out --skip, or select more with --check",
    "run reference -k '('": "error: -k '(': expected not OR left parenthesis OR identifier; got end of input; join words by and, or, not and parentheses, such as 'window and not fp8'",
    "run --last-failed": "error: results: holds no run yet; `attncheck run` without --output writes one",
    "run --in-process reference --device tpu": "error: device 'tpu': no such device; give cpu, cuda or cuda:N",
    "run --in-process reference --device meta": "error: device 'meta': attncheck examines on cpu, cuda or cuda:N",
    "run --in-process reference --expect nothing.yaml": "error: nothing.yaml: there is no such file",
    "run --in-process reference --output wrong.py": "error: wrong.py: exists already; runs are never overwritten, name another file",
    "run --in-process reference --dump wrong.py": "error: --dump wrong.py cannot be written: File exists",
    "run reference --no-output --output a.jsonl": "error: --no-output cannot be combined with --output a.jsonl; leave out one of them",
    "run reference --report pdf=a.pdf": "error: unknown report format 'pdf' (known: ...)",
    "run reference --report html": "error: --report html names no file; give html=FILE",
    "run reference --shard 3": "error: --shard 3: give I/N with I from 1 to N, such as 2/7 for the second of seven shards",
    "run reference --case decode --shard 1/2 --in-process": "error: --shard 1/2: 1 cases are selected; give at most as many shards",
    "run --provider vllm --shard 1/2": "error: --shard 1/2 cannot be combined with --provider vllm; leave out one of them",
    "run --provider vllm --skip lse": "error: --skip lse: a run of providers alone has the one check utilities; leave --skip out",
    "run --provider vllm --backend reference --skip utilities": "error: a provider is examined by the check utilities, which --skip leaves out",
    "run reference --jobs 1.5": "error: --jobs '1.5': give a whole number, 1 or above, or auto",
    "run reference --jobs 0": "error: --jobs '0': give a whole number, 1 or above, or auto",
    "run reference --jobs 2 --in-process": "error: --jobs 2 and --in-process exclude each other; leave out one of them",
    "run reference --case-timeout -1": "error: --case-timeout: must be at least 0 (found '-1'); see `attncheck run --help`",
    "run reference --case-timeout nan": "error: --case-timeout: must be at least 0 (found 'nan'); see `attncheck run --help`",
    "run reference --case-timeout 9 --in-process": "error: --case-timeout 9 kills the process of a backend, and --in-process starts none; leave out one of them",
    "run reference --memory-limit much": "error: --memory-limit 'much': give a size, such as 512MiB, 4GiB or a number of bytes",
    "run reference --memory-limit 100MiB": "error: --memory-limit 100 MiB: torch needs more; give 512 MiB or more",
    "run reference --memory-limit 1GiB --in-process": "error: --memory-limit limits the process of a backend, and --in-process starts none; leave out one of them",
    "run reference --device cpu --device-memory-limit 2GiB": "error: --device-memory-limit is for a GPU, and --device cpu has none; leave out one of them",
    "run reference --executor dask": "error: --executor 'dask': give local, ray or ray:FILE",
    "run reference --executor ray --in-process": "error: --executor ray cannot be combined with --in-process; leave out one of them",
    "run reference --executor ray --dump tensors": "error: --executor ray cannot be combined with --dump tensors; leave out one of them",
    "run reference --executor ray --show-output": "error: --executor ray cannot be combined with --show-output; leave out one of them",
    "run reference --executor ray --check timing": "error: --executor ray: the check timing compares times of one device, and a cluster has many; take times by a run on one machine",
    "run --executor ray --provider vllm": "error: --executor ray cannot be combined with --provider vllm; leave out one of them",
    "run reference --resume notes.jsonl --in-process": "error: notes.jsonl:1: is not a run file: its first line is not JSON (expected ident at line 1 column 2)",
    "run reference --resume none.jsonl --in-process": "error: none.jsonl: cannot be read: No such file or directory",
    "run reference --resume run.jsonl.gz --in-process": "error: run.jsonl.gz: cannot be resumed: its name does not end in .jsonl",
    "run reference --resume none.jsonl --output x.jsonl": "error: --resume none.jsonl cannot be combined with --output x.jsonl; leave out one of them",
    "run reference --resume none.jsonl --no-output": "error: --resume none.jsonl cannot be combined with --no-output; leave out one of them",
    "run --resume none.jsonl --provider vllm": "error: --resume none.jsonl cannot be combined with --provider vllm; leave out one of them",
    "run reference --timeout 3": "error: no such option: --timeout; use --case-timeout for one check of a case, --backend-timeout for a whole backend; see `attncheck run --help`",
    "run reference --rounds 3": "error: no such option: --rounds; use `attncheck time --rounds`; see `attncheck run --help`",
    "run reference --ray-address local": "error: no such option: --ray-address; use --executor ray:FILE, whose keys are address, resources and runtime_env; see `attncheck run --help`",
    "run reference --watch": "error: no such option: --watch; use watchfiles of PyPI: `watchfiles --filter python 'attncheck run ./mine.py' .`; see `attncheck run --help`",
    "run reference --frobnicate": "error: no such option: --frobnicate; see `attncheck run --help`",
    "run reference --seed x": "error: --seed: must be a whole number (found 'x'); see `attncheck run --help`",
    "run reference --seed -1": "error: --seed: must be at least 0 (found '-1'); see `attncheck run --help`",
    "time reference --time-limit x": "error: --time-limit: must be a number (found 'x'); see `attncheck time --help`",
    "time reference --time-limit 0": "error: a time limit of 0.0 s: give seconds, more than 0",
    "time reference --time-limit nan": "error: a time limit of nan s: give seconds, more than 0",
    "time reference --rounds 0": "error: --rounds: must be at least 1 (found '0'); see `attncheck time --help`",
    "time reference --rounds 3 --in-process": "error: --rounds 3 in one process: a round is a process; leave out --in-process or --rounds",
    "fuzz reference --check timing": "error: check 'timing' does not run on drawn cases; give one of numerics, lse, cache_write, containment, features, determinism, invariance, builder, cudagraph, refusals",
    "fuzz reference --budget five": "error: --budget 'five': give a time, such as 90s, 5m or 1h",
    "fuzz reference torch_sdpa": "error: fuzz examines one backend, and 2 are given; name one as in `attncheck run`",
    "mutants nowhere-*": "error: no mutant matches 'nowhere-*'; the names are in backends/mutants/*.yaml",
    "mutants --kind weather": "error: no mutant is of kind 'weather'; known are accident, ...",
    "mutants sinks-ignored --shard 2/2": "error: no mutant is left; give fewer filters, or fewer parts",
    "mutants --suite nowhere": "error: unknown suite 'nowhere' (known: ...)",
    "mutants --from nowhere.jsonl": "error: nowhere.jsonl: cannot be read: No such file or directory",
    "shrink": "error: results: holds no run yet; `attncheck run` without --output writes one",
    "report": "error: results: holds no run yet; `attncheck run` without --output writes one",
    "report a.jsonl --format pdf": "error: --format: 'pdf' is not one of 'terminal', 'markdown', 'html', 'junit', 'sarif', 'github', 'pytest-benchmark', 'json', 'csv', 'audit', 'audit-json', 'expect', 'statement', 'badge'; see `attncheck report --help`",
    "report nowhere.jsonl --output out": "error: nowhere.jsonl: cannot be read: No such file or directory",
    "compare": "error: missing argument 'BASE'; see `attncheck compare --help`",
    "compare last": "error: results: holds no run yet; `attncheck run` without --output writes one",
    "list cases --case nothing": "error: no case of smoke matches 'nothing'; `attncheck list cases --suite smoke` shows the ids",
    "show no-such-case": "error: no case of the built-in suites matches 'no-such-case'; for a case file, give --suite FILE",
    "site": "error: there is no run file; give RUN or --runs DIR",
    "site --runs none": "error: --runs none is not a folder; name a folder, or give run files as arguments",
    "weigh": "error: no such command 'weigh'; see `attncheck --help`",
    "test ./mine.py": "error: no such command 'test'; use `attncheck run`; see `attncheck --help`",
    "version": "error: no such command 'version'; use `attncheck --version`; see `attncheck --help`",
    "run reference:*": "error: backend 'reference:*': 'reference' is no family of backends; write vllm:*",
    "record --output gone/a.yaml -- true": "error: --output gone/a.yaml: no such folder",
    "record --output small.yaml -- true": "error: --output small.yaml: there already; move it away, or name another file",
    "record --every 0 -- true": "error: recording: every is 0; give a whole number above 0",
    "record -- no-such-command": "error: no-such-command: cannot be run: No such file or directory",
    "new backend class": "error: a backend cannot be called 'class': it is a word of Python's",
    "new backend none": "error: a backend cannot be called 'none': it is a word of Python's",
    "new backend 9a": f"error: a backend cannot be called '9a': {NO_MODULE}",
    "new backend kernels/fast": f"error: a backend cannot be called 'kernels/fast': {NO_MODULE}",
    "new backend ''": f"error: a backend cannot be called '': {NO_MODULE}",
    "new backend torch_sdpa": "error: a backend cannot be called 'torch_sdpa': that is a registered backend; taken are ...",
    "new backend json": "error: a backend cannot be called 'json': json.py would hide an installed module of that name",
    "new backend step --kind classes": "error: a backend cannot be called 'step': its class would be called Step, as another name in the file",
    "new": "Usage: attncheck new [OPTIONS] COMMAND [ARGS]...",
}
"""Commands in the folder of :mod:`conftest`, with their message. A run is of small.yaml, unless it names a suite."""

LONG = {
    "./\udcff.py": "error: './\\udcff.py' is not UTF-8, or not in the locale's encoding; give another name",
    f"reference --output {'o' * 300} --in-process": f"error: '{'o' * 76}...: this name is too long for the file system",
    f"--suite {','.join(['nothing.yaml'] * 30)}": "error: nothing.yaml: there is no such file; built-in suites: ...",
    " ".join(f"./backend_{number}.py" for number in range(257)): (
        "error: 257 backends: a run has at most 256; split them into several runs"
    ),
}
"""Words of runs that are no text, or longer than the system or a run file permits."""


@pytest.mark.parametrize(
    ("command", "message"), [*REFUSED.items(), *((f"run {words}", message) for words, message in LONG.items())]
)
def test_a_refused_command_is_exit_code_2_with_one_line_that_helps(typed, plain, folder, monkeypatch, command, message):
    shutil.copy(folder / "small.yaml", folder / "again.yaml")
    (folder / "broken.py").write_text("import nothing_of_that_name\n")
    (folder / "notes.jsonl").write_text("notes of mine")
    (folder / "bad.yaml").write_text("suite: bad\ncases:\n  - id: a\n    bach: q1\n")
    monkeypatch.setattr(ForkServer, "begin", lambda _: None)
    before = files(folder)
    is_run = command.startswith(("run", "time")) and "--suite" not in command
    done = typed(command, *(["--suite", "small.yaml"] if is_run else []))
    assert done.code == 2
    line = plain(" ".join(done.err.splitlines()[0].split()))
    assert line == message or (message.endswith(", ...") and line.startswith(message.removesuffix("...")))
    assert files(folder) == before


def files(folder):
    """The contents of all files but those of Python's and attncheck's caches."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not {"__pycache__", "cache"} & {*path.parts})
    return {path: path.read_bytes() for path in paths}


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
