"""The state of a device (frequency, temperature, throttling), and which kernels a call runs.

The state comes from nvidia-smi, which is part of the driver and needs no Python library. The kernels come from torch's
profiler.
"""

import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.profiler import ProfilerActivity, profile

from attncheck.reports.run_file.timings import DeviceState, Kernel

CommandRunner = Callable[[Sequence[str]], str | None]
"""Returns what a command prints, or None if it is missing, fails or does not respond."""

REASONS = {
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""Names from nvidia-smi by bit of the driver's mask (NVML's ``nvmlClocksEventReason...``).

Bit 0, an idle GPU, is not a throttling reason.
"""

MASKS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The mask's name, and its name in drivers before 535."""


def run_command(command: Sequence[str]) -> str | None:
    """Run a command for at most five seconds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)  # noqa: S603 (fixed words)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def device_state(device: torch.device | str, run: CommandRunner = run_command) -> DeviceState | None:
    """Return the present state of a CUDA device; None for others, or if nvidia-smi is missing or does not list the GPU.

    Figures that the driver does not report are None.
    """
    gpu = _identifier(device)
    return None if gpu is None else state_of(gpu, run)


def state_under_load(
    device: torch.device | str, work: Callable[[], object], run: CommandRunner = run_command
) -> DeviceState | None:
    """Return the state while ``work`` runs repeatedly, because an idle device lowers its clock and is not throttled.

    Exceptions of ``work`` propagate.
    """
    gpu = _identifier(device)
    if gpu is None:
        return None
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(state_of, gpu, run)
        while not future.done():
            work()
    return future.result()


def state_of(gpu: str, run: CommandRunner) -> DeviceState | None:
    """Return the state of the GPU with this nvidia-smi identifier."""
    for mask in MASKS:
        fields = ("clocks.sm", "clocks.max.sm", "temperature.gpu", mask)
        printed = run(("nvidia-smi", f"--id={gpu}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"))
        words = [word.strip() for word in (printed or "").strip().split(",")]
        if len(words) == len(fields):
            clock, max_clock, temperature, active = (_number(word) for word in words)
            return DeviceState(
                sm_clock_mhz=clock,
                max_sm_clock_mhz=max_clock,
                temperature_c=temperature,
                throttle_reasons=tuple(name for bit, name in REASONS.items() if (active or 0) & bit),
            )
    return None


def kernels_of(call: Callable[[], object], device: torch.device | str) -> tuple[Kernel, ...]:
    """Return what one run of ``call`` launches, by torch's profiler: longest first, launches with one name merged.

    Profiling slows the host but not the kernels, so it runs separately from the samples.

    On CUDA: kernels, copies and fills, with their time on the device. Elsewhere kernels have no names, so: ATen's
    operators, with their time excluding the operators they call. Work outside torch is not seen.
    """
    is_cuda = torch.device(device).type == "cuda"
    kind = "CUDA" if is_cuda else "CPU"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    if is_cuda:
        torch.cuda.synchronize(device)
    with profile(activities=activities) as profiler:
        call()
        if is_cuda:
            torch.cuda.synchronize(device)
    counts, durations = Counter[str](), Counter[str]()
    for event in profiler.events() or ():
        if event.device_type.name != kind or getattr(event, "is_user_annotation", False):
            continue
        if not is_cuda and not event.name.startswith("aten::"):
            continue
        counts[event.name] += 1
        duration_us = event.time_range.elapsed_us() if is_cuda else event.self_cpu_time_total
        durations[event.name] += round(duration_us * 1000)
    return tuple(
        Kernel(name=name, count=counts[name], duration_ns=duration) for name, duration in durations.most_common()
    )


def _identifier(device: torch.device | str) -> str | None:
    """Return nvidia-smi's identifier of a device, or None. torch's index may differ from nvidia-smi's."""
    if torch.device(device).type != "cuda":
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _number(word: str) -> int | None:
    """Return the number in ``1980`` or ``0x0000000000000004``; None for ``[N/A]`` and all other text."""
    try:
        return int(word, 0)
    except ValueError:
        return None
