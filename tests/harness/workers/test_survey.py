"""Every backend of a family: why it can run or not, though one of them ends the process that loads it."""

import os
import signal
import sys
from types import ModuleType

import pytest
from inline_snapshot import snapshot

from attncheck.backends import registry
from attncheck.errors import BackendLoadError
from attncheck.harness.workers.limits import Limit
from attncheck.harness.workers.survey import survey

LIMIT = Limit(60)


@pytest.fixture
def library(monkeypatch):
    """A family of built-in backends by other names; ``deadly`` kills whatever loads it."""

    def load(ref):
        if ref == "some:deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        return load_as_ever(ref.removeprefix("some:"))

    load_as_ever = registry.load
    monkeypatch.setattr(registry, "load", load)
    monkeypatch.setattr(registry, "SURVEYS", {"some": "their_survey"})
    module = ModuleType("their_survey")
    module.member_names = lambda: ("reference", "deadly", "torch_sdpa", "vllm", "triton_unified:x")
    module.declared_by = lambda name: ({"dtype": ("float16", name)}, "NEVER")
    monkeypatch.setitem(sys.modules, "their_survey", module)
    return module


def test_each_backend_is_reported_and_one_that_ends_the_process_costs_itself_alone(library):
    found = {each.name: each for each in survey("some", "cpu", (), LIMIT)}
    assert list(found) == ["some:reference", "some:deadly", "some:torch_sdpa", "some:vllm", "some:triton_unified:x"]
    assert [each.name for each in found.values() if not each.reason] == ["some:reference", "some:torch_sdpa"]
    assert found["some:torch_sdpa"].declared == {"dtype": ("float16", "torch_sdpa")}
    assert found["some:torch_sdpa"].level == "NEVER"
    assert "SIGKILL" in found["some:deadly"].reason
    assert found["some:vllm"].reason == snapshot("vllm names many backends")
    assert found["some:triton_unified:x"].reason == snapshot("triton_unified takes no argument")


def test_a_library_that_is_missing_or_no_family_is_a_wrong_question(library):
    def missing():
        raise ImportError("No module named 'some'")

    library.member_names = missing
    with pytest.raises(BackendLoadError) as refused:
        survey("some", "cpu", (), LIMIT)
    assert str(refused.value) == snapshot("backend 'some:*': its library cannot be imported: No module named 'some'")
    with pytest.raises(BackendLoadError) as refused:
        survey("other", "cpu", (), LIMIT)
    assert str(refused.value) == snapshot("backend 'other:*': 'other' is no family of backends; write some:*")
