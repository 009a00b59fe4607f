"""Watches the worker of a serving engine, and writes a run file while it serves."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from attncheck.harness.device import collect_environment
from attncheck.harness.engine.events import ObserverResult, ObserverSettings
from attncheck.harness.engine.findings import EngineCase, joined, records_of
from attncheck.harness.engine.observer import EngineObserver
from attncheck.harness.engine.plugin import WatchSettings
from attncheck.harness.engine.vllm_runner import EngineHooks, watch_workers
from attncheck.harness.recording.kept_file import KeptFile
from attncheck.reports.run_file.store import now, read_run, write_run

WRITE_EVERY_S = 1.0
"""Seconds between two writes of the run file; vLLM may kill the process before it writes at its end."""

SERVED = EngineCase(
    id="served", description="requests of a server's clients", checks=("output", "token", "position", "write")
)
"""The case of requests that are not ours: prefix hits and further steps of a request may not occur."""


def watch_engine(settings: WatchSettings) -> None:
    """Watch the worker that this process makes, if it makes one. A second call does nothing."""
    watch_workers(lambda worker: ServedEngine(settings, worker).start())


class ServedEngine:
    """The worker of an engine, which is watched from :meth:`start` to the end of its process."""

    def __init__(self, settings: WatchSettings, worker: Any) -> None:
        self._settings, self._worker = settings, worker
        observed = ObserverSettings(judge_every=settings.judge_every, follow_one_of=settings.follow_one_of)
        self.hooks = EngineHooks(EngineObserver(observed))
        self._started, self._began_s = now(), time.monotonic()
        self._environment = collect_environment(str(worker.model_runner.device))
        self._written: tuple[int, str | None] = (0, None)
        self._case_id = ""  # until it is written

    def start(self) -> None:
        """Watch the worker, and write the run file from now on."""
        self.hooks.install(self._worker)
        self.run_file = KeptFile(self._settings.path, self.write, WRITE_EVERY_S)

    def write(self) -> None:
        """Write what was observed so far, unless it is written already. No file is written before the first step."""
        result = self.hooks.observer.result()
        state = (result.steps, result.failure)
        if state == self._written:
            return
        with _locked(self._settings.path.parent):
            self._write(result)
        self._written = state

    def _write(self, result: ObserverResult) -> None:
        """Write a case of this engine, beside those of the command's other engines."""
        path = self._settings.path
        earlier = [read_run(path)] if path.exists() else []
        if not self._case_id:
            num_others = sum(len(run.header.cases) for run in earlier)
            self._case_id = f"{SERVED.id}-{num_others + 1}" if num_others else SERVED.id
        description = f"{SERVED.description}, up to step {result.steps} at {now()}"
        case = SERVED.model_copy(update={"id": self._case_id, "description": description})
        own = records_of(case, result, self._environment, duration_s=time.monotonic() - self._began_s)
        notes = [f"outputs and pages of one in {self._settings.judge_every} steps were judged"]
        if self._settings.follow_one_of > 1:
            notes.append(f"one of {self._settings.follow_one_of} first blocks of prompts was followed")
        started = min([self._started, *(run.header.started for run in earlier)])
        run = joined([*earlier, own], started, self._settings.command, notes)
        aside = path.with_name(f"{path.stem}.{os.getpid()}.jsonl")
        aside.unlink(missing_ok=True)
        write_run(aside, run.header, run.records, run.errors)
        aside.replace(path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other engines from writing into ``folder`` at the same time."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
