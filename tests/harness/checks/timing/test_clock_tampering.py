"""References that clocks hold: who replaces what they were taken from is named, and changes nothing."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attncheck.harness.checks.timing import clock, device_api
from attncheck.harness.checks.timing.clock import EventClock, HostClock, tampered

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

print(*clock.tampered(), clock.host_ns() > 0)
"""


def test_nothing_is_named_where_nothing_was_done():
    assert tampered() == ()


@pytest.mark.parametrize(
    ("owner", "attribute", "name"),
    [
        (time, "perf_counter_ns", "time.perf_counter_ns"),
        (time, "monotonic", "time.monotonic"),
        (torch.cuda, "synchronize", "torch.cuda.synchronize"),
        (torch.cuda, "Event", "torch.cuda.Event"),
        (torch.cuda, "current_stream", "torch.cuda.current_stream"),
        (torch.cuda.Event, "record", "torch.cuda.Event.record"),
        (torch.cuda.Event, "elapsed_time", "torch.cuda.Event.elapsed_time"),
        (torch.cuda.Stream, "synchronize", "torch.cuda.Stream.synchronize"),
        (torch.cuda.CUDAGraph, "replay", "torch.cuda.CUDAGraph.replay"),
        (clock, "host_ns", "attncheck.harness.checks.timing.clock.host_ns"),
        (clock, "EventClock", "attncheck.harness.checks.timing.clock.EventClock"),
        (EventClock, "time", "attncheck.harness.checks.timing.clock.EventClock.time"),
        (HostClock, "time", "attncheck.harness.checks.timing.clock.HostClock.time"),
        (device_api, "cuda_api", "attncheck.harness.checks.timing.device_api.cuda_api"),
        (device_api, "_record", "attncheck.harness.checks.timing.device_api._record"),
    ],
)
def test_what_was_replaced_is_named(monkeypatch, owner, attribute, name):
    monkeypatch.setattr(owner, attribute, lambda *args, **kwargs: 0)
    assert tampered() == (name,)


def test_a_function_that_was_given_another_body_is_named(monkeypatch):
    monkeypatch.setattr(HostClock.time, "__code__", (lambda self, call, *, before=None, after=None: 0).__code__)
    assert HostClock().time(lambda: None) == 0
    assert tampered() == ("attncheck.harness.checks.timing.clock.HostClock.time",)


def test_what_was_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda.Event, "query", lambda self: True)
    monkeypatch.setattr(torch._C, "_cuda_synchronize", lambda: None, raising=False)
    assert tampered() == ("torch.cuda.Event.query", "torch._C._cuda_synchronize")


def test_vllms_own_set_stream_is_nothing_to_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    assert tampered() == ()


def test_references_are_taken_before_a_backend_is_imported(tmp_path):
    backend = tmp_path / "patches.py"
    backend.write_text(FILE)
    words = [sys.executable, "-c", PROGRAM, f"{backend}:Kernel"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["time.perf_counter_ns True"], done.stderr


class TestCudaApi:
    """The functions of ``torch._C``, replaced by stand-ins that take down what they are given."""

    @pytest.fixture
    def journal(self, monkeypatch):
        taken = []

        def stand_in(name, answer=None):
            def act(*args, **kwargs):
                taken.append((name, *args, *kwargs.items()))
                return answer

            return act

        for name, answer in {
            "_current_stream": (7, 1, 1),
            "_exchange_device": 0,
            "_query": 0,
            "_elapsed_time": 0.5,
        }.items():
            monkeypatch.setattr(device_api, name, stand_in(name, answer))
        for name in ("_synchronize", "_set_stream", "_sleep", "_record"):
            monkeypatch.setattr(device_api, name, stand_in(name))
        for name in ("_event_cls", "_stream_cls"):
            monkeypatch.setattr(device_api, name, lambda kind=name, **given: SimpleNamespace(kind=kind, **given))
        return taken

    def test_every_device_is_its_own(self, journal):
        api = device_api.cuda_api("cuda:1")
        api.synchronize()
        api.hold(1000)
        assert api.current() == (7, 1, 1)
        own, back = ("_exchange_device", 1), ("_exchange_device", 0)
        assert journal == [own, ("_synchronize",), back, own, ("_sleep", 2000), back, ("_current_stream", 1)]

    def test_events_are_recorded_on_the_stream_they_are_given(self, journal):
        api = device_api.cuda_api("cuda:1")
        event = api.record((7, 1, 1))
        ((name, recorded, stream),) = journal
        assert (name, recorded) == ("_record", event)
        assert event == SimpleNamespace(kind="_event_cls", enable_timing=True)
        assert stream == SimpleNamespace(kind="_stream_cls", stream_id=7, device_index=1, device_type=1)
        assert api.is_done(event) is False
        assert api.elapsed_ms(event, event) == 0.5

    def test_a_stream_is_made_current_again(self, journal):
        device_api.cuda_api("cuda:1").make_current((7, 1, 1))
        assert journal == [("_set_stream", ("stream_id", 7), ("device_index", 1), ("device_type", 1))]

    def test_the_device_is_the_one_before_even_after_an_error(self, journal, monkeypatch):
        def lost():
            raise RuntimeError("device lost")

        monkeypatch.setattr(device_api, "_synchronize", lost)
        with pytest.raises(RuntimeError, match="device lost"):
            device_api.cuda_api("cuda:1").synchronize()
        assert journal == [("_exchange_device", 1), ("_exchange_device", 0)]


def test_torch_has_what_is_taken_by_these_names():
    """Of a build with CUDA; the stubs that every build brings say so."""
    stubs = (Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text()
    for name in ("synchronize", "exchangeDevice", "getCurrentStream", "setStream", "sleep"):
        assert f"def _cuda_{name}(" in stubs
    event, stream = (
        stubs.partition(f"class _Cuda{name}Base")[2].partition("\nclass ")[0] for name in ("Event", "Stream")
    )
    assert all(f"def {name}(" in event for name in ("record", "query", "elapsed_time"))
    assert all(name in stream for name in ("stream_id", "device_index", "device_type"))
