"""Signals that end a run come as exceptions, once; handlers of before are put back."""

import os
import signal
import threading

import pytest

from attncheck.harness.cli.common import interruptible, signal_of


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_first_signal_is_raised_and_the_second_ends_the_process(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with interruptible():
            with pytest.raises(KeyboardInterrupt) as caught:
                os.kill(os.getpid(), number)
            assert signal_of(caught.value) == number
            assert signal.getsignal(number) == signal.SIG_DFL
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_interrupt_without_a_signal_is_that_of_the_keyboard() -> None:
    assert signal_of(KeyboardInterrupt()) == signal.SIGINT


def test_another_thread_leaves_the_handlers_alone() -> None:
    found = []

    def work() -> None:
        with interruptible():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]
