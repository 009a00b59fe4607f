"""Signals that end a run: each raises KeyboardInterrupt, so that what was found is still shown. Loads no torch."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def signal_of(interrupt: KeyboardInterrupt) -> signal.Signals:
    """Return the signal that ended the run; SIGINT where Python raised the exception by itself."""
    return next((each for each in interrupt.args if isinstance(each, signal.Signals)), signal.SIGINT)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt where a signal comes that ends the run; a second one ends the process at once.

    A signal that is ignored, as SIGHUP is under nohup, stays ignored. Does nothing outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    taken = [number for number in _SIGNALS if before[number] not in (signal.SIG_IGN, None)]

    def interrupt(number: int, _frame: FrameType | None) -> None:
        for each in taken:
            signal.signal(each, signal.SIG_DFL)
        raise KeyboardInterrupt(signal.Signals(number))

    try:
        for number in taken:
            signal.signal(number, interrupt)
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])
