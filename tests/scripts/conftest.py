"""Modules of the folder scripts/, which is no package."""

from importlib import import_module
from pathlib import Path

import pytest


@pytest.fixture
def script(monkeypatch):
    """``script("gpu_evidence")``: a module of the folder."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent.parent / "scripts"))
    return import_module
