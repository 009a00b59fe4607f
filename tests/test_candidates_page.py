"""docs/candidates.md and docs/triton-kernels.md are true: every candidate is named, and commands do what the pages state."""

import re
from pathlib import Path

import pytest

from attncheck.backends.registry import FAMILIES, builtin_names, known_names

DOCS = Path(__file__).resolve().parent.parent / "docs"
TEXT = (DOCS / "candidates.md").read_text(encoding="utf-8")
TRITON = (DOCS / "triton-kernels.md").read_text(encoding="utf-8")
RUN = re.compile(r"^```console\n\$ (.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_candidate_is_named() -> None:
    named = re.findall(r"^\| `(\w+)(?::NAME)?` \|", TEXT, re.MULTILINE)
    assert sorted(named) == sorted(
        name for name in known_names() if name in {*builtin_names(), "xformers_vllm", *FAMILIES}
    )


@pytest.mark.slow
def test_an_interpreted_candidate_runs_as_the_page_states(shell, assert_printed, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="nothing is interpreted without Triton")
    ((command, output),) = RUN.findall(TEXT)
    code, printed = shell(command, tmp_path)
    assert code == 0, printed
    assert_printed(output, printed)


@pytest.mark.slow
def test_a_kernel_of_triton_runs_as_the_page_states(shell, assert_printed, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="nothing is interpreted without Triton")
    (file,) = re.findall(r"^```python\n(.*?)^```$", TRITON, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.py").write_text(file, encoding="utf-8")
    ((command, output),) = RUN.findall(TRITON)
    code, printed = shell(f"env -u TRITON_INTERPRET {command}", tmp_path)
    assert code == 0, printed
    assert_printed(output, printed)
