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
from attncheck.harness.engine.findings import STOPPED, EngineCase, engines_in, header_of, records_of
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
        self._observer = EngineObserver(
            ObserverSettings(judge_every=settings.judge_every, follow_one_of=settings.follow_one_of)
        )
        self.hooks = EngineHooks(self._observer)
        self._started, self._began_s = now(), time.monotonic()
        self._notes = [f"outputs and pages of one in {settings.judge_every} steps were judged"]
        if settings.follow_one_of > 1:
            self._notes.append(f"one of {settings.follow_one_of} first blocks of prompts was followed")
        self._written: tuple[int, str | None] = (0, None)
        self._case_id: str | None = None  # until it is written
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
        with _locked(self._settings.path.parent):
            self._write(result)
        self._written = state

    def _write(self, result: ObserverResult) -> None:
        """Write a case of this engine, beside those of the command's other engines."""
        path = self._settings.path
        errors = [] if result.failure is None else [f"{STOPPED}{result.failure}"]
        engines, started = [], self._started
        if path.exists():
            run = read_run(path)
            engines, started, errors = engines_in(run), run.header.started, [*run.errors, *errors]
        case_id = self._case_id or (f"{SERVED.id}-{len(engines) + 1}" if engines else SERVED.id)
        description = f"{SERVED.description}, up to step {result.steps} at {now()}"
        case = SERVED.model_copy(update={"id": case_id, "description": description})
        own = records_of(case, result, self._environment, duration_s=time.monotonic() - self._began_s)
        engines = [*(each for each in engines if each.case.id != case_id), own]
        header = header_of(engines, started, command=self._settings.command, notes=self._notes)
        aside = path.with_name(f"{path.stem}.{os.getpid()}.jsonl")
        aside.unlink(missing_ok=True)
        write_run(aside, header, [record for each in engines for record in each.records], dict.fromkeys(errors))
        aside.replace(path)
        self._case_id = case_id


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
