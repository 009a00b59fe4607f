"""A file that an engine's process writes again and again while it serves, and when it ends."""

import logging
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path

LOGGER = logging.getLogger("attncheck")


class KeptFile:
    """Calls ``write`` every ``every_s`` seconds from a thread, and when this process ends, until :meth:`cancel`.

    What ``write`` raises is logged: a failure must not disturb the engine, nor keep its process alive. ``path``: of
    what it writes.
    """

    def __init__(self, path: Path, write: Callable[[], None], every_s: float) -> None:
        self._path, self._write, self._every_s = path, write, every_s
        self._ended = threading.Event()
        self._at_exit = Finalize(None, self.end, exitpriority=10)
        threading.Thread(target=self._keep_writing, name="attncheck-file", daemon=True).start()

    def end(self) -> None:
        """Write for the last time."""
        self.cancel()
        self._write_or_log()

    def cancel(self) -> None:
        """Write no more."""
        self._ended.set()
        self._at_exit.cancel()

    def _keep_writing(self) -> None:
        while not self._ended.wait(self._every_s):
            self._write_or_log()

    def _write_or_log(self) -> None:
        try:
            self._write()
        except Exception:
            LOGGER.exception("attncheck could not write %s", self._path)
