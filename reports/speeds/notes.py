"""Notes on the figures in a table of speeds: how they were measured, and what makes them doubtful.

Each note is one sentence, stated once however many figures it concerns.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from attncheck.reports.analysis.phrases import one_line
from attncheck.reports.analysis.reasons import named, without_figures
from attncheck.reports.run_file.timings import DeviceState
from attncheck.reports.speeds.speed import Speed, by_backend, mean_ceilings, timings_of
from attncheck.reports.speeds.tables import FASTEST, FASTEST_ROUNDS, SpeedTable, rate_unit, suites_of

CLOCKS = {
    "host": "a monotonic clock around the call",
    "events": "CUDA events",
    "graph": "CUDA events around a graph's replay",
}
_MUCH_SLOWER = 2.0
"""Ratio to the fastest backend from which a slower case is named."""
_SHOWN = 3
"""Maximum cases named in a note."""


def legend(tables: Sequence[SpeedTable]) -> str:
    """Return the legend of the columns of ``tables``."""
    headings = {heading for table in tables for heading in table.headings}
    sentences = []
    if "rounds" in headings:
        sentences.append("median: geometric mean of the medians of the rounds, each a process of its own")
    if "spread" in headings:
        sentences.append("spread: how far those medians lie apart (deviation of their logs)")
    if "95% interval" in headings:
        sentences.append("interval: of the median within one process; another process may well lie outside of it")
    if any(heading.startswith("build") for heading in headings):
        sentences.append("build: the metadata of the batch, made on the host before each forward")
    if any(heading.endswith("B/s") for heading in headings):
        sentences.append("bytes and operations are the least that a case takes, causal and window aware")
    if "roofline" in headings:
        sentences.append("roofline: the least time the ceilings below allow, as a share of the time taken")
    return "; ".join([*sentences, *fastest_note(tables)])


def fastest_note(tables: Sequence[SpeedTable]) -> list[str]:
    """Return the meaning of the mark for the fastest backend, or [] if no row has it."""
    if not any(table.has_fastest for table in tables):
        return []
    return [f"{FASTEST} fastest: {FASTEST_ROUNDS} rounds or more, and every one below every one of the others"]


def speed_notes(speeds: Sequence[Speed]) -> list[str]:
    """Return notes on slowdowns, rounds, clocks, cache, ceilings and device, and on unsettled or throttled figures."""
    parts = (_slowdowns, rounds_note, _clocks, _overheads, _ceilings, _device, _throttled, _unsettled, _noted)
    return [note for part in parts for note in part(speeds)]


def doubts(speeds: Sequence[Speed]) -> list[str]:
    """Return the notes that make figures doubtful: throttling, and unsettled medians of a single round.

    With several rounds, an unsettled median is no doubt, since the spread between rounds includes it.
    """
    return [*_throttled(speeds), *_unsettled([speed for speed in speeds if len(speed.rounds) == 1])]


def _slowdowns(speeds: Sequence[Speed]) -> Iterator[str]:
    """Yield the slowdown of each backend relative to the fastest, if it is at least 2 in any case."""
    for suite, members in suites_of([speed for speed in speeds if speed.part == "forward"]).items():
        times = by_backend(members, "forward")
        shared = sorted(set.intersection(*map(set, times.values())))
        if not shared:
            continue
        means = {name: statistics.geometric_mean(own[case].median_ns for case in shared) for name, own in times.items()}
        first = min(means, key=lambda name: means[name])
        for name in (name for name in times if name != first):
            ratios = {case: times[name][case].median_ns / times[first][case].median_ns for case in shared}
            least, most = (choose(ratios, key=lambda case: ratios[case]) for choose in (min, max))
            if ratios[most] >= _MUCH_SLOWER:
                mean = means[name] / means[first]
                yield one_line(
                    f"{name} takes {mean:.3g} times as long as {first} in {suite}: {ratios[least]:.3g} times in "
                    f"{least}, {ratios[most]:.3g} times in {most}"
                )


def rounds_note(speeds: Sequence[Speed]) -> Iterator[str]:
    """Yield the number of rounds, and how far their medians spread."""
    counts = {len(speed.rounds) for speed in speeds}
    spreads = [speed.spread for speed in speeds if speed.spread is not None]
    if spreads:
        count = str(max(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
        yield (
            f"{count} rounds, each in a process of its own; their medians spread by {statistics.median(spreads):.1%} "
            f"as a rule, by {max(spreads):.1%} at most"
        )
    elif counts:
        yield "one round: the next process may well differ by more than the figures show"


def _clocks(speeds: Sequence[Speed]) -> Iterator[str]:
    parts: dict[str, Counter[str]] = {}
    for speed in speeds:
        for latency in speed.rounds:
            parts.setdefault(latency.clock, Counter())[speed.part] += 1
    for clock, counts in parts.items():
        yield f"{', '.join(counts)} by {CLOCKS[clock]}"
    caches = {timing.cache for speed in speeds for timing in speed.timings}
    if caches == {"cold"}:
        yield "cold: the device's last-level cache was flushed before each sample"
    elif caches == {"warm"}:
        yield "warm: caches were left as the call before left them"
    elif caches:
        yield "cold in some cases and warm in others: figures of the two are not to be compared"


def _overheads(speeds: Sequence[Speed]) -> Iterator[str]:
    found = [timing.overhead for timing in timings_of(speeds) if timing.overhead is not None]
    if found:
        empty_us = statistics.median(each.empty_ns for each in found) / 1000
        replays = [each.replay_ns for each in found if each.replay_ns is not None]
        replay = f", {statistics.median(replays) / 1000:.1f} us for the replay of a graph" if replays else ""
        yield f"subtracted from samples: {empty_us:.1f} us for a pair of events{replay}"


def _ceilings(speeds: Sequence[Speed]) -> Iterator[str]:
    for dtype, ceilings in mean_ceilings(speeds).items():
        copy, product = ceilings.copy_bytes_per_s, ceilings.matmul_flops_per_s
        bandwidth, flops = rate_unit([copy], "B"), rate_unit([product], "FLOP")
        yield (
            f"ceilings measured in the same processes: copy {bandwidth.text(copy)} {bandwidth.name}, "
            f"product of {dtype} matrices {flops.text(product)} {flops.name}"
        )


def _device(speeds: Sequence[Speed]) -> Iterator[str]:
    states = [timing.device for timing in timings_of(speeds) if timing.device is not None]
    clocks = [state.sm_clock_mhz for state in states if state.sm_clock_mhz is not None]
    if clocks:
        most = max((state.max_sm_clock_mhz for state in states if state.max_sm_clock_mhz), default=None)
        of = "" if most is None else f" of at most {most}"
        span = str(min(clocks)) if min(clocks) == max(clocks) else f"{min(clocks)} to {max(clocks)}"
        yield f"SM clock {span}{of} MHz"


def _throttled(speeds: Sequence[Speed]) -> Iterator[str]:
    throttled = [(speed, reason) for speed in speeds for reason in _throttle_reasons(speed)]
    for reason in dict.fromkeys(reason for _, reason in throttled):
        cases = [f"{speed.backend}, {speed.case}" for speed, why in throttled if why == reason]
        yield f"the device was held back ({one_line(reason)}) while these were timed: {_named(cases)}"


def _throttle_reasons(speed: Speed) -> tuple[str, ...]:
    states: Iterable[DeviceState] = (timing.device for timing in speed.timings if timing.device is not None)
    return tuple(dict.fromkeys(reason for state in states for reason in state.throttle_reasons))


def _unsettled(speeds: Sequence[Speed]) -> Iterator[str]:
    loose = [speed for speed in speeds if not all(latency.is_settled for latency in speed.rounds)]
    if loose:
        cases = [f"{speed.backend}, {speed.case} ({speed.part})" for speed in loose]
        yield f"too noisy: the time limit ended before the median's interval was narrow enough: {_named(cases)}"


def _noted(speeds: Sequence[Speed]) -> Iterator[str]:
    """Yield recorded notes; those that differ only in figures are merged, since each round has its own figures."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for speed in speeds:
        for note in dict.fromkeys(note for timing in speed.timings for note in timing.notes):
            alike.setdefault(without_figures(note), []).append((note, f"{speed.backend}, {speed.case}"))
    for members in alike.values():
        count = len({note for note, _ in members})
        more = f" (one of {count} such notes)" if count > 1 else ""
        yield f"{one_line(members[0][0])}{more}: {_named([case for _, case in members])}"


def _named(cases: Sequence[str]) -> str:
    once = [one_line(case) for case in dict.fromkeys(cases)]
    return named(once, _SHOWN, "; ")
