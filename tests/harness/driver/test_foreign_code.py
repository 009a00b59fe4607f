"""Entering foreign code: its exceptions come back with a name, and its settings do not stay."""

import os
from pathlib import Path

import pytest
import torch

from attncheck.harness.driver.foreign_code import StageError, call_backend

SETTINGS = {
    "dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "device": (torch.get_default_device, lambda: torch.set_default_device("meta")),
    "gradients": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "threads": (torch.get_num_threads, lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
    "determinism": (torch.are_deterministic_algorithms_enabled, lambda: torch.use_deterministic_algorithms(True)),
    "products": (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("medium")),
    "folder": (Path.cwd, lambda: os.chdir("/")),
}


def test_a_folder_that_is_gone_is_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def foreign():
        Path("gone").mkdir()
        os.chdir("gone")
        (tmp_path / "gone").rmdir()
        return "answer"

    assert call_backend("forward", foreign) == "answer"
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_settings_are_as_before(name, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read, change = SETTINGS[name]
    before = read()

    def foreign():
        change()
        assert read() != before, "the change must be one"
        if error is not None:
            raise error(name)

    if error is None:
        call_backend("forward", foreign)
    elif error is KeyboardInterrupt:  # only the user's interrupt passes through
        with pytest.raises(KeyboardInterrupt):
            call_backend("forward", foreign)
    else:
        with pytest.raises(StageError) as failure:
            call_backend("forward", foreign)
        assert failure.value.raised.error_type == "ValueError"
    assert read() == before
