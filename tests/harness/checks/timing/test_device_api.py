"""References that clocks hold: what replaces their sources is named, and changes nothing."""

import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from attncheck.harness.checks.timing import device_api
from attncheck.harness.checks.timing.device_api import CacheFlush, replaced_clocks

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
from attncheck.harness.checks.timing import device_api

print(*device_api.replaced_clocks(), device_api.host_ns() > 0)
"""


def test_nothing_is_named_where_nothing_was_done():
    assert replaced_clocks() == ()


@pytest.mark.parametrize(
    ("owner", "attribute", "name"),
    [
        (time, "perf_counter_ns", "time.perf_counter_ns"),
        (time, "monotonic", "time.monotonic"),
        (torch.cuda, "synchronize", "torch.cuda.synchronize"),
        (torch.cuda, "current_stream", "torch.cuda.current_stream"),
        (torch.cuda.Event, "record", "torch.cuda.Event.record"),
        (torch.cuda.Event, "query", "torch.cuda.Event.query"),
        (torch.cuda.Event, "elapsed_time", "torch.cuda.Event.elapsed_time"),
        (torch.cuda, "Event", "torch.cuda.Event"),
    ],
)
def test_what_was_replaced_is_named(monkeypatch, owner, attribute, name):
    monkeypatch.setattr(owner, attribute, lambda *args, **kwargs: 0)
    assert replaced_clocks() == (name,)


def test_vllms_own_set_stream_is_nothing_to_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    assert replaced_clocks() == ()


def test_references_are_taken_before_a_backend_is_imported(tmp_path):
    backend = tmp_path / "patches.py"
    backend.write_text(FILE)
    words = [sys.executable, "-c", PROGRAM, f"{backend}:Kernel"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["time.perf_counter_ns True"], done.stderr


class TestCudaApi:
    """The functions of ``torch.cuda``, replaced by stand-ins that take down what they are given."""

    @pytest.fixture
    def journal(self, monkeypatch):
        taken = []

        def stand_in(name, answer=None):
            def act(*args):
                taken.append((name, *args))
                return answer

            return act

        @contextmanager
        def on_device(index):
            taken.append(("enter", index))
            yield
            taken.append(("leave", index))

        for name, answer in {"_current_stream": "main", "_query": 0, "_elapsed_time": 0.5}.items():
            monkeypatch.setattr(device_api, name, stand_in(name, answer))
        for name in ("_synchronize", "_set_stream", "_sleep", "_record"):
            monkeypatch.setattr(device_api, name, stand_in(name))
        monkeypatch.setattr(device_api, "_on_device", on_device)
        monkeypatch.setattr(device_api, "_new_event", SimpleNamespace)
        return taken

    def test_every_device_is_its_own(self, journal):
        api = device_api.cuda_api("cuda:1")
        api.synchronize()
        api.hold(1000)
        assert api.current() == "main"
        held = [("enter", 1), ("_sleep", 2000), ("leave", 1)]
        assert journal == [("_synchronize", 1), *held, ("_current_stream", 1)]

    def test_events_are_recorded_on_the_stream_they_are_given(self, journal):
        api = device_api.cuda_api("cuda:1")
        event = api.record("side")
        assert journal == [("_record", event, "side")]
        assert event.enable_timing is True
        assert api.is_done(event) is False
        assert api.elapsed_ms(event, event) == 0.5

    def test_a_stream_is_made_current_again(self, journal):
        device_api.cuda_api("cuda:1").make_current("side")
        assert journal == [("_set_stream", "side")]


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
