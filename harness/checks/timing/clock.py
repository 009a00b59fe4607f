"""Clocks for steps: events or host time, samples, and the state of the device beside them."""

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.driver.foreign_code import collection_paused
from attncheck.reports.run_file.timings import ClockName, DeviceState, Kernel

# References to functions of Python and torch that clocks use, taken on import, before any backend is imported.
#
# A backend may later replace `time.perf_counter_ns`, `torch.cuda.synchronize` or a method of `torch.cuda.Event`. Clocks
# keep using these references, and :func:`replaced_clocks` returns what was replaced.

host_ns = time.perf_counter_ns
"""The host's monotonic clock, in nanoseconds."""

# ``set_stream`` is not watched, because vLLM replaces it to look up the current stream faster.
_WATCHED: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("time", time, ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns")),
    ("torch.cuda", torch.cuda, ("synchronize", "current_stream", "Event")),
    ("torch.cuda.Event", torch.cuda.Event, ("record", "query", "elapsed_time")),
)
_TAKEN = [(f"{path}.{name}", owner, name, getattr(owner, name)) for path, owner, names in _WATCHED for name in names]

_synchronize, _current_stream, _set_stream = torch.cuda.synchronize, torch.cuda.current_stream, torch.cuda.set_stream
_on_device = torch.cuda.device
_sleep: Any = torch.cuda._sleep
_new_event: Any = torch.cuda.Event
_record: Any = torch.cuda.Event.record
_query: Any = torch.cuda.Event.query
_elapsed_time: Any = torch.cuda.Event.elapsed_time
_amax: Any = torch.amax


def replaced_clocks() -> tuple[str, ...]:
    """Return the names of clocks, events and synchronisation functions that were replaced since import."""
    return tuple(label for label, owner, name, value in _TAKEN if getattr(owner, name, None) is not value)


@dataclass(frozen=True)
class DeviceApi:
    """The functions of a device with streams that a clock needs. Streams and events are opaque, so it can be simulated.

    current: returns the current stream. make_current: makes a stream current. record: returns a new event after all
    work issued to a stream so far. is_done: whether the device has reached an event. elapsed_ms: float32 milliseconds
    between two reached events. synchronize: waits for all streams. hold: keeps the current stream idle for at least
    this many nanoseconds while more work is issued to it; 0 launches a kernel that does nothing.
    """

    current: Callable[[], Any]
    make_current: Callable[[Any], None]
    record: Callable[[Any], Any]
    is_done: Callable[[Any], bool]
    elapsed_ms: Callable[[Any, Any], float]
    synchronize: Callable[[], None]
    hold: Callable[[int], None]
    now_ns: Callable[[], int] = host_ns


def cuda_api(device: torch.device | str) -> DeviceApi:
    """Return the API of a CUDA device, using the references taken on import."""
    _, _, number = str(torch.device(device)).partition(":")
    index = int(number) if number else torch.cuda.current_device()
    cycles = cycles_per_ns(index)

    def record(stream: Any) -> Any:
        event = _new_event(enable_timing=True)
        _record(event, stream)
        return event

    def hold(ns: int) -> None:
        with _on_device(index):
            _sleep(round(ns * cycles))

    return DeviceApi(
        current=lambda: _current_stream(index),
        make_current=_set_stream,
        record=record,
        is_done=lambda event: bool(_query(event)),
        elapsed_ms=lambda start, end: float(_elapsed_time(start, end)),
        synchronize=lambda: _synchronize(index),
        hold=hold,
    )


def cycles_per_ns(device: torch.device | int) -> float:
    """Return an upper bound on the rate of the counter that ``torch.cuda._sleep`` reads, so that no hold is too short.

    The counter counts GPU cycles, whose clock may exceed its nominal rate by a quarter. On gfx11 it runs at 100 MHz.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    if getattr(properties, "gcnArchName", "").startswith("gfx11"):
        return 0.1
    return 1.25 * getattr(properties, "clock_rate", 2_400_000) / 1e6  # kHz


class CacheFlush:
    """Flushes the L2 cache of a CUDA device on the current stream when called. Does nothing on other devices.

    Each sample then reads its inputs from memory. The buffer is read, not written, because written lines would be
    written back to memory during the sample. ``num_bytes``: size of the buffer, twice that of the cache; 0 if none is
    flushed. CPU caches are not flushed, since copying the inputs of a sample would fill them again.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.num_bytes = 0
        if torch.device(device).type == "cuda":
            self.num_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.zeros(self.num_bytes // 4, dtype=torch.int32, device=device)
        self._largest = torch.zeros((), dtype=torch.int32, device=device)

    def __call__(self) -> None:
        """Flush the cache."""
        if self.num_bytes:
            _amax(self._buffer, dim=0, out=self._largest)


# The state of a device (frequency, temperature, throttling), and which kernels a call runs.
#
# The state comes from nvidia-smi, which is part of the driver and needs no Python library. The kernels come from
# torch's profiler.

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


# Clocks that keep their own references to Python and torch, so a backend imported later cannot replace them.
#
# :class:`HostClock` times what is done when a call returns: everything on a CPU, and the host's part of a step.
# :class:`EventClock` times the work of a device.

__all__ = ["Clock", "EventClock", "HostClock", "clock_for", "host_ns"]

LONGEST_HOLD_NS = 10_000_000
"""Longest time for which a device is held back while the host issues a call, in nanoseconds."""

GUARDS = 5
"""Number of first samples for which the device is not held back. If most of them are late, it is never held."""

MARGIN_NS = 20_000
"""Nanoseconds added to the length of a hold, and to the threshold above which a sample is late."""

_SLOW_SHARE = 0.01
"""Share of the duration of a sample that is added to the threshold above which it is late."""


def do_nothing() -> None:
    """Do nothing."""


class Clock(Protocol):
    """Times one call. ``name``: the clock's name in records."""

    name: ClockName

    def time(
        self,
        call: Callable[[], object],
        *,
        before: Callable[[], object] = do_nothing,
        after: Callable[[], object] = do_nothing,
    ) -> int:
        """Return the nanoseconds that ``call`` takes, including all work that it starts.

        ``before`` and ``after`` are not counted. Work that they issue to the current stream runs directly before and
        after the work of ``call``: first new inputs and poison for the output, then a copy of the output.
        """
        ...

    def wait(self) -> None:
        """Wait until all issued work is done."""
        ...


class HostClock:
    """The host's monotonic clock around a call, which ends when ``wait`` (for a device) returns.

    Cannot see: work left to another thread of the process. The CPU time of other threads does not show it, because
    OpenMP's threads spin for a while after their work. Judging the output after the call does.
    """

    name: ClockName = "host"

    def __init__(self, wait: Callable[[], object] | None = None) -> None:
        self._wait = wait

    def time(
        self,
        call: Callable[[], object],
        *,
        before: Callable[[], object] = do_nothing,
        after: Callable[[], object] = do_nothing,
    ) -> int:
        """See :class:`Clock`."""
        before()
        self.wait()
        with collection_paused():
            began = host_ns()
            call()
            if self._wait is not None:
                self._wait()
            ended = host_ns()
            after()
        return ended - began

    def wait(self) -> None:
        """See :class:`Clock`."""
        if self._wait is not None:
            self._wait()


class EventClock:
    """Events on the current stream, around the work that a call issues to it. Use one clock for each thing timed.

    ::

        host     sync | hold | before | start | call | end | after | settled | sync | last
        stream          ####   ######   !       ####   !     #####   !
        others                                    ########################### ~            late: until here

    - The device is held back until the host has issued everything, so that gaps between launches do not count. They
      count if the host does not get ahead, because it waits for the device inside the call or takes longer than the
      longest hold. This affects ``num_behind`` of ``num_taken`` samples.
    - Work on other streams that continues after this stream has settled counts until its end: ``num_late`` samples.
      The event ``last`` is recorded when the whole device is idle. A sample is late if the time from ``settled`` to
      ``last`` exceeds that of a call without work by more than 1 % of the sample. After a long wait a host is slow to
      record ``last``: on an H200 by about 25 us after 6 ms.
    - Work on other streams that does not wait for the current stream could finish while this stream is held. So the
      first :data:`GUARDS` samples, part of the warm-up, are taken without a hold. If most of them are late, all later
      samples are taken without a hold too, and gaps between launches count: ``is_overlapped``. Two late samples of
      five, caused by a slow host, change nothing.
    - A call that leaves another stream current does not move the end, which is recorded on the stream of the start.

    An empty call takes a few microseconds by these events. Callers subtract them (``measure_overhead``).

    Cannot see: work on other streams that ends within :data:`MARGIN_NS` and 1 % of the sample after the end, or that
    starts early from the sixth sample on. Both show in the output because of the stream's order: such work reads inputs
    before ``before`` has written them, or writes an output that is poisoned afterwards or is incomplete when ``after``
    copies it.

    Times between events are float32 milliseconds. Each sample has its own start event, so that no digits are lost.
    """

    name: ClockName = "events"

    def __init__(self, device: torch.device | str, api: DeviceApi | None = None) -> None:
        self._api = cuda_api(device) if api is None else api
        self._hold_ns = 0
        self._guards: list[bool] = []
        self._is_holding = True
        self.is_overlapped = False
        self._idle_ns: int | None = None
        self.num_taken = self.num_behind = self.num_late = 0

    def time(
        self,
        call: Callable[[], object],
        *,
        before: Callable[[], object] = do_nothing,
        after: Callable[[], object] = do_nothing,
    ) -> int:
        """See :class:`Clock`."""
        api = self._api
        idle_ns = self._idle()
        is_guard = len(self._guards) < GUARDS
        is_held = self._is_holding and not is_guard
        api.synchronize()
        stream = api.current()
        with collection_paused():
            began = api.now_ns()
            if is_held:
                api.hold(self._hold_ns)
            before()
            if not is_held:
                api.synchronize()
                began = api.now_ns()
            start = api.record(stream)
            call()
            end = api.record(stream)
            is_ahead = not api.is_done(start)
            issued_ns = api.now_ns() - began
            if api.current() != stream:
                api.make_current(stream)
            after()
        settled = api.record(stream)
        api.synchronize()
        last = api.record(stream)
        api.synchronize()

        taken_ns, went_on_ns = self._between(start, end), self._between(settled, last)
        is_late = went_on_ns > 2 * idle_ns + MARGIN_NS + taken_ns * _SLOW_SHARE
        if is_guard:
            self._guards.append(is_late)
            self.is_overlapped = sum(self._guards) > GUARDS // 2
            self._is_holding = not self.is_overlapped
        else:
            self.num_taken += 1
            self.num_behind += not is_ahead and not self.is_overlapped
            self.num_late += is_late
        self._set_hold(issued_ns, is_behind=is_held and not is_ahead)
        return self._between(start, last) - idle_ns if is_late else taken_ns

    def wait(self) -> None:
        """See :class:`Clock`."""
        self._api.synchronize()

    def _between(self, start: Any, end: Any) -> int:
        return round(self._api.elapsed_ms(start, end) * 1e6)

    def _set_hold(self, issued_ns: int, *, is_behind: bool) -> None:
        if is_behind and self._hold_ns == LONGEST_HOLD_NS:
            self._is_holding = False
        wanted = issued_ns + issued_ns // 2 + MARGIN_NS
        self._hold_ns = min(LONGEST_HOLD_NS, max(wanted, 2 * self._hold_ns) if is_behind else wanted)

    def _idle(self) -> int:
        """Return the nanoseconds from a settled stream to the next event if no other work runs on the device."""
        if self._idle_ns is None:
            found = []
            for _ in range(5):
                self._api.synchronize()
                stream = self._api.current()
                settled = self._api.record(stream)
                self._api.synchronize()
                last = self._api.record(stream)
                self._api.synchronize()
                found.append(self._between(settled, last))
            self._idle_ns = round(median(found))
        return self._idle_ns


def clock_for(device: torch.device | str) -> Clock:
    """Return a clock for work on ``device``: events on CUDA, the host's clock elsewhere."""
    return EventClock(device) if torch.device(device).type == "cuda" else HostClock()


# Take samples: a warm-up until times settle, then as many as the median needs or as time allows.
#
# :func:`median_interval` estimates how well the median is known.

WARM_UP_SHARE = 0.2
"""Largest share of the time limit for the warm-up."""

CALM = 3
"""The warm-up ends after this many calls in a row that are hardly faster than the fastest one before them."""

LEAST = 3
"""Samples taken regardless of time. The interval of a single sample would have no width."""

GROWTH = 1.25
"""Growth of the number of samples between two looks at the interval. Constant looking would stop too early."""

RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Samples:
    """``samples_ns`` in the order taken, their median, and its 95 % interval, in nanoseconds.

    ``is_settled``: the interval is as narrow as required, and the medians of the two halves of the samples differ by no
    more than that width.
    """

    samples_ns: tuple[int, ...]
    median_ns: float
    low_ns: float
    high_ns: float
    is_settled: bool


def sample(take: Callable[[], int], settings: TimingSettings, now: Callable[[], int] = host_ns) -> Samples:
    """Call ``take``, which returns nanoseconds, until the median is known well enough. ``now`` returns nanoseconds.

    The time limit covers the warm-up and the samples. Even if it is short, there is one warm-up call and :data:`LEAST`
    samples, or ``max_samples`` if that is fewer. Exceptions of ``take`` propagate.
    """
    end = now() + settings.limit_s * 1e9
    _warm_up(take, settings, now, now() + WARM_UP_SHARE * settings.limit_s * 1e9)
    taken = [take() for _ in range(min(LEAST, settings.max_samples))]
    look_at = settings.min_samples
    while now() < end and len(taken) < settings.max_samples:
        if len(taken) >= look_at:
            if _is_settled(taken, settings):
                break
            look_at = max(look_at + 1, int(look_at * GROWTH))
        taken.append(take())
    return samples_of(taken, settings)


def samples_of(taken: list[int], settings: TimingSettings) -> Samples:
    """Return the statistics of the nanoseconds ``taken``, of which there must be at least one."""
    low, high = median_interval(taken)
    return Samples(tuple(taken), float(median(taken)), low, high, _is_settled(taken, settings))


def _warm_up(take: Callable[[], int], settings: TimingSettings, now: Callable[[], int], end: float) -> None:
    best, calm = take(), 0
    while calm < CALM and now() < end:
        found = take()
        calm = 0 if found < best * (1 - settings.relative_width) else calm + 1
        best = min(best, found)


def _is_settled(taken: list[int], settings: TimingSettings) -> bool:
    if len(taken) < max(2, settings.min_samples):
        return False
    low, high = median_interval(taken)
    allowed = settings.relative_width * median(taken)
    half = len(taken) // 2
    drift = abs(median(taken[half:]) - median(taken[:half]))
    return high - low <= allowed and drift <= allowed


def median_interval(samples: Sequence[int]) -> tuple[float, float]:
    """Return a 95 % bootstrap percentile interval of the median. The same samples give the same interval.

    Consecutive samples are correlated, because clocks rise and other load comes and goes, so drawing them one by one
    would give too narrow an interval. The function therefore draws runs of samples, and wraps around at the end: the
    circular block bootstrap (Politis and Romano 1992). A run has about ``n ** (1/3) - 1`` samples, or one if n is below
    16, where longer runs would give an even narrower interval. In simulations the interval contains the median of
    independent samples in 92 to 95 of 100 cases. For three samples, whose range it is, this is 76; for 200 samples with
    a correlation of 0.5 between neighbours, 89. For one sample, both ends equal it.

    Raises ``ValueError`` without a sample.

    >>> low, high = median_interval([10, 11, 10, 12, 11, 10, 11, 12, 11, 50])
    >>> low <= 11 <= high < 50
    True
    """
    values = np.asarray(samples, dtype=np.float64)
    count = len(values)
    if not count:
        raise ValueError("no sample, so no median: give at least one")
    length = max(1, round(count ** (1 / 3)) - 1)
    blocks = -(-count // length)
    starts = np.random.default_rng(0).integers(count, size=(RESAMPLES, blocks, 1))
    drawn = (starts + np.arange(length)).reshape(RESAMPLES, -1)[:, :count] % count
    low, high = np.quantile(np.median(values[drawn], axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)
