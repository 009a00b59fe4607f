"""Candidates ``hf:...``: kernels of the Hub are loaded, named with their version, examined, and refused with a reason.

The package ``kernels`` is a stand-in (`hub/kernels.py`), and the kernel is written in plain torch.
"""

import importlib
import json
import sys
from pathlib import Path

import pytest

from attncheck.backends.candidates import hub
from attncheck.backends.registry import load
from attncheck.errors import BackendLoadError, BackendUnavailableError
from attncheck.reports.run_file.store import read_run

HERE = Path(__file__).parent / "hub"
METADATA = {"id": "_mine_cpu_1", "name": "mine", "version": 1, "license": "Apache-2.0", "backend": {"type": "cpu"}}


def make_kernel(folder, source, repo="owner/mine"):
    build = folder / repo / "build" / "torch-cpu"
    build.mkdir(parents=True)
    (build / "__init__.py").write_text(source, encoding="utf-8")
    (build / "metadata.json").write_text(json.dumps(METADATA), encoding="utf-8")


@pytest.fixture
def source():
    return (HERE / "torch_kernel.py").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    """A folder that holds the stand-in as an installed distribution of version 9.8."""
    (tmp_path / "kernels.py").write_bytes((HERE / "kernels.py").read_bytes())
    facts = tmp_path / "kernels-9.8.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 9.8\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def here(folder, monkeypatch):
    """The same folder, as the working directory and on the path of this process."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    return folder


SRC = Path(__file__).parents[3] / "src"


def run(shell, folder, words):
    return shell(f"attncheck run --device cpu --output run.jsonl {words}", folder, PYTHONPATH=f"{SRC}:{folder}")


@pytest.mark.usefixtures("preloaded")
def test_a_right_kernel_passes_and_its_version_is_recorded(shell, folder, source):
    make_kernel(folder, source)
    code, printed = run(shell, folder, "hf:owner/mine@1 --suite smoke --check numerics --check lse --check containment")
    assert code == 0, printed
    found = read_run(folder / "run.jsonl")
    (info,) = found.header.backends
    assert info.version == "version 1, revision commit of version 1, kernels 9.8"
    assert sum(record.outcome == "passed" for record in found.records) > 100
    kernels = {name for record in found.records for name in getattr(record, "chosen_kernels", ())}
    functions = ("flash_attn_varlen_func", "flash_attn_with_kvcache")
    assert kernels == {f"owner/mine@1 {function}" for function in functions}


@pytest.mark.usefixtures("preloaded")
def test_a_wrong_kernel_of_a_folder_is_found(shell, folder, source):
    wrong = source.replace("[:, None] + keys - rows - ", "[:, None] - ")
    assert wrong != source
    make_kernel(folder, wrong)
    code, printed = run(shell, folder, "hf:./owner/mine --case extend --check numerics")
    assert code == 1
    assert "finding 1 of 1, hf:./owner/mine: perhaps: the causal mask is aligned" in " ".join(printed.split()), printed
    (info,) = read_run(folder / "run.jsonl").header.backends
    assert info.version == "version 1, kernels 9.8"
    assert "__init__.py" in " ".join(info.files)


def test_a_kernel_runs_on_the_devices_of_its_build(here, source):
    make_kernel(here, source)
    backend = load("hf:owner/mine@1").backend
    assert backend.unavailable_reasons("cpu") == []
    assert backend.unavailable_reasons("cuda") == ["device cuda: the backend runs on cpu"]


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("hf", "hf names many backends; name one, such as hf:kernels-community/flash-attn2@1"),
        ("hf:owner/mine", "names no version; write hf:owner/mine@1, or a branch, tag or commit after the @"),
        ("hf:owner/short@1", "it has no flash_attn_varlen_func; flash_attn_with_kvcache takes no block_table"),
    ],
)
def test_what_cannot_be_a_candidate_is_refused(here, ref, message, source):
    short = source.replace("def flash_attn_varlen_func", "def other").replace("block_table=None", "pages=None")
    make_kernel(here, short, "owner/short")
    with pytest.raises(BackendLoadError, match=message):
        load(ref)


@pytest.mark.usefixtures("here")
def test_a_kernel_without_a_build_for_this_machine_is_unavailable():
    with pytest.raises(BackendUnavailableError) as raised:
        load("hf:./owner/other")
    assert str(raised.value) == (
        "backend 'hf:./owner/other' is unavailable here: kernels cannot load it: FileNotFoundError: "
        "Cannot find a build variant for this system in owner/other:"
    )


UNTRUSTED = """Kernel repository 'owner/mine' could not verify publisher trust status. Set trust_remote_code=True or add
the repository ID to the trust_remote_code allowlist to allow loading kernels from untrusted sources."""


def refuse(monkeypatch, words):
    def get_kernel(*_, **__):
        raise ValueError(words)

    monkeypatch.setattr(importlib.import_module("kernels"), "get_kernel", get_kernel)


@pytest.mark.usefixtures("here")
def test_without_a_connection_the_message_names_what_attncheck_offers(monkeypatch):
    refuse(monkeypatch, UNTRUSTED)
    with pytest.raises(BackendUnavailableError, match=r"no connection to the Hub, or.*hf:\./folder") as raised:
        load("hf:owner/mine@1")
    assert "trust_remote_code" not in str(raised.value)


@pytest.mark.usefixtures("here")
def test_a_version_that_does_not_exist_is_an_error(monkeypatch):
    refuse(monkeypatch, "Version 7 not found, available versions: 1")
    with pytest.raises(BackendLoadError, match="Version 7 not found, available versions: 1"):
        load("hf:owner/mine@7")


def test_without_the_package_the_message_names_what_to_install(monkeypatch):
    monkeypatch.setattr(hub.machine, "installed_version", lambda name: None)
    with pytest.raises(BackendUnavailableError, match=r"the package kernels is not installed; install it \(pip"):
        load("hf:owner/mine@1")
