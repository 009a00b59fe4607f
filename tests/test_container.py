"""The container file has what the wheel is built from, and its shell, its pins and its program are right as written."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "Containerfile").read_text(encoding="utf-8")
INSTRUCTIONS = re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE)).splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def words_of(name):
    return [line.removeprefix(f"{name} ").split() for line in INSTRUCTIONS if line.startswith(f"{name} ")]


def test_both_stages_have_the_same_base_of_a_version():
    bases = [words[0] for words in words_of("FROM")]
    assert len(bases) == 2
    assert len(set(bases)) == 1
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", bases[0])


def test_every_file_of_the_wheel_is_copied():
    copied = [name for words in words_of("COPY") if not words[0].startswith("--") for name in words[:-1]]
    assert [name for name in copied if not (ROOT / name).exists()] == []
    links = [path.resolve() for path in (ROOT / "src" / "attncheck").iterdir() if path.is_symlink()]
    assert {str(path.relative_to(ROOT)) for path in links} <= set(copied)
    assert {"pyproject.toml", "src", PROJECT["readme"], *PROJECT["license-files"]} <= set(copied)


def test_the_versions_are_the_pins_and_the_program_is_installed():
    (pinned,) = re.findall(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(re.findall(r"TORCH=(\d[^\s+]*)", TEXT)) == {pinned}
    assert [words[0] for words in words_of("ARG")] == [f"TORCH={pinned}+cpu", "INDEX="]
    (program,) = re.findall(r'ENTRYPOINT \["(\w+)"\]', TEXT)
    assert program in PROJECT["scripts"]
    (extras,) = re.findall(r'"attncheck\[([\w,]+)\] @', TEXT)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize(
    ("torch", "index", "installed"),
    [
        ("2.13.0+cpu", "", None),
        ("2.13.0+cpu", "https://example.org/cpu", "--extra-index-url https://example.org/cpu torch==2.13.0+cpu"),
        ("2.13.0", "", "constraints.txt torch==2.13.0"),
    ],
)
def test_a_cpu_build_needs_the_address_of_its_wheels(tmp_path, torch, index, installed):
    """The command of the image, in a shell of its kind, with a stand-in for pip."""
    (command,) = (
        line.removeprefix("RUN ") for line in INSTRUCTIONS if "ENTRYPOINT" not in line and "pip install" in line
    )
    (tmp_path / "pip").write_text('#!/bin/sh\necho "pip $*"\n', encoding="utf-8")
    (tmp_path / "pip").chmod(0o755)
    path = f"{tmp_path}:{Path(shutil.which('ls') or '/bin/ls').parent}"
    env = {"TORCH": torch, "INDEX": index, "PATH": path}
    done = subprocess.run(["/bin/sh", "-c", command], env=env, capture_output=True, text=True, check=False)
    if installed is None:
        assert done.returncode == 1
        assert done.stderr == "give --build-arg INDEX=..., or TORCH=2.13.0 for CUDA\n"
        assert done.stdout == ""
    else:
        assert installed in done.stdout
