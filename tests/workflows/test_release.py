"""The release: what may publish, what is checked before, and the metadata that an index shows."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/attncheck-release.yml").read_text(encoding="utf-8"))
BUILD, PUBLISH = WORKFLOW["jobs"]["build"], WORKFLOW["jobs"]["publish"]
CHANGELOG = "# Changelog\n\n## 0.1.0 - 2026-12-01\n"


@pytest.fixture
def checkout(tmp_path):
    """The files that the script reads, with a date in the changelog."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/prepare_release.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG, encoding="utf-8")
    return tmp_path


def prepare(checkout, tag):
    """Run the step of the workflow, as a step of a job for this tag."""
    (script,) = (step["run"] for step in BUILD["steps"] if "prepare_release" in step.get("run", ""))
    env = {"GITHUB_REF_NAME": tag, "GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "owner/attncheck"}
    (checkout / "python").symlink_to(sys.executable)
    env["PATH"] = f"{checkout}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", script], cwd=checkout, env=os.environ | env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_only_the_job_that_publishes_what_was_built_and_checked_may_publish():
    assert WORKFLOW[True] == {"push": {"tags": ["v*"]}}  # PyYAML reads `on` as true
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert "permissions" not in BUILD
    assert PUBLISH["permissions"] == {"id-token": "write", "attestations": "write", "contents": "read"}
    assert (PUBLISH["needs"], PUBLISH["environment"]) == ("build", "pypi")
    assert not [step for step in PUBLISH["steps"] if "run" in step], "it runs no code of the checkout"
    assert "secrets." not in str(WORKFLOW)
    kept, fetched = BUILD["steps"][-1], PUBLISH["steps"][0]
    assert kept["with"]["name"] == fetched["with"]["name"]
    folder = fetched["with"]["path"]
    assert PUBLISH["steps"][1]["with"]["subject-path"] == f"{folder}/*"
    assert PUBLISH["steps"][2]["with"] == {"packages-dir": folder}


def test_the_commands_of_the_build_are_those_of_tox_and_their_scripts_exist():
    (script,) = (step["run"] for step in BUILD["steps"] if "-m build" in step.get("run", ""))
    wheel = (ROOT / "tox.ini").read_text(encoding="utf-8").partition("[testenv:wheel]")[2]
    for command in ("python -m build --outdir", "check-wheel-contents", "python scripts/check_wheel.py"):
        assert command in script
        assert command.replace("scripts/", "scripts{/}") in wheel
    for step in BUILD["steps"]:
        assert "${{" not in step.get("run", "")
        assert all((ROOT / name).is_file() for name in re.findall(r"scripts/\S+", step.get("run", "")))


def test_a_release_has_links_to_its_repository(checkout):
    code, printed = prepare(checkout, "v0.1.0")
    assert code == 0, printed
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["urls"]["Source"] == "https://example.org/owner/attncheck"
    assert project["scripts"]["attncheck"]
    text = (checkout / "README.md").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets
    for target in targets:
        path = re.fullmatch(r"https://example.org/owner/attncheck/(raw|blob)/v0\.1\.0/([^#]+)(#.*)?", target)
        assert path, target
        assert (ROOT / path[2]).exists()
        assert (path[1] == "raw") == path[2].endswith(".png")


@pytest.mark.parametrize(
    ("tag", "changelog", "message"),
    [
        ("v0.2.0", CHANGELOG, "the tag is v0.2.0, and pyproject.toml has version 0.1.0: the tag must be v0.1.0"),
        ("0.1.0", CHANGELOG, "the tag is 0.1.0"),
        ("v0.1.0", "## 0.1.0 - unreleased\n", "CHANGELOG.md has no line `## 0.1.0 - YEAR-MONTH-DAY`"),
    ],
)
def test_a_tag_that_is_not_the_version_is_refused(checkout, tag, changelog, message):
    (checkout / "CHANGELOG.md").write_text(changelog, encoding="utf-8")
    before = (checkout / "pyproject.toml").read_bytes()
    code, printed = prepare(checkout, tag)
    assert code == 1
    assert message in printed
    assert (checkout / "pyproject.toml").read_bytes() == before
