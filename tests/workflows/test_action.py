"""The action: its steps call its scripts with what these read, and the scripts pass on exit codes and arguments.

The scripts run with a stand-in for `attncheck` on PATH, which notes its arguments and ends as ``$END`` states.
"""

import lzma
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main
import yaml

from attncheck.harness.cli.app import app

ROOT = Path(__file__).resolve().parent.parent.parent
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
SCRIPTS = {name: step for name, step in STEPS.items() if "run" in step}
EVIDENCE = ROOT / "docs" / "evidence" / "cpu-2026-11-26" / "xformers-vllm.jsonl.xz"
OF_GITHUB = {"GITHUB_OUTPUT", "GITHUB_PATH", "GITHUB_STEP_SUMMARY", "RUNNER_TEMP"}
OF_BASH = {"BASH_REMATCH", "BASH_SOURCE", "PWD"}

STAND_IN = """#!/usr/bin/env bash
(IFS=$'\\x1f'; printf '%s\\x1e' "$*") >>"$CALLS"
if [ "$1" = -c ]; then echo /the/scripts; fi
if [ "$1" = run ] && [ "$END" != 2 ]; then touch "${@: -1}"; fi
case $END in
    hang) exec sleep 60 ;;
    crash) kill -SEGV $$ ;;
    *" fails") if [[ " $* " == *" ${END% fails} "* ]]; then exit 3; fi ;;
    *) exit "$END" ;;
esac
"""
HOSTILE = (
    "$(touch ran)",
    "`touch ran`",
    "a; touch ran",
    "a && touch ran",
    "a\ntouch ran",
    "${IFS}>ran",
    "x[$(touch ran)]",
)


@dataclass(frozen=True)
class Runner:
    """A folder in which a script of the action runs as a step of a job."""

    folder: Path

    def step(self, script: str, end: str = "0", **env: str) -> tuple[int, str]:
        """Run a script, with ``end`` for the stand-in; its exit code and what it printed."""
        own = {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "CALLS": str(self.folder / "calls"),
            "END": end,
            "RUNNER_TEMP": str(self.folder),
            **{name: str(self.folder / name) for name in ("GITHUB_OUTPUT", "GITHUB_PATH", "GITHUB_STEP_SUMMARY")},
        }
        done = subprocess.run(
            [ROOT / "scripts" / "action" / script],
            cwd=self.folder,
            env={**os.environ, **own, **env},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def examine(self, run: str = "--backend a", end: str = "0", **env: str) -> tuple[int, str]:
        return self.step("examine", end, **{"RUN": run, "DEVICE": "", "EXPECT": "", "MINUTES": "1"} | env)

    @property
    def calls(self) -> list[list[str]]:
        """The arguments of each call of a stand-in."""
        path = self.folder / "calls"
        return [call.split("\x1f") for call in path.read_text().split("\x1e")[:-1]] if path.exists() else []

    @property
    def outputs(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in (self.folder / "GITHUB_OUTPUT").read_text().splitlines())


@pytest.fixture
def runner(tmp_path):
    (tmp_path / "bin").mkdir()
    for name in ("attncheck", "a-python"):
        path = tmp_path / "bin" / name
        path.write_text(STAND_IN, encoding="utf-8")
        path.chmod(0o755)
    return Runner(tmp_path)


def test_the_exit_code_of_the_run_is_that_of_the_step_and_an_output(runner):
    for code in (0, 1, 2, 3, 130, 143):
        (runner.folder / "GITHUB_OUTPUT").unlink(missing_ok=True)
        assert runner.examine(end=str(code))[0] == code
        assert runner.outputs["exit-code"] == str(code)
        assert Path(runner.outputs["run-file"]).parent == Path(runner.outputs["folder"])
        assert Path(runner.outputs["run-file"]).exists() == (code != 2)


@pytest.mark.parametrize(
    ("end", "minutes", "code", "message"), [("hang", "0.03", 124, "after 0.03 minutes"), ("crash", "1", 139, "")]
)
def test_a_run_that_hangs_or_dies_ends_the_step_and_leaves_its_file(runner, end, minutes, code, message):
    found, printed = runner.examine(end=end, MINUTES=minutes)
    assert found == code
    assert message in printed
    assert runner.outputs["exit-code"] == str(code)
    assert runner.step("report", RUN_FILE=runner.outputs["run-file"])[0] == 0
    assert [call[0] for call in runner.calls] == ["run", "report", "report", "report"]


def test_a_time_out_before_the_first_record_is_reported(runner):
    (runner.folder / "bin" / "attncheck").write_text("#!/usr/bin/env bash\nexec sleep 60\n", encoding="utf-8")
    assert runner.examine(MINUTES="0.005")[0] == 124
    _, printed = runner.step("report", RUN_FILE=runner.outputs["run-file"])
    assert "stopped after 0.005 minutes (input minutes); nothing was examined by then" in printed


def test_quotes_group_words_and_patterns_are_not_expanded(runner):
    (runner.folder / "ragged-file").touch()
    given = "--backend './my file.py:Mine'\n  --suite \"smoke{cache.block_size: 32}\" --case ragged* --case a\\ b"
    assert runner.examine(given, DEVICE="cpu", EXPECT="known faults.yaml", WITHIN="2 m")[0] == 0
    expected = ["run", "--within", "2 m", "--backend", "./my file.py:Mine", "--suite", "smoke{cache.block_size: 32}"]
    expected += ["--case", "ragged*", "--case", "a b", "--device", "cpu", "--expect", "known faults.yaml"]
    assert runner.calls == [[*expected, "--output", runner.outputs["run-file"]]]
    assert runner.examine("")[0] == 0
    assert runner.calls[1][:-1] == ["run", "--output"]
    code, printed = runner.examine("--case 'ragged")
    assert code == 2
    assert "input run: a quote has no partner: --case 'ragged" in printed
    assert len(runner.calls) == 2


def test_no_input_is_executed(runner):
    for hostile in HOSTILE:
        runner.examine(hostile, DEVICE=hostile, EXPECT=hostile, WITHIN=hostile)
        call = runner.calls[-1]
        words = ["--within", hostile, *hostile.split(), "--device", hostile, "--expect", hostile]
        assert call[1:] == [*words, "--output", call[-1]]
        runner.examine(MINUTES=hostile)
        runner.step("report", RUN_FILE=hostile)
        runner.step("compare", COMPARE_WITH=hostile, RUN_FILE=hostile)
        runner.step("install", INSTALL=hostile, PYTHON="a-python")
        runner.step("install", INSTALL="", PYTHON=hostile)
    assert not (runner.folder / "ran").exists()


@pytest.mark.parametrize("failing", ["github", "junit", "html"])
def test_every_report_is_tried_and_one_that_fails_fails_the_step(runner, failing):
    path = runner.folder / "the run.jsonl"
    path.touch()
    assert runner.step("report", f"{failing} fails", RUN_FILE=str(path))[0] == 3
    beside = [
        [form, "--output", str(runner.folder / file)]
        for form, file in (("junit", "junit.xml"), ("html", "report.html"))
    ]
    assert runner.calls == [["report", str(path), "--format", *words] for words in (["github"], *beside)]


def use_attncheck(runner: Runner) -> None:
    """Put attncheck itself on the PATH of the scripts, instead of the stand-in."""
    program = runner.folder / "bin" / "attncheck"
    program.write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" -m attncheck "$@"\n', encoding="utf-8")


def test_a_backend_that_cannot_be_imported_is_in_every_report(runner):
    use_attncheck(runner)
    (runner.folder / "broken.py").write_text("\nimport a_module\n", encoding="utf-8")
    code, printed = runner.examine("./broken.py:Mine")
    assert code == 2, printed
    code, printed = runner.step("report", RUN_FILE=runner.outputs["run-file"])
    assert code == 0
    why = "backend './broken.py:Mine': importing it raised ModuleNotFoundError: No module named 'a_module'"
    assert printed.startswith("::error file=broken.py,line=2,title=attncheck%3A nothing was examined::error: ")
    assert len(printed.splitlines()) == 1
    (error,) = ET.parse(Path(runner.outputs["folder"]) / "junit.xml").findall("testsuite/testcase/error")
    for text in (printed, (runner.folder / "GITHUB_STEP_SUMMARY").read_text(encoding="utf-8"), error.text):
        assert why in text
    # Its texts are escaped.
    (runner.folder / "stderr.txt").write_text("error: 100% <b> & ]]>\x1b[31m\nerror: two\n", encoding="utf-8")
    _, printed = runner.step("report", RUN_FILE=str(runner.folder / "none.jsonl"))
    assert printed == "::error title=attncheck%3A nothing was examined::error: 100%25 <b> & ]]>[31m%0Aerror: two\n"
    (error,) = ET.parse(runner.folder / "junit.xml").findall("testsuite/testcase/error")
    assert error.text == "error: 100% <b> & ]]>[31m\nerror: two"


def test_a_comparison_passes_its_options_and_its_exit_code_on(runner):
    code, _ = runner.step("compare", "1", COMPARE_WITH="base.jsonl --fail-on '@build: 20%'", RUN_FILE="new.jsonl")
    assert code == 1
    assert runner.calls == [["compare", "base.jsonl", "--fail-on", "@build: 20%", "new.jsonl", "--format", "github"]]
    runner.examine(DEVICE="cpu", EXPECT="known.yaml")
    runner.step("report", RUN_FILE=runner.outputs["run-file"])
    known = typer.main.get_command(app).commands
    for name, *arguments in runner.calls:
        known[name].make_context(name, arguments)  # raises where an option is not there


@pytest.mark.parametrize(
    ("given", "expected"), [("", [f"{ROOT}[report]"]), ("--no-deps 'attncheck>=0.1'", ["--no-deps", "attncheck>=0.1"])]
)
def test_this_checkout_is_installed_where_nothing_is_named(runner, given, expected):
    assert runner.step("install", INSTALL=given, PYTHON="a-python")[0] == 0
    assert runner.calls[0] == ["-m", "pip", "install", *expected]
    assert (runner.folder / "GITHUB_PATH").read_text() == "/the/scripts\n"
    assert runner.step("install", "1", INSTALL=given, PYTHON="a-python")[0] == 1


def test_an_unfinished_run_is_reported_as_one(runner):
    """By attncheck itself, of the first records of a kept run."""
    path = runner.folder / "run.jsonl"
    with lzma.open(EVIDENCE, "rt", encoding="utf-8") as file:
        path.write_text("".join(line for _, line in zip(range(20), file, strict=False)), encoding="utf-8")
    use_attncheck(runner)
    code, printed = runner.step("report", RUN_FILE=str(path))
    assert code == 0, printed
    assert printed.startswith("::error ")
    assert (runner.folder / "GITHUB_STEP_SUMMARY").read_text(encoding="utf-8").startswith("## attncheck: ")
    faults = ET.parse(runner.folder / "junit.xml").findall("testsuite[@name='run']/testcase/error")
    assert len(faults) == 1
    assert (runner.folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_step_calls_a_script_with_all_that_it_reads_and_no_more(name):
    step = SCRIPTS[name]
    (script,) = re.fullmatch(r'"\$GITHUB_ACTION_PATH/(scripts/action/\w+)"', step["run"]).groups()
    assert step["shell"] == "bash"
    assert os.access(ROOT / script, os.X_OK)
    text = (ROOT / script).read_text(encoding="utf-8")
    assert subprocess.run(["bash", "-n", ROOT / script], check=False).returncode == 0
    assert set(re.findall(r"\$\{?([A-Z_]+)\b", text)) - OF_BASH - OF_GITHUB == set(step["env"])


def test_every_input_is_used_and_every_name_in_an_expression_is_there():
    text = str(ACTION["runs"]) + str(ACTION["outputs"])
    assert set(re.findall(r"\binputs\.([\w-]+)", text)) == set(ACTION["inputs"])
    assert all(("default" in given) != given.get("required", False) for given in ACTION["inputs"].values())
    written = set(re.findall(r"([\w-]+)=\$", (ROOT / "scripts" / "action" / "examine").read_text(encoding="utf-8")))
    read = re.findall(r"steps\.(\w+)\.outputs\.([\w-]+)", text)
    assert {step for step, _ in read} == {"examine"}
    assert {output for _, output in read} == written & {"folder", "run-file", "exit-code"}


def test_what_follows_the_examination_runs_after_a_failure_and_not_before_it():
    names = list(STEPS)
    after = names[names.index("Examine") + 1 :]
    assert after == ["Report", "Compare", "Keep the run file and the reports"]
    for name in after:
        assert STEPS[name]["if"].startswith("${{ !cancelled() && steps.examine.outputs.run-file != ''")
    assert all("timeout-minutes" not in step for step in STEPS.values())  # an action may not set it
