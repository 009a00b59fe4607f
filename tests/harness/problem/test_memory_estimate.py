"""Memory that a case needs beside what the device, the host and the process have, and where it is judged."""

import pytest
import torch

from attncheck.harness.problem import sizes
from attncheck.harness.problem.sizes import judging_device, shortage

GIB = 2**30


@pytest.fixture
def held(monkeypatch):
    """The memory of a GPU of 1024 GiB; ``fraction``: of 1024, that torch may take."""
    held = {"free": 0, "allocated": 0, "reserved": 0, "fraction": 1024}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (held["free"], 1024 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: held["allocated"])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: held["reserved"])
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: held["fraction"] / 1024)
    return held


def test_what_torch_keeps_for_itself_is_free(held, make_case):
    held |= {"allocated": 2**20, "reserved": 16 * GIB}
    assert shortage(make_case(), torch.device("cuda:0")) is None
    held["reserved"] = 2**20
    assert "cuda:0 has 0.0 GiB free" in str(shortage(make_case(), torch.device("cuda:0")))


def test_torch_may_be_allowed_a_part_of_what_is_free(held, make_case, monkeypatch):
    monkeypatch.setattr(sizes, "needed_bytes", lambda _case, **_: 2 * GIB)
    held |= {"free": 1000 * GIB, "fraction": 4}
    assert shortage(make_case(), torch.device("cuda:0")) is None
    held |= {"allocated": 3 * GIB, "reserved": 3 * GIB}
    found = shortage(make_case(), torch.device("cuda:0"))
    assert found == "the case needs about 2.0 GiB, cuda:0 has 1.0 GiB free"


def test_the_process_may_have_less_than_the_host(make_case, monkeypatch):
    monkeypatch.setattr(sizes, "needed_bytes", lambda _case, **_: 2 * GIB)
    monkeypatch.setattr(sizes, "free_host_bytes", lambda: 64 * GIB)
    assert shortage(make_case(), torch.device("cpu")) is None
    monkeypatch.setattr(sizes, "free_own_bytes", lambda: GIB)
    assert shortage(make_case(), torch.device("cpu")) == "the case needs about 2.0 GiB, the process has 1.0 GiB free"


def test_a_small_case_is_judged_on_the_host_and_a_large_one_on_its_device(make_case):
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    short, long = make_case((1, 33), (1, 17)), make_case((4096, 4096))
    assert [judging_device(case, gpu) for case in (short, long)] == [cpu, gpu]
    assert judging_device(long, cpu) == cpu
