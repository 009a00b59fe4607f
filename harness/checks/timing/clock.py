"""Clocks for steps: events or host time, samples, and the state of the device beside them."""

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
from attncheck.harness.device import EVENT_FUNCTIONS, KINDS, Accelerator, CommandRunner, accelerator_of
from attncheck.harness.driver.foreign_code import collection_paused
from attncheck.harness.host import run_command
from attncheck.reports.run_file.timings import ClockName, DeviceState, Kernel

# References to functions of Python and torch that clocks use, taken on import, before any backend is imported.
#
# A backend may later replace `time.perf_counter_ns`, `torch.cuda.synchronize` or a method of `torch.cuda.Event`. Clocks
# keep using these references, and :func:`replaced_clocks` returns what was replaced.

host_ns = time.perf_counter_ns
"""The host's monotonic clock, in nanoseconds."""

for _kind in KINDS:
    _kind.references()  # which keeps them

# ``set_stream`` is not watched, because vLLM replaces it to look up the current stream faster.
_WATCHED: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("time", time, ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns")),
    *((f"torch.{kind.type}", kind.module(), ("synchronize", "current_stream", "Event")) for kind in KINDS),
    *((f"torch.{kind.type}.Event", kind.module().Event, EVENT_FUNCTIONS) for kind in KINDS),
)
_TAKEN = [(f"{path}.{name}", owner, name, getattr(owner, name)) for path, owner, names in _WATCHED for name in names]
_amax: Any = torch.amax


def replaced_clocks() -> tuple[str, ...]:
    """Return the names of clocks, events and synchronisation functions that were replaced since import."""
    return tuple(label for label, owner, name, value in _TAKEN if getattr(owner, name, None) is not value)


class CacheFlush:
    """Flushes the L2 cache of a GPU on the current stream when called. Does nothing on a CPU.

    Each sample then reads its inputs from memory. The buffer is read, not written, because written lines would be
    written back to memory during the sample. ``num_bytes``: size of the buffer, twice that of the cache; 0 if none is
    flushed. CPU caches are not flushed, since copying the inputs of a sample would fill them again.
    """

    def __init__(self, device: torch.device | str) -> None:
        accelerator = accelerator_of(device)
        self.num_bytes = 0 if accelerator is None else 2 * accelerator.facts().cache
        self._buffer = torch.zeros(self.num_bytes // 4, dtype=torch.int32, device=device)
        self._largest = torch.zeros((), dtype=torch.int32, device=device)

    def __call__(self) -> None:
        """Flush the cache."""
        if self.num_bytes:
            _amax(self._buffer, dim=0, out=self._largest)


# The state of a device under load, and which kernels a call runs, by torch's profiler.


def state_under_load(
    device: torch.device | str, work: Callable[[], object], run: CommandRunner = run_command
) -> DeviceState | None:
    """Return the state while ``work`` runs repeatedly, because an idle device lowers its clock and is not throttled.

    Exceptions of ``work`` propagate.
    """
    accelerator = accelerator_of(device)
    if accelerator is None:
        return None
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(accelerator.state, run)
        while not future.done():
            work()
    return future.result()


def kernels_of(call: Callable[[], object], device: torch.device | str) -> tuple[Kernel, ...]:
    """Return what one run of ``call`` launches, by torch's profiler: longest first, launches with one name merged.

    Profiling slows the host but not the kernels, so it runs separately from the samples.

    On a GPU: kernels, copies and fills, with their time on the device. On a CPU kernels have no names, so: ATen's
    operators, with their time excluding the operators they call. Work outside torch is not seen.
    """
    accelerator = accelerator_of(device)
    kind, wait = ("CPU", do_nothing) if accelerator is None else (accelerator.type.upper(), accelerator.synchronize)
    activities = {ProfilerActivity.CPU, getattr(ProfilerActivity, kind)}
    wait()
    with profile(activities=activities) as profiler:
        call()
        wait()
    counts, durations = Counter[str](), Counter[str]()
    for event in profiler.events() or ():
        if event.device_type.name != kind or getattr(event, "is_user_annotation", False):
            continue
        if accelerator is None and not event.name.startswith("aten::"):
            continue
        counts[event.name] += 1
        duration_us = event.self_cpu_time_total if accelerator is None else event.time_range.elapsed_us()
        durations[event.name] += round(duration_us * 1000)
    return tuple(
        Kernel(name=name, count=counts[name], duration_ns=duration) for name, duration in durations.most_common()
    )


# Clocks that keep their own references to Python and torch, so a backend imported later cannot replace them.
#
# :class:`HostClock` times what is done when a call returns: everything on a CPU, and the host's part of a step.
# :class:`EventClock` times the work of a device.

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

    def __init__(self, api: Accelerator) -> None:
        self._api = api
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

        taken_ns = self._between(start, end)
        went_on_ns = self._between(settled, last)
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
    """Return a clock for work on ``device``: events on a GPU, the host's clock on a CPU."""
    accelerator = accelerator_of(device)
    return HostClock() if accelerator is None else EventClock(accelerator)


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
    """Return the statistics of the nanoseconds ``taken``; at least one."""
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
