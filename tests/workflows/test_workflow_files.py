"""What the workflows in .github/ ask for: when, on which machines, of whom, with which rights, and by which words."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer.main
from packaging.requirements import Requirement

from attncheck.backends.registry import BUILTIN
from attncheck.harness.cli.app import app
from attncheck.harness.run.selection import select_cases

ROOT = Path(__file__).resolve().parent.parent.parent
CPU, GPU = FILES = "attncheck-cpu.yml", "attncheck-gpu.yml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("${{ vars.UNSET }}", ""),
        ("${{ vars.UNSET || 'python3' }}", "python3"),
        ("on ${{ matrix.gpu }}!", "on h100!"),
        ("${{ !cancelled() && matrix.gpu != 'a100' }}", True),
        ("${{ inputs.accept == true }}", False),
        ("${{ fromJSON('{\"h100\": 1410}')[matrix.gpu] }}", 1410),
        ("${{ fromJSON('{}')[matrix.gpu] }}", ""),
        ("${{ 'it''s && so' }}", "it's && so"),
    ],
)
def test_expressions_are_read_as_github_reads_them(expressions, lenient, expression, expected):
    names = {
        "vars": lenient(),
        "inputs": lenient(),
        "matrix": SimpleNamespace(gpu="h100"),
        "cancelled": lambda: False,
        "fromJSON": lambda text: json.loads(text, object_hook=lenient),
    }
    assert expressions(expression, names) == expected


def test_a_name_that_a_context_does_not_hold_is_a_mistake(job, tmp_path):
    made = job(GPU, "gpu", tmp_path, {"ref_name": "main"}, matrix={"gpu": "h100"})
    with pytest.raises(KeyError, match="event"):
        made.asks_for("Keep the run files as the last green ones")


def test_no_foreign_code_reaches_a_machine_of_ones_own(workflow):
    """Whoever opens a pull request chooses what its workflow executes: that is for machines of GitHub's."""
    for file in FILES:
        read = workflow(file)
        own = any("self-hosted" in job["runs-on"] for job in read["jobs"].values())
        assert own == (file == GPU)
        assert set(read["on"]) == {"push", "workflow_dispatch", *([] if own else ["pull_request"])}
        assert read["on"]["push"] == {"branches": ["main"]}


def test_a_workflow_may_do_no_more_than_it_does(workflow):
    assert workflow(CPU)["permissions"] == {"contents": "read"}
    assert workflow(GPU)["permissions"] == {"contents": "read", "actions": "read"}
    assert not [job for file in FILES for job in workflow(file)["jobs"].values() if "permissions" in job]


def test_no_two_jobs_share_a_gpu_and_none_is_broken_off(workflow):
    (job,) = workflow(GPU)["jobs"].values()
    assert job["concurrency"] == {"group": "attncheck-gpu-${{ matrix.gpu }}", "cancel-in-progress": False}
    assert "${{ matrix.gpu }}" in job["runs-on"]


@pytest.mark.parametrize("file", FILES)
def test_every_job_ends_and_every_artifact_has_a_name_of_its_own(workflow, file):
    for job in workflow(file)["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 120
        names = [step["with"]["name"] for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
        assert len(set(names)) == len(names) > 0
        if "strategy" in job:
            assert all("${{ matrix.gpu }}" in name for name in names)


@pytest.mark.parametrize(("file", "words"), [(CPU, "EXAMINE"), (GPU, "EXAMINE"), (GPU, "TIME")])
def test_what_is_asked_by_default_is_there(workflow, file, words):
    command = typer.main.get_command(app).commands["run"]
    given = command.make_context("run", workflow(file)["env"][words].split()).params
    assert set(given["backend"]) <= set(BUILTIN)
    assert select_cases(given["suite"], (), ("timing",) if words == "TIME" else (), ()).cases
    assert (given["rounds"] or 0) >= 10 if words == "TIME" else given["rounds"] is None


def test_what_is_installed_beside_a_torch_is_all_that_is_needed_but_torch_and_numpy(workflow):
    (install,) = (step["run"] for step in workflow(GPU)["jobs"]["gpu"]["steps"] if "Install" in step.get("name", ""))
    own, others = install.strip().splitlines()
    assert own == '"$PYTHON" -m pip install --no-deps "$ATTNCHECK"'
    needed = {
        Requirement(each).name for each in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["report"]]
    }
    assert set(others.removeprefix('"$PYTHON" -m pip install ').split()) == needed - {"torch", "numpy"}


def artifact(run, created, *, branch="main", head=1, expired=False):
    origin = {"id": run, "head_branch": branch, "repository_id": 1, "head_repository_id": head}
    return {"expired": expired, "created_at": created, "workflow_run": origin}


@pytest.mark.skipif(shutil.which("jq") is None, reason="no jq, which reads as gh does")
@pytest.mark.parametrize(
    ("artifacts", "expected"),
    [
        ([], ""),
        ([artifact(7, "2026-11-01T00:00:00Z")], "7"),
        ([artifact(7, "2026-11-01T00:00:00Z"), artifact(8, "2026-11-03T00:00:00Z")], "8"),
        ([artifact(8, "2026-11-03T00:00:00Z"), artifact(7, "2026-11-01T00:00:00Z")], "8"),
        ([artifact(7, "2026-11-01T00:00:00Z"), artifact(8, "2026-11-03T00:00:00Z", expired=True)], "7"),
        ([artifact(7, "2026-11-01T00:00:00Z"), artifact(8, "2026-11-03T00:00:00Z", branch="topic")], "7"),
        ([artifact(7, "2026-11-01T00:00:00Z"), artifact(8, "2026-11-03T00:00:00Z", head=2)], "7"),
        ([artifact(8, "2026-11-03T00:00:00Z", head=2)], ""),
    ],
)
def test_the_last_green_run_is_the_newest_of_the_default_branch_of_this_repository(workflow, artifacts, expected):
    (newest,) = (step["env"]["NEWEST"] for step in workflow(GPU)["jobs"]["gpu"]["steps"] if step.get("id") == "green")
    done = subprocess.run(
        ["jq", "-r", newest],
        input=json.dumps({"total_count": len(artifacts), "artifacts": artifacts}),
        env={**os.environ, "BRANCH": "main"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected


def test_the_variables_that_are_read_are_told(workflow):
    """A variable of the repository that is read stands in a comment, since nothing else tells of it."""
    for file in FILES:
        text = (ROOT / ".github" / "workflows" / file).read_text(encoding="utf-8")
        comments = "\n".join(line for line in text.splitlines() if "#" in line)
        read = set(re.findall(r"\bvars\.(\w+)", text))
        assert read
        assert [name for name in read if name not in comments] == []
