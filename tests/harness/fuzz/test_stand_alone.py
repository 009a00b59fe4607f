"""A stand-alone file fails while the fault is there, without attncheck, and passes once it is repaired."""

import io
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attncheck.cases.model import Case
from attncheck.harness.driver import pool
from attncheck.harness.fuzz import stand_alone_process
from attncheck.harness.fuzz.stand_alone import StandAloneAnswer, StandAloneRequest
from attncheck.harness.fuzz.stand_alone_process import NotExpressibleError, plain, written
from attncheck.harness.fuzz.stand_alone_template import restored
from attncheck.reference import AttentionParams
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec, PaddingSpec, PathSpec, RequestSpec, SplitKVOptions

FUNCTION = """\
import torch
from attncheck import kernel_backend

def attend(query, key_cache, value_cache, metadata, params, out, output_lse):
    starts, page = metadata.query_start_loc.tolist(), key_cache.shape[1]
    for request, seq_len in enumerate(metadata.seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        context = seq_len - (rows.stop - rows.start)
        pages = metadata.block_table_tensor[request, : -(-seq_len // page)].long()
        key, value = (cache[pages].flatten(0, 1)[:seq_len].float() for cache in (key_cache, value_cache))
        grouped = query[rows].float().unflatten(1, (params.num_kv_heads, -1))
        scores = torch.einsum("qhgd,khd->hgqk", grouped, key) * params.softmax_scale
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(context - FAULT)
        scores = scores.masked_fill(~visible, float("-inf"))
        out[rows] = torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), value).flatten(1, 2).to(out.dtype)
        output_lse[rows] = scores.logsumexp(-1).permute(2, 0, 1).flatten(1)

def write(key, value, key_cache, value_cache, slot_mapping):
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, key_cache.shape[1])
            key_cache[page, offset], value_cache[page, offset] = key[row], value[row] * (1 + WRITE_FAULT)

FAULT, WRITE_FAULT = 1, 0
Mine = kernel_backend(attend, name="mine", features=("lse",), writer=write)
"""

FAULTS, RIGHT = "FAULT, WRITE_FAULT = 1, 0", "FAULT, WRITE_FAULT = 0, 0"

CLASS = """\
from attncheck.backends.candidates.torch_sdpa import SDPABackend, SDPAImpl

class Wrong(SDPABackend):
    get_impl_cls = staticmethod(lambda: Impl)

class Impl(SDPAImpl):
    def forward(self, *args, **keywords):
        result = super().forward(*args, **keywords)
        result[1:] *= FACTOR
        return result

FACTOR = 1.25
"""

SEPARATE = """\
from attncheck.backends.candidates.torch_sdpa import SDPABackend, SDPAImpl

class Wrong(SDPABackend):
    forward_includes_kv_cache_update = False
    get_impl_cls = staticmethod(lambda: Impl)
    get_builder_cls = staticmethod(lambda: Builder)

class Builder(SDPABackend.get_builder_cls()):
    def __init__(self, spec, layer_names, vllm_config, device):
        super().__init__(spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        self.num_heads = layers[layer_names[0]].impl.num_heads
        layers[layer_names[0]].was_built = True

class Impl(SDPAImpl):
    def do_kv_cache_update(self, layer, key, value, kv_cache, slots):
        layer.was_written = layer.was_built
        super().write(layer, key * FACTOR, value, *self._cache_views(kv_cache), slots)

    def forward(self, layer, *args, **keywords):
        assert layer.was_written and layer.impl is self
        return super().forward(layer, *args, **keywords)

    def write(self, *_):
        pass

FACTOR = 1.25
"""

CRASH = """\
import os
def attend(query, key_cache, value_cache, metadata, params, out):
    os.abort()
"""

WITHOUT_ATTNCHECK = """\
import importlib.abc, runpy, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "attncheck":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

CASE = Case(
    suite="fuzz",
    id="small",
    layer=LayerSpec(num_heads=2, num_kv_heads=1, head_size=8, dtype="float32"),
    cache=CacheSpec(block_size=4),
    batch=BatchSpec(requests=(RequestSpec(query_len=2, seq_len=6), RequestSpec(query_len=1, seq_len=3))),
)


def write_for(folder: Path, source: str, name: str, check: str = "numerics", **request: object) -> StandAloneAnswer:
    file = folder / "mine.py"
    file.write_text(source, encoding="utf-8")
    wanted = {"case": CASE, "summary": 'rows are "wrong"', **request}
    return written(
        StandAloneRequest(
            ref=f"{file}:{name}", check=check, seed=0, device="cpu", path=str(folder / "repro.py"), **wanted
        )
    )


def run_alone(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the file as a maintainer does who has no attncheck."""
    command = [sys.executable, "-I", "-c", WITHOUT_ATTNCHECK, str(folder / "repro.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def run_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[object, str]:
    """The exit code of the file, and what it prints; run in this process, which has torch."""
    monkeypatch.setattr(sys, "argv", ["repro.py", *words])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended, torch.no_grad():
        runpy.run_path(str(folder / "repro.py"))
    return ended.value.code, capsys.readouterr().out


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are kept without being run, which takes a process that loads torch."""
    monkeypatch.setattr(stand_alone_process, "_shows", lambda _path, _request: True)


@pytest.mark.usefixtures("kept")
def test_the_assertion_holds_once_the_function_is_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write_for(tmp_path, FUNCTION, "Mine") == StandAloneAnswer(True)
    code, printed = run_here(tmp_path, monkeypatch, capsys)
    assert code == 1
    assert "wrong: 3 of 3 rows" in printed
    assert "wrong: the log-sum-exp of 6 rows and heads" in printed
    repaired = tmp_path / "repaired.py"
    repaired.write_text(FUNCTION.replace(FAULTS, RIGHT), encoding="utf-8")
    assert run_here(tmp_path, monkeypatch, capsys, str(repaired)) == (0, "right\n")


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("padding", [PaddingSpec(), PaddingSpec(requests=1, tokens=1, unmapped_tokens=1)])
def test_what_a_writer_does_to_the_cache_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], padding: PaddingSpec
) -> None:
    case = replace(CASE, batch=replace(CASE.batch, padding=padding))
    write_for(tmp_path, FUNCTION.replace(FAULTS, "FAULT, WRITE_FAULT = 0, 1"), "Mine", "cache_write", case=case)
    code, printed = run_here(tmp_path, monkeypatch, capsys)
    assert code == 1
    assert "elements of the cache" in printed


@pytest.mark.usefixtures("kept")
def test_what_may_be_refused_is_right_if_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_for(tmp_path, FUNCTION, "Mine", "refusals", may_refuse=True)
    refusing = tmp_path / "refusing.py"
    refusing.write_text(FUNCTION.replace("    starts, page", "    raise ValueError('too long')\n    starts, page"))
    assert run_here(tmp_path, monkeypatch, capsys, str(refusing)) == (0, "refused: too long\n")
    assert run_here(tmp_path, monkeypatch, capsys)[0] == 1


@pytest.mark.usefixtures("kept")
def test_a_function_of_another_module_is_loaded_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "kernel_beside.py").write_text(FUNCTION, encoding="utf-8")
    wrapper = "import kernel_beside\nMine = kernel_beside.kernel_backend(kernel_beside.attend, name='mine')\n"
    write_for(tmp_path, wrapper.replace("name='mine'", "name='mine', features=('lse',)"), "Mine")
    monkeypatch.undo()
    del sys.modules["kernel_beside"]
    assert run_here(tmp_path, monkeypatch, capsys)[0] == 1


@pytest.mark.usefixtures("kept")
def test_a_class_that_writes_the_cache_apart_from_forward_is_called_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_for(tmp_path, SEPARATE, "Wrong", "cache_write")
    code, printed = run_here(tmp_path, monkeypatch, capsys)
    assert code == 1
    assert "elements of the cache are wrong" in printed
    (tmp_path / "mine.py").write_text(SEPARATE.replace("1.25", "1"), encoding="utf-8")
    assert run_here(tmp_path, monkeypatch, capsys) == (0, "right\n")


@pytest.mark.slow
def test_a_wrong_function_is_shown_without_attncheck_until_it_is_repaired(tmp_path: Path) -> None:
    assert write_for(tmp_path, FUNCTION, "Mine") == StandAloneAnswer(True)
    wrong = run_alone(tmp_path)
    assert wrong.returncode == 1, wrong.stderr
    assert "wrong: 3 of 3 rows" in wrong.stdout
    repaired = tmp_path / "repaired.py"
    repaired.write_text(FUNCTION.replace(FAULTS, RIGHT), encoding="utf-8")
    right = run_alone(tmp_path, str(repaired))
    assert (right.returncode, right.stdout.strip()) == (0, "right"), right.stderr


@pytest.mark.slow
def test_the_file_of_a_class_states_that_it_needs_attncheck(tmp_path: Path) -> None:
    assert write_for(tmp_path, CLASS, "Wrong") == StandAloneAnswer(True, needs="attncheck")
    text = (tmp_path / "repro.py").read_text(encoding="utf-8")
    assert "Needs torch and attncheck." in text
    (tmp_path / "mine.py").write_text(CLASS.replace("1.25", "1"), encoding="utf-8")
    right = subprocess.run([sys.executable, tmp_path / "repro.py"], capture_output=True, text=True, check=False)
    assert (right.returncode, right.stdout.strip()) == (0, "right"), right.stderr


@pytest.mark.slow
def test_a_crash_is_shown(tmp_path: Path) -> None:
    assert write_for(tmp_path, CRASH, "attend", ends=True).written
    assert run_alone(tmp_path).returncode < 0


@pytest.mark.slow
def test_an_exception_is_shown(tmp_path: Path) -> None:
    raising = FUNCTION.replace("    starts, page", "    raise RuntimeError('no kernel')\n    starts, page")
    assert write_for(tmp_path, raising, "Mine", raised="RuntimeError").written
    assert "RuntimeError: no kernel" in run_alone(tmp_path).stderr


@pytest.mark.slow
def test_a_right_backend_leaves_no_file(tmp_path: Path) -> None:
    right = FUNCTION.replace(FAULTS, RIGHT)
    assert write_for(tmp_path, right, "Mine") == StandAloneAnswer(False, "one step does not show the fault")
    assert not (tmp_path / "repro.py").exists()


def test_a_path_of_several_calls_is_left_to_attncheck(tmp_path: Path) -> None:
    path = PathSpec(name="split_kv", options=SplitKVOptions(parts=2))
    requests = (RequestSpec(query_len=1, seq_len=20),)
    case = Case(suite="fuzz", id="a", layer=CASE.layer, cache=CASE.cache, batch=BatchSpec(requests=requests, path=path))
    source = FUNCTION.replace('("lse",)', '("lse", "non_causal")')
    answer = write_for(tmp_path, source, "Mine", case=case)
    assert answer.reason == "the path split_kv takes 2 calls of forward"


def test_a_graph_is_left_to_attncheck(tmp_path: Path) -> None:
    assert write_for(tmp_path, FUNCTION, "Mine", "cudagraph").reason == "a captured graph takes several steps"


def test_what_is_defined_within_a_function_is_left_to_attncheck(tmp_path: Path) -> None:
    inner = (
        "def make():\n    def attend(query, key_cache, value_cache, metadata, params, out): ...\n    return attend\n"
    )
    source = f"from attncheck import kernel_backend\n{inner}Mine = kernel_backend(make(), name='mine')\n"
    assert "make.<locals>.attend is defined within a function" in write_for(tmp_path, source, "Mine").reason


def test_arguments_are_read_as_they_were_without_running_code() -> None:
    codes = torch.arange(80, dtype=torch.uint8)
    fused = torch.tensor([torch.nan, torch.inf, 0.1, 1e-40] * 15).view(3, 20)
    query, key = fused[:, :8].unflatten(1, (2, 4)), fused[:, 9:17]
    params = AttentionParams(num_heads=4, num_kv_heads=2, head_size=64, window=(3, 0))
    config = SimpleNamespace(get_head_size=lambda: 64, inner=(torch.float16, [torch.device("cpu")]))
    file = io.BytesIO()
    torch.save(plain([query, key, codes, codes.view(torch.float8_e4m3fn), params, config, [config]], {}), file)
    file.seek(0)
    got = restored(torch.load(file, weights_only=True), {})
    assert (got[0].shape, got[0].stride()) == (query.shape, query.stride())
    assert torch.equal(got[0].view(torch.int32), query.view(torch.int32))
    assert torch.equal(got[1].view(torch.int32), key.view(torch.int32))
    assert got[0].untyped_storage().data_ptr() == got[1].untyped_storage().data_ptr()
    assert got[3].dtype == torch.float8_e4m3fn
    assert got[3].view(torch.uint8).tolist() == codes.tolist()
    assert (got[4].group_size, got[4].softmax_scale, got[4].window) == (2, 0.125, (3, 0))
    assert got[5].get_head_size() == 64
    assert got[5].inner == (torch.float16, [torch.device("cpu")])
    assert got[6][0] is got[5]
    with pytest.raises(NotExpressibleError, match="a generator is among the arguments"):
        plain((each for each in ()), {})


@pytest.mark.usefixtures("kept")
def test_what_is_too_long_for_a_file_is_left_to_attncheck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_alone_process, "_MOST_TEXT", 1024)
    assert write_for(tmp_path, FUNCTION, "Mine").reason == "its tensors take more than 1 KiB of text"


def test_a_step_of_too_much_memory_is_not_copied_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "save", None)
    monkeypatch.setattr(stand_alone_process, "_MOST_MEMORY", 1024)
    assert write_for(tmp_path, FUNCTION, "Mine").reason == "its tensors take more than 0 MiB"


@pytest.mark.usefixtures("kept")
def test_a_large_cache_is_not_compared_with_some_of_its_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pool, "SMALL_POOL", 8)
    case = replace(CASE, cache=replace(CASE.cache, num_blocks=100))
    write_for(tmp_path, FUNCTION.replace(FAULTS, RIGHT), "Mine", "cache_write", case=case)
    assert run_here(tmp_path, monkeypatch, capsys) == (0, "right\n")
