"""A run of a library with ``--within``: what the time limit or a signal leaves is on the page of its audit."""

import json
import os
import re
import signal

import pytest

from attncheck.harness.cli.app import main
from attncheck.harness.workers import survey
from attncheck.harness.workers.limits import TimeLimits
from attncheck.reports.run_file.header import SurveyedBackend
from attncheck.reports.run_file.store import read_run

pytestmark = pytest.mark.usefixtures("preloaded")

WORDS = ("--suite", "smoke", "--case", "decode", "--check", "numerics", "--device", "cpu", "--jobs", "2")

BACKEND = """\
import os
import time

from attncheck.backends.candidates.torch_sdpa import SDPABackend, SDPAImpl


class Impl(SDPAImpl):
    def forward(self, layer, query, *args, **kwargs):
        if query.dtype.itemsize == 4:
            {statement}
        return super().forward(layer, query, *args, **kwargs)


class Mine(SDPABackend):
    @staticmethod
    def get_impl_cls():
        return Impl
"""
"""A backend that executes a statement in float32 cases."""


@pytest.fixture
def audit(monkeypatch, tmp_path, capfd):
    """``audit(statement, form, *words)``: the exit code and the audit of a run of two backends, and its run file."""

    def run(statement, form, *words):
        file, runs, page = tmp_path / "mine.py", tmp_path / "run.jsonl", tmp_path / "audit"
        file.write_text(BACKEND.format(statement=statement))
        family = [SurveyedBackend(name=name, level="UNIFORM_BATCH") for name in (f"{file}:Mine", "torch_sdpa")]
        family.append(SurveyedBackend(name="vllm:ONE", reason="ONE needs a GPU"))
        monkeypatch.setattr(survey, "survey", lambda family_name, device, wishes, limit: tuple(family))
        code = main(["run", "vllm:*", *WORDS, *words, "--output", str(runs), "--report", f"{form}={page}"])
        capfd.readouterr()
        assert main(["report", str(runs), "--format", form]) == 0
        assert capfd.readouterr().out == page.read_text()
        return code, page.read_text(), read_run(runs)

    return run


def test_a_backend_that_uses_up_its_time_has_its_measured_part_and_what_it_left(audit, monkeypatch):
    """A hang in float32 takes the time of the backend: its float16 case, which comes before, is right."""
    shared = TimeLimits.shared  # the time of loading does not count
    monkeypatch.setattr(TimeLimits, "shared", lambda limits, _, backends, jobs: shared(limits, 5.0, backends, jobs))
    code, page, run = audit("time.sleep(1e6)", "audit", "--within", "1000")
    assert code == 1
    assert run.complete
    assert {record.outcome for record in run.records if record.backend == "torch_sdpa"} == {"passed"}
    mine = {record.case_id: record.outcome for record in run.records if record.backend == "Mine"}
    left = list(mine.values()).count("timed_out")
    assert (mine["decode.float16"], mine["decode.float32"]) == ("passed", "timed_out")
    assert re.findall(r"^- `(.*)`: (.*)$", page, re.MULTILINE) == [("Mine", f"{left} of {len(mine)} cases")]


def test_a_signal_ends_the_audit_with_a_page_of_what_was_measured(audit):
    """The second backend is done, and waits for the first, which sends the signal."""
    statement = f"time.sleep(3); os.kill({os.getpid()}, {signal.SIGTERM:d}); time.sleep(1e6)"
    code, page, run = audit(statement, "audit-json", "--within", "0")
    assert code == 128 + signal.SIGTERM
    assert not run.complete
    found = json.loads(page)
    assert found["complete"] is False
    done = {(record.backend, record.case_id) for record in run.records}
    assert ("torch_sdpa", "decode.float32") in done
    assert ("Mine", "decode.float32") not in done
