"""Watches the worker of a serving engine, and writes a run file while it serves."""

import os
import time
from typing import Any

from attncheck.harness.device import collect_environment
from attncheck.harness.engine.events import ObserverSettings
from attncheck.harness.engine.findings import STOPPED, EngineCase, header_of, records_of
from attncheck.harness.engine.observer import EngineObserver
from attncheck.harness.engine.plugin import WatchSettings
from attncheck.harness.engine.vllm_runner import EngineHooks, watch_workers
from attncheck.harness.recording.kept_file import KeptFile
from attncheck.reports.run_file.store import now, write_run

WRITE_EVERY_S = 10.0
"""Seconds between two writes of the run file."""

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
        self._observer = EngineObserver(
            ObserverSettings(judge_every=settings.judge_every, follow_one_of=settings.follow_one_of)
        )
        self.hooks = EngineHooks(self._observer)
        self._started, self._began_s = now(), time.monotonic()
        self._notes = [f"outputs and pages of one in {settings.judge_every} steps were judged"]
        if settings.follow_one_of > 1:
            self._notes.append(f"one of {settings.follow_one_of} first blocks of prompts was followed")
        self._written: tuple[int, str | None] = (0, None)
        self._environment = collect_environment(str(worker.model_runner.device))

    def start(self) -> None:
        """Watch the worker, and write the run file from now on."""
        self.hooks.install(self._worker)
        self.run_file = KeptFile(self._settings.path, self.write, WRITE_EVERY_S)

    def write(self) -> None:
        """Write what was observed so far, unless it is written already. No file is written before the first step."""
        result = self._observer.result()
        state = (result.steps, result.failure)
        if state == self._written:
            return
        records = records_of(SERVED, result, self._environment, duration_s=time.monotonic() - self._began_s)
        header = header_of([records], command=self._settings.command, notes=self._notes)
        header = header.model_copy(update={"started": self._started})
        errors = () if result.failure is None else (f"{STOPPED}{result.failure}",)
        path = self._settings.path
        aside = path.with_name(f"{path.stem}.{os.getpid()}.jsonl")
        aside.unlink(missing_ok=True)
        write_run(aside, header, records.records, errors)
        aside.replace(path)
        self._written = state
