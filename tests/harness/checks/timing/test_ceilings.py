"""What the device can do: by a clock in virtual time, and once for real."""

import pytest
import torch

from attncheck.harness.checks.timing import ceilings
from attncheck.harness.checks.timing.ceilings import CPU, measure_ceilings
from attncheck.harness.checks.timing.clock import HostClock
from attncheck.harness.checks.timing.device_api import CacheFlush


class Watch:
    """Says of calls in turn that they took so long; the host's clock follows."""

    name = "host"

    def __init__(self, times):
        self.times, self.host, self.calls = times, 0, []

    def time(self, call, **around):
        result = call()
        taken = self.times(len(self.calls), result)
        self.calls.append((result.shape, taken))
        self.host += taken
        return taken

    def wait(self):
        pass


@pytest.fixture
def measured(monkeypatch):
    def measure(times, dtype="float32"):
        watch = Watch(times)
        monkeypatch.setattr(ceilings, "host_ns", lambda: watch.host)
        return measure_ceilings("cpu", dtype, watch), watch

    return measure


def test_rates_are_of_the_shortest_call_and_copies_count_twice(measured):
    """The first of each is no measure: it may allocate. The others of a copy take 4, 3, 2, 2 ... ms."""

    def times(number, result):
        if result.ndim == 1:
            return 100 if number == 0 else (4_000_000, 3_000_000, 2_000_000)[min(number - 1, 2)]
        return round(2 * len(result) ** 3 / 500)  # 500 flops a nanosecond

    found, watch = measured(times)
    assert found.copy_bytes_per_s == pytest.approx(2 * CPU.copied / 2e-3)
    assert found.matmul_flops_per_s == pytest.approx(500e9, rel=1e-3)
    assert max(len(shape) for shape, _ in watch.calls) == 2
    assert (1024, 1024) in [tuple(shape) for shape, _ in watch.calls]
    assert found.dtype == "float32"


def test_what_is_slow_is_asked_for_less(measured):
    """A product of float16 without instructions for it: 0.1 flops a nanosecond."""

    def times(number, result):
        return 1_000_000 if result.ndim == 1 else round(2 * len(result) ** 3 / 0.1)

    found, watch = measured(times, "float16")
    assert found.matmul_flops_per_s == pytest.approx(1e8, rel=1e-3)
    assert {tuple(shape) for shape, _ in watch.calls if len(shape) == 2} == {(128, 128)}
    assert watch.host < 0.3e9


def test_this_machine_can_do_something():
    state = torch.get_rng_state()
    found = measure_ceilings("cpu", "bfloat16", HostClock())
    assert found.copy_bytes_per_s > 1e7
    assert found.matmul_flops_per_s > 1e6
    assert torch.equal(torch.get_rng_state(), state)


def test_a_cpu_is_not_flushed():
    flush = CacheFlush("cpu")
    flush()
    assert flush.num_bytes == 0


def test_a_flush_writes_twice_the_cache(monkeypatch):
    properties = type("Properties", (), {"L2_cache_size": 1000})
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, device: empty(*size, dtype=dtype).fill_(7))
    flush = CacheFlush("cuda")
    assert flush.num_bytes == 2000
    flush()
    assert flush._buffer.shape == (2000,)
    assert not flush._buffer.any()
