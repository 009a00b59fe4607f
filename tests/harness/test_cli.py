"""The command line as a person uses it: exit codes, what is printed where, what the run file holds."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from attncheck.errors import SelectionError
from attncheck.harness import cli
from attncheck.harness.commands import schema
from attncheck.harness.selection import select_cases
from attncheck.reports.store import read_run

SUITE = """\
suite: small
description: two small questions
defaults:
  layer: {num_heads: 4, num_kv_heads: 2, head_size: 32, dtype: float32}
cases:
  - {id: decode, batch: q1s20_q1s7}
  - {id: prefill, batch: q17, checks: [numerics]}
"""
WRONG = """\
from attncheck.backends.reference_backend import ReferenceBackend, ReferenceImpl

class Wrong(ReferenceBackend):
    class Impl(ReferenceImpl):
        def forward(self, *args, **kwargs):
            result = super().forward(*args, **kwargs)
            result.mul_(1.25)
            return result
    @classmethod
    def get_name(cls): return "WRONG"
    @classmethod
    def get_impl_cls(cls): return cls.Impl

class Raising(Wrong):
    class Impl(ReferenceImpl):
        def forward(self, *args, **kwargs):
            raise RuntimeError("no such kernel")

class Leaving(Wrong):
    class Impl(ReferenceImpl):
        def forward(self, *args, **kwargs):
            raise SystemExit(0)

class Nowhere(ReferenceBackend):
    @classmethod
    def unavailable_reasons(cls, device): return ["needs a moon"]

class Nothing(ReferenceBackend):
    @classmethod
    def unsupported_reasons(cls, layer, cache, batch): return ["cannot"]
"""

Attncheck = Callable[..., int]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.yaml").write_text(SUITE)
    (tmp_path / "wrong.py").write_text(WRONG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Attncheck:
    """``run("--backend", "reference")``: the exit code of that run of the small suite."""

    def run(*words: str) -> int:
        return cli.main(["run", "--suite", "small.yaml", "--device", "cpu", *words])

    return run


@pytest.fixture
def here(run: Attncheck) -> Attncheck:
    """The same without processes of the backends' own, where these are not what is tested: they cost seconds."""
    return lambda *words: run("--in-process", *words)


def the_run(folder: Path) -> Path:
    (path,) = (folder / "results").iterdir()
    return path


def test_a_right_backend_is_exit_code_0_with_a_table_and_a_run_file(
    run: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--backend", "reference") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("attncheck ")
    assert out[0].endswith("suite small: 2 cases, seed 0")
    header = next(line for line in out if line.startswith("backend"))
    row = next(line for line in out if line.startswith("reference "))
    assert header.split()[:7] == ["backend", "numerics", "lse", "cache_write", "containment", "cudagraph", "claims"]
    assert row.split()[:7] == ["reference", "2/2", *["1/1"] * 5]
    assert str(the_run(folder).relative_to(folder)) in out[-1]
    stored = read_run(the_run(folder))
    assert stored.complete
    assert len(stored.records) == 7
    assert stored.header.command[:4] == ("attncheck", "run", "--suite", "small.yaml")


def test_a_wrong_answer_is_exit_code_1_and_its_repro_line_works(
    run: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--backend", "./wrong.py:Wrong", "--seed", "5") == 1
    printed = capsys.readouterr().out
    line = next(line.strip() for line in printed.splitlines() if line.strip().startswith("repeat: "))
    words = line.removeprefix("repeat: ").split()
    assert words[:4] == ["attncheck", "run", "--backend", "./wrong.py:Wrong"]
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 1
    assert "failed  Wrong  small/decode  numerics" in done.stdout
    assert "seed 5" in done.stdout.splitlines()[0]


def test_an_exception_of_a_backend_is_a_record(
    here: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("--backend", "./wrong.py:Raising") == 1
    printed = capsys.readouterr()
    assert "RuntimeError in forward: no such kernel" in printed.out
    assert "Traceback" not in printed.err
    assert {record.outcome for record in read_run(the_run(folder)).records} == {"errored", "failed"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backend", "refrence"], "did you mean 'reference'?"),
        (["--backend", "./wrong.py"], "no class in it; ask for ./wrong.py:Wrong"),
        (["--backend", "./broken.py:B"], "importing it raised"),
        (["--backend", "./nothing.py:B"], "cannot read nothing.py"),
        (["--backend", "./wrong.py:Nowhere"], "backend 'Nowhere' is unavailable here: needs a moon"),
        (["--suite", "smoky"], "did you mean 'smoke'?"),
        (["--suite", "nothing.yaml"], "nothing.yaml: there is no such file"),
        (["--suite", "bad.yaml"], "bad.yaml:4:5"),
        (["--case", "decod"], "did you mean 'decode'?"),
        (["--case", "zz*"], "matches 'zz*'; `attncheck list cases --suite small.yaml` shows the ids"),
        (["--case", "prefill", "--check", "lse"], "no case of small.yaml asks for lse"),
        (["--check", "numeric"], "did you mean 'numerics'?"),
        (["--device", "tpu"], "give cpu, cuda or cuda:N"),
        (["--device", "meta"], "attncheck examines on cpu, cuda or cuda:N"),
        (["--backend", "reference", "--expect", "nothing.yaml"], "cannot be read"),
        (["--backend", "reference", "--output", "wrong.py"], "wrong.py: exists already"),
    ],
)
def test_a_wrong_question_is_exit_code_2_with_one_line_that_helps(
    run: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    (folder / "broken.py").write_text("import nothing_of_that_name\n")
    (folder / "bad.yaml").write_text("suite: bad\ncases:\n  - id: a\n    bach: q1\n")
    assert run(*words) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert not (folder / "results").exists()


def test_two_files_of_one_suite_name_are_a_wrong_question(
    here: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "again.yaml").write_text(SUITE)
    assert here("--suite", "again.yaml") == 2
    assert "again.yaml are both called 'small'; give them two names" in capsys.readouterr().err
    varied = "small.yaml{cache.block_size: 32}"
    assert here("--suite", varied) == 2
    assert f"small.yaml and {varied} are both called 'small'; ask them in two runs" in capsys.readouterr().err


def test_two_backends_of_one_name_are_a_wrong_question(
    run: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "other.py").write_text(WRONG)
    assert run("--backend", "./wrong.py:Wrong", "--backend", "./other.py:Wrong") == 2
    assert "two of the backends are called 'Wrong'" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["fuzz"], ["new"], ["compare"], ["run", "--seed", "x"], ["run", "--frobnicate"]])
def test_what_there_is_not_is_a_usage_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert "Usage: attncheck" in capsys.readouterr().err


def test_a_backend_asked_for_by_name_must_have_been_examined(
    here: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("--backend", "./wrong.py:Nothing") == 2
    printed = capsys.readouterr()
    assert "not one case of backend 'Nothing' was examined: cannot" in printed.err
    assert "unsupported" in printed.out
    assert read_run(the_run(folder)).complete


def test_exitfirst_stops_at_the_first_that_falls_short(here: Attncheck, folder: Path) -> None:
    assert here("--backend", "./wrong.py:Wrong", "--exitfirst") == 1
    records = read_run(the_run(folder)).records
    assert [record.outcome for record in records] == ["failed"]


def test_filters_reach_the_run(here: Attncheck, folder: Path) -> None:
    assert here("--backend", "reference", "--case", "small/dec*", "--check", "lse", "--check", "numerics") == 0
    records = read_run(the_run(folder)).records
    assert [(record.case_id, record.check) for record in records] == [("decode", "numerics"), ("decode", "lse")]


def test_defaults_of_the_suites_can_be_set(here: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--backend", "reference", "--suite", "small.yaml", "--set", "layer.head_size=64", "--set"]
    assert here(*words, "cache.block_size=8", "--output", "set.jsonl") == 0
    run = read_run(folder / "set.jsonl")
    needs = {need for record in run.records for need in record.needs}
    assert {"head_size=64", "block_size=8"} <= needs
    assert "head_size=32" not in needs
    (suite,) = run.header.suites
    assert suite.ref == "small.yaml{layer.head_size: 64, cache.block_size: 8}"
    assert here(*words, "cache.block_size") == 2
    assert "KEY=VALUE" in capsys.readouterr().err


def test_without_a_backend_all_built_in_ones_run(here: Attncheck, folder: Path) -> None:
    assert here("--check", "numerics") == 0
    names = {record.backend for record in read_run(the_run(folder)).records}
    assert {"reference", "torch_sdpa", "flex_attention"} <= names


def test_a_second_run_gets_a_file_of_its_own(here: Attncheck, folder: Path) -> None:
    for _ in range(3):
        assert here("--backend", "reference", "--case", "prefill") == 0
    assert len(list((folder / "results").iterdir())) == 3


def test_expected_failures(here: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = {"backend": "Wrong", "case": "small/*", "check": "numerics", "outcome": "failed", "reason": "issue 17"}
    (folder / "expect.yaml").write_text(json.dumps([entry]))
    assert here("--backend", "./wrong.py:Wrong", "--check", "numerics", "--expect", "expect.yaml") == 0
    assert "2 xfailed" in capsys.readouterr().out
    stale = entry | {"case": "small/dekode"}
    (folder / "expect.yaml").write_text(json.dumps([entry, stale]))
    assert here("--backend", "./wrong.py:Wrong", "--check", "numerics", "--expect", "expect.yaml") == 1
    assert "error: expect.yaml:1: Wrong, small/dekode, numerics: failed expected, but it" in capsys.readouterr().out
    (folder / "expect.yaml").write_text(json.dumps([entry | {"backend": "reference"}]))
    assert here("--backend", "reference", "--check", "numerics", "--expect", "expect.yaml") == 1
    assert "2 xpassed" in capsys.readouterr().out


def test_a_dump_that_is_a_file_is_refused_before_the_run(
    here: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here("--backend", "reference", "--dump", "wrong.py") == 2
    assert "--dump wrong.py cannot be a folder: File exists" in capsys.readouterr().err
    assert not (folder / "results").exists()


def test_dump_writes_tensors_that_load_as_data(run: Attncheck, folder: Path) -> None:
    import torch

    assert run("--backend", "./wrong.py:Wrong", "--case", "decode", "--dump", "dumps") == 1
    (path,) = (folder / "dumps").iterdir()
    content = torch.load(path, weights_only=True)
    # A quarter more than the truth was put out, up to float32's rounding.
    assert torch.allclose(content["output"].double(), 1.25 * content["truth"], rtol=1e-4)


def test_lines_for_ci_go_to_stderr(run: Attncheck, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--backend", "./wrong.py:Wrong", "--check", "numerics") == 1
    printed = capsys.readouterr()
    assert printed.err.splitlines()[0].startswith("failed  Wrong  small/decode  numerics: ")
    assert "\033" not in printed.out + printed.err


def test_what_is_printed_fits_100_columns(here: Attncheck, capsys: pytest.CaptureFixture[str]) -> None:
    here("--backend", "./wrong.py:Wrong", "--backend", "torch_sdpa", "--backend", "reference")
    for line in capsys.readouterr().out.splitlines():
        assert len(line) <= 100 or line.strip().startswith("repeat: ")


def test_our_own_fault_is_exit_code_3_and_says_how_to_see_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fall() -> int:
        raise ZeroDivisionError("of ours")

    assert cli.exit_code(fall) == 3
    err = capsys.readouterr().err
    assert "attncheck itself failed: ZeroDivisionError: of ours" in err
    assert "ATTNCHECK_TRACEBACK=1" in err
    assert "Traceback" not in err
    monkeypatch.setenv("ATTNCHECK_TRACEBACK", "1")
    assert cli.exit_code(fall) == 3
    assert "in fall" in capsys.readouterr().err


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
    assert done.stderr.startswith("attncheck itself failed: ModuleNotFoundError: import of typer halted")


def test_ctrl_c_is_130_and_leaves_a_run_that_can_be_read(folder: Path) -> None:
    (folder / "slow.py").write_text(
        WRONG.replace("result.mul_(1.25)", "import time, pathlib; pathlib.Path('began').touch(); time.sleep(60)")
    )
    command = [sys.executable, "-m", "attncheck", "run", "--suite", "small.yaml", "--output", "cut.jsonl"]
    process = subprocess.Popen(
        [*command, "--backend", "reference", "--backend", "./slow.py:Wrong"], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not (folder / "began").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "what was found so far is in cut.jsonl" in err
    stored = read_run("cut.jsonl")
    assert not stored.complete
    assert {record.backend for record in stored.records} == {"reference"}


def test_a_reader_that_leaves_is_no_fault(folder: Path) -> None:
    code = "import os; r, w = os.pipe(); os.close(r); os.dup2(w, 1)\n"
    code += "import sys; from attncheck.__main__ import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "list", "cases"], capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_schema_is_the_schema_of_case_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert schema.schema() == 0
    assert "cases" in json.loads(capsys.readouterr().out)["properties"]


def test_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    printed = capsys.readouterr().out
    for word in ("backends", "torch_sdpa", "suites", "smoke", "checks", "numerics", "cannot see"):
        assert word in printed
    assert max(map(len, printed.splitlines())) <= 100
    assert cli.main(["list", "cases", "--suite", "small.yaml", "--case", "pre*"]) == 0
    assert capsys.readouterr().out == "small/prefill  q17\n"
    assert cli.main(["list", "cases", "--case", "nothing"]) == 2


def test_doctor_says_what_can_run_and_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed
    assert "on cpu: can run" in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_report_reads_runs(here: Attncheck, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("--backend", "./wrong.py:Wrong", "--output", "a.jsonl") == 1
    told = capsys.readouterr().out
    assert cli.main(["report", "a.jsonl"]) == 0
    assert set(told.splitlines()[1:-1]) <= set(capsys.readouterr().out.splitlines())
    assert cli.main(["report", "a.jsonl", "--format", "markdown", "--output", "a.md"]) == 0
    assert (folder / "a.md").read_text().startswith("# attncheck report")
    assert cli.main(["report", "a.jsonl", "--output", "a.jsonl"]) == 2
    assert cli.main(["report", "a.md"]) == 2
    assert cli.main(["report", "b.jsonl"]) == 2
    assert read_run("a.jsonl").complete


@pytest.mark.parametrize(
    "words", [["--help"], ["run", "--help"], ["list"], ["list", "cases"], ["schema"], ["report", "a.jsonl"]]
)
def test_light_commands_load_no_torch(here: Attncheck, folder: Path, words: list[str]) -> None:
    if words[0] == "report":
        assert here("--backend", "reference", "--case", "prefill", "--output", "a.jsonl") == 0
    code = (
        "import sys\nfrom attncheck.__main__ import main\ncode = main()\n"
        "heavy = sorted({'torch', 'numpy'} & set(sys.modules))\n"
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_loads_no_pydantic_either() -> None:
    code = "import sys\nimport attncheck.harness.cli\nsys.exit(bool({'pydantic', 'yaml', 'rich'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_that_stopped_early_says_so(here: Attncheck, capsys: pytest.CaptureFixture[str]) -> None:
    assert here("--backend", "./wrong.py:Wrong", "--exitfirst") == 1
    assert "stopped at the first record that fell short (--exitfirst)" in capsys.readouterr().out


def test_a_case_without_its_axes_is_suggested_with_them() -> None:
    with pytest.raises(SelectionError, match=r"no case of smoke matches 'decode'; did you mean 'decode\.\*'\?"):
        select_cases(["smoke"], ["decode"])
