"""Held streams: what one writes in existing memory is seen by another only after a wait."""

import pytest
import torch


@pytest.fixture
def held(device):
    """``held(act)`` fills zeros with ones on a held side stream, calls ``act(side)`` and returns the default stream's view."""

    def run(act):
        numbers, side = torch.zeros(3, device="cuda"), torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(1000)
            numbers[1:].fill_(1)
            doubled = numbers * 2  # the stream sees what it wrote
        act(side)
        seen = numbers + 0
        torch.cuda.synchronize()
        assert numbers.tolist() == [0, 1, 1]
        assert doubled.tolist() == [0, 2, 2]
        return seen.tolist()

    return run


def wait_for_event_of(side):
    event = torch.cuda.Event()
    event.record(side)
    torch.cuda.current_stream().wait_event(event)


def wait_for_a_third_stream_that_waits_for(side):
    third = torch.cuda.Stream()
    third.wait_stream(side)
    torch.cuda.current_stream().wait_stream(third)


WAITS = {
    "stream": lambda side: torch.cuda.current_stream().wait_stream(side),
    "event": wait_for_event_of,
    "third stream": wait_for_a_third_stream_that_waits_for,
    "host": lambda side: side.synchronize(),
    "device": lambda side: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_wait_makes_the_writes_of_a_held_stream_visible(held, wait):
    assert held(wait) == [0, 1, 1]


NO_WAITS = {
    "nothing": lambda side: None,
    "the other direction": lambda side: side.wait_stream(torch.cuda.current_stream()),
    "an event of before": lambda side: torch.cuda.current_stream().wait_event(torch.cuda.Event()),
    "a wait for another stream": lambda side: torch.cuda.current_stream().synchronize(),
}


@pytest.mark.parametrize("act", NO_WAITS.values(), ids=NO_WAITS)
def test_without_a_wait_another_stream_sees_the_old_contents(held, act):
    assert held(act) == [0, 0, 0]


def test_a_stream_that_is_not_held_writes_at_once(device):
    numbers = torch.zeros(3, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        numbers.fill_(1)
    assert (numbers + 0).tolist() == [1, 1, 1]
