"""The GPUs that processes of a run may use side by side, and the variables by which each process sees one."""

from types import SimpleNamespace

import pytest
import torch

from attncheck.errors import QuestionError
from attncheck.harness.device import Cuda
from attncheck.harness.run.evaluate import environment_of
from attncheck.harness.run.preparation import gpu_variables, gpus_alike, refuse_other_gpu


@pytest.mark.parametrize(
    ("count", "given", "expected"),
    [
        (2, {}, ["0", "1"]),
        (2, {"CUDA_VISIBLE_DEVICES": "3,1"}, ["3", "1"]),
        (2, {"CUDA_VISIBLE_DEVICES": "GPU-aa, GPU-bb"}, ["GPU-aa", "GPU-bb"]),
        (2, {"CUDA_VISIBLE_DEVICES": "5,4,-1,2"}, ["5", "4"]),
        (1, {"CUDA_VISIBLE_DEVICES": "MIG-aa,MIG-bb"}, ["MIG-aa"]),
        (2, {"HIP_VISIBLE_DEVICES": "3,1"}, ["0", "1"]),
    ],
)
def test_each_process_sees_one_of_the_gpus_that_are_visible(
    count: int, given: dict[str, str], expected: list[str]
) -> None:
    assert gpu_variables(count, given, Cuda.visible_variables()) == [
        {"CUDA_VISIBLE_DEVICES": each} for each in expected
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["0", "1"]),
        ({"HIP_VISIBLE_DEVICES": "3,1", "CUDA_VISIBLE_DEVICES": "0,2"}, ["3", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, ["2", "3"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, ["0", "1"]),
    ],
)
def test_rocm_gets_both_variables_and_counts_within_those_of_its_runtime(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: list[str]
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    found = gpu_variables(2, given, Cuda.visible_variables())
    assert found == [{"HIP_VISIBLE_DEVICES": each, "CUDA_VISIBLE_DEVICES": each} for each in expected]


def gpu(uuid: str, *, name: str = "H100", minor: int = 0, memory: int = 80) -> SimpleNamespace:
    sizes = {"total_memory": memory * 2**30, "L2_cache_size": 50 * 2**20, "multi_processor_count": 132}
    return SimpleNamespace(name=name, major=9, minor=minor, uuid=uuid, **sizes)


def machine(monkeypatch: pytest.MonkeyPatch, *gpus: SimpleNamespace) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])


def test_gpus_of_another_kind_than_the_first_are_left_out_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu("a"), gpu("b", memory=40), gpu("c"), gpu("d", minor=1), gpu("e", name="H200"))
    gpus, notes = gpus_alike("cuda")
    assert [(each.uuid, each.variables) for each in gpus] == [
        ("a", {"CUDA_VISIBLE_DEVICES": "0"}),
        ("c", {"CUDA_VISIBLE_DEVICES": "2"}),
    ]
    assert [note.partition(" (")[0] for note in notes] == ["GPU 1", "GPU 3", "GPU 4"]
    assert notes[0] == (
        "GPU 1 (H100, compute capability 9.0, 40.0 GiB) is not used: it is not of the kind of GPU 0 "
        "(H100, compute capability 9.0, 80.0 GiB)"
    )


def test_a_device_with_a_number_is_one_gpu_and_a_cpu_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpu("a"), gpu("b"))
    assert [gpus_alike(device) for device in ("cpu", "cuda:1")] == [((), ())] * 2


def test_a_process_on_another_gpu_or_in_another_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    here = environment_of("cpu")
    monkeypatch.setattr("attncheck.harness.run.evaluate.collect_environment", lambda device: here)
    machine(monkeypatch, gpu("a"))
    refuse_other_gpu("cuda", "a", here)
    with pytest.raises(QuestionError, match=r"^the process sees the GPUs a, and has to use b alone$"):
        refuse_other_gpu("cuda", "b", here)
    with pytest.raises(QuestionError, match=r"^driver on GPU a is None, and '570.1' in the run$"):
        refuse_other_gpu("cuda", "a", here.model_copy(update={"driver": "570.1"}))
    machine(monkeypatch, gpu("a"), gpu("b"))
    with pytest.raises(QuestionError, match=r"^the process sees the GPUs a, b, and has to use a alone$"):
        refuse_other_gpu("cuda", "a", here)
