"""Turns signals that end a run into KeyboardInterrupt, so that its findings are still reported. Loads no torch."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def signal_of(interrupt: KeyboardInterrupt) -> signal.Signals:
    """Return the signal that ended the run; SIGINT if Python raised the exception itself."""
    return next((each for each in interrupt.args if isinstance(each, signal.Signals)), signal.SIGINT)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first signal that ends a run; a second signal kills the process.

    A signal that is ignored, as SIGHUP under nohup, stays ignored. Has no effect outside the main thread.
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
