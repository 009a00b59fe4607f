"""``--expect NAME`` is a file of the user's, or one that attncheck brings."""

from pathlib import Path

import pytest

from attncheck.harness.run.expectations import expectation_file, load_expectations

OWN = sorted((Path(__file__).resolve().parents[3] / "docs" / "expected").glob("*.yaml"))


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.stem)
def test_a_file_of_attncheck_is_named_without_its_path(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = expectation_file(Path(path.stem))
    assert found.samefile(path)
    assert load_expectations(found)


def test_a_file_of_the_user_comes_first_and_other_names_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("missing", "missing.yaml", "folder/vllm-cpu-attn"):
        assert expectation_file(Path(name)) == Path(name)
    (tmp_path / "vllm-cpu-attn").write_text("")
    assert expectation_file(Path("vllm-cpu-attn")) == Path("vllm-cpu-attn")
