"""`attncheck new backend` writes a backend that is right, and refuses what would be no module or hide one."""

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import attncheck
from attncheck.backends.registry import load
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


@pytest.mark.slow
def test_the_template_of_vllm_is_typed_on_our_classes(tmp_path):
    """The others are checked as modules of attncheck."""
    pytest.importorskip("mypy")
    path = tmp_path / "kernel.py"
    path.write_text(template_files(BackendKind.VLLM, path.stem)[path.name].replace(OF_VLLM, OF_ATTNCHECK))
    options = ["--strict", "--config-file=", "--follow-imports=silent", "--cache-dir", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "mypy", *options, path]
    checked = subprocess.run(command, check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("kind", list(BackendKind))
def test_what_is_written_is_right_under_its_own_name_and_so_is_its_test(kind, tmp_path, typed):
    folder = tmp_path / "new folder"
    printed = typed(f"new backend my_kernel --kind {kind} --output", folder).out.splitlines()
    assert printed[0] == f"written: {folder}/my_kernel.py, {folder}/test_my_kernel.py"
    ref = f"{folder}/my_kernel.py:MyKernel"
    is_of_vllm = kind == BackendKind.VLLM
    named = f"vllm:{ref}" if is_of_vllm else ref
    assert shlex.split(printed[1]) == ["attncheck", "run", "--backend", named]
    assert shlex.split(printed[2]) == ["pytest", f"{folder}/test_my_kernel.py"]
    if is_of_vllm:
        path = folder / "my_kernel.py"
        path.write_text(path.read_text().replace(OF_VLLM, OF_ATTNCHECK))
        if importlib.util.find_spec("vllm") is None:
            assert "or import attncheck.backends.contract in its place" in printed[3]
    assert load(ref).backend.get_name() == ("CUSTOM" if is_of_vllm else "MY_KERNEL")

    (tmp_path / "small.yaml").write_text(SUITE)
    found = attncheck.examine(ref, suite=str(tmp_path / "small.yaml"), checks=("numerics", "refusals"), device="cpu")
    assert found.passed, found
    assert [record.outcome for record in found.records if record.case_id == "window"] == ["unsupported", "passed"]

    spec = importlib.util.spec_from_file_location("written", folder / "test_my_kernel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.test_my_kernel == attncheck.backend_tests(named, suite="smoke")


@pytest.mark.parametrize("kind", list(BackendKind))
@pytest.mark.parametrize("name", ["a", "attend"])
def test_no_trace_of_the_template_is_left(kind, name):
    for file, text in template_files(kind, name).items():
        ast.parse(text)
        assert text.startswith(f"# {file}\n")
        assert not re.search(r"(?<![a-z])mine(?![a-z])", text, re.IGNORECASE)
    assert re.search(r"^(class )?Mine\b", template_files(kind, "mine")["mine.py"], re.MULTILINE)


def test_a_reference_can_be_typed_from_where_it_was_written():
    assert backend_ref(BackendKind.FUNCTION, "fast", Path()) == "./fast.py:Fast"
    assert backend_ref(BackendKind.CLASSES, "my_fast_one", Path("kernels")) == "kernels/my_fast_one.py:MyFastOne"
    assert backend_ref(BackendKind.VLLM, "fast", Path("../up")) == "vllm:../up/fast.py:Fast"
    assert backend_ref(BackendKind.VLLM, "fast", Path("/abs")) == "vllm:/abs/fast.py:Fast"


@pytest.mark.parametrize("there", ["fast.py", "test_fast.py"])
def test_nothing_is_overwritten(there, tmp_path, typed):
    (tmp_path / there).write_text("years of work")
    done = typed("new backend fast --output", tmp_path)
    assert (done.code, f"{tmp_path / there}: there already" in done.err) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "years of work"
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "fast.py").symlink_to("elsewhere.py")  # to nowhere
    for folder, reason in ((tmp_path / there / "new", "Not a directory"), (tmp_path / "link", "File exists")):
        done = typed("new backend fast --output", folder)
        assert done.code == 2
        assert done.err.endswith(f" cannot be written: {reason}\n")
    assert not (tmp_path / "link" / "elsewhere.py").exists()


def test_modules_beside_the_new_ones_are_not_hidden(tmp_path):
    (tmp_path / "fast.py").write_text("")
    (tmp_path / "kernels").mkdir()
    for name in ("fast", "kernels"):
        command = [sys.executable, "-m", "attncheck", "new", "backend", name, "--output", "new"]
        subprocess.run(command, cwd=tmp_path, check=True)
    assert len(list((tmp_path / "new").iterdir())) == 4
