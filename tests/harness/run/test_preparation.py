"""What a run prepares: kernels, rounds of times, and what its header states of the environment."""

import getpass
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from inline_snapshot import snapshot

import attncheck
from attncheck.cases.loader import load_suite
from attncheck.errors import QuestionError, SelectionError
from attncheck.harness import device
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.device import Cuda, Facts, GpuModes, accelerator_of, collect_environment
from attncheck.harness.host import CacheContents, KernelCache, first_line, kernel_caches
from attncheck.harness.run.backend_loading import ThisProcess
from attncheck.harness.run.evaluate import environment_of
from attncheck.harness.run.options import RunOptions
from attncheck.harness.run.outcomes import BackendDescription, not_loaded
from attncheck.harness.run.run import Run
from attncheck.harness.run.selection import (
    DEFAULT_INTERPRETED,
    DEFAULT_ROUNDS,
    DEFAULT_SUITES,
    RoundQuestions,
    RunPlan,
    check_timed,
    count_questions,
    rotated,
    select_cases,
    timed_questions,
    untimed_questions,
)
from attncheck.harness.workers.pool import WorkerPool
from attncheck.reference.spec import DEFAULT_CHECKS
from attncheck.reports.run_file.header import BackendInfo

MINE = """
from attncheck.backends.candidates.reference import ReferenceBackend

class Slow(ReferenceBackend):
    @classmethod
    def default_suite(cls, device): return "interpreted"

class Slower(Slow):
    pass

class Odd(ReferenceBackend):
    @classmethod
    def default_suite(cls, device): return "decode"

class Picky(ReferenceBackend):
    supported_layouts = ("HND",)

    @classmethod
    def get_supported_kernel_block_sizes(cls): return [48]

class Broken(ReferenceBackend):
    @classmethod
    def get_supported_kernel_block_sizes(cls): raise RuntimeError("no sizes")
"""
CASES = ["decode", "decode.float16", "shared-cache"]
"""The first is a case of `interpreted` alone, the second of `smoke` alone, the third of both."""


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


def examined_keys(records):
    found = {}
    for record in records:
        found.setdefault(record.backend, set()).add(f"{record.suite}/{record.case_id}")
    return found


def opened(selection, refs, here=None, **how):
    return Run.open(selection, RunOptions(backends=tuple(refs), device="cpu"), here or ThisProcess(), **how)


def test_each_backend_is_examined_on_its_own_suite(mine):
    here, slow = ThisProcess(), f"{mine}:Slow"
    run = opened(select_cases([], CASES, ["numerics"]), ["reference", slow], here)
    assert examined_keys(list(here.examiner(run).run())) == {
        "reference": {"smoke/decode.float16", "smoke/decode.bfloat16", "smoke/decode.float32", "smoke/shared-cache"},
        "Slow": {"interpreted/decode", "interpreted/shared-cache"},
    }
    assert [suite.name for suite in run.selection.suites] == ["smoke", "interpreted"]
    assert run.notes == (f"reference: suite smoke; {slow}: suite interpreted",)
    lone = opened(select_cases([], ["decode.float16"]), ["reference", slow])
    assert lone.notes == (f"reference: suite smoke; {slow}: no case of suite interpreted",)
    named = opened(select_cases(["smoke"], ["decode.float16"]), ["reference", slow]).plan
    assert [[case.key for case in named.cases_of(ref)] for ref in ("reference", slow)] == [["smoke/decode.float16"]] * 2


def test_a_suite_without_a_backend_is_not_part_of_the_run(mine):
    for ref, suite in ((f"{mine}:Slow", "interpreted"), ("reference", "smoke")):
        run = opened(select_cases([], (), ["numerics"]), [ref])
        assert run.selection.refs == (suite,)
        assert {case.suite for case in run.plan.cases} == {suite}
        assert run.notes == ()


def test_a_run_that_names_nothing_is_short():
    """Of the real candidates: those that are interpreted on a CPU, and those that serve latent caches alone."""
    pytest.importorskip("triton", reason="without Triton nothing is interpreted")
    run = opened(select_cases([]), [])
    case_keys = {each.ref: {case.key for case in run.plan.cases_of(each.ref)} for each in run.backends}
    assert case_keys["triton_unified"] == {f"interpreted/{case}" for case in DEFAULT_INTERPRETED}
    assert case_keys["triton_mla"] == {"interpreted/latent"}
    latent = ("latent", "latent-float32", "latent-unrotated", "latent-non-causal")
    assert case_keys["torch_mla"] == {f"smoke/{name}" for name in latent}
    assert case_keys["torch_sdpa"] == {case.key for case in load_suite("smoke").cases}
    assert set(run.selection.cases) == set(run.plan.cases)
    assert {case.key for case in run.plan.cases} == set().union(*case_keys.values())
    (note,) = run.notes
    assert re.search(r"triton_unified.*: 9 of 80 cases of suite interpreted; ", note)
    assert note == snapshot(
        "reference, torch_sdpa, flex_attention, torch_varlen, flash_attn, flashinfer: suite smoke; triton_unified, xformers: 9 of 80 cases of suite interpreted; reference_mla, torch_mla: 4 of 101 cases of suite smoke; triton_mla: 1 of 80 cases of suite interpreted; reference_state, torch_state: suite state; --case '*' selects all"
    )


def test_a_run_that_names_a_backend_or_a_case_is_whole(mine):
    whole = {case.key for case in load_suite("interpreted").cases}
    named = opened(select_cases([]), [f"{mine}:Slow"])
    assert {case.key for case in named.plan.cases_of(f"{mine}:Slow")} == whole
    pytest.importorskip("triton", reason="without Triton nothing is interpreted")
    by_case = opened(select_cases([], ["*"]), [])
    assert {case.key for case in by_case.plan.cases_of("triton_mla")} == whole


def test_a_backend_that_cannot_run_here_is_refused_or_kept():
    gone = not_loaded("gone", ("no library",))
    selection, here = select_cases(["smoke"]), ThisProcess([gone])
    with pytest.raises(SelectionError, match=r"^backend 'gone' is unavailable here: no library$"):
        opened(selection, ["gone"], here)
    kept = opened(selection, ["gone"], here, keeps_unavailable=True)
    assert [each.unavailable_reasons for each in kept.backends] == [("no library",)]
    assert here.examiner(kept).plan.backends == (gone,)


def test_what_is_wrong_is_refused_before_anything_is_examined(mine):
    with pytest.raises(SelectionError, match=r"^no such case in interpreted, the default suite; give --suite smoke$"):
        opened(select_cases([], ["decode.float16"]), [f"{mine}:Slow", f"{mine}:Slower"])
    with pytest.raises(QuestionError, match="default_suite answered 'decode', none of smoke, interpreted, state"):
        attncheck.examine(f"{mine}:Odd")
    assert DEFAULT_SUITES == ("smoke", "interpreted", "state")
    with pytest.raises(SelectionError, match="seed -1"):
        Run.open(select_cases(["smoke"]), RunOptions(backends=("reference",), device="cpu", seed=-1), ThisProcess())


def test_from_python_too(mine):
    examination = attncheck.examine(f"{mine}:Slow", cases="decode", checks="numerics")
    assert examined_keys(examination.records) == {"Slow": {"interpreted/decode"}}
    assert [suite.name for suite in examination.header.suites] == ["interpreted"]


@pytest.mark.parametrize("suites", [["smoke"], []])
def test_a_named_backend_is_examined_on_pages_that_it_takes(mine, suites):
    selection = select_cases(suites, ["decode.float32"], ["numerics"])
    here = ThisProcess()
    run = opened(selection, [f"{mine}:Picky"], here, fits_pages=True)
    assert run.selection.refs == ("smoke{cache.block_size: 48, cache.layout: HND}",)
    (record,) = here.examiner(run).run()
    assert (record.outcome, record.case_hash) == ("passed", run.selection.cases[0].hash)
    unfitted = opened(selection, [f"{mine}:Broken"], fits_pages=True)  # its declarations raise
    assert unfitted.selection.refs == ("smoke",)


def test_times_are_taken_apart_from_all_other_checks(make_case):
    plain, named = make_case(name="plain"), replace(make_case(name="named"), checks=("lse", "timing"))
    by_case = RunPlan(cases=(plain, named))
    assert untimed_questions(by_case, "a") == RoundQuestions(((plain, DEFAULT_CHECKS), (named, ("lse",))))
    assert timed_questions(by_case, "a", 4) == RoundQuestions(((named, ("timing",)),), round=4)
    by_run = RunPlan(cases=(plain, named), checks=("timing",))
    assert untimed_questions(by_run, "a") == RoundQuestions(())
    assert timed_questions(by_run, "a") == RoundQuestions(((plain, ("timing",)), (named, ("timing",))))
    assert timed_questions(by_run, "a", 1, {plain.key}) == RoundQuestions(((named, ("timing",)),), round=1)


def test_a_backend_is_examined_on_its_own_suite_only(make_case):
    mine, other = make_case(), replace(make_case(), suite="other")
    plan = RunPlan(cases=(mine, other), checks=("numerics", "timing"), chosen={"a": frozenset({other.key})}, rounds=3)
    assert [case for case, _ in untimed_questions(plan, "a").questions] == [other]
    assert [case for case, _ in timed_questions(plan, "a").questions] == [other]
    assert count_questions(plan, ["a"]) == 1 + 3
    assert count_questions(plan, ["a", "b"]) == (1 + 3) + (2 + 6)


def test_every_backend_is_the_first_as_often_as_any_other():
    orders = [rotated("abc", number) for number in range(6)]
    assert all(sorted(order) == list("abc") for order in orders)
    for place in range(3):
        assert sorted(order[place] for order in orders) == list("aabbcc")
    assert rotated([], 3) == ()


class FakePool(WorkerPool):
    """Keeps what it is assigned, and starts no process."""

    def assign(self, assignment):
        self.assignment = assignment

    def choose_device(self, wishes, wanted):
        return "cpu", (), environment_of("cpu")

    def describe(self, refs):
        return [BackendDescription(info=BackendInfo(name=ref, ref=ref)) for ref in refs]


@pytest.mark.parametrize(
    ("wanted", "check", "in_process", "rounds"),
    [
        (None, "timing", False, DEFAULT_ROUNDS),
        (3, "timing", False, 3),
        (None, "numerics", False, 1),
        (None, "timing", True, 1),
    ],
)
def test_ten_rounds_by_default(wanted, check, in_process, rounds):
    options = RunOptions(backends=("reference",), rounds=wanted, in_process=in_process)
    assert Run.open(select_cases(["decode"], (), [check]), options, FakePool()).plan.rounds == rounds


def test_settings_of_times_reach_the_plan_the_processes_and_the_header():
    pool, settings = FakePool(), TimingSettings(limit_s=2.0, warm=True)
    selection = select_cases(["decode"], (), ["timing"])
    options = RunOptions(backends=("reference",), device="cpu", rounds=4, time_limit=2.0, warm_cache=True)
    apart = Run.open(selection, options, pool)
    assert (apart.plan.rounds, apart.plan.timing, pool.assignment.timing) == (4, settings, settings)
    assert (apart.header().rounds, apart.notes) == (4, ())
    own = TimingSettings(max_samples=20)
    here = Run.open(selection, replace(options, rounds=1), ThisProcess(), timing=own)
    assert (here.plan.rounds, here.plan.timing) == (1, own)


def test_options_of_times_need_times():
    assert not select_cases(["decode"]).is_timed
    selection = select_cases(["decode"], (), ["timing"])
    assert selection.is_timed
    check_timed(selection, "--kernels")
    with pytest.raises(SelectionError, match=r"^--kernels configures the check timing: add --check timing$"):
        check_timed(select_cases(["decode"], (), ["lse"]), "--kernels")
    with pytest.raises(SelectionError, match=r"^--rounds 2 in one process: a round is a process; leave out --in-"):
        RunOptions(rounds=2, in_process=True)


SRC = Path(attncheck.__file__).parents[1]


def test_the_environment_is_what_runs_and_its_tools_are_queried_once(monkeypatch):
    found = collect_environment("cpu")
    assert (found.torch, found.attncheck) == (torch.__version__, attncheck.__version__)
    assert (found.device, found.driver, accelerator_of("cpu")) == ("cpu", None, None)
    assert found.cores >= 1
    assert found.cpu
    monkeypatch.setattr(subprocess, "run", lambda *_a, **_k: pytest.fail("queried again"))
    assert collect_environment("cpu") == found
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: not found.deterministic)
    assert collect_environment("cpu").deterministic != found.deterministic


@pytest.mark.parametrize("tool", ["no-such-tool-at-all", "false"])
def test_a_missing_tool_is_none(tool):
    assert first_line(tool) is None


def test_a_checkout_that_is_not_installed_has_a_version():
    # -S leaves site-packages out, so that only PYTHONPATH finds attncheck and no metadata is there.
    command = [sys.executable, "-S", "-c", "import attncheck; print(attncheck.__version__)"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(SRC)}, stdout=subprocess.PIPE, check=True)
    assert done.stdout.decode().strip() == attncheck.__version__


@pytest.mark.parametrize(
    ("printed", "expected", "processes"),
    [
        ("Exclusive_Process, Disabled, 80000", GpuModes("Exclusive_Process", "Disabled", 80000 * 2**20), 1),
        ("Default, [N/A], 24576", GpuModes("Default", "[N/A]", 24 * 2**30), 3),
        ("Default, [N/A], 500", GpuModes("Default", "[N/A]", 500 * 2**20), 1),
        ("Default, Disabled, [N/A]", GpuModes("Default", "Disabled"), 10),
        ("No devices were found", None, 10),
        (None, None, 10),
    ],
)
def test_the_modes_of_a_gpu_are_those_that_nvidia_smi_prints_for_it(printed, expected, processes, monkeypatch):
    """A process needs 4 GiB of half its free memory; without a figure, of half its 80 GiB."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"of {device}"))
    monkeypatch.setattr(device, "first_line", lambda *words: printed if "--id=GPU-of 1" in words else "of another")
    monkeypatch.setattr(Cuda, "facts", lambda _gpu: Facts("H100", "9.0", 80 * 2**30, cache=50 * 2**20))
    assert Cuda(1).modes() == expected
    assert Cuda(1).most_processes() == processes
    assert expected is None or expected.is_shared == (expected.compute == "Default")


@pytest.mark.parametrize(
    ("hip", "major", "expected"), [(None, 9, True), (None, 7, True), (None, 6, False), ("6", 9, False)]
)
def test_mps_serves_gpus_of_nvidia_since_volta(hip, major, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    monkeypatch.setattr(torch.version, "hip", hip)
    assert Cuda().can_serve_several() == expected


def folders(environment):
    return {cache.library: str(cache.folder) for cache in kernel_caches(environment)}


def test_kernel_caches_lie_where_the_libraries_or_their_variables_put_them(monkeypatch):
    placed = {"TRITON_CACHE_DIR": "t", "TORCHINDUCTOR_CACHE_DIR": "i", "FLASHINFER_WORKSPACE_BASE": "f"}
    assert folders(placed) == {"triton": "t", "inductor": "i", "flashinfer": "f/.cache/flashinfer"}
    assert folders({"TRITON_HOME": "h"})["triton"] == "h/.triton/cache"
    found = folders({})
    inductor = pytest.importorskip("torch._inductor.runtime.cache_dir_utils").default_cache_dir()
    home = Path.home()
    assert found == {
        "triton": str(home / ".triton/cache"),
        "inductor": inductor,
        "flashinfer": str(home / ".cache/flashinfer"),
    }

    def nameless():
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(getpass, "getuser", nameless)
    assert "torchinductor_uid_" in folders({})["inductor"]


def test_files_of_a_cache_are_counted_and_kernels_by_their_ending(tmp_path):
    cache = KernelCache("triton", tmp_path / "cache", (".cubin", ".hsaco"))
    assert cache.contents() == CacheContents(0, 0, 0)
    for name, size in (("key/a.cubin", 100), ("key/a.json", 20), ("other/deep/b.hsaco", 3)):
        (tmp_path / "cache" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cache" / name).write_bytes(b"x" * size)
    (tmp_path / "cache" / "gone.cubin").symlink_to("nowhere")  # as a file that vanishes between the two looks
    assert cache.contents() == CacheContents(3, 123, 2)
