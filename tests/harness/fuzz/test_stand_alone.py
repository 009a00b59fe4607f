"""A stand-alone file fails while the fault is there, without attncheck, and passes once it is repaired."""

import io
import runpy
import subprocess
import sys
from dataclasses import replace
from signal import SIGABRT
from types import SimpleNamespace

import pytest
import torch
from made_cases import make_case

from attncheck.harness.driver import pool
from attncheck.harness.fuzz import stand_alone_process
from attncheck.harness.fuzz.stand_alone import StandAloneAnswer, StandAloneRequest
from attncheck.harness.fuzz.stand_alone_process import NotExpressibleError, plain, written
from attncheck.harness.fuzz.stand_alone_template import restored, wrong_results
from attncheck.reference import AttentionParams
from attncheck.reference.step_spec import BatchSpec, PaddingSpec, PathSpec, RequestSpec, SplitKVOptions

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

SIZES = {"num_heads": 2, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
CASE = make_case((2, 6), (1, 3), cache={"block_size": 4}, **SIZES)


def raising(error):
    """The function, which raises ``error`` before it does anything."""
    return FUNCTION.replace("    starts, page", f"    raise {error}\n    starts, page")


def write_for(folder, source, name, check="numerics", **request):
    file = folder / "mine.py"
    file.write_text(source, encoding="utf-8")
    wanted = {"case": CASE, "summary": 'rows are "wrong"', **request}
    return written(
        StandAloneRequest(
            ref=f"{file}:{name}", check=check, seed=0, device="cpu", path=str(folder / "repro.py"), **wanted
        )
    )


def run_alone(folder, *words):
    """Run the file as a maintainer does who has no attncheck."""
    command = [sys.executable, "-I", "-c", WITHOUT_ATTNCHECK, str(folder / "repro.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def run_here(tmp_path, monkeypatch, capsys):
    """``run_here(repaired)``: the exit code of the file and what it prints; run in this process, which has torch.

    ``repaired``: the text of a backend to examine instead. The file is kept without being run in a process of its own.
    """
    monkeypatch.setattr(stand_alone_process, "_shows", lambda _path, _request: True)

    def run_here(repaired=""):
        words = ["repro.py"]
        if repaired:
            (tmp_path / "repaired.py").write_text(repaired, encoding="utf-8")
            words.append(str(tmp_path / "repaired.py"))
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.setattr(sys, "path", [*sys.path])
        with pytest.raises(SystemExit) as ended, torch.no_grad():
            runpy.run_path(str(tmp_path / "repro.py"))
        return ended.value.code, capsys.readouterr().out

    return run_here


def test_the_assertion_holds_once_the_function_is_repaired(tmp_path, run_here):
    assert write_for(tmp_path, FUNCTION, "Mine") == StandAloneAnswer(True)
    code, printed = run_here()
    assert code == 1
    assert "wrong: 3 of 3 rows" in printed
    assert "wrong: the log-sum-exp of 6 rows and heads" in printed
    assert run_here(FUNCTION.replace(FAULTS, RIGHT)) == (0, "right\n")


@pytest.mark.parametrize("padding", [PaddingSpec(), PaddingSpec(requests=1, tokens=1, unmapped_tokens=1)])
def test_what_a_writer_does_to_the_cache_is_shown(tmp_path, run_here, padding):
    case = replace(CASE, batch=replace(CASE.batch, padding=padding))
    write_for(tmp_path, FUNCTION.replace(FAULTS, "FAULT, WRITE_FAULT = 0, 1"), "Mine", "cache_write", case=case)
    code, printed = run_here()
    assert code == 1
    assert "elements of the cache" in printed


def test_what_may_be_refused_is_right_if_it_is(tmp_path, run_here):
    write_for(tmp_path, FUNCTION, "Mine", "refusals", may_refuse=True)
    assert run_here(raising("ValueError('too long')")) == (0, "refused: too long\n")
    assert run_here()[0] == 1


def test_a_function_of_another_module_is_loaded_by_its_path(tmp_path, run_here, monkeypatch):
    (tmp_path / "kernel_beside.py").write_text(FUNCTION, encoding="utf-8")
    wrapper = "Mine = kernel_beside.kernel_backend(kernel_beside.attend, name='mine', features=('lse',))\n"
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        write_for(tmp_path, f"import kernel_beside\n{wrapper}", "Mine")
    del sys.modules["kernel_beside"]
    assert run_here()[0] == 1


def test_a_class_that_writes_the_cache_apart_from_forward_is_called_for_both(tmp_path, run_here):
    assert write_for(tmp_path, SEPARATE, "Wrong", "cache_write") == StandAloneAnswer(True, needs="attncheck")
    assert "Needs torch and attncheck." in (tmp_path / "repro.py").read_text(encoding="utf-8")
    code, printed = run_here()
    assert code == 1
    assert "elements of the cache are wrong" in printed
    (tmp_path / "mine.py").write_text(SEPARATE.replace("1.25", "1"), encoding="utf-8")
    assert run_here() == (0, "right\n")


def test_a_large_cache_is_not_compared_with_some_of_its_pages(tmp_path, run_here, monkeypatch):
    monkeypatch.setattr(pool, "SMALL_POOL", 8)
    case = replace(CASE, cache=replace(CASE.cache, num_blocks=100))
    write_for(tmp_path, FUNCTION.replace(FAULTS, RIGHT), "Mine", "cache_write", case=case)
    assert run_here() == (0, "right\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "name", "fields", "code", "printed"),
    [
        (FUNCTION, "Mine", {}, 1, "wrong: 3 of 3 rows"),
        (CRASH, "attend", {"ends": True}, -SIGABRT, ""),
        (raising("RuntimeError('no kernel')"), "Mine", {"raised": "RuntimeError"}, 1, "RuntimeError: no kernel"),
    ],
    ids=["wrong", "ends", "raises"],
)
def test_a_fault_is_shown_without_attncheck_until_it_is_repaired(tmp_path, source, name, fields, code, printed):
    assert write_for(tmp_path, source, name, **fields) == StandAloneAnswer(True)
    wrong = run_alone(tmp_path)
    assert wrong.returncode == code
    assert printed in wrong.stdout + wrong.stderr
    repaired = tmp_path / "repaired.py"
    repaired.write_text(FUNCTION.replace(FAULTS, RIGHT), encoding="utf-8")
    if name == "Mine":
        right = run_alone(tmp_path, str(repaired))
        assert (right.returncode, right.stdout.strip()) == (0, "right"), right.stderr


@pytest.mark.slow
def test_a_right_backend_leaves_no_file(tmp_path):
    right = FUNCTION.replace(FAULTS, RIGHT)
    assert write_for(tmp_path, right, "Mine") == StandAloneAnswer(False, "one step does not show the fault")
    assert not (tmp_path / "repro.py").exists()


INNER = """\
from attncheck import kernel_backend
def make():
    def attend(query, key_cache, value_cache, metadata, params, out): ...
    return attend
Mine = kernel_backend(make(), name='mine')
"""
SPLIT = replace(
    CASE,
    batch=BatchSpec(
        requests=(RequestSpec(query_len=1, seq_len=20),),
        path=PathSpec(name="split_kv", options=SplitKVOptions(parts=2)),
    ),
)


@pytest.mark.parametrize(
    ("source", "check", "case", "limits", "reason"),
    [
        (
            FUNCTION.replace('("lse",)', '("lse", "non_causal")'),
            "numerics",
            SPLIT,
            {},
            "the path split_kv takes 2 calls of forward",
        ),
        (FUNCTION, "cudagraph", CASE, {}, "a captured graph takes several steps"),
        (INNER, "numerics", CASE, {}, "make.<locals>.attend is defined within a function"),
        (FUNCTION, "numerics", CASE, {"_MOST_TEXT": 1024}, "its tensors take more than 1 KiB of text"),
        (FUNCTION, "numerics", CASE, {"_MOST_MEMORY": 1024}, "its tensors take more than 0 MiB"),
    ],
)
def test_what_no_file_can_show_is_left_to_attncheck(tmp_path, monkeypatch, source, check, case, limits, reason):
    for name, limit in limits.items():
        monkeypatch.setattr(stand_alone_process, name, limit)
    assert reason in write_for(tmp_path, source, "Mine", check, case=case).reason


def test_a_row_that_must_be_zero_is_right_if_it_is():
    zeros = torch.zeros(2, 1)
    right = {"output": torch.zeros(2, 1, 4), "expected": torch.zeros(2, 1, 4).double(), "norm": zeros, "peak": zeros}
    right |= {"lse": None, "cache": None}
    assert wrong_results(right, None) == []
    right["output"][1, 0, 2] = 1e-6
    assert wrong_results(right, None) == ["1 of 2 rows; worst: row 1, head 0, no error is allowed"]
    right["output"][0, 0, 2] = torch.nan
    assert wrong_results(right, None) == ["2 of 2 rows; worst: row 0, head 0, NaN or infinite"]


def test_arguments_are_read_as_they_were_without_running_code():
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
