"""What a backend leaves behind in the interpreter is seen; what libraries do by themselves is not."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck.harness.checks.timing.hooks import active_modes, added_kernels, replaced, tracers


def test_nothing_is_left_behind_by_a_compiler():
    compiled = torch.compile(lambda tensor: tensor * 2, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert (replaced(), added_kernels()) == ((), ())


@pytest.mark.parametrize(
    ("owner", "name", "told"), [(torch.Tensor, "copy_", "torch.Tensor.copy_"), (torch, "randperm", "torch.randperm")]
)
def test_what_is_replaced_is_named(owner, name, told):
    was = vars(owner).get(name)
    setattr(owner, name, lambda *_: None)
    try:
        assert replaced() == (told,)
    finally:
        delattr(owner, name)
        if was is not None:
            setattr(owner, name, was)
    assert replaced() == ()


def test_a_name_of_its_own_is_nobodys_business(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "name_of_a_library", 1, raising=False)
    assert replaced() == ()


def test_kernels_of_aten_are_named_while_they_are_registered():
    library = torch.library.Library("aten", "IMPL")
    library.impl("clone", lambda tensor, *, memory_format=None: tensor, "CPU")
    try:
        assert added_kernels() == ("aten/clone/CPU",)
    finally:
        library._destroy()
    assert added_kernels() == ()


def test_modes_and_tracers():
    before, was = active_modes(), sys.getprofile()
    with TorchDispatchMode():
        assert active_modes() == (before[0] + 1, before[1])
    own = lambda *_: None  # noqa: E731
    sys.setprofile(own)
    try:
        found = tracers()
    finally:
        sys.setprofile(was)
    assert found[0] is own
    assert tracers()[0] is was
