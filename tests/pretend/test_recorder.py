"""The recorder that replays Python: what it refuses at capture, and what a replay reads."""

import inspect

import pytest
import torch
from pretend_cuda import present
from pretend_cuda.recorder import PythonRecorder

from attncheck.harness.checks.cudagraph.recorder import CaptureError


def test_a_replay_reads_what_its_inputs_hold_by_then_and_keeps_what_was_bound():
    with present() as device:
        given, output = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
        numbers = iter([10, 20, 30])

        def prepare():
            bound = next(numbers)  # two warm-ups and the capture
            return lambda: output.copy_(given * bound)

        recording = PythonRecorder(device).record(prepare)
        assert output.tolist() == [30, 30, 30]
        given.fill_(2)
        recording.replay()
        assert output.tolist() == [60, 60, 60]


def forward_that_reads(given):
    return given.sum().item()


def test_a_forward_that_reads_on_the_host_is_refused_at_its_line():
    with present() as device:
        given = torch.ones(3, device="cuda")
        with pytest.raises(CaptureError) as caught:
            PythonRecorder(device).record(lambda: lambda: forward_that_reads(given))
        lines, first = inspect.getsourcelines(forward_that_reads)
        (violation,) = caught.value.violations
        assert (violation.kind, violation.call) == ("host read", lines[1].strip().removeprefix("return "))
        assert violation.where.endswith(f"test_recorder.py:{first + 1} in forward_that_reads")
        torch.cuda.synchronize()  # no capture goes on


def test_a_forward_that_synchronises_is_refused():
    with present() as device, pytest.raises(CaptureError, match="not permitted when stream is capturing"):
        PythonRecorder(device).record(lambda: _synchronise_in_capture(device))


def _synchronise_in_capture(device):
    return lambda: torch.cuda.synchronize() if device.is_capturing else None
