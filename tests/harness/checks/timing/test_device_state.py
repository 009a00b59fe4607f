"""What nvidia-smi prints, read, and what runs in a call, by stand-ins for the command and for a profiler."""

import subprocess
from contextlib import contextmanager
from threading import Event
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity

from attncheck.harness.checks.timing import clock as device_state_module
from attncheck.harness.checks.timing.clock import kernels_of, state_under_load
from attncheck.harness.device import Cuda
from attncheck.harness.host import run_command
from attncheck.reports.run_file.timings import DeviceState, Kernel


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
