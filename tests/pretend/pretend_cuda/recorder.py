"""A CUDA-graph recorder whose replays call ``forward`` again, with the arguments of the capture.

A replay returns nothing; the return value of ``forward`` is that of the capture.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from attncheck.harness.checks.cudagraph.recorder import CaptureError, Forward, Recording, violation_of
from pretend_cuda.device import PretendDevice

WARM_UPS = 2


class PythonRecorder:
    """Records in place of the product's ``DeviceRecorder``."""

    def __init__(self, pretend: PretendDevice) -> None:
        self._pretend, self.name = pretend, pretend.named.type

    def record(self, prepare: Callable[[], Forward]) -> Recording:
        for _ in range(WARM_UPS):
            prepare()()
        getattr(torch, self.name).synchronize()
        forward = prepare()
        try:
            with self._pretend.capturing():
                forward()
        except Exception as error:
            raise CaptureError((violation_of(_without_own_frames(error)),)) from error

        def replay() -> None:
            forward()
            self._pretend.current.synchronize()

        return Recording(replay=replay, launch=forward)


def _without_own_frames(error: Exception) -> Exception:
    """Return the error as torch would raise it, without frames of the pretend device after the backend's line."""
    last = last_foreign = error.__traceback__
    while last is not None:
        if Path(last.tb_frame.f_code.co_filename).parent != Path(__file__).parent:
            last_foreign = last
        last = last.tb_next
    if last_foreign is not None:
        last_foreign.tb_next = None
    return error
