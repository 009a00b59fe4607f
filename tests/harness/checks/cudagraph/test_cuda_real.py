"""Real CUDA graphs, where there is a GPU: a replay computes anew, and what cannot be captured is named."""

from functools import partial
from pathlib import Path

import pytest
import torch

from attncheck.harness.checks.cudagraph.recorder import CaptureError, Violation, recorder_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HERE = Path(__file__)


def test_a_real_graph_computes_anew_in_the_same_memory():
    x, out = torch.ones(4, 4, device="cuda"), torch.zeros(4, 4, device="cuda")
    recording = recorder_for(x.device).record(lambda: partial(torch.mm, x, x, out=out))
    x.fill_(2.0)
    out.fill_(torch.nan)
    recording.replay()
    assert out.cpu().eq(16.0).all()


def test_a_real_host_read_is_named_and_the_next_recording_works(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # files outside of the current folder are named in full
    x, out = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
    recorder = recorder_for(x.device)

    def reading():
        out.fill_(x.sum().item())

    def copying():
        out.copy_(torch.tensor([1.0] * 4, device="cuda"))

    def waiting():
        event = torch.cuda.Event()
        event.record()
        event.synchronize()

    def querying():  # which no debug mode sees: only the capture fails
        event = torch.cuda.Event()
        event.record()
        event.query()

    with pytest.raises(CaptureError) as caught:
        recorder.record(lambda: reading)
    where = f"{HERE}:{reading.__code__.co_firstlineno + 1} in reading"
    assert caught.value.violations == (Violation("host read", "x.sum().item()", where),)
    with pytest.raises(CaptureError, match=r"^host copy: torch\.tensor\(.*in copying$"):
        recorder.record(lambda: copying)
    with pytest.raises(CaptureError, match=r"^host read: event\.synchronize\(\).*in waiting$"):
        recorder.record(lambda: waiting)
    with pytest.raises(CaptureError, match="in querying"):
        recorder.record(lambda: querying)
    recording = recorder.record(lambda: partial(torch.add, x, x, out=out))
    x.fill_(3.0)
    recording.replay()
    assert out.cpu().eq(6.0).all()
