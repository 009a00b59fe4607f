"""Watches the worker of a serving engine, and writes a run file while it serves."""

import functools
import logging
import os
import threading
import time
from importlib import import_module
from multiprocessing.util import Finalize
from typing import Any

from attncheck.harness.device import collect_environment
from attncheck.harness.engine.events import ObserverSettings
from attncheck.harness.engine.findings import STOPPED, EngineCase, header_of, records_of
from attncheck.harness.engine.internals import check_internals
from attncheck.harness.engine.observer import EngineObserver
from attncheck.harness.engine.plugin import WatchSettings
from attncheck.harness.engine.vllm_runner import EngineHooks
from attncheck.reports.run_file.store import now, write_run

LOGGER = logging.getLogger("attncheck")

WRITE_EVERY_S = 10.0
"""Seconds between two writes of the run file."""

SERVED = EngineCase(
    id="served", description="requests of a server's clients", checks=("output", "token", "position", "write")
)
"""The case of requests that are not ours: prefix hits and further steps of a request may not occur."""


def watch_workers(settings: WatchSettings, wrapper_class: type[Any] | None = None) -> None:
    """Watch the worker that this process makes, if it makes one. A second call does nothing.

    ``wrapper_class``: vLLM's ``WorkerWrapperBase``, or another for a test.
    """
    wrapper_class = wrapper_class or import_module("vllm.v1.worker.worker_base").WorkerWrapperBase
    init_device = wrapper_class.init_device
    if hasattr(init_device, "__wrapped__"):
        return

    @functools.wraps(init_device)
    def watched(wrapper: Any, *args: Any, **keywords: Any) -> Any:
        made = init_device(wrapper, *args, **keywords)
        try:
            parallel = wrapper.worker.vllm_config.parallel_config
            if not wrapper.worker.rank and not parallel.data_parallel_rank:  # other ranks get the same batches
                ServedEngine(settings, wrapper.worker.model_runner).start()
        except Exception:
            LOGGER.exception("attncheck cannot watch this engine, which is not affected")
        return made

    wrapper_class.init_device = watched


class ServedEngine:
    """The worker of an engine, from :meth:`start` to the end of its process."""

    def __init__(self, settings: WatchSettings, runner: Any) -> None:
        self._settings = settings
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
        self._environment = collect_environment(str(runner.device))

    def start(self, *modules: Any) -> None:
        """Watch the runner of vLLM, or of these modules, and begin to write the run file."""
        try:
            check_internals()
            self.hooks.install(*modules)
        except Exception as error:  # noqa: BLE001 (the run file has to state it)
            self._observer.fail(error)
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
        with self.hooks.steps.lock:
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
