"""What docs/ shows is what attncheck reads."""

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from attncheck.backends.conventions import Conventions
from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite
from attncheck.cases.model import question
from attncheck.harness.expectations import load_expectations
from attncheck.reference.spec import CHECKS, FEATURES, CacheSpec, LayerSpec, MLASpec, OutputQuantSpec

DOCS = Path(__file__).resolve().parent.parent / "docs"
TEXT = (DOCS / "case-files.md").read_text(encoding="utf-8")
CASE_FILE, EXPECTED = re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_the_case_file_is_one(tmp_path: Path) -> None:
    path = tmp_path / "name.yaml"
    path.write_text(CASE_FILE, encoding="utf-8")
    cases = load_suite(str(path)).cases
    assert [case.id for case in cases] == [f"decode.{d}-{b}" for d in ("float16", "bfloat16") for b in (16, 32)]
    assert question(cases[0])["layer"]["logits_soft_cap"] == 30.0


def test_the_expectation_file_is_one(tmp_path: Path) -> None:
    path = tmp_path / "known.yaml"
    path.write_text(EXPECTED, encoding="utf-8")
    (entry,) = load_expectations(path)
    assert entry.expectation.fits_case("smoke", "window-decode")


def test_the_backend_is_one_and_every_feature_and_convention_is_told(tmp_path: Path) -> None:
    text = (DOCS / "backends.md").read_text(encoding="utf-8")
    program, builder = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    path = tmp_path / "mine.py"
    path.write_text(program, encoding="utf-8")
    assert load(f"{path}:Mine").backend.conventions.lse_base == "2"
    shown: dict[str, Any] = {}
    exec(builder, shown)
    levels = [shown["Builder"].get_cudagraph_support(None, SimpleNamespace(sliding_window=w)).name for w in (None, 8)]
    assert levels == ["UNIFORM_BATCH", "NEVER"]
    told = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(told) == sorted(FEATURES)
    assert all(f"`{field.name}`" in text for field in fields(Conventions))


def test_every_key_and_check_is_named() -> None:
    for kind in (LayerSpec, CacheSpec, MLASpec, OutputQuantSpec):
        for name in (field.name for field in fields(kind)):
            assert name in TEXT, f"docs/case-files.md does not name {name}"
    judged = (DOCS / "how-it-judges.md").read_text(encoding="utf-8")
    for check in CHECKS:
        assert f"| `{check}` |" in judged
