"""Detects that a backend lost the device. Loads no torch when imported.

After an illegal memory access every CUDA call of the process raises. The call that raises first may be one of the
harness. The check that ran is still recorded as ``crashed``.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from attncheck.errors import AttncheckError
from attncheck.harness.run.outcomes import OURSELVES
from attncheck.reports.run_file.causes import raised_at
from attncheck.reports.run_file.records import Crashed, Errored, Record, without_outcome

if TYPE_CHECKING:
    import torch

_REMEDY = "repeat with CUDA_LAUNCH_BLOCKING=1 or under compute-sanitizer"


class DeviceLostError(AttncheckError):
    """A backend lost the device, so this process can no longer use it. ``record``: that of the check."""

    def __init__(self, record: Crashed) -> None:
        self.record = record
        super().__init__(
            f"backend {record.backend}, case {record.case}, {record.stage}: {record.cause}; "
            "start a new process for what follows"
        )


def until_device_is_lost(records: Iterable[Record], device: "torch.device") -> Iterator[Record]:
    """Yield ``records`` of one case and backend, checking the device before each.

    Raises:
        DeviceLostError: the check of the next record lost the device, or left a CUDA error that the harness hit.
    """
    for record in records:
        if (cause := _loss(device) or _error_met(record)) is not None:
            raise DeviceLostError(_crashed_instead(record, cause))
        yield record


def is_device_error(error: Exception, device: "torch.device") -> bool:
    """Return whether CUDA raised ``error`` or the device is lost; out of memory is neither."""
    return _is_lasting(type(error).__name__, str(error)) or _loss(device) is not None


def _loss(device: "torch.device") -> str | None:
    """Return how the device was lost, with CUDA's message, or None if the device still works."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize(device if device.type == "cuda" else None)
    except RuntimeError as error:
        return None if _lacks_memory(str(error)) else f"the device was lost: {_first_line(error)}; {_REMEDY}"
    return None


def _error_met(record: Record) -> str | None:
    """Return the CUDA error that a call of the harness hit, or None.

    A library that ignores the status of its launch leaves the error for the next torch call to raise.
    """
    if not isinstance(record, Errored) or record.stage != OURSELVES:
        return None
    if not _is_lasting(record.error_type, record.message):
        return None
    words = record.traceback.rpartition(f"{record.error_type}: ")[2]  # message has no line breaks left
    return f"a CUDA error was left behind: {_first_line(words)}; {_REMEDY}"


def _is_lasting(error_type: str, message: str) -> bool:
    return error_type == "AcceleratorError" and not _lacks_memory(message)


def _lacks_memory(message: str) -> bool:
    return "out of memory" in message


def _first_line(error: object) -> str:
    return next(iter(str(error).splitlines()), "no message")


def _crashed_instead(record: Record, cause: str) -> Crashed:
    """Return the record of the same check as ``crashed``, with the line of the backend that raised, if there is one."""
    kept = {name: value for name, value in without_outcome(record).items() if name in Crashed.model_fields}
    stage, place = f"check {record.check}", ""
    if isinstance(record, Errored) and record.stage != OURSELVES:
        stage = f"{stage}, in {record.stage}"
        place = raised_at(record.traceback).replace(", in ", " in ")  # as the fault handler writes it
    return Crashed(**kept, stage=stage, cause=cause, output=place and f"{place}\n")
