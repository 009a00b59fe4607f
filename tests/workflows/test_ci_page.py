"""docs/ci.md and docs/ci-gpus.md are true: the expected fault is one, and they name what action and workflows have."""

import re
import shlex
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import typer.main
import yaml

from attncheck.harness.cli.app import app

pytestmark = pytest.mark.xdist_group("ci-page")

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("ci.md", "ci-gpus.md"))
GPU = "attncheck-gpu.yml"
FILES = dict(re.findall(r"^```yaml\n# (\S+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
GITLAB = yaml.safe_load(FILES[".gitlab-ci.yml"])["attncheck"]
FAULT = "    if metadata.max_query_len > 128:\n        return\n"


def test_the_known_fault_is_expected_and_its_end_is_noticed(shell, tmp_path):
    (tmp_path / "known.yaml").write_text(FILES["known.yaml"], encoding="utf-8")
    (expect,) = re.findall(r"^\$ (attncheck run .*--expect .*)$", TEXT, re.MULTILINE)
    code, printed = shell(f"attncheck new backend my_backend && {expect} --case 'long-chunk*'", tmp_path)
    assert code == 1, printed
    assert "xpassed" in printed
    path = tmp_path / "my_backend.py"
    right = path.read_text(encoding="utf-8")
    first = re.search(r"^def attend\([^)]*\) -> None:\n(    \"\"\".*\n)?", right, re.MULTILINE)[0]
    path.write_text(right.replace(first, first + FAULT), encoding="utf-8")
    code, printed = shell(f"{expect} --case 'long-chunk*'", tmp_path)
    assert code == 0, printed
    assert "failed as expected" in printed


def test_what_is_named_of_the_workflows_is_there():
    texts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").iterdir()}
    read = yaml.safe_load(texts[GPU])
    for file, given in re.findall(r"^gh workflow run (\S+)(.*)$", TEXT, re.MULTILINE):
        assert file == GPU
        for name in re.findall(r"-f (\w+)=true", given):
            assert read[True]["workflow_dispatch"]["inputs"][name]["type"] == "boolean"  # PyYAML reads `on` as true
    named = [texts[file] for file in re.findall(r"(attncheck-\w+\.yml)`", TEXT)]
    for name in re.findall(r"`((?:ATTNCHECK|TORCH|PIP)_?[A-Z_]*|EXAMINE|TIME|COMPARE)`", TEXT):
        assert any(name in text for text in named), name
    assert re.search(r"from (\d+) % on it fails the job, of `build` from (\d+) %", TEXT).groups() == tuple(
        re.findall(r"(\d+)%", read["env"]["COMPARE"])
    )
    (rounds,) = re.findall(r"--rounds \d+", read["env"]["TIME"])
    assert f"`{rounds}`" in TEXT
    limits = re.findall(r"in (\d+) minutes at most", TEXT)
    (steps,) = (job["steps"] for job in read["jobs"].values())
    assert [int(limit) for limit in limits] == [step["timeout-minutes"] for step in steps if "timeout-minutes" in step]


def test_the_inputs_of_the_action_are_all_described():
    table = dict(re.findall(r"^\| `([\w-]+)` \| .* \| (.*?) \|$", TEXT, re.MULTILINE))
    assert list(table) == list(ACTION["inputs"])
    assert {name for name, default in table.items() if default == "required"} == {"run"}
    for name in ("minutes", "artifact"):
        assert table[name].strip("`") == ACTION["inputs"][name]["default"]
    outputs = re.search(r"^The outputs are .*$", TEXT, re.MULTILINE)[0]
    assert set(re.findall(r"`([\w-]+)`", outputs)) == set(ACTION["outputs"])


def test_the_workflow_with_the_action_gives_it_what_it_takes_and_time_to_report():
    (job,) = yaml.safe_load(FILES[".github/workflows/attncheck.yml"])["jobs"].values()
    (given,) = (step["with"] for step in job["steps"] if step["uses"] == "OWNER/attncheck@REF")
    assert given.keys() <= ACTION["inputs"].keys()
    assert given["minutes"] + 10 <= job["timeout-minutes"]
    command = typer.main.get_command(app).commands["run"]
    command.make_context("run", [*shlex.split(given["run"]), "--device", given["device"]])


def test_the_gitlab_job_leaves_the_reports_that_it_names(tmp_path, shell):
    """Its commands, on one case, with a backend of one's own; pip does nothing."""
    few = ("--device cpu", "--device cpu --case decode.float32 --check numerics")
    assert "attncheck run" in GITLAB["script"][-1]
    assert few[0] in GITLAB["script"][-1]
    script = "\n".join(["set -e", "pip() { :; }", *GITLAB["script"][:-1], GITLAB["script"][-1].replace(*few)])
    code, printed = shell(f"attncheck new backend my_backend\n{script}", tmp_path)
    assert code == 0, printed
    cases = ET.parse(tmp_path / GITLAB["artifacts"]["reports"]["junit"]).findall("testsuite/testcase")
    assert [(case.get("name"), case.get("file")) for case in cases] == [("numerics", "my_backend.py")]
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"run.jsonl", "junit.xml", "report.html"}
    assert GITLAB["artifacts"]["paths"] == ["results/"]
    # After a failure as well, and before its limit.
    assert GITLAB["artifacts"]["when"] == "always"
    (limit,) = re.findall(r"^timeout --signal=TERM --kill-after=60 (\d+)m", GITLAB["script"][-1])
    assert int(limit) + 10 <= int(GITLAB["timeout"].removesuffix("m"))


def test_code_scanning_gets_whole_runs_only_and_what_the_action_leaves():
    """The steps are right as they are written, and their condition lets no other exit code pass."""
    write, upload = yaml.safe_load(FILES["code-scanning.yml"])
    condition = write["if"]
    assert "github.event_name != 'pull_request'" in condition
    (codes,) = re.findall(r"fromJSON\('(.*?)'\)", condition)
    assert yaml.safe_load(codes) == ["0", "1"]
    outputs = re.findall(r"steps\.attncheck\.outputs\.([\w-]+)", f"{condition} {write['env']}")
    assert set(outputs) <= set(ACTION["outputs"])
    words = shlex.split(write["run"])
    context = typer.main.get_command(app).commands["report"].make_context("report", words[2:])
    assert context.params["form"] == "sarif"
    assert upload["with"]["sarif_file"] == str(context.params["output"])
    assert f"hashFiles('{upload['with']['sarif_file']}')" in upload["if"]
