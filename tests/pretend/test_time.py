"""Simulated time: streams that run behind the host, events between their work, and waits."""

import pytest
import torch
from pretend_cuda.clock import BYTES_PER_NS, EVENT_NS, KERNEL_NS

HOLD_NS = 1_000_000


def recorded():
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def test_between_two_events_lies_the_work_that_was_issued_behind_a_hold(device):
    held = torch.empty(10**6, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(2 * HOLD_NS)
    start = recorded()
    held.zero_()
    held.zero_()
    end = recorded()
    assert not start.query()
    torch.cuda.synchronize()
    assert start.query()
    work = 2 * (KERNEL_NS + 10**6 // BYTES_PER_NS) + EVENT_NS
    assert start.elapsed_time(end) == pytest.approx(work / 1e6)


def test_the_host_waits_until_the_device_is_done(device):
    before = device.clock.host_ns
    torch.cuda._sleep(2 * HOLD_NS)
    issued = device.clock.host_ns - before
    torch.cuda.synchronize()
    assert issued < HOLD_NS < device.clock.host_ns - before


def test_a_stream_runs_beside_another_until_it_waits_for_it(device):
    side = torch.cuda.Stream()
    torch.cuda._sleep(2 * HOLD_NS)
    with torch.cuda.stream(side):
        early = recorded()
        side.wait_stream(device.clock.streams[0])
        late = recorded()
    assert early.elapsed_time(late) == pytest.approx(HOLD_NS / 1e6, rel=0.02)
    assert torch.cuda.current_stream() is not side
