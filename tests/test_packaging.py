"""What holds the distribution together: links, versions, pins, scripts, and names that must not be reachable."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import attncheck

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("reference", "cases", "backends", "reports", "harness")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    stated = [line.split("#")[0].strip() for line in lines]
    return dict(line.lower().replace("_", "-").split("==") for line in stated if line)


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout: no list of our own files")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_a_room_is_reached_by_a_relative_link_and_its_bare_name_is_no_module_of_ours():
    """What an installation puts on sys.path holds no second copy of a room (-P leaves out the folder itself)."""
    found = f"import importlib.util as u; print(*(name for name in {ROOMS} if u.find_spec(name)))"
    done = subprocess.run([sys.executable, "-P", "-c", found], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
    for room in ROOMS:
        assert str((ROOT / "src" / "attncheck" / room).readlink()) == f"../../{room}"


def test_versions_agree():
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert attncheck.__version__ == PROJECT["version"] == versions[0]


def test_scripts_are_executable_and_parse():
    for name in ("scripts/demo", "scripts/gpu-evidence", "scripts/test", "scripts/tox", ".ci/run", ".ci/nightly"):
        assert os.access(ROOT / name, os.X_OK)
        subprocess.run(["bash", "-n", str(ROOT / name)], check=True)


def test_every_requirement_is_pinned_within_its_range():
    packaging = pytest.importorskip("packaging.requirements")
    stated = [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra)]
    for requirement in map(packaging.Requirement, stated):
        if requirement.name == PROJECT["name"]:
            continue
        pinned = pins()[requirement.name.lower().replace("_", "-")]
        assert pinned in requirement.specifier, f"{requirement} does not admit the pin {pinned}"


def test_the_extra_dev_names_every_other_extra():
    for_gpus = {"flashinfer", "flash-attn"}
    extras = set(PROJECT["optional-dependencies"]) - {"dev"} - for_gpus
    (own,) = (r for r in PROJECT["optional-dependencies"]["dev"] if r.startswith("attncheck["))
    assert set(own.removeprefix("attncheck[").removesuffix("]").split(",")) == extras


def test_the_scripts_refuse_an_old_python_in_words(tmp_path):
    """With nothing new enough on PATH, the message names what is needed and how to point at it."""
    checkout = tmp_path / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    for name in ("scripts/test", "scripts/tox", "constraints.txt"):
        (checkout / name).write_bytes((ROOT / name).read_bytes())
        (checkout / name).chmod(0o755)
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname"):
        (tools / tool).symlink_to(f"/bin/{tool}" if Path(f"/bin/{tool}").exists() else f"/usr/bin/{tool}")
    (tools / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tools / "python3").chmod(0o755)

    done = subprocess.run(
        [str(checkout / "scripts" / "test")], env={"PATH": str(tools)}, capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert "Python 3.11 or newer" in done.stderr
    assert "PYTHON=" in done.stderr
    assert not (checkout / ".venv").exists()


def test_no_file_names_a_package_registry():
    """Set-up takes packages from the index of the machine's pip: the project names no host of a registry."""
    hosts = ["pypi." + "org", "python" + "hosted", "download.py" + "torch", "registry." + "npmjs"]
    for path in tracked_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        assert not [host for host in hosts if host in text], path


def test_no_two_public_classes_of_the_harness_share_a_name():
    """A name in a traceback, a search or an import then means one thing."""
    found: dict[str, list[str]] = {}
    for path in (ROOT / "harness").rglob("*.py"):
        if "templates" not in path.parts:  # what `attncheck new` writes
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


@pytest.mark.xdist_group("together")
def test_the_pinned_pytest_and_xdist_keep_groups_together(request):
    """Tests that share an expensive fixture need one worker; xdist marks them by an @ in the id (not under -n 0)."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("no worker of --dist loadgroup")
    assert request.node.nodeid.endswith("@together")
