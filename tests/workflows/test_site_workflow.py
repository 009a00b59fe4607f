"""The commands of attncheck-site.yml keep run files on a branch, and build the site from all of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/attncheck-site.yml").read_text(encoding="utf-8"))
KEPT = WORKFLOW["env"]["KEPT"]
STEPS = WORKFLOW["jobs"]["site"]["steps"]


def git(folder: Path, *words: str) -> str:
    config = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
    return subprocess.run(["git", *config, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def job(tmp_path):
    """``job("7")`` runs the commands after run 7 of the GPU workflow, in a new checkout, and returns that checkout."""
    git(tmp_path, "init", "--quiet", "--bare", "--initial-branch=main", "origin")
    git(tmp_path, "clone", "--quiet", "origin", "first")
    (tmp_path / "first/README").write_text("kernels")
    git(tmp_path / "first", "add", ".")
    git(tmp_path / "first", "commit", "--quiet", "--message", "First")
    git(tmp_path / "first", "push", "--quiet", "origin", "HEAD:main")
    for name in ("attncheck-h100", "attncheck-h100-green"):
        shutil.copytree(ROOT / "docs/evidence/cpu-2026-11-22", tmp_path / "artifacts" / name)
        (file,) = (tmp_path / "artifacts" / name).glob("*.jsonl.xz")
        subprocess.run(["xz", "--decompress", file], check=True)
    commands = {
        "python": f'exec "{sys.executable}" "$@"',
        "gh": f'[ "$1 $2" = "run download" ] && cp -r "{tmp_path}/artifacts" "${{@: -1}}"',
    }
    (tmp_path / "bin").mkdir()
    for name, command in commands.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{command}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    def run(number):
        checkout = tmp_path / f"job-{len(list(tmp_path.glob('job-*')))}"
        git(tmp_path, "clone", "--quiet", "origin", str(checkout))
        own = {"RUN": number, "GITHUB_REPOSITORY": "owner/name", "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        for step in STEPS:
            if "run" not in step or step.get("name", "").startswith("Install"):
                continue
            if step.get("if") == "${{ env.RUN != '' }}" and not number:
                continue
            assert "${{" not in step["run"], "an expression would be code; pass it in env"
            done = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                cwd=checkout,
                env={**os.environ, "KEPT": KEPT, **own},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, (step, done.stdout, done.stderr)
        return checkout

    return run


def test_runs_are_kept_once_and_the_site_has_all_of_them(job, tmp_path):
    job("7")
    checkout = job("8")
    names = "attncheck-h100/xformers-vllm-auto.jsonl.gz"
    assert git(tmp_path / "origin", "ls-tree", "-r", "--name-only", KEPT).split() == [f"7/{names}", f"8/{names}"]
    assert git(tmp_path / "origin", "ls-tree", "-r", "--name-only", "main").split() == ["README"]
    shown = (checkout / "site/runs.html").read_text(encoding="utf-8")
    assert all(f"{run}/{names}" in shown for run in ("7", "8"))
    # A job that runs again, or by hand, keeps nothing new.
    kept = git(tmp_path / "origin", "rev-parse", KEPT)
    job("7")
    assert (job("") / "site/index.html").is_file()
    assert git(tmp_path / "origin", "rev-parse", KEPT) == kept


def test_the_site_waits_for_the_gpu_workflow():
    gpu = yaml.safe_load((ROOT / ".github/workflows/attncheck-gpu.yml").read_text(encoding="utf-8"))
    trigger = WORKFLOW[True]["workflow_run"]  # YAML 1.1 reads the key `on` as true
    assert trigger["workflows"] == [gpu["name"]]
    assert trigger["branches"] == gpu[True]["push"]["branches"]
    (name,) = (
        step["with"]["name"]
        for step in gpu["jobs"]["gpu"]["steps"]
        if step.get("name") == "Keep the run files as the last green ones"
    )
    assert name.endswith("-green")
