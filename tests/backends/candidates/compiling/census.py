"""Counts the kernels that a backend would compile for a suite on a GPU, and compiles a part of them.

    python census.py 90 triton_unified smoke --case 'window*' --compile 10

The harness runs its cases on the CPU. Launches are recorded and write nothing, so every judgement is replaced by one
that holds. Prints JSON: the number of kernels by name, and what compiling the first of them took.
"""

import argparse
import json
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from launches import recorded

from attncheck.backends import interpreter, registry
from attncheck.cases.loader import load_suite, select
from attncheck.harness.checks import cache_write, numerics
from attncheck.harness.checks.cudagraph import check, replay
from attncheck.harness.checks.cudagraph.recorder import Recorder, Recording
from attncheck.harness.checks.cudagraph.replay import ProbeProblems
from attncheck.harness.checks.findings import Holds
from attncheck.harness.run.evaluate import Examiner, RunPlan

CHECKS = ("numerics", "cache_write", "cudagraph")
"""Those that launch: others look at the same step, or repeat it with other contents."""


def launched(prepare):
    """Make the launches of a capture as ``DeviceRecorder`` does."""
    for _ in range(3):
        prepare()()
    return Recording(replay=lambda: None, launch=lambda: None)  # replaying compiles nothing


@contextmanager
def judging_nothing():
    """Examine Triton's backends on a CPU as if it were a GPU whose answers are all right."""
    with ExitStack() as stack:
        for where, name, value in (
            (interpreter, "unavailable_reasons", lambda device: []),
            (check, "recorder_for", lambda _device: Recorder("cuda", launched)),
            (replay, "step_fault", lambda *seen: None),
            (ProbeProblems, "truth", lambda *given: None),
            (numerics, "check_numerics", lambda *seen, explains=True: Holds({})),
            (cache_write, "judge_pool", lambda *seen: Holds({})),
            (cache_write, "_judge", _call),
        ):
            stack.enter_context(patch.object(where, name, value))
        yield


def _call(question):
    question.function(*question.arguments.values())


def kernels_of(capability, backend, suite, patterns):
    """Return the kernels of the cases that match ``patterns``, each once."""
    cases = tuple(select(load_suite(suite).cases, patterns))
    examiner = Examiner(RunPlan(cases=cases, backends=(registry.load(backend),), checks=CHECKS))
    with judging_nothing(), recorded(capability) as kernels:
        wrong = [record for record in examiner.run() if record.outcome not in ("passed", "unsupported")]
    assert not wrong, wrong[0]
    assert not examiner.blind, examiner.blind
    return kernels


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("capability", type=int)
    parser.add_argument("backend")
    parser.add_argument("suite")
    parser.add_argument("--case", action="append")
    parser.add_argument("--compile", type=int, default=0)
    given = parser.parse_args()
    kernels = kernels_of(given.capability, given.backend, given.suite, given.case or ["*"])
    compiled = [kernel.compile(given.capability) for kernel in kernels[: given.compile]]
    counts = Counter(kernel.name for kernel in kernels)
    sys.stdout.write(json.dumps({"kernels": counts, "compiled": compiled}))
