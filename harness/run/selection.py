"""From names to a question: which suites, cases and checks a run is about.

The command line, the pytest plugin and ``attncheck.examine`` all choose here, so that they refuse the same things with
the same words. Loads no torch.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from attncheck.cases.loader import load_suite
from attncheck.cases.model import Case, Suite
from attncheck.cases.overrides import with_defaults
from attncheck.errors import SelectionError
from attncheck.harness.checks.timing.settings import TimingSettings
from attncheck.harness.run.backend_description import BackendDescription
from attncheck.harness.run.patterns import cases_by_keywords, choose_checks, matching_cases, split_commas
from attncheck.reference.spec import BACKEND_CHECKS, CHECKS, DEFAULT_CHECKS
from attncheck.reports.run_file.timings import TIMING

DEFAULT_SUITES = ("smoke", "interpreted")
"""What is asked where no suite is named: of each backend the one that it says suits it (``default_suite``)."""

DEFAULT_INTERPRETED = (
    "decode",
    "mixed.float16",
    "prefill",
    "long-decode",
    "heads-first",
    "window-extend",
    "soft-cap",
    "padded-decode",
    "latent",
)
"""Cases of the suite ``interpreted`` in a run that names no suite, no case and no backend.

The others take minutes; so do the CUDA-graph levels of interpreted kernels.
"""

DEFAULT_ROUNDS = 10
"""Processes of each backend that its times are taken in: what a comparison of two runs needs to see a few per cent."""


_MERGED_PATHS = frozenset({"cascade", "split_kv", "dcp"})
"""Paths of which each call may read only a part of the keys."""

_LATENT_PATHS = frozenset({"mla", "spec_decode", "cascade", "split_kv", "dcp", "micro_batch"})
"""Paths of layers with a latent cache."""


@dataclass(frozen=True)
class Selection:
    """What is asked: whole suites, and the cases of them that the filters leave, in order."""

    suites: tuple[Suite, ...]
    refs: tuple[str, ...]
    """How each suite was named: a built-in name, or a path."""
    cases: tuple[Case, ...]
    checks: tuple[str, ...] | None
    """The checks asked for; None: all that apply."""
    by_default: bool = False
    """No suite was named: they are :data:`DEFAULT_SUITES`, of which each backend is asked one."""
    names_cases: bool = False
    """The cases were chosen by their names, words or keys."""
    is_short: bool = False
    """The run names no suite, case or backend: each backend gets the cases of :func:`default_cases` that are few."""

    @property
    def all_cases(self) -> tuple[Case, ...]:
        """Every case of the suites, filtered or not."""
        return tuple(case for suite in self.suites for case in suite.cases)

    @property
    def device_wishes(self) -> tuple[str, ...]:
        """The devices that suites ask for, in order."""
        return tuple(suite.default_device for suite in self.suites if suite.default_device)

    @property
    def asked_checks(self) -> tuple[str, ...]:
        """The checks that are made of any case, in the order they are reported."""
        asked = {check for case in self.cases for check in checks_of(case, self.checks)}
        return tuple(check for check in BACKEND_CHECKS if check in asked)

    @property
    def is_timed(self) -> bool:
        """Whether the check ``timing`` is made of any case."""
        return any(TIMING in checks_of(case, self.checks) for case in self.cases)

    def beginning_with(self, keys: Collection[str]) -> "Selection":
        """The same with the cases of these keys, ``suite/id``, before the others."""
        first = frozenset(keys)
        return replace(self, cases=tuple(sorted(self.cases, key=lambda case: case.key not in first)))

    def of_suites(self, names: Collection[str], keys: Collection[str] | None = None) -> "Selection":
        """The same of these suites only, and of the cases with these keys (``suite/id``; None: all).

        Raises:
            SelectionError: nothing is left.
        """
        kept = [(suite, ref) for suite, ref in zip(self.suites, self.refs, strict=True) if suite.name in names]
        cases = tuple(case for case in self.cases if case.suite in names and (keys is None or case.key in keys))
        if not cases:
            asked = " or ".join(dict.fromkeys(names))
            others = " --suite ".join(dict.fromkeys(case.suite for case in self.cases))
            raise SelectionError(f"no such case in {asked}, the suite asked by default; give --suite {others}")
        suites, refs = zip(*kept, strict=True)
        return replace(self, suites=suites, refs=refs, cases=cases)


def check_timed(selection: Selection, option: str) -> None:
    """Raises SelectionError for an ``option`` of the check ``timing`` where that is not made."""
    if not selection.is_timed:
        raise SelectionError(f"{option} is about the check {TIMING}, which is made by name: ask for it as well")


def choose_timing(selection: Selection, *, limit_s: float | None, warm: bool, kernels: bool) -> TimingSettings:
    """How times are taken, by the options of the command line; ``limit_s``: None where it was not given.

    Raises:
        SelectionError: an option of the check ``timing`` where that is not made, a limit that is none.
    """
    given = {"--time-limit": limit_s is not None, "--warm-cache": warm, "--kernels": kernels}
    for option in (name for name, is_given in given.items() if is_given):
        check_timed(selection, option)
    settings = TimingSettings(warm=warm, kernels=kernels)
    return settings if limit_s is None else replace(settings, limit_s=limit_s)


def choose_rounds(wanted: int | None, *, is_timed: bool, in_process: bool = False) -> int:
    """In how many processes, one after another, each backend is timed; 1 where it is not, or not in its own.

    Raises:
        SelectionError: ``wanted`` is no such number, or more than can be had.
    """
    if wanted is not None and wanted < 1:
        raise SelectionError(f"{wanted} rounds: give a whole number, 1 or above")
    if wanted is not None and wanted > 1 and not is_timed:
        raise SelectionError(f"{wanted} rounds, and only the check {TIMING} is made in rounds; add --check {TIMING}")
    if wanted is not None and wanted > 1 and in_process:
        raise SelectionError(
            f"{wanted} rounds in one process: a round is a process; leave out --in-process or --rounds"
        )
    return wanted or (DEFAULT_ROUNDS if is_timed and not in_process else 1)


def check_seed(seed: int) -> int:
    """``seed``; raises SelectionError for a negative one."""
    if seed < 0:
        raise SelectionError(f"seed {seed}: give a whole number, 0 or above")
    return seed


def select_cases(
    suites: Sequence[str],
    patterns: Sequence[str] = (),
    checks: Sequence[str] = (),
    settings: Sequence[str] = (),
    *,
    skip: Sequence[str] = (),
    keywords: str = "",
    keys: Collection[str] = (),
) -> Selection:
    """Load suites (names or paths; none: :data:`DEFAULT_SUITES`) and apply the filters.

    ``patterns`` match ``suite/id`` or the id; none: every case. ``checks``, ``skip``: names or patterns of checks to
    make, and to leave out; none: all that apply. ``settings``: defaults to put in place of the suites' own, as
    ``key=value``. ``keywords``: an expression as pytest's -k. ``keys``: only these ``suite/id``, where any are given.
    Commas separate names.

    Raises:
        QuestionError: an unknown suite or check, a broken case file, two suites of one name, a pattern that matches
            nothing, a check that no selected case asks for.
    """
    wanted = _wanted_checks(checks, skip)
    refs = tuple(dict.fromkeys(with_defaults(ref, settings) for ref in split_commas(suites) or DEFAULT_SUITES))
    loaded = tuple(load_suite(ref) for ref in refs)
    for position, suite in enumerate(loaded):
        twin = next((index for index, other in enumerate(loaded[:position]) if other.name == suite.name), None)
        if twin is not None:
            allowed = "ask them in two runs" if loaded[twin].path == suite.path else "give them two names"
            raise SelectionError(f"{refs[twin]} and {refs[position]} are both called {suite.name!r}; {allowed}")
    cases = tuple(case for suite in loaded for case in suite.cases if not keys or case.key in keys)
    if patterns := split_commas(patterns):
        chosen = {case.key for pattern in patterns for case in matching_cases(cases, pattern, refs)}
        cases = tuple(case for case in cases if case.key in chosen)
    if keywords:
        cases = cases_by_keywords(cases, keywords)
    if wanted is not None:
        cases = tuple(case for case in cases if checks_of(case, wanted))
    if not cases:
        that = " that matches" if patterns or keywords or keys else ""
        asked = f" asks for {', '.join(wanted)}" if wanted else ""
        raise SelectionError(f"no case of {' or '.join(refs)}{that}{asked}")
    names_cases = bool(patterns or keywords or keys)
    return Selection(loaded, refs, cases, wanted, by_default=not suites, names_cases=names_cases)


def _wanted_checks(checks: Sequence[str], skip: Sequence[str]) -> tuple[str, ...] | None:
    """Return the checks of backends that are asked for, in the order of reports; None: all that apply.

    Raises:
        QuestionError: an unknown check, a check of providers, or none is left.
    """
    chosen, skipped = choose_checks(checks), choose_checks(skip)
    for check in chosen:
        if check not in BACKEND_CHECKS:
            raise SelectionError(f"check {check!r} examines a provider of utilities, not a backend; give --provider")
    if not chosen and not skipped:
        return None
    left = tuple(check for check in BACKEND_CHECKS if check in (chosen or DEFAULT_CHECKS) and check not in skipped)
    if not left:
        raise SelectionError(f"--skip {', '.join(skipped)} leaves no check of {', '.join(chosen or DEFAULT_CHECKS)}")
    return left


def default_suites(selection: Selection, backends: Sequence[BackendDescription]) -> dict[str, str]:
    """Return, by reference, the default suite of each backend; ``selection`` was made by default."""
    names = dict(zip(DEFAULT_SUITES, (suite.name for suite in selection.suites), strict=True))
    return {each.ref: names[each.default_suite] for each in backends}


def default_cases(
    selection: Selection, backends: Sequence[BackendDescription], *, is_short: bool
) -> dict[str, frozenset[str]]:
    """Return, by reference, the keys of the cases each backend gets; ``selection`` names no suite.

    ``is_short``: of the suite ``interpreted`` only :data:`DEFAULT_INTERPRETED`, and no layer without a latent cache for
    a backend that serves latent caches alone.
    """
    suites = default_suites(selection, backends)

    def includes(backend: BackendDescription, case: Case) -> bool:
        if case.suite != suites[backend.ref]:
            return False
        is_left_out = backend.default_suite == "interpreted" and case.id not in DEFAULT_INTERPRETED
        return not (is_short and (is_left_out or (backend.is_mla and case.layer.mla is None)))

    return {each.ref: frozenset(case.key for case in selection.cases if includes(each, case)) for each in backends}


def checks_of(case: Case, checks: tuple[str, ...] | None) -> tuple[str, ...]:
    """The checks to make of ``case`` where ``checks`` are asked for (None: all), in the order they are reported.

    A check that is made by name only is made of every case where the run names it, whatever checks the case names.
    """
    asked = set(DEFAULT_CHECKS if case.checks is None else case.checks)
    asked.update(name for name in checks or () if CHECKS[name].by_name_only)
    return tuple(name for name in BACKEND_CHECKS if name in asked and (checks is None or name in checks))


def unanswered_reasons(case: Case) -> tuple[str, ...]:
    """Return why this version of attncheck cannot examine ``case``; empty: it can."""
    layer, path = case.layer, case.batch.path.name
    reasons = []
    if layer.mla is not None and path not in _LATENT_PATHS:
        reasons.append(f"latent attention by the path {path!r} is not examined by this version of attncheck")
    if layer.mla is not None and layer.output_quant is not None:
        reasons.append("output_quant of latent attention is not examined by this version of attncheck")
    if layer.output_quant is not None and path in _MERGED_PATHS:
        reasons.append(f"output_quant by the path {path!r}: codes of parts of the keys cannot be merged")
    if layer.mla is not None and case.strides is not None and case.strides.output == "transposed":
        reasons.append("strides.output 'transposed' of latent attention: an impl gets [tokens, heads * head size]")
    return tuple(reasons)
