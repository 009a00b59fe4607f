"""Functions of a device that clocks use: references to them, its state under load, and its kernels."""

import subprocess
import sys
import time
from contextlib import contextmanager
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity

from attncheck.harness.checks.timing import clock as device_state_module
from attncheck.harness.checks.timing.clock import CacheFlush, kernels_of, replaced_clocks, state_under_load
from attncheck.harness.device import Cuda, Facts, cycles_per_ns
from attncheck.harness.host import run_command
from attncheck.reports.run_file.timings import DeviceState, Kernel

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


class Driver:
    """Prints ``line`` where all fields are known to it, and nothing otherwise."""

    def __init__(self, line, unknown=""):
        self.line, self.unknown, self.commands = line, unknown, []

    def __call__(self, command):
        self.commands.append(command)
        return None if self.unknown and self.unknown in " ".join(command) else self.line


def gpu_of(uuid="GPU-0f0f"):
    gpu = Cuda(0)
    gpu.properties = SimpleNamespace(uuid=uuid)
    return gpu


@pytest.mark.parametrize(
    ("printed", "state"),
    [
        ("1980, 1980, 41, 0x0000000000000000\n", (1980, 1980, 41, ())),
        ("1200, 1980, 88, 0x0000000000000001", (1200, 1980, 88, ())),
        ("1200, 1980, 88, 0x0000000000000004", (1200, 1980, 88, ("sw_power_cap",))),
        (
            "1200, 1980, 88, 0x0000000000000068",
            (1200, 1980, 88, ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown")),
        ),
        ("1200, 1980, 88, [N/A]", (1200, 1980, 88, ())),
        ("[N/A], 1410, [Unknown Error], [Not Supported]", (None, 1410, None, ())),
        *((printed, None) for printed in (None, "", "No devices were found", "1, 2, 3", "1, 2, 3, 4, 5")),
    ],
)
def test_the_state_is_what_the_driver_prints(printed, state):
    names = ("sm_clock_mhz", "max_sm_clock_mhz", "temperature_c", "throttle_reasons")
    assert gpu_of().state(Driver(printed)) == (state and DeviceState(**dict(zip(names, state, strict=True))))


@pytest.mark.parametrize(("uuid", "name"), [("0f0f", "GPU-0f0f"), ("GPU-0f0f", "GPU-0f0f"), ("MIG-1", "MIG-1")])
def test_the_gpu_is_named_by_its_uuid_and_an_older_driver_has_the_older_name(uuid, name):
    driver = Driver("1410, 1410, 50, 0x0000000000000080", unknown="clocks_event_reasons")
    assert gpu_of(uuid).state(driver).throttle_reasons == ("hw_power_brake_slowdown",)
    assert [command[:2] for command in driver.commands] == [("nvidia-smi", f"--id={name}")] * 2


def test_the_state_is_read_while_the_device_is_at_work(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0f0f"))
    done, begun, worked = [], Event(), Event()

    def work():
        begun.wait(10)
        done.append(1)
        if len(done) == 3:
            worked.set()

    def answer(command):
        begun.set()
        return "1200, 1980, 80, 0x4" if worked.wait(10) else None

    assert state_under_load("cuda:0", work, answer).throttle_reasons == ("sw_power_cap",)
    assert len(done) >= 3
    with pytest.raises(LookupError, match="gone"):  # work that fails is the caller's
        state_under_load("cuda:0", lambda: {}["gone"], lambda command: Event().wait(0.1) or None)


def test_a_cpu_is_neither_queried_nor_put_to_work():
    driver, work = Driver("1980, 1980, 41, 0x0"), Driver("")
    assert state_under_load("cpu", work, driver) is None
    assert not driver.commands


def test_a_command_that_is_missing_fails_or_hangs_answers_nothing(monkeypatch):
    assert run_command(("attncheck-has-no-such-command",)) is None
    assert run_command(("false",)) is None
    assert run_command(("echo", "7")) == "7\n"

    def hang(command, timeout, **kwargs):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert run_command(("echo", "7")) is None


EVENTS = (
    ("aten::mm", "CPU", 900.0),
    ("cudaLaunchKernel", "CPU", 5.0),
    ("split_kernel", "CUDA", 40.5),
    ("split_kernel", "CUDA", 41.0),
    ("merge_kernel", "CUDA", 7.25),
    ("a range", "CUDA", 95.0),
)


def test_kernels_of_a_gpu_are_neither_work_of_the_host_nor_annotations(monkeypatch):
    order = []

    def event(name, kind, us):
        return SimpleNamespace(
            name=name,
            device_type=SimpleNamespace(name=kind),
            time_range=SimpleNamespace(elapsed_us=lambda: us),
            self_cpu_time_total=us,
            is_user_annotation=name == "a range",
        )

    @contextmanager
    def profile(activities):
        assert ProfilerActivity.CUDA in activities
        order.append("profile")
        yield SimpleNamespace(events=lambda: [event(*each) for each in EVENTS])
        order.append("end")

    monkeypatch.setattr(device_state_module, "profile", profile)
    monkeypatch.setattr(Cuda, "synchronize", lambda _gpu: order.append("wait"))
    assert kernels_of(lambda: order.append("call"), "cuda") == (
        Kernel(name="split_kernel", count=2, duration_ns=81_500),
        Kernel(name="merge_kernel", count=1, duration_ns=7_250),
    )
    assert order == ["wait", "profile", "call", "wait", "end"]
