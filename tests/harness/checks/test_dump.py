"""Where a failing case's tensors go."""

from pathlib import Path
from typing import Any

import pytest
import torch

from attncheck.harness.checks.interface import dump_tensors


@pytest.mark.parametrize(
    ("backend", "name"), [("Mine", "Mine"), ("vllm:CPU_ATTN", "vllm:CPU_ATTN"), ("vllm:./a b.py:C", "vllm:._a_b.py:C")]
)
def test_the_file_is_named_by_case_and_backend_and_lies_in_the_folder(
    make_case: Any, tmp_path: Path, backend: str, name: str
) -> None:
    whole = torch.arange(1000)
    path = dump_tensors(tmp_path / "new", make_case(), 3, backend, {"part": whole[:2]})
    assert path == tmp_path / "new" / f"made.case.{name}.seed3.pt"
    content = torch.load(path, weights_only=True)
    assert content["part"].untyped_storage().nbytes() == 16
    assert content["seed"] == 3
