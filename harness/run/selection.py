"""Resolves names to the suites, cases and checks of a run. Loads no torch.

The command line, the pytest plugin and ``attncheck.examine`` all select here, so that they report the same errors.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from attncheck.cases.keys import with_defaults
from attncheck.cases.loader import load_suite
from attncheck.cases.model import Case, Suite
from attncheck.errors import CaseFileError, SelectionError, SeveralMistakesError
from attncheck.harness.checks.timing.settings import TimingSettings
from attncheck.harness.run.backend_description import BackendDescription
from attncheck.harness.run.patterns import cases_by_keywords, choose_checks, matching_cases, split_commas
from attncheck.reference.spec import BACKEND_CHECKS, CHECKS, default_checks
from attncheck.reports.run_file.timings import TIMING

DEFAULT_SUITES = ("smoke", "interpreted")
"""Suites of a run that names none; each backend gets the one that its ``default_suite`` returns."""

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

The other cases take minutes, as do the CUDA-graph levels of interpreted kernels.
"""

DEFAULT_ROUNDS = 10
"""Number of processes in which each backend is timed; a comparison of two runs then detects a few per cent."""


_MERGED_PATHS = frozenset({"cascade", "split_kv", "dcp"})
"""Paths in which each call may read only a part of the keys."""

_LATENT_PATHS = frozenset({"mla", "spec_decode", "cascade", "split_kv", "dcp", "micro_batch"})
"""Paths supported for layers with a latent cache."""


@dataclass(frozen=True)
class Selection:
    """What a run examines: suites, and the cases of them that pass the filters, in order."""

    suites: tuple[Suite, ...]
    refs: tuple[str, ...]
    """How each suite was named: a built-in name, or a path."""
    cases: tuple[Case, ...]
    checks: tuple[str, ...] | None
    """The checks requested, or None for all that apply."""
    leaves_out_checks: bool = False
    """Whether ``checks`` are all but some, rather than named ones."""
    by_default: bool = False
    """Whether no suite was named; then the suites are :data:`DEFAULT_SUITES`, and each backend gets one of them."""
    names_cases: bool = False
    """Whether the cases were selected by pattern, keyword or key."""
    is_short: bool = False
    """Whether the run names no suite, case or backend; then :func:`default_cases` keeps only a few."""

    @property
    def all_cases(self) -> tuple[Case, ...]:
        """Every case of the suites, regardless of the filters."""
        return tuple(case for suite in self.suites for case in suite.cases)

    @property
    def device_wishes(self) -> tuple[str, ...]:
        """The default devices of the suites, in order."""
        return tuple(suite.default_device for suite in self.suites if suite.default_device)

    @property
    def selected_checks(self) -> tuple[str, ...]:
        """The checks that run for at least one case on some device, in the order of reports."""
        selected = {check for case in self.cases for check in checks_of(case, self.checks, "cuda")}
        return tuple(check for check in BACKEND_CHECKS if check in selected)

    def checks_on(self, device: str) -> tuple[str, ...] | None:
        """Return the checks requested for a run on ``device``, or None for all that apply."""
        if self.checks is None or not self.leaves_out_checks:
            return self.checks
        return tuple(check for check in self.checks if check in default_checks(device))

    @property
    def is_timed(self) -> bool:
        """Whether the check ``timing`` runs for any case."""
        return any(TIMING in checks_of(case, self.checks) for case in self.cases)

    def beginning_with(self, keys: Collection[str]) -> "Selection":
        """Return this selection with the cases of these keys (``suite/id``) moved to the front."""
        first = frozenset(keys)
        return replace(self, cases=tuple(sorted(self.cases, key=lambda case: case.key not in first)))

    def of_suites(self, names: Collection[str], keys: Collection[str] | None = None) -> "Selection":
        """Return this selection restricted to these suites, and to cases with these keys (``suite/id``).

        If ``keys`` is None, all cases of the suites stay.

        Raises:
            SelectionError: no case is left.
        """
        kept = [(suite, ref) for suite, ref in zip(self.suites, self.refs, strict=True) if suite.name in names]
        cases = tuple(case for case in self.cases if case.suite in names and (keys is None or case.key in keys))
        if not cases:
            wanted = " or ".join(dict.fromkeys(names))
            others = " --suite ".join(dict.fromkeys(case.suite for case in self.cases))
            raise SelectionError(f"no such case in {wanted}, the default suite; give --suite {others}")
        suites, refs = zip(*kept, strict=True)
        return replace(self, suites=suites, refs=refs, cases=cases)


def check_timed(selection: Selection, option: str) -> None:
    """Raise SelectionError if ``option`` configures the check ``timing`` and no case runs it."""
    if not selection.is_timed:
        raise SelectionError(f"{option} configures the check {TIMING}: add --check {TIMING}")


def choose_timing(selection: Selection, *, limit_s: float | None, warm: bool, kernels: bool) -> TimingSettings:
    """Return the timing settings for these command-line options; ``limit_s``: None if it was not given.

    Raises:
        SelectionError: an option of the check ``timing`` was given but no case runs it, or the limit is invalid.
    """
    given = {"--time-limit": limit_s is not None, "--warm-cache": warm, "--kernels": kernels}
    for option in (name for name, is_given in given.items() if is_given):
        check_timed(selection, option)
    settings = TimingSettings(warm=warm, kernels=kernels)
    return settings if limit_s is None else replace(settings, limit_s=limit_s)


def choose_rounds(wanted: int | None, *, is_timed: bool, in_process: bool = False) -> int:
    """Return the number of processes in which each backend is timed; 1 if it is not timed, or runs in this process.

    Raises:
        SelectionError: ``wanted`` is below 1, or above 1 without timing or with ``in_process``.
    """
    if wanted is not None and wanted < 1:
        raise SelectionError(f"{wanted} rounds: give a whole number, 1 or above")
    if wanted is not None and wanted > 1 and not is_timed:
        raise SelectionError(
            f"--rounds {wanted}: only the check {TIMING} runs in rounds; add --check {TIMING}, or leave out --rounds"
        )
    if wanted is not None and wanted > 1 and in_process:
        raise SelectionError(
            f"{wanted} rounds in one process: a round is a process; leave out --in-process or --rounds"
        )
    return wanted or (DEFAULT_ROUNDS if is_timed and not in_process else 1)


def check_seed(seed: int) -> int:
    """Return ``seed``; raise SelectionError if it is negative."""
    if seed < 0:
        raise SelectionError(f"seed {seed}: give a whole number, 0 or above")
    return seed


def _loaded(ref: str, named: str) -> Suite:
    """Return a suite. Raise its CaseFileError with the place ``named`` for mistakes in replaced defaults."""
    try:
        return load_suite(ref)
    except CaseFileError as error:
        for each in (error, *(error.errors if isinstance(error, SeveralMistakesError) else ())):
            if each.file == ref != named:
                each.file, each.line, each.column = named, None, None
        raise


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
    """Load suites (names or paths; default: :data:`DEFAULT_SUITES`) and apply the filters.

    ``patterns`` match ``suite/id`` or the id; empty selects every case.
    ``checks``, ``skip``: names or patterns of checks to run and to leave out. If both are empty, all that apply run.
    ``settings``: values that replace defaults of the suites, as ``key=value``. ``keywords``: an expression as in
    pytest's -k.
    ``keys``: if not empty, only the cases of these ``suite/id``. Commas separate names.

    Raises:
        QuestionError: an unknown suite or check, a broken case file, two suites of one name, a pattern that matches
            nothing, or a check that no selected case runs.
    """
    wanted = _wanted_checks(checks, skip)
    names = split_commas(suites) or DEFAULT_SUITES
    typed = {with_defaults(name, settings): name for name in names}
    refs = tuple(typed)
    options = " ".join(f"--set {each}" for each in settings)
    named = " with ".join(filter(None, [" or ".join(names), options]))
    loaded = tuple(_loaded(ref, f"{name} with {options}" if options else name) for ref, name in typed.items())
    for position, suite in enumerate(loaded):
        twin = next((index for index, other in enumerate(loaded[:position]) if other.name == suite.name), None)
        if twin is not None:
            allowed = "examine them in two runs" if loaded[twin].path == suite.path else "give them two names"
            raise SelectionError(f"{refs[twin]} and {refs[position]} are both called {suite.name!r}; {allowed}")
    cases = tuple(case for suite in loaded for case in suite.cases if not keys or case.key in keys)
    if patterns := split_commas(patterns):
        chosen = {case.key for pattern in patterns for case in matching_cases(cases, pattern, refs, named)}
        cases = tuple(case for case in cases if case.key in chosen)
    if keywords:
        cases = cases_by_keywords(cases, keywords)
    if wanted is not None:
        cases = tuple(case for case in cases if checks_of(case, wanted))
    if not cases:
        that = " that matches" if patterns or keywords or keys else ""
        with_checks = f" asks for {', '.join(wanted)}" if wanted else ""
        raise SelectionError(f"no case of {named}{that}{with_checks}")
    names_cases = bool(patterns or keywords or keys)
    leaves_out = not split_commas(checks)
    return Selection(loaded, refs, cases, wanted, leaves_out, by_default=not suites, names_cases=names_cases)


def _wanted_checks(checks: Sequence[str], skip: Sequence[str]) -> tuple[str, ...] | None:
    """Return the requested checks of backends, in the order of reports, or None for all that apply.

    Raises:
        QuestionError: a check is unknown or examines providers, or none is left.
    """
    chosen, skipped = choose_checks(checks), choose_checks(skip)
    for check in chosen:
        if check not in BACKEND_CHECKS:
            raise SelectionError(f"check {check!r} examines a provider of utilities, not a backend; give --provider")
    if not chosen and not skipped:
        return None
    begun = chosen or default_checks("cuda")
    left = tuple(check for check in BACKEND_CHECKS if check in begun and check not in skipped)
    if not left:
        raise SelectionError(
            f"--skip {', '.join(skipped)} removes every selected check; leave out --skip, or select more with --check"
        )
    return left


def default_suites(selection: Selection, backends: Sequence[BackendDescription]) -> dict[str, str]:
    """Return the default suite of each backend, by reference; ``selection`` must be one ``by_default``."""
    names = dict(zip(DEFAULT_SUITES, (suite.name for suite in selection.suites), strict=True))
    return {each.ref: names[each.default_suite] for each in backends}


def default_cases(
    selection: Selection, backends: Sequence[BackendDescription], *, is_short: bool
) -> dict[str, frozenset[str]]:
    """Return the keys of each backend's cases, by reference; ``selection`` must be one ``by_default``.

    ``is_short``: whether to keep only :data:`DEFAULT_INTERPRETED` of the suite ``interpreted``, and only layers with a
    latent cache for backends that serve no others.
    """
    suites = default_suites(selection, backends)

    def includes(backend: BackendDescription, case: Case) -> bool:
        if case.suite != suites[backend.ref]:
            return False
        is_left_out = backend.default_suite == "interpreted" and case.id not in DEFAULT_INTERPRETED
        return not (is_short and (is_left_out or (backend.is_mla and case.layer.mla is None)))

    return {each.ref: frozenset(case.key for case in selection.cases if includes(each, case)) for each in backends}


def checks_of(case: Case, checks: tuple[str, ...] | None, device: str = "") -> tuple[str, ...]:
    """Return the checks to run for ``case`` on ``device``, in the order of reports.

    ``checks``: the requested ones, or None for all. A requested check that does not run by default on
    every device runs for every case, whatever checks the case lists.
    """
    of_case = set((checks or default_checks(device)) if case.checks is None else case.checks)
    of_case.update(name for name in checks or () if CHECKS[name].by_default != "everywhere")
    return tuple(name for name in BACKEND_CHECKS if name in of_case and (checks is None or name in checks))


def unanswered_reasons(case: Case) -> tuple[str, ...]:
    """Return why this version of attncheck cannot examine ``case``; empty if it can."""
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
