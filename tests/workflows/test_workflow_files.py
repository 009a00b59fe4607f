"""The workflows in .github/ are right as they are written: their shell, their commands, what they may do and where."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer.main
import yaml
from packaging.requirements import Requirement

from attncheck.backends.registry import BUILTIN
from attncheck.harness.cli.app import app
from attncheck.harness.run.selection import select_cases

ROOT = Path(__file__).resolve().parent.parent.parent
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("attncheck-*")}
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
CPU, GPU = FILES = "attncheck-cpu.yml", "attncheck-gpu.yml"
OF_GITHUB = {"GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT", "GITHUB_REPOSITORY", "GITHUB_ENV", "HOME"}
SHELL = {"[", "ls", "true", "continue", "echo", "tee", "for", "do", "done", "if", "then", "else", "fi"}
BEGINNINGS = {"pip install ", "gh api", "gh run download", "sudo --non-interactive nvidia-smi"}


def read(text):
    """A workflow; YAML 1.1, which PyYAML reads, takes its key `on` for a truth value."""
    found = yaml.safe_load(text)
    return {**found, "on": found[True]}


def problems(text):
    """What is wrong with the steps of a workflow."""
    workflow = read(text)
    for job in workflow["jobs"].values():
        ids = {step["id"] for step in job["steps"] if "id" in step}
        yield from (f"no step {name}" for name in re.findall(r"steps\.(\w+)\.", str(job)) if name not in ids)
        for step in (step for step in job["steps"] if step.get("uses") == "./"):
            yield from _wrong_inputs(step["with"])
        for step in (step for step in job["steps"] if "run" in step):
            env = {**workflow["env"], **job.get("env", {}), **step.get("env", {})}
            yield from _problems_of(step["run"], env)


def _wrong_inputs(given):
    yield from (f"the action has no input {name}" for name in given.keys() - ACTION["inputs"].keys())
    required = {name for name, each in ACTION["inputs"].items() if each.get("required")}
    yield from (f"the action lacks its input {name}" for name in required - given.keys())
    yield from wrong_in(["attncheck", "run", *shlex.split(given.get("run", ""))])


def _problems_of(script, env):
    done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True, check=False)
    yield from done.stderr.splitlines()
    if "${{" in script:
        yield "what an expression comes to would be code: hand it over in `env`"
    known = {*env, *OF_GITHUB, *re.findall(r"\b(\w+)=", script), *re.findall(r"\bfor (\w+) in", script)}
    yield from (f"${name} is not set" for name in re.findall(r"\$(\w+)", script) if name not in known)
    for command in commands(script):
        words = shlex.split(re.sub(r'"?\$([A-Z_]+)"?', lambda name: env.get(name[1], name[0]), command))
        if words[0] == "attncheck":
            yield from wrong_in(words)
        elif words[0] not in SHELL and not any(command.startswith(each) for each in BEGINNINGS):
            yield f"unknown command: {command}"


def commands(script):
    """The simple commands of a script, without assignments; in the words of the command line, not of Python."""
    script = script.replace('"$PYTHON" -m ', "").replace("2> /dev/null", "")
    nested = re.findall(r"\$\((.*?)\)", script)
    flat = re.sub(r"\$\(.*?\)", "FILE", script)
    for piece in itertools.chain(nested, re.split(r"\n|;|&&|\|\|?", flat)):
        command = re.sub(r"(\s|^)#.*", "", re.sub(r"^\s*((do|then|else) |\w+=\S+)*", "", piece)).strip()
        if command:
            yield command


def wrong_in(words):
    """Errors of attncheck's command line in a command, before it is run."""
    known = typer.main.get_command(app).commands
    if words[1] not in known:
        return [f"attncheck has no command {words[1]}"]
    try:
        known[words[1]].make_context(words[1], words[2:])
    except Exception as error:  # noqa: BLE001 (click's, of which some typers bring a copy under another name)
        return [str(error)]
    return []


@pytest.mark.parametrize("file", FILES)
def test_every_step_is_right_as_it_is_written(file):
    workflow = read(TEXTS[file])
    if any("run" in step for job in workflow["jobs"].values() for step in job["steps"]):
        assert workflow["defaults"] == {"run": {"shell": "bash"}}
    assert list(problems(TEXTS[file])) == []
    comments = "\n".join(line for line in TEXTS[file].splitlines() if "#" in line)
    assert [name for name in re.findall(r"\bvars\.(\w+)", TEXTS[file]) if name not in comments] == []


def test_a_slip_in_a_step_is_found():
    for file, right, wrong in (
        (CPU, "flex_attention --suite smoke", "flex_attention --suit smoke"),
        (CPU, "          minutes:", "          minute:"),
        (CPU, "          run:", "          runs:"),
        (GPU, "-m attncheck run $EXAMINE", "-m attncheck rnu $EXAMINE"),
        (GPU, "steps.examine.", "steps.exam."),
        (GPU, "$TIME", "$TIMES"),
        (GPU, "          done", "          don"),
        (GPU, "gh run download", "gh download"),
    ):
        assert right in TEXTS[file]
        assert list(problems(TEXTS[file].replace(right, wrong, 1))) != []


def test_no_foreign_code_reaches_a_machine_of_ones_own_and_no_step_may_do_more_than_it_does():
    """Anyone who opens a pull request chooses what its workflow executes: that is for machines of GitHub's."""
    for text in (*TEXTS.values(), (ROOT / "action.yml").read_text(encoding="utf-8")):
        used = re.findall(r"^[^#\n]*\buses: (.*)$", text, re.MULTILINE)
        assert used
        # A tag can be moved to other code; a comment has the release for readers.
        pinned = re.compile(r"\./$|[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
        assert [each for each in used if not pinned.match(each)] == []
    for file in FILES:
        workflow = read(TEXTS[file])
        own = any("self-hosted" in job["runs-on"] for job in workflow["jobs"].values())
        assert own == (file == GPU)
        assert set(workflow["on"]) == {"push", "workflow_dispatch", *([] if own else ["pull_request"])}
        assert workflow["on"]["push"] == {"branches": ["main"]}
        assert workflow["permissions"] == {"contents": "read", **({"actions": "read"} if own else {})}
        assert not [job for job in workflow["jobs"].values() if "permissions" in job]


def test_no_two_jobs_share_a_gpu_every_job_ends_and_every_artifact_has_a_name_of_its_own():
    (job,) = read(TEXTS[GPU])["jobs"].values()
    assert job["concurrency"] == {"group": "attncheck-gpu-${{ matrix.gpu }}", "cancel-in-progress": False}
    assert "${{ matrix.gpu }}" in job["runs-on"]
    for each in (job, *read(TEXTS[CPU])["jobs"].values()):
        assert 0 < each["timeout-minutes"] <= 120
        names = [step["with"]["name"] for step in each["steps"] if "upload-artifact" in step.get("uses", "")]
        names += [step["with"]["artifact"] for step in each["steps"] if step.get("uses") == "./"]
        assert len(set(names)) == len(names) > 0
        assert each is not job or all("${{ matrix.gpu }}" in name for name in names)


def test_reports_are_made_before_the_limit_of_the_job_when_a_run_hangs():
    """A job that reaches its own limit is cancelled, and no further step runs."""
    for file in FILES:
        for job in read(TEXTS[file])["jobs"].values():
            runs = [step for step in job["steps"] if re.search("attncheck (run|time)", step.get("run", ""))]
            limits = [step["timeout-minutes"] for step in runs]
            limits += [step["with"]["minutes"] for step in job["steps"] if step.get("uses") == "./"]
            assert limits
            assert sum(limits) + 15 <= job["timeout-minutes"]
            ids = [step["id"] for step in runs]
            for step in job["steps"]:
                if step.get("name", "").startswith(("Report", "Keep the run files and")):
                    assert f"!cancelled() && steps.{ids[0]}.outcome != 'skipped'" in step["if"]


def examined(file, words):
    """The words after `attncheck run` of a workflow: in a variable, or in an input of the action."""
    workflow = read(TEXTS[file])
    if words in workflow["env"]:
        return workflow["env"][words].split()
    (given,) = (step["with"] for job in workflow["jobs"].values() for step in job["steps"] if "with" in step)
    return shlex.split(given[words])


@pytest.mark.parametrize(("file", "words"), [(CPU, "run"), (GPU, "EXAMINE"), (GPU, "TIME")])
def test_the_defaults_of_the_inputs_exist(file, words):
    name = "time" if words == "TIME" else "run"
    given = typer.main.get_command(app).commands[name].make_context(name, examined(file, words)).params
    assert set(given["backends"]) <= set(BUILTIN)
    assert select_cases(given["suites"], (), ("timing",) if words == "TIME" else (), ()).cases
    assert words != "TIME" or given["rounds"] >= 10


def test_what_is_installed_beside_a_torch_is_all_that_is_needed_but_torch_and_numpy():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (install,) = (step["run"] for step in read(TEXTS[GPU])["jobs"]["gpu"]["steps"] if "Install" in step.get("name", ""))
    own, others = install.strip().splitlines()
    assert own == '"$PYTHON" -m pip install --no-deps "$ATTNCHECK"'
    stated = [*project["dependencies"], *project["optional-dependencies"]["report"]]
    needed = {Requirement(each).name for each in stated}
    assert set(others.removeprefix('"$PYTHON" -m pip install ').split()) == needed - {"torch", "numpy"}


def artifact(run, created, *, branch="main", head=1, expired=False):
    origin = {"id": run, "head_branch": branch, "repository_id": 1, "head_repository_id": head}
    return {"expired": expired, "created_at": created, "workflow_run": origin}


@pytest.mark.skipif(shutil.which("jq") is None, reason="no jq, which reads as gh does")
def test_the_last_green_run_is_the_newest_of_the_default_branch_of_this_repository():
    (newest,) = (s["env"]["NEWEST"] for s in read(TEXTS[GPU])["jobs"]["gpu"]["steps"] if s.get("id") == "green")
    old, new = artifact(7, "2026-11-01T00:00:00Z"), artifact(8, "2026-11-03T00:00:00Z")
    others = [
        artifact(9, "2026-11-04T00:00:00Z", expired=True),
        artifact(10, "2026-11-05T00:00:00Z", branch="topic"),
        artifact(11, "2026-11-06T00:00:00Z", head=2),
    ]
    for found, wanted in ((others, ""), ([old, *others], "7"), ([old, new], "8"), ([new, old], "8")):
        listing, env = json.dumps({"artifacts": found}), {**os.environ, "BRANCH": "main"}
        done = subprocess.run(["jq", "-r", newest], input=listing, env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == wanted


def examined_by(script):
    """The arguments of each `attncheck run` of a script in .ci/."""
    return re.findall(r"^step scripts/demo (.*)$", (ROOT / ".ci" / script).read_text(encoding="utf-8"), re.MULTILINE)


def test_the_night_runs_what_ci_skips():
    skipped = [words.replace("--skip", "--check") for words in examined_by("run") if "--skip" in words]
    assert examined_by("nightly") == skipped != []
    for words in (*examined_by("run"), *skipped):
        assert wrong_in(["attncheck", "run", *shlex.split(words)]) == []
    (job,) = read(TEXTS["attncheck-nightly.yml"])["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/nightly"]
