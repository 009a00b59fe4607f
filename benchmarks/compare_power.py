"""How often ``attncheck compare`` finds what is slower, and how often it names what is not.

    python benchmarks/compare_power.py [--comparisons 2000] [--seed 0]
    python benchmarks/compare_power.py --aa RUN... [--pairs 2000]

Without a run, processes are simulated: comparisons of 100 cases, 5 of them 5 % slower in NEW, whose process medians
spread in several ways; then the smallest slowdown found, by spread and rounds. The interval is computed for all cases
at once, and checked against attncheck's own, which takes them one by one.

With ``--aa``, the rounds of real runs (``attncheck run --check timing --rounds N``, N 10 or more) are split into two
halves that differ in nothing, at first even from odd ones, then at random, until there are enough pairs; whatever is
named is a false alarm. Of several runs, each is also compared with the next one as they are: the same backends, at
another time.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

import numpy as np
from numpy.typing import NDArray
from scipy import special
from tabulate import tabulate

from attncheck.reports.comparison.compare import compare_runs
from attncheck.reports.comparison.power import ProcessNoise, smallest_slowdown
from attncheck.reports.comparison.significance import EFFECT, FAMILY_LEVEL, MARGIN, MIN_ROUNDS, estimate_ratio
from attncheck.reports.comparison.speed_changes import ComparisonTerms, SpeedChange, SpeedPair, compare_speeds
from attncheck.reports.run_file.store import read_run
from attncheck.reports.run_file.timings import PARTS
from attncheck.reports.speeds.speed import Speed, speeds

CASES, SLOW, SLOWDOWN, ROUNDS = 100, 5, 0.05, 10
BATCH = 100

Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, tuple[int, int, int]], tuple[Floats, Floats]]
"""Return logs of process medians, ``[comparisons, cases, rounds]``, of BASE and NEW; both have the same true speed."""


def _each(noise: Callable[[np.random.Generator, tuple[int, ...]], Floats]) -> Draw:
    """Draw both sides from the same noise, each process independently."""
    return lambda rng, shape: (noise(rng, shape), noise(rng, shape))


def _now_and_then(share: float, factor: float) -> Draw:
    """Add to 1 % of spread a ``share`` of processes that are slower by ``factor``."""
    return _each(lambda rng, shape: rng.normal(0, 0.01, shape) + (rng.random(shape) < share) * np.log(factor))


def _in_turns(wander: Callable[[np.random.Generator, tuple[int, ...]], Floats]) -> Draw:
    """Add to 1 % of spread a machine whose speed changes while processes of both sides alternate."""

    def draw(rng: np.random.Generator, shape: tuple[int, int, int]) -> tuple[Floats, Floats]:
        both = wander(rng, (*shape[:-1], 2 * shape[-1])) + rng.normal(0, 0.01, (*shape[:-1], 2 * shape[-1]))
        return both[..., ::2], both[..., 1::2]

    return draw


def _one_after_the_other(wander: Callable[[np.random.Generator, tuple[int, ...]], Floats]) -> Draw:
    """Use the same machine, but run all processes of NEW after those of BASE."""

    def draw(rng: np.random.Generator, shape: tuple[int, int, int]) -> tuple[Floats, Floats]:
        both = wander(rng, (*shape[:-1], 2 * shape[-1])) + rng.normal(0, 0.01, (*shape[:-1], 2 * shape[-1]))
        return both[..., : shape[-1]], both[..., shape[-1] :]

    return draw


def _normal(share: float) -> Draw:
    return _each(lambda rng, shape: rng.normal(0, share, shape))


def _heavy(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Draw from Student's t with 3 degrees of freedom, scaled to 1 % of spread."""
    drawn: Floats = rng.standard_t(3, shape) * 0.01 / np.sqrt(3)
    return drawn


def _drift(_: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Slow down steadily, by 10 % from the first process to the last."""
    return np.broadcast_to(np.linspace(0, np.log(1.1), shape[-1]), shape)


def _wandering(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Draw 3 % of spread, with a correlation of 0.9 between consecutive processes."""
    steps = rng.normal(0, 0.03, shape)
    for index in range(1, shape[-1]):
        steps[..., index] = 0.9 * steps[..., index - 1] + np.sqrt(1 - 0.9**2) * steps[..., index]
    return steps


@dataclass(frozen=True)
class Scenario:
    """A distribution of process medians; ``in_turns``: both sides alternate in one run and are compared as pairs."""

    name: str
    draw: Draw
    in_turns: bool = False


_ONE_PERCENT = _normal(0.01)

SCENARIOS = (
    Scenario("spread of 1 %", _ONE_PERCENT),
    Scenario("spread of 1 %, one run", _ONE_PERCENT, in_turns=True),
    Scenario("spread of 2 %", _normal(0.02)),
    Scenario("spread of 5 %", _normal(0.05)),
    Scenario("spread of 1 %, heavy tails (t, 3 degrees)", _each(_heavy)),
    Scenario("one process in ten 30 % slower", _now_and_then(0.1, 1.3)),
    Scenario("every second process 30 % slower", _now_and_then(0.5, 1.3)),
    Scenario("every second process 30 % slower, one run", _now_and_then(0.5, 1.3), in_turns=True),
    Scenario("drift of 10 %, one run", _in_turns(_drift), in_turns=True),
    Scenario("drift of 10 %, one run after the other", _one_after_the_other(_drift)),
    Scenario("wandering by 3 %, one run", _in_turns(_wandering), in_turns=True),
    Scenario("wandering by 3 %, one run after the other", _one_after_the_other(_wandering)),
)


def intervals(base: Floats, new: Floats, level: float, *, in_turns: bool) -> tuple[Floats, Floats]:
    """Return the bounds of log(NEW/BASE) over the last axis, by the method of :func:`estimate_ratio`."""
    halves_of = [_half_of_welch(base, new, level / 2 if in_turns else level)]
    if in_turns:
        rounds = base.shape[-1]
        error = (new - base).std(axis=-1, ddof=1) / np.sqrt(rounds)
        halves_of.append(special.stdtrit(rounds - 1, 1 - level / 4) * error)
    half = np.minimum.reduce(halves_of)
    difference = new.mean(axis=-1) - base.mean(axis=-1)
    return difference - half, difference + half


def _half_of_welch(base: Floats, new: Floats, level: float) -> Floats:
    shares = [logs.var(axis=-1, ddof=1) / logs.shape[-1] for logs in (base, new)]
    total = shares[0] + shares[1]
    freedom = total**2 / sum(share**2 / (logs.shape[-1] - 1) for share, logs in zip(shares, (base, new), strict=True))
    half: Floats = special.stdtrit(freedom, 1 - level / 2) * np.sqrt(total)
    return half


@dataclass(frozen=True)
class Tally:
    """Shares of pairs: slow ones reported slower, equal ones reported as changed, equal ones left undecided."""

    found: float
    named: float
    unclear: float


def simulate(draw: Draw, comparisons: int, rng: np.random.Generator, *, in_turns: bool) -> Tally:
    """Simulate comparisons of :data:`CASES`; the first :data:`SLOW` are slower in NEW by :data:`SLOWDOWN`."""
    level = FAMILY_LEVEL / CASES
    counts = np.zeros(3)
    for start in range(0, comparisons, BATCH):
        base, new = draw(rng, (min(BATCH, comparisons - start), CASES, ROUNDS))
        new = new.copy()
        new[:, :SLOW] += np.log1p(SLOWDOWN)
        low, high = intervals(base, new, level, in_turns=in_turns)
        if start == 0:
            # The vectorised interval must equal that of attncheck itself, which takes one pair at a time.
            _agree(base[0], new[0], low[0], high[0], level, in_turns=in_turns)
        slower, faster = low > np.log1p(EFFECT), high < -np.log1p(EFFECT)
        same = ~slower & ~faster & (low >= -np.log1p(MARGIN)) & (high <= np.log1p(MARGIN))
        named = (slower | faster)[:, SLOW:]
        counts += [slower[:, :SLOW].sum(), named.sum(), (~named & ~same[:, SLOW:]).sum()]
    found, *others = counts / comparisons
    return Tally(found / SLOW, *(count / (CASES - SLOW) for count in others))


def _agree(base: Floats, new: Floats, low: Floats, high: Floats, level: float, *, in_turns: bool) -> None:
    for case in range(len(base)):
        times = np.exp(base[case]).tolist(), np.exp(new[case]).tolist()
        own = estimate_ratio(*times, level=level, in_turns=in_turns)
        np.testing.assert_allclose([np.log(own.low), np.log(own.high)], [low[case], high[case]], rtol=1e-9)


def print_simulations(comparisons: int, seed: int) -> None:
    """Print the results of the scenarios, then the theoretical smallest slowdown by spread and rounds."""
    rng = np.random.default_rng(seed)
    rows = []
    for scenario in SCENARIOS:
        tally = simulate(scenario.draw, comparisons, rng, in_turns=scenario.in_turns)
        rows.append([scenario.name, *(f"{share:.2%}" for share in (tally.found, tally.named, tally.unclear))])
        if scenario.draw is _ONE_PERCENT:
            assert tally.found >= 0.95, tally
            assert tally.named <= 0.01, tally
    print(f"{comparisons} comparisons of {CASES} cases, {SLOW} of them {SLOWDOWN:.0%} slower, {ROUNDS} rounds a side\n")
    print(tabulate([["process medians", "slow ones found", "others named", "others undecided"], *rows], "firstrow"))
    print(f"\nthe smallest slowdown found in 80 % of tries among {CASES} pairs, by rounds a side\n")
    spreads, rounds = (0.003, 0.01, 0.02, 0.05, 0.1, 0.2), (5, 10, 20, 40, 80)
    level = FAMILY_LEVEL / CASES
    table = [
        [f"{spread:.1%}", *(f"{smallest_slowdown(ProcessNoise(spread), count, level=level):.1%}" for count in rounds)]
        for spread in spreads
    ]
    print(tabulate([["spread", *map(str, rounds)], *table], "firstrow", stralign="right"))


def halves(found: Sequence[Speed], pairs: int, seed: int) -> Iterator[list[SpeedChange]]:
    """Yield comparisons of two halves of the rounds of ``found``, until ``pairs`` pairs are compared.

    The first split is of even and odd rounds, further ones are random.
    """
    drawn = Random(seed)  # noqa: S311 (a simulation)
    compared = 0
    splits = 0
    while compared < pairs:
        split = []
        for speed in found:
            order = list(range(len(speed.rounds)))
            if splits:
                drawn.shuffle(order)
            even = len(order) // 2 * 2
            one, other = (_rounds(speed, order[offset:even:2]) for offset in (0, 1))
            split.append(SpeedPair(speed.backend, one, other, in_turns=not splits))
        yield list(compare_speeds(split, ComparisonTerms()))
        compared += len(split)
        splits += 1


def _rounds(speed: Speed, which: Sequence[int]) -> Speed:
    rounds = tuple(speed.rounds[index] for index in which)
    return Speed(speed.backend, speed.case, speed.part, rounds, tuple(speed.timings[index] for index in which))


def print_false_alarms(paths: Sequence[str], pairs: int, seed: int) -> None:
    """Print how often identical runs are reported as changed, and the spread between their processes."""
    runs = [read_run(path) for path in paths]
    rows = []
    for run in runs:
        found = [speed for speed in speeds(run.records) if len(speed.rounds) >= 2 * MIN_ROUNDS]
        if not found:
            print(f"{run.path}: no time of {2 * MIN_ROUNDS} rounds or more")
            continue
        print_spread(run.path, found)
        comparisons = list(halves(found, pairs, seed))
        rows.append(_row(f"{run.path}: even and odd rounds", comparisons[:1]))
        rows.append(_row(f"{run.path}: random halves", comparisons[1:]))
    for base, new in pairwise(runs):
        rows.append(_row(f"{base.path} and {new.path}", [list(compare_runs(base, new).speeds)]))
    print(
        tabulate(
            [["times that differ in nothing", "comparisons", "pairs", "named", "share", "undecided"], *rows], "firstrow"
        )
    )


def _row(name: str, comparisons: Sequence[Sequence[SpeedChange]]) -> list[str]:
    verdicts = [change.verdict for changes in comparisons for change in changes]
    named = verdicts.count("slower") + verdicts.count("faster")
    share = f"{named / len(verdicts):.2%}" if verdicts else "-"
    unclear = f"{verdicts.count('cannot tell') / len(verdicts):.1%}" if verdicts else "-"
    return [name, str(len(comparisons)), str(len(verdicts)), str(named), share, unclear]


def print_spread(path: str, found: Sequence[Speed]) -> None:
    """Print for each part the spread between processes, and the smallest slowdown it allows to find."""
    rows = []
    level = FAMILY_LEVEL / len(found)
    for part in PARTS:
        spreads = sorted(speed.spread for speed in found if speed.part == part and speed.spread is not None)
        if len(spreads) > 1:
            tenths = statistics.quantiles(spreads, n=10)
            allowed = (
                smallest_slowdown(ProcessNoise(tenths[4]), rounds, level=level) for rounds in (ROUNDS, 2 * ROUNDS)
            )
            rows.append(
                [part, len(spreads), *(f"{share:.1%}" for share in (tenths[0], tenths[4], tenths[8], *allowed))]
            )
    headings = ["part", "times", "spread: a tenth", "half", "nine tenths below"]
    headings += [f"slowdown found, {rounds} rounds" for rounds in (ROUNDS, 2 * ROUNDS)]
    print(f"{path}: how far process medians lie apart\n\n{tabulate([headings, *rows], 'firstrow')}\n")


def main() -> None:
    """Run the benchmark that the command line selects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comparisons", type=int, default=2000)
    parser.add_argument("--aa", nargs="+", metavar="RUN", default=[])
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.aa:
        print_false_alarms(options.aa, options.pairs, options.seed)
    else:
        print_simulations(options.comparisons, options.seed)


if __name__ == "__main__":
    main()
