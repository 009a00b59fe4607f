"""Dumps from strangers, loaded as documented: tensors and names, or an exception, and no code of theirs."""

from pathlib import Path
from pickle import UnpicklingError
from random import Random

import pytest
import torch
from mutations import answered, damaged, try_inputs
from torch import Tensor

from attncheck.cases.loader import load_suite
from attncheck.harness.checks.interface import dump_tensors


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    content = {"query": torch.ones(2, 8), "block_table": torch.zeros(2, 2, dtype=torch.int32), "lse": None}
    return dump_tensors(tmp_path, load_suite("smoke").cases[0], 0, "Mine", content | {"block_size": 16})


@pytest.mark.parametrize("count", [150, pytest.param(4_000, marks=pytest.mark.slow)])
def test_whatever_a_dump_holds(dump: Path, tmp_path: Path, count: int) -> None:
    whole = dump.read_bytes()

    def load(path: Path) -> object:
        try:
            return torch.load(path, weights_only=True)
        except Exception:  # noqa: BLE001 (torch names none)
            return None

    def check(chance: Random) -> None:
        content = answered(load, tmp_path / "any.pt", damaged(chance, [whole]))
        if isinstance(content, dict):
            assert all(isinstance(value, Tensor | str | int | None) for value in content.values())

    try_inputs(check, count)


class _Command:
    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.made,)


def test_a_dump_runs_no_code(dump: Path, tmp_path: Path) -> None:
    made, evil = tmp_path / "made", tmp_path / "evil.pt"
    torch.save({"query": _Command(made)}, evil)
    with pytest.raises(UnpicklingError, match="weights_only"):
        torch.load(evil, weights_only=True)
    assert not made.exists()
    torch.load(evil, weights_only=False)
    assert made.exists()  # what the file would have done
