"""``scripts/contract_changes.py`` lists the members of two files that differ."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

OLD = '''
class Builder:
    level: int = 0
    gone: int = 0
    def build(self, prefix: int) -> int:
        """Build."""
    @classmethod
    def same(cls): ...
    def renamed(self): ...
'''
NEW = '''
class Builder:
    level: int = 1
    def build(self, prefix: int) -> int:
        """Build; prefix is 0."""
    @classmethod
    def same(cls):
        return 1
    @staticmethod
    def fresh(): ...
    def renamed(self, more=None): ...
'''


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import contract_changes

    yield contract_changes
    sys.modules.pop("contract_changes")


def test_each_member_that_differs_is_listed(script, tmp_path):
    (tmp_path / "old.py").write_text(OLD)
    (tmp_path / "new.py").write_text(NEW)
    found = script.changes(str(tmp_path / "old.py"), str(tmp_path / "new.py"))
    kinds = {each["member"].removeprefix("Builder."): each["change"] for each in found}
    assert kinds == {
        "level": "changed",
        "gone": "removed",
        "build": "described",
        "fresh": "added",
        "renamed": "changed",
    }
    renamed = next(each for each in found if each["member"] == "Builder.renamed")
    assert (renamed["was"], renamed["now"]) == ("(self)", "(self, more=None)")
