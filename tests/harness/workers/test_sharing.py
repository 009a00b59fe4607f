"""Turns on a device: side by side, or alone while all others wait."""

import threading

from attncheck.harness.workers.sharing import SharedDevice


def test_a_turn_alone_waits_for_the_others_and_holds_up_later_ones():
    steps = []
    device = SharedDevice(is_shared_gpu=True)
    device.add(lambda: steps.append("ended"))
    is_waiting = threading.Event()

    def alone():
        is_waiting.set()
        with device.alone() as turn:
            assert turn.is_alone
            steps.append("alone")

    def later():
        with device.turn():
            steps.append("later")

    threads = [threading.Thread(target=alone), threading.Thread(target=later)]
    with device.turn():
        threads[0].start()
        assert is_waiting.wait(10)
        while not device._num_waiting:
            pass
        threads[1].start()
        threads[1].join(0.1)
        steps.append("first")
    for thread in threads:
        thread.join(10)
    assert steps == ["first", "ended", "alone", "later"]
