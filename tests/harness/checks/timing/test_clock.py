"""Clocks, on a device that is simulated in virtual time: what counts, what does not, and who gets caught."""

import gc

import pytest
import torch

from attncheck.harness.checks.timing import clock
from attncheck.harness.checks.timing.clock import GUARDS, LONGEST_HOLD_NS, HostClock, clock_for

US = 1_000


def settled(timer, call, **around):
    """The tenth sample: holds have been learnt by then."""
    return [timer.time(call, **around) for _ in range(10)][-1]


def close(ns, share=1e-4):
    return pytest.approx(ns, rel=share)


@pytest.mark.parametrize("kernel_ns", [10 * US, 100 * US, 1_000 * US, 10_000 * US])
def test_gaps_between_launches_do_not_count(device, kernel_ns):
    def step():
        for _ in range(5):
            device.spend(300 * US)  # Python, far slower than the device
            device.work(kernel_ns)

    timer = device.clock
    assert settled(timer, step) == close(5 * kernel_ns)
    assert (timer.num_behind, timer.num_late) == (0, 0)


def test_what_goes_before_and_after_does_not_count(device):
    order = []

    def issue(name, ns):
        return lambda: (order.append(name), device.work(ns))

    timer = device.clock
    flush, copy = issue("before", 700 * US), issue("after", 900 * US)
    assert settled(timer, issue("call", 50 * US), before=flush, after=copy) == close(50 * US)
    assert order == ["before", "call", "after"] * 10
    assert timer.num_late == 0


def test_work_that_another_stream_does_in_between_counts_once(device):
    def step():
        device.work(20 * US)
        device.work(80 * US, on="side", behind=["main"])
        device.work(10 * US, behind=["side"])

    timer = device.clock
    assert settled(timer, step) == close(110 * US)
    assert timer.num_late == 0


def test_work_left_on_another_stream_counts_to_its_end(device):
    def step():
        device.work(20 * US)
        device.work(400 * US, on="side", behind=["main"])

    timer = device.clock
    times = [timer.time(step) for _ in range(20)]
    assert all(420 * US <= ns <= 440 * US for ns in times)
    assert times[-1] == close(424 * US)  # 4 us until it is issued; not the time until the host sees the end
    assert timer.num_late == timer.num_taken == 20 - GUARDS


def test_work_that_does_not_wait_for_the_held_stream_counts_as_well(device):
    def step():
        device.spend(30 * US)
        device.work(400 * US, on="side")

    timer = device.clock
    times = [timer.time(step, before=lambda: device.work(1_000 * US)) for _ in range(20)]
    assert all(400 * US <= ns <= 460 * US for ns in times)
    assert device.held == []


def test_a_host_that_is_late_twice_in_the_warm_up_spoils_no_time(device):
    timer = device.clock
    times = []
    for number in range(20):
        device.wake_ns = 500 * US if number in (1, 2) else 6 * US
        times.append(timer.time(lambda: device.work(50 * US)))
    assert times[GUARDS:] == [close(50 * US)] * (20 - GUARDS)
    assert (timer.num_late, timer.is_overlapped) == (0, False)
    assert len(device.held) == 20 - GUARDS


def test_a_host_that_is_slow_to_wake_up_after_a_long_call_is_not_late(device):
    timer = device.clock
    timer.time(lambda: device.work(50 * US))  # the time of an idle device is measured here
    device.wake_ns = 70 * US
    assert settled(timer, lambda: device.work(6_000 * US)) == close(6_000 * US)
    assert timer.num_late == 0

    def leave_work():
        device.work(6_000 * US)
        device.work(200 * US, on="side", behind=["main"])

    assert settled(timer, leave_work) == close(6_204 * US, share=0.02)
    assert timer.num_late > 0


def test_where_the_device_is_never_held_back_the_host_has_not_fallen_behind(device):
    timer = device.clock
    for _ in range(10):
        timer.time(lambda: device.work(400 * US, on="side"))
    assert (timer.is_overlapped, timer.num_behind, device.held) == (True, 0, [])


def test_a_call_that_leaves_its_own_stream_current_is_timed_to_the_end_of_both(device):
    def step():
        device.stream = "side"
        device.work(400 * US)

    timer = device.clock
    copied = []
    times = [timer.time(step, after=lambda: copied.append(device.stream)) for _ in range(20)]
    assert all(400 * US <= ns <= 440 * US for ns in times)
    assert set(copied) == {"main"}
    assert device.stream == "main"


def test_a_call_that_leaves_an_idle_stream_current_is_timed_to_the_end_of_its_work(device):
    def step():
        device.work(400 * US, on="main")
        device.stream = "side"

    timer = device.clock
    times = [timer.time(step) for _ in range(10)]
    assert all(400 * US <= ns <= 440 * US for ns in times)


def test_a_call_that_waits_for_the_device_is_timed_with_its_gaps(device):
    def step():
        device.work(100 * US)
        device.wait_for("main")
        device.spend(40 * US)
        device.work(100 * US)

    timer = device.clock
    times = [timer.time(step) for _ in range(40)]
    assert all(240 * US <= ns <= 270 * US for ns in times)
    assert timer.num_behind == timer.num_taken
    assert len(device.held) < 20
    assert device.held[-1] == LONGEST_HOLD_NS  # and none in vain after that


def test_the_hold_is_as_long_as_issuing_takes(device):
    slow = iter([10**9])  # the first call compiles

    def step():
        device.spend(next(slow, 200 * US))
        device.work(30 * US)

    timer = device.clock
    assert settled(timer, step) == close(30 * US)
    assert 200 * US < device.held[-1] < 400 * US


def test_an_idle_device_is_no_work(device):
    assert settled(device.clock, lambda: None) == 0


def test_the_host_clock_takes_what_lies_between(monkeypatch):
    now, order = [0], []

    def step(name, ns):
        def act():
            order.append(name)
            now[0] += ns

        return act

    monkeypatch.setattr(clock, "host_ns", lambda: now[0])
    timer = HostClock(wait=step("wait", 5))
    assert timer.time(step("call", 70), before=step("before", 1_000), after=step("after", 1_000)) == 75
    assert order == ["before", "wait", "call", "wait", "after"]


def test_no_garbage_is_collected_under_a_clock(device):
    seen = []
    for timer in (HostClock(), device.clock):
        timer.time(lambda: seen.append(gc.isenabled()))
        with pytest.raises(LookupError):
            timer.time(lambda: {}["gone"])
        assert gc.isenabled()
    assert seen == [False, False]


def test_the_host_clock_does_not_look_clocks_up(monkeypatch):
    for name in ("perf_counter_ns", "perf_counter", "monotonic_ns"):
        monkeypatch.setattr(f"time.{name}", lambda: 0)
    product = torch.ones(200, 200)
    assert HostClock().time(lambda: product @ product) > 0


def test_a_cpu_has_the_hosts_clock():
    assert clock_for("cpu").name == "host"
