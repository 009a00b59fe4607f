"""Watches the worker of a serving engine, and writes a run file while it serves."""

import logging
import os
import threading
import time
from multiprocessing.util import Finalize
from typing import Any

from attncheck.harness.device import collect_environment
from attncheck.harness.engine.events import ObserverSettings
from attncheck.harness.engine.findings import STOPPED, EngineCase, header_of, records_of
from attncheck.harness.engine.observer import EngineObserver
from attncheck.harness.engine.plugin import WatchSettings
from attncheck.harness.engine.vllm_runner import EngineHooks, watch_workers
from attncheck.reports.run_file.store import now, write_run

LOGGER = logging.getLogger("attncheck")

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
    """The worker of an engine, from :meth:`start` to the end of its process."""

    def __init__(self, settings: WatchSettings, worker: Any) -> None:
        self._settings, self._worker = settings, worker
        self._observer = EngineObserver(
            ObserverSettings(judge_every=settings.judge_every, follow_one_of=settings.follow_one_of)
        )
        self.hooks = EngineHooks(self._observer)
        self._ended = threading.Event()
        self._started, self._began_s = now(), time.monotonic()
        self._notes = [f"outputs and pages of one in {settings.judge_every} steps were judged"]
        if settings.follow_one_of > 1:
            self._notes.append(f"one of {settings.follow_one_of} first blocks of prompts was followed")
        self._written: tuple[int, str | None] = (0, None)
        self._environment = collect_environment(str(worker.model_runner.device))

    def start(self) -> None:
        """Watch the worker, and begin to write the run file."""
        self.hooks.install(self._worker)
        Finalize(None, self.end, exitpriority=10)
        threading.Thread(target=self._keep_writing, name="attncheck-engine", daemon=True).start()

    def end(self) -> None:
        """Write the run file for the last time."""
        self._ended.set()
        self._write_or_log()

    def _keep_writing(self) -> None:
        while not self._ended.wait(WRITE_EVERY_S):
            self._write_or_log()

    def _write_or_log(self) -> None:
        try:
            self.write()
        except Exception:
            LOGGER.exception("attncheck could not write %s", self._settings.path)

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
