"""Which files a watch looks at, and what it takes for a change."""

import os
from pathlib import Path

import pytest

import attncheck
from attncheck.harness.cli.watch import WatchedFiles, file_of

OURS = Path(attncheck.__file__).parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "kernels_of_mine"
    (package / "inner").mkdir(parents=True)
    for name in ("__init__.py", "backend.py", "inner/tiles.py"):
        (package / name).write_text("raise RuntimeError('a watch imports nothing')\n")
    (tmp_path / "mine.py").write_text("import torch\n")
    (tmp_path / "suite.yaml").write_text("suite: x\n")
    return tmp_path


@pytest.mark.parametrize(
    ("ref", "file"),
    [
        ("./mine.py", Path("mine.py")),
        ("./mine.py:Mine", Path("mine.py")),
        ("vllm:./mine.py:Mine", Path("mine.py")),
        ("reference", OURS / "backends" / "candidates" / "reference.py"),
        ("torch_sdpa:math", OURS / "backends" / "candidates" / "torch_sdpa.py"),
        ("unheard_of:Mine", None),
        ("nothing", None),
    ],
)
def test_the_file_of_a_backend(folder: Path, ref: str, file: Path | None) -> None:
    assert file_of(ref) == file


def test_the_file_of_a_module_is_found_without_importing_it(folder: Path) -> None:
    assert file_of("kernels_of_mine.backend:Mine") == folder / "kernels_of_mine" / "backend.py"
    assert file_of("kernels_of_mine:Mine") == folder / "kernels_of_mine" / "__init__.py"
    assert file_of("kernels_of_mine.other:Mine") is None


def test_a_save_a_new_file_and_a_deleted_one_are_changes(folder: Path) -> None:
    suite = folder / "suite.yaml"
    files = WatchedFiles(["./mine.py:Mine"], [suite])
    assert files.changed() == ()
    Path("mine.py").write_text("import torch, math\n")
    assert files.changed() == (Path("mine.py"),)
    files.accept()
    os.utime(suite, ns=(1, 1))  # the same text, saved again
    Path("helper.py").touch()
    assert set(files.changed()) == {suite, Path("helper.py")}
    files.accept()
    Path("helper.py").unlink()
    assert files.changed() == (Path("helper.py"),)
    files.accept()
    Path("notes.txt").touch()
    assert files.changed() == ()


def test_a_package_is_watched_with_its_folders(folder: Path) -> None:
    files = WatchedFiles(["kernels_of_mine.backend:Mine"])
    tiles = folder / "kernels_of_mine" / "inner" / "tiles.py"
    tiles.write_text("TILE = 64\n")
    assert files.changed() == (tiles,)


@pytest.mark.parametrize(
    ("text", "libraries"),
    [
        ("import torch\n", ()),
        ("import triton.language as tl\nfrom xformers import ops\n", ("triton", "xformers")),
        ("import os\nos.environ['TRITON_INTERPRET'] = '1'\nimport triton\n", ()),
        ("import tritonclient\n", ()),
    ],
)
def test_the_kernel_libraries_that_sources_import(folder: Path, text: str, libraries: tuple[str, ...]) -> None:
    Path("mine.py").write_text(text)
    assert WatchedFiles(["./mine.py"]).libraries() == libraries
