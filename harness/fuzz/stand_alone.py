"""Writes a failure as one Python file that needs only torch and the backend's file. Loads no torch.

The file has the case, the call, the tensors in compressed form, the expected values and the comparison. Another process
writes it, and runs it before it is kept.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from attncheck.cases.model import Case
from attncheck.harness.fuzz.shrink import BackendProcess, Failure
from attncheck.reports.run_file.records import Ended, Errored

_LIMIT_S = 600.0


@dataclass(frozen=True)
class StandAloneRequest:
    """The failure of ``case`` in ``check``; ``summary``: one line about it. ``path``: the file to write.

    ``raised``: the type of the exception, or empty if none was raised. ``ends``: whether it crashes or hangs the
    process. ``may_refuse``: whether the backend may refuse the case, since it does not declare it.
    """

    ref: str
    case: Case
    check: str
    seed: int
    device: str
    path: str
    summary: str
    raised: str = ""
    ends: bool = False
    may_refuse: bool = False


@dataclass(frozen=True)
class StandAloneAnswer:
    """Whether the file was ``written`` and shows the failure; if not, ``reason`` has the cause.

    ``needs``: what must be installed besides torch and the backend's own file.
    """

    written: bool
    reason: str = ""
    needs: str = ""


def write_stand_alone(process: BackendProcess, failure: Failure, path: Path) -> StandAloneAnswer:
    """Write ``path`` if one step of the backend shows the failure."""
    record, case = failure.record, failure.case
    (reasons,) = process.reasons_against([case])
    request = StandAloneRequest(
        ref=process.backend.ref,
        case=case,
        check=record.check,
        seed=record.seed,
        device=process.device,
        path=str(path),
        summary=case.description,
        raised=record.error_type if isinstance(record, Errored) else "",
        ends=isinstance(record, Ended),
        may_refuse=bool(reasons),
    )
    command = [sys.executable, "-m", "attncheck.harness.fuzz.stand_alone_process"]
    request_json = TypeAdapter(StandAloneRequest).dump_json(request)
    environment = os.environ | process.backend.info.required_environment
    try:
        ended = subprocess.run(  # noqa: S603 (this Python)
            command,
            input=request_json,
            capture_output=True,
            env=environment,
            timeout=_LIMIT_S,
            check=False,
        )
        return TypeAdapter(StandAloneAnswer).validate_json(ended.stdout)
    except subprocess.TimeoutExpired:
        return StandAloneAnswer(False, f"it was not written within {_LIMIT_S:g} s")
    except ValidationError:
        last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        reason = f"the process that writes it ended with exit code {ended.returncode}: {last or 'no message'}"
        return StandAloneAnswer(False, reason)
