"""The check ``timing`` as a pytest item: pytest-benchmark takes the samples, and has them in its tables and files.

pytest-benchmark calls one complete sample of the check: new inputs, one ``forward``, comparison of the output. Its
timer is a :class:`Stopwatch` that advances by the device time that the check measured for the call. So the figures
equal those of ``attncheck run``, without the time for preparing inputs and comparing outputs.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from attncheck.errors import QuestionError
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.checks.timing.clock import Samples, host_ns, samples_of
from attncheck.harness.device import accelerator_of
from attncheck.harness.pytest_plugin.items import CheckItem, Question
from attncheck.harness.run.evaluate import environment_of
from attncheck.reports.pytest_benchmark import MACHINE, benchmark_names, extra_info, machine_of
from attncheck.reports.run_file.records import Record
from attncheck.reports.run_file.timings import StepPart
from attncheck.reports.speeds.speed import speeds

WARM_UPS = 3
"""Uncounted calls before the samples of a part; the last one determines how many samples fit into the time."""


class Stopwatch:
    """A clock that advances only by :meth:`advance`, in nanoseconds; :meth:`read` is a timer for pytest-benchmark."""

    def __init__(self) -> None:
        self._elapsed_ns = 0

    def read(self) -> float:
        """Return the elapsed time in seconds."""
        return self._elapsed_ns / 1e9

    def advance(self, nanoseconds: int) -> None:
        """Add this many nanoseconds to the elapsed time."""
        self._elapsed_ns += nanoseconds


class Benchmarks:
    """pytest-benchmark's fixture objects for the running item: one per part, grouped by case and part.

    ``session``: that of pytest-benchmark. The fixtures are constructed here, since its ``benchmark`` fixture is
    available only to test functions.
    """

    def __init__(self, session: Any) -> None:
        self._session = session
        self._item: TimingItem | None = None
        self._fixtures: dict[StepPart, tuple[Any, Stopwatch]] = {}

    def begin(self, item: "TimingItem") -> None:
        """Attribute all samples from now on to ``item``."""
        self._item, self._fixtures = item, {}

    def sample(self, part: StepPart, take: Callable[[], int], settings: TimingSettings) -> Samples:
        """Return samples of one part by ``benchmark.pedantic``: as many as fit into ``--benchmark-max-time``.

        At least ``--benchmark-min-rounds``, and otherwise at most ``settings.max_samples``. pytest-benchmark takes only
        one if benchmarks are disabled.
        """
        taken: list[int] = []
        fixture, stopwatch = self._new(part)

        def call() -> None:
            taken.append(take())
            stopwatch.advance(taken[-1])

        spent_ns = 1
        for _ in range(WARM_UPS):
            began = host_ns()
            take()
            spent_ns = max(1, host_ns() - began)
        options = self._session.options
        fitting = int(float(options["max_time"]) * 1e9 / spent_ns)
        fixture.pedantic(call, rounds=max(1, options["min_rounds"], min(fitting, settings.max_samples)))
        return samples_of(taken, settings)

    def end(self, record: Record) -> None:
        """Give pytest-benchmark the result of the check. Timings of wrong results are removed from its session."""
        found = speeds([record])
        if not found:
            own = [fixture.stats for fixture, _ in self._fixtures.values()]
            self._session.benchmarks[:] = [each for each in self._session.benchmarks if each not in own]
            return
        for speed in found:
            if speed.part == "build":  # sampled together with forward, in the same calls
                self._repeat(speed.part, speed.rounds[0].samples_ns)
            fixture, _ = self._fixtures[speed.part]
            fixture.extra_info.update(extra_info(speed, record))

    def _repeat(self, part: StepPart, samples_ns: tuple[int, ...]) -> None:
        fixture, stopwatch = self._new(part)
        left = iter(samples_ns)
        fixture.pedantic(lambda: stopwatch.advance(next(left)), rounds=len(samples_ns))

    def _new(self, part: StepPart) -> tuple[Any, Stopwatch]:
        from pytest_benchmark.fixture import BenchmarkFixture
        from pytest_benchmark.utils import NameWrapper

        item, session, stopwatch = self._item, self._session, Stopwatch()
        if item is None:
            raise ValueError("no item has begun")
        names = benchmark_names(item.case.suite, item.case.id, item.backend.name, part)
        own = {"timer": NameWrapper(stopwatch.read), "group": names.group, "cprofile": False}
        fixture: Any = BenchmarkFixture(
            item,
            add_stats=session.benchmarks.append,
            logger=session.logger,
            warner=item.warn,
            disabled=session.disabled,
            **{**session.options, **own},
        )
        fixture.name, fixture.fullname = names.name, names.fullname
        fixture.param, fixture.params = names.param, names.params
        self._fixtures[part] = fixture, stopwatch
        return fixture, stopwatch


class TimingItem(CheckItem):
    """The check ``timing`` of one case of one backend."""

    fixturenames = ("benchmark",)
    """pytest-benchmark reads this to apply ``--benchmark-only`` and ``--benchmark-skip``."""

    def setup(self) -> None:
        """Skip under pytest-xdist, where pytest-benchmark disables itself because parallel tests distort timings."""
        super().setup()
        if os.environ.get("PYTEST_XDIST_WORKER"):
            reason = "times taken beside other tests are none: leave out -n of pytest-xdist"
            raise pytest.skip.Exception(reason, _use_item_location=True)

    def examine(self) -> Record | QuestionError:
        """Return the record of the check, with samples taken by pytest-benchmark."""
        benchmarks = self.question.benchmarks
        benchmarks.begin(self)
        found = self.question.record_of(self)
        if not isinstance(found, QuestionError):
            benchmarks.end(found)
        return found


class Machine:
    """Adds machine information to pytest-benchmark's files, and decides which of them are comparable with this run."""

    def __init__(self, question: Question) -> None:
        self._question = question

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_update_machine_info(self, machine_info: dict[str, Any]) -> None:
        """Add the device, its driver and clocks, and the versions."""
        device = self._question.device
        accelerator = accelerator_of(device)
        state = None if accelerator is None else accelerator.state()
        machine_info[MACHINE] = machine_of(environment_of(device), state)

    @pytest.hookimpl(optionalhook=True)
    def pytest_benchmark_compare_machine_info(
        self, benchmarksession: Any, machine_info: dict[str, Any], compared_benchmark: dict[str, Any]
    ) -> None:
        """Raise UsageError for timings of another device; log a warning for another driver, clock or version."""
        theirs = compared_benchmark.get("machine_info", {}).get(MACHINE)
        if theirs is None:
            return
        ours = machine_info[MACHINE]
        if refusal := refusal_of(ours, theirs):
            raise pytest.UsageError(f"attncheck: --benchmark-compare: {refusal}")
        differing = [key for key in ours if ours[key] != theirs.get(key)]
        if differing:
            changes = ", ".join(f"{key} {theirs.get(key)} then, {ours[key]} now" for key in differing)
            message = f"attncheck: compared with a run of other circumstances: {changes}"
            benchmarksession.logger.warning(message)


def refusal_of(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return why timings of two machines cannot be compared; empty if they can."""
    if all(ours.get(key) == theirs.get(key) for key in ("device", "device_name")):
        return ""
    then, now = (f"{each.get('device_name')} ({each.get('device')})" for each in (theirs, ours))
    return f"the saved times are of {then}, and these are of {now}; compare runs of one device"
