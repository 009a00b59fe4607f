"""The numbers of a backend's code are read, and nothing of it runs."""

from pathlib import Path

from attncheck.harness.fuzz.search import constants_of, sources_of

CODE = '''\
"""A docstring with 777 in it, and in text: 888."""
raise RuntimeError("imported")
TILE = 96
def attend(keys, splits=7):
    if keys % 48 == 1 or keys > 2 ** 30:
        return keys[1:5000]
'''


def test_numbers_of_comparisons_names_and_defaults_are_found(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(CODE)
    assert set(constants_of(f"{file}:attend")) == {96, 7, 48, 30}


def test_a_package_of_its_own_is_read_whole() -> None:
    names = {path.name for path in sources_of("triton_unified")}
    assert {"backend.py", "tiling.py", "attention.py"} <= names
    assert [path.name for path in sources_of("torch_sdpa")] == ["torch_sdpa.py"]


def test_what_has_no_source_has_no_numbers(tmp_path: Path) -> None:
    assert constants_of(str(tmp_path / "missing.py")) == ()
    assert constants_of("no.such.module:Mine") == ()
    (tmp_path / "broken.py").write_text("def (")
    assert constants_of(str(tmp_path / "broken.py")) == ()
