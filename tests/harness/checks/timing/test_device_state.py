"""What nvidia-smi prints, read, and what runs in a call, by stand-ins for the command and for a profiler."""

import subprocess
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


def state_by(driver):
    gpu = Cuda(0)
    gpu.properties = SimpleNamespace(uuid="GPU-0f0f")
    return gpu.state(driver)


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
    assert state_by(Driver(printed)) == (state and DeviceState(**dict(zip(names, state, strict=True))))


def test_a_driver_with_the_older_name():
    driver = Driver("1410, 1410, 50, 0x0000000000000080", unknown="clocks_event_reasons")
    assert state_by(driver).throttle_reasons == ("hw_power_brake_slowdown",)
    assert len(driver.commands) == 2


@pytest.mark.parametrize(("uuid", "name"), [("0f0f", "GPU-0f0f"), ("GPU-0f0f", "GPU-0f0f"), ("MIG-1", "MIG-1")])
def test_the_gpu_is_named_by_its_uuid(uuid, name):
    gpu, driver = Cuda(1), Driver("1980, 1980, 41, 0x0")
    gpu.properties = SimpleNamespace(uuid=uuid)
    assert gpu.state(driver).temperature_c == 41
    assert driver.commands[0][:2] == ("nvidia-smi", f"--id={name}")


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Properties", (), {"uuid": "0f0f"}))
    return "cuda:0"


def test_the_state_is_read_while_the_device_is_at_work(gpu):
    done, begun, worked = [], Event(), Event()

    def work():
        begun.wait(10)
        done.append(1)
        if len(done) == 3:
            worked.set()

    def answer(command):
        begun.set()
        return "1200, 1980, 80, 0x4" if worked.wait(10) else None

    assert state_under_load(gpu, work, answer).throttle_reasons == ("sw_power_cap",)
    assert len(done) >= 3


def test_work_that_fails_under_the_question_is_the_callers(gpu):
    with pytest.raises(LookupError, match="gone"):
        state_under_load(gpu, lambda: {}["gone"], lambda command: Event().wait(0.1) or None)


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


def test_operators_of_a_cpu():
    calls = []
    a = torch.randn(40, 40)

    def step():
        calls.append(1)
        for _ in range(3):
            torch.mm(a, a)
        return a.exp()

    found = kernels_of(step, "cpu")
    counts = {each.name: each.count for each in found}
    assert (counts["aten::mm"], counts["aten::exp"]) == (3, 1)
    assert calls == [1]
    assert all(name.startswith("aten::") for name in counts)
    assert [each.duration_ns for each in found] == sorted((each.duration_ns for each in found), reverse=True)


def event(name, kind, us, *, annotation=False):
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=kind),
        time_range=SimpleNamespace(elapsed_us=lambda: us),
        self_cpu_time_total=us,
        is_user_annotation=annotation,
    )


@pytest.fixture
def profiler(monkeypatch):
    """Of a GPU: three launches of two kernels, a copy, what the host did, and an annotation."""
    events = [
        event("aten::mm", "CPU", 900.0),
        event("cudaLaunchKernel", "CPU", 5.0),
        event("split_kernel", "CUDA", 40.5),
        event("split_kernel", "CUDA", 41.0),
        event("merge_kernel", "CUDA", 7.25),
        event("Memcpy DtoD (Device -> Device)", "CUDA", 2.0),
        event("a range", "CUDA", 95.0, annotation=True),
    ]
    order = []

    class Profile:
        def __init__(self, activities):
            order.append(f"profile {len(activities)}")
            assert ProfilerActivity.CUDA in activities

        def __enter__(self):
            return self

        def __exit__(self, *error):
            order.append("end")

        def events(self):
            return events

    monkeypatch.setattr(device_state_module, "profile", Profile)
    monkeypatch.setattr(Cuda, "synchronize", lambda _gpu: order.append("wait"))
    return order


def test_kernels_of_a_gpu(profiler):
    found = kernels_of(lambda: profiler.append("call"), "cuda")
    assert found == (
        Kernel(name="split_kernel", count=2, duration_ns=81_500),
        Kernel(name="merge_kernel", count=1, duration_ns=7_250),
        Kernel(name="Memcpy DtoD (Device -> Device)", count=1, duration_ns=2_000),
    )
    assert profiler == ["wait", "profile 2", "call", "wait", "end"]
