"""References that clocks hold: what replaces their sources is named, and changes nothing."""

import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from attncheck.harness.checks.timing.clock import CacheFlush, replaced_clocks
from attncheck.harness.device import Cuda, Facts, cycles_per_ns

FILE = """
import time
from attncheck.backends.kernel import kernel_backend

time.perf_counter_ns = lambda: 0


def attend(query, key_cache, value_cache, metadata, params, out): ...


Kernel = kernel_backend(attend, name="kernel")
"""

PROGRAM = """
import sys
from attncheck.harness.run.backend_loading import load_backend

print(load_backend(sys.argv[1]).name)
from attncheck.harness.checks.timing import clock

print(*clock.replaced_clocks(), clock.host_ns() > 0)
"""


@pytest.mark.parametrize(
    ("owner", "attribute", "name"),
    [
        *((time, name, f"time.{name}") for name in ("perf_counter_ns", "monotonic")),
        *((torch.cuda, name, f"torch.cuda.{name}") for name in ("synchronize", "current_stream", "Event")),
        *((torch.cuda.Event, name, f"torch.cuda.Event.{name}") for name in ("record", "query", "elapsed_time")),
        (torch.cuda, "set_stream", None),  # vLLM replaces it
    ],
)
def test_what_was_replaced_is_named(monkeypatch, owner, attribute, name):
    assert replaced_clocks() == ()
    monkeypatch.setattr(owner, attribute, lambda *args, **kwargs: 0)
    assert replaced_clocks() == ((name,) if name else ())


def test_references_are_taken_before_a_backend_is_imported(tmp_path, preloaded):
    backend = tmp_path / "patches.py"
    backend.write_text(FILE)
    words = [sys.executable, "-c", PROGRAM, f"{backend}:Kernel"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["time.perf_counter_ns True"], done.stderr


def test_every_call_of_cuda_is_for_its_own_device_and_stream(monkeypatch):
    """The functions of ``torch.cuda``, replaced by fakes that record their arguments."""
    taken = []

    def stand_in(name, answer=None):
        return lambda *args: taken.append((name, *args)) or answer

    @contextmanager
    def on_device(index):
        taken.append(("enter", index))
        yield
        taken.append(("leave", index))

    answers = {"current_stream": "main", "query": 0, "elapsed_time": 0.5}
    names = (*answers, "synchronize", "set_stream", "_sleep", "record")
    references = {name: stand_in(name, answers.get(name)) for name in names}
    references |= {"device": on_device, "Event": SimpleNamespace}
    monkeypatch.setattr(Cuda, "references", lambda _device: SimpleNamespace(**references))
    properties = {1: SimpleNamespace(clock_rate=1_600_000)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    api = Cuda(1)
    api.synchronize()
    api.hold(1000)
    assert api.current() == "main"
    api.make_current("side")
    event = api.record("side")
    assert event.enable_timing is True
    assert taken == [
        ("synchronize", 1),
        *(("enter", 1), ("_sleep", 2000), ("leave", 1)),
        *(("current_stream", 1), ("set_stream", "side"), ("record", event, "side")),
    ]
    assert api.is_done(event) is False
    assert api.elapsed_ms(event, event) == 0.5


def test_a_flush_reads_twice_the_cache_and_leaves_nothing_to_be_written_back(monkeypatch, device, cached):
    """The call itself takes 50 us; 1 MB of dirty lines would take a millisecond more."""
    facts, zeros = Facts("GPU", "9.0", 2**30, cache=500_000), torch.zeros
    monkeypatch.setattr(Cuda, "facts", lambda _gpu: facts)
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: zeros(*size, dtype=dtype))
    flush, none = CacheFlush("cuda"), CacheFlush("cpu")
    none()
    assert (flush.num_bytes, none.num_bytes) == (1_000_000, 0)
    began = device.free["main"] = device.host
    with cached:
        flush()
    assert device.free["main"] - began >= 1_000_000

    def flushed():
        with cached:
            flush()

    timer = device.clock
    times = [timer.time(lambda: device.work(50_000), before=flushed) for _ in range(10)]
    assert times[-1] == pytest.approx(50_000, abs=10)


@pytest.mark.parametrize(
    ("properties", "cycles"),
    [
        ({"clock_rate": 1_980_000}, 2.475),
        ({"clock_rate": 2_520_000, "gcnArchName": "NVIDIA GeForce RTX 4090"}, 3.15),
        ({"clock_rate": 2_100_000, "gcnArchName": "gfx942:sramecc+:xnack-"}, 2.625),
        ({"clock_rate": 2_304_000, "gcnArchName": "gfx1100"}, 0.1),
        ({}, 3),
    ],
)
def test_a_hold_counts_the_cycles_of_its_device(properties, cycles):
    assert cycles_per_ns(SimpleNamespace(**properties)) == pytest.approx(cycles)
