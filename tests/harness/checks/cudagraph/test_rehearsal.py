"""What a rehearsal finds: waits by any name, copies from the host, and the words for what was raised."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attncheck.harness.checks.cudagraph import recorder
from attncheck.harness.checks.cudagraph.recorder import SYNCHRONISED, Violation, rehearse, violation_of
from attncheck.harness.device import Cuda

HERE = Path(__file__)


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Files outside of the current folder are named in full."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def gpu(monkeypatch, elsewhere):
    """A GPU to rehearse on, with no debug mode."""
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)


STREAM = torch.Stream(stream_id=0, device_index=0, device_type=1)  # of CUDA, which need not be there
wait = STREAM.synchronize  # by a name of its own


def rehearsed(call, own, lines=()):
    """What a forward of ``lines`` and then ``call`` does that a capture would not allow."""
    exec(compile("\n".join(["def forward():", *lines, f"    {call}"]), str(HERE), "exec"), own)
    return rehearse(own["forward"], Cuda())


@pytest.mark.parametrize("call", ["STREAM.synchronize()", "wait()"])
def test_what_the_debug_mode_lets_pass_is_named_as_well(gpu, call):
    found = rehearsed(call, dict(globals()))
    assert (found.kind, found.where) == ("host read", f"{HERE}:2 in forward")
    assert sys.getprofile() is None


def test_another_profiler_is_left_alone(gpu):
    def watch(*_):
        pass

    sys.setprofile(watch)
    try:
        assert rehearse(lambda: None, Cuda()) is None
        found = sys.getprofile()
    finally:
        sys.setprofile(None)
    assert found is watch


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch raises where a CPU build has no GPU")
@pytest.mark.parametrize(
    "call",
    [
        "torch.tensor([1, 2], device='cuda')",
        "torch.as_tensor([1, 2], device='cuda')",
        "torch.ones(2).to('cuda')",
        "torch.ones(2).cuda()",
        "torch.ones(2).new_tensor([1], device='cuda')",
    ],
)
def test_a_copy_to_the_device_is_no_host_read(gpu, monkeypatch, call):
    monkeypatch.setattr(recorder, "SYNCHRONISED", "not compiled with CUDA enabled")
    found = rehearsed(call, {"torch": torch, "__name__": "backend"})
    assert (found.kind, found.where) == ("host copy", f"{HERE}:2 in forward")


@pytest.mark.parametrize(
    ("call", "message"),
    [("torch.ones(2).copy_(META)", "Cannot copy out of meta"), ("META.tolist()", "Cannot copy out of meta")],
)
def test_a_copy_from_the_device_is_a_host_read_though_one_to_it_has_failed_before(gpu, monkeypatch, call, message):
    monkeypatch.setattr(recorder, "SYNCHRONISED", message)
    own = {"torch": torch, "META": torch.ones(2, device="meta"), "__name__": "backend"}
    found = rehearsed(
        f"    {call}", own, ["    try:", "        torch.tensor([1], device='hpu')", "    except Exception:"]
    )
    assert (found.kind, found.where) == ("host read", f"{HERE}:5 in forward")


def test_the_expression_that_waited_is_named_though_another_error_came_of_it(elsewhere):
    of_torch = {"__name__": "torch._tensor"}
    exec(f"def item():\n    raise RuntimeError({SYNCHRONISED!r})", of_torch)
    rows = SimpleNamespace(item=of_torch["item"])

    def read():
        return [0] * (1 + rows.item())

    def forward():
        try:
            read()
        except RuntimeError as error:
            raise ValueError("no lengths") from error

    with pytest.raises(ValueError, match="no lengths") as caught:
        forward()
    where = f"{HERE}:{read.__code__.co_firstlineno + 1} in read"
    assert violation_of(caught.value) == Violation("host read", "rows.item()", where)


def test_without_a_line_of_the_backend_the_message_has_no_place():
    assert violation_of(RuntimeError(SYNCHRONISED)) == Violation("host read", SYNCHRONISED)
    assert violation_of(RuntimeError()) == Violation("error", "RuntimeError: ")
