"""The class that `attncheck new backend --kind vllm` writes passes, and its test; a fault in it is found."""

import pytest

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def folder(shell, tmp_path_factory):
    """A folder with the two files as they are written."""
    made = tmp_path_factory.mktemp("own")
    code, printed = shell("attncheck new backend mine --kind vllm", made)
    assert code == 0, printed
    return made


def test_what_is_written_passes(shell, folder):
    command = "attncheck run --backend vllm:./mine.py:Mine --case 'decode*'"
    code, printed = shell(f"VLLM_LOGGING_LEVEL=ERROR {command}", folder)
    assert code == 0, printed
    assert "vllm:./mine.py:Mine: PASSED: 4 cases right" in printed


def test_its_test_passes(shell, folder):
    code, printed = shell("VLLM_LOGGING_LEVEL=ERROR python -m pytest -q test_mine.py", folder)
    assert code == 0, printed
    assert " passed" in printed


def test_an_attention_that_is_wrong_is_found(shell, folder, tmp_path):
    text = (folder / "mine.py").read_text(encoding="utf-8")
    assert text.count(".tril(context)") == 1
    (tmp_path / "mine.py").write_text(text.replace(".tril(context)", ".tril(context + 1)"), encoding="utf-8")
    command = "attncheck run --backend vllm:./mine.py:Mine --case extend --check numerics"
    code, printed = shell(f"VLLM_LOGGING_LEVEL=ERROR {command}", tmp_path)
    assert code == 1, printed
    assert "perhaps: " in printed
