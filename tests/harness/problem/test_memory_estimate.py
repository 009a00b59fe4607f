"""Memory that a case needs beside what the device has."""

from typing import Any

import pytest
import torch

from attncheck.harness.problem.memory_estimate import shortage


def test_what_torch_keeps_for_itself_is_free(monkeypatch: pytest.MonkeyPatch, make_case: Any) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (0, 2**40))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 2**20)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 2**34)
    assert shortage(make_case(), torch.device("cuda:0")) is None
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 2**20)
    assert "cuda:0 has 0.0 GiB free" in str(shortage(make_case(), torch.device("cuda:0")))
