"""Turns on a device: side by side, or alone while all others wait."""

import threading

from attncheck.harness.workers.sharing import SharedDevice


class FakeProcesses:
    """Processes on a device; ``ended``: how often all of them were ended."""

    def __init__(self):
        self.ended = 0

    def end_all(self):
        self.ended += 1


def test_a_turn_is_shared_if_another_overlaps_it_from_either_side():
    device = SharedDevice(3, is_gpu=True)
    with device.turn() as before:
        pass
    with device.turn() as outer:
        assert not outer.is_shared
        with device.turn() as inner:
            assert inner.is_shared
        assert outer.is_shared
    assert not before.is_shared


def test_a_turn_alone_waits_for_the_others_and_holds_up_later_ones():
    device, processes = SharedDevice(3, is_gpu=True), FakeProcesses()
    device.add(processes)
    steps = []
    is_waiting = threading.Event()

    def alone():
        is_waiting.set()
        with device.alone() as turn:
            assert turn.is_alone
            steps.append(f"alone, ended {processes.ended}")

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
    assert steps == ["first", "alone, ended 1", "later"]


def test_the_processes_of_a_cpu_pause_and_stay():
    device, processes = SharedDevice(3), FakeProcesses()
    device.add(processes)
    with device.alone():
        pass
    assert (processes.ended, device.can_repeat) == (0, False)


def test_the_end_of_another_process_counts_and_its_own_does_not():
    device = SharedDevice(2, is_gpu=True)
    with device.turn() as turn:
        device.count_end()
        assert not device.have_others_ended(turn)
        device.count_end()
        assert device.have_others_ended(turn)
