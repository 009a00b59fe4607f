"""Clocks, on a device that is simulated in virtual time: what counts, what does not, and who gets caught."""

import gc

import pytest
import torch

from attncheck.harness.checks.timing import clock
from attncheck.harness.checks.timing.clock import GUARDS, LONGEST_HOLD_NS, HostClock

US = 1_000


def settled(timer, call, **around):
    """The tenth sample: holds have been learnt by then."""
    return [timer.time(call, **around) for _ in range(10)][-1]


def close(ns, share=1e-4):
    return pytest.approx(ns, rel=share)


def test_what_goes_before_and_after_does_not_count(device):
    order = []

    def issue(name, ns):
        return lambda: (order.append(name), device.work(ns))

    timer = device.clock
    flush, copy = issue("before", 700 * US), issue("after", 900 * US)
    assert settled(timer, issue("call", 50 * US), before=flush, after=copy) == close(50 * US)
    assert order == ["before", "call", "after"] * 10
    assert timer.num_late == 0


def kernels_of(kernel_ns):
    def step(device):
        for _ in range(5):
            device.spend(300 * US)  # Python, far slower than the device
            device.work(kernel_ns)

    return step


def with_another_stream_in_between(device):
    device.work(20 * US)
    device.work(80 * US, on="side", behind=["main"])
    device.work(10 * US, behind=["side"])


def left_on_another_stream(device):
    device.work(20 * US)
    device.work(400 * US, on="side", behind=["main"])


def not_waiting_for_the_held_stream(device):
    device.spend(30 * US)
    device.work(400 * US, on="side")


def leaving_its_own_stream_current(device):
    device.stream = "side"
    device.work(400 * US)


def leaving_an_idle_stream_current(device):
    device.work(400 * US, on="main")
    device.stream = "side"


def waiting_for_the_device(device):
    device.work(100 * US)
    device.wait_for("main")
    device.spend(40 * US)
    device.work(100 * US)


def idle(device):
    pass


@pytest.mark.parametrize(
    ("step", "low_us", "high_us", "num_behind", "num_late", "num_held"),
    [
        *((kernels_of(us * US), 5 * us, 5 * us, 0, 0, 15) for us in (10, 100, 1_000, 10_000)),
        (with_another_stream_in_between, 110, 110, 0, 0, 15),
        # 4 us until the work on the side is issued; not the time until the host sees the end
        (left_on_another_stream, 424, 424, 0, 15, 0),
        (not_waiting_for_the_held_stream, 400, 460, 0, 15, 0),
        (leaving_its_own_stream_current, 400, 440, 0, 15, 0),
        (leaving_an_idle_stream_current, 400, 440, 0, 0, 15),
        (waiting_for_the_device, 240, 270, 15, 0, 5),
        (idle, 0, 0, 0, 0, 15),
    ],
)
def test_what_counts_of_a_step(device, step, low_us, high_us, num_behind, num_late, num_held):
    timer, copied = device.clock, []
    around = {"before": lambda: device.work(1_000 * US), "after": lambda: copied.append(device.stream)}
    times = [timer.time(lambda: step(device), **around) for _ in range(20)]
    assert all(0.9999 * low_us * US <= ns <= 1.0001 * high_us * US for ns in times[10:]), times
    assert (timer.num_behind, timer.num_late) == (num_behind, num_late)
    assert len(device.held) == num_held
    if num_behind:
        assert device.held[-1] == LONGEST_HOLD_NS  # and none in vain after that
    assert set(copied) == {"main"}


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
