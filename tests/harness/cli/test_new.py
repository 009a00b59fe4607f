"""`attncheck new backend` writes a backend that is right, and refuses what would be no module or hide one."""

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import attncheck
from attncheck.backends.registry import load
from attncheck.harness.cli import app as cli
from attncheck.harness.cli.show import BackendKind, backend_ref, template_files

SUITE = """\
suite: small
defaults:
  layer: {num_heads: 4, num_kv_heads: 2, head_size: 32, dtype: float32}
cases:
  - {id: mixed, batch: q1s20_q3s7, cache: {block_size: 8}}
  - {id: window, batch: q3s20, layer: {sliding_window: 5}}
"""


OF_VLLM, OF_ATTNCHECK = "from vllm.v1.attention.backend import", "from attncheck.backends.contract import"
"""The import of the template for vLLM's classes, and the one that puts it on attncheck's."""


def test_the_templates_are_typed(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    paths = [tmp_path / f"{kind}_kernel.py" for kind in BackendKind]
    for kind, path in zip(BackendKind, paths, strict=True):
        path.write_text(template_files(kind, path.stem)[path.name].replace(OF_VLLM, OF_ATTNCHECK))
    options = ["--strict", "--config-file=", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache")]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *paths], check=False, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("kind", list(BackendKind))
def test_what_is_written_is_right_under_its_own_name(
    kind: BackendKind, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new folder"
    assert cli.main(["new", "backend", "my_kernel", "--kind", kind, "--output", str(folder)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"written: {folder}/my_kernel.py, {folder}/test_my_kernel.py"
    ref = f"{folder}/my_kernel.py:MyKernel"
    typed = f"vllm:{ref}" if kind == BackendKind.VLLM else ref
    assert shlex.split(printed[1]) == ["attncheck", "run", "--backend", typed]
    assert shlex.split(printed[2]) == ["pytest", f"{folder}/test_my_kernel.py"]
    if kind == BackendKind.VLLM:
        path = folder / "my_kernel.py"
        path.write_text(path.read_text().replace(OF_VLLM, OF_ATTNCHECK))
        if importlib.util.find_spec("vllm") is None:
            assert "or import attncheck.backends.contract in its place" in printed[3]
    assert load(ref).backend.get_name() == ("CUSTOM" if kind == BackendKind.VLLM else "MY_KERNEL")

    (tmp_path / "small.yaml").write_text(SUITE)
    found = attncheck.examine(ref, suite=str(tmp_path / "small.yaml"), checks=("numerics", "refusals"), device="cpu")
    assert found.passed, found
    assert [record.outcome for record in found.records if record.case_id == "window"] == ["unsupported", "passed"]


@pytest.mark.parametrize("kind", list(BackendKind))
def test_the_test_examines_the_file_beside_it(kind: BackendKind, tmp_path: Path) -> None:
    path = tmp_path / "test_my_kernel.py"
    path.write_text(template_files(kind, "my_kernel")["test_my_kernel.py"])
    spec = importlib.util.spec_from_file_location("written", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.test_my_kernel == attncheck.backend_tests(backend_ref(kind, "my_kernel", tmp_path), suite="smoke")


@pytest.mark.parametrize("kind", list(BackendKind))
@pytest.mark.parametrize("name", ["a", "my_kernel", "Flash3", "attend"])
def test_no_trace_of_the_template_is_left(kind: BackendKind, name: str) -> None:
    for file, text in template_files(kind, name).items():
        ast.parse(text)
        assert text.startswith(f"# {file}\n")
        assert not re.search(r"(?<![a-z])mine(?![a-z])", text, re.IGNORECASE)


def test_a_reference_can_be_typed_from_where_it_was_written() -> None:
    assert backend_ref(BackendKind.FUNCTION, "fast", Path()) == "./fast.py:Fast"
    assert backend_ref(BackendKind.CLASSES, "my_fast_one", Path("kernels")) == "kernels/my_fast_one.py:MyFastOne"
    assert backend_ref(BackendKind.VLLM, "fast", Path("../up")) == "vllm:../up/fast.py:Fast"
    assert backend_ref(BackendKind.VLLM, "fast", Path("/abs")) == "vllm:/abs/fast.py:Fast"


NO_MODULE = "it names a Python module, of letters, digits and underscores, a letter first"
NO_NAMES = {
    "class": "it is a word of Python's",
    "none": "it is a word of Python's",
    "9a": NO_MODULE,
    "kernels/fast": NO_MODULE,
    "": NO_MODULE,
    "torch_sdpa": "that is a registered backend; taken are ...",
    "json": "json.py would hide an installed module of that name",
    "step": "its class would be called Step, as another name in the file",
}


@pytest.mark.parametrize(("name", "reason"), NO_NAMES.items())
def test_a_bad_name_is_refused_and_nothing_written(
    plain: Callable[[str], str], name: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new"
    assert cli.main(["new", "backend", name, "--kind", "classes", "--output", str(folder)]) == 2
    assert plain(capsys.readouterr().err).strip() == f"error: a backend cannot be called {name!r}: {reason}"
    assert not folder.exists()


@pytest.mark.parametrize("there", ["fast.py", "test_fast.py"])
def test_nothing_is_overwritten(
    plain: Callable[[str], str], there: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / there).write_text("years of work")
    assert cli.main(["new", "backend", "fast", "--output", str(tmp_path)]) == 2
    assert f"{tmp_path / there}: there already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "years of work"
    for folder, reason in ((tmp_path / there / "new", "Not a directory"), (tmp_path / "link", "File exists")):
        if folder.name == "link":
            folder.mkdir()
            (folder / "fast.py").symlink_to("elsewhere.py")  # to nowhere
        assert cli.main(["new", "backend", "fast", "--output", str(folder)]) == 2
        assert capsys.readouterr().err.endswith(f" cannot be written: {reason}\n")
    assert not (tmp_path / "link" / "elsewhere.py").exists()


def test_modules_beside_the_new_ones_are_not_hidden(tmp_path: Path) -> None:
    (tmp_path / "fast.py").write_text("")
    (tmp_path / "kernels").mkdir()
    for name in ("fast", "kernels"):
        command = [sys.executable, "-m", "attncheck", "new", "backend", name, "--output", "new"]
        subprocess.run(command, cwd=tmp_path, check=True)
    assert len(list((tmp_path / "new").iterdir())) == 4


@pytest.mark.parametrize("kind", list(BackendKind))
def test_only_the_template_itself_is_called_as_the_template(kind: BackendKind) -> None:
    assert re.search(r"^(class )?Mine\b", template_files(kind, "mine")["mine.py"], re.MULTILINE)
