"""Which cases and checks a run examines: patterns, page sizes, shards, rounds and the plan of a backend."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import filter as fnmatch_filter
from itertools import groupby
from pathlib import Path
from shlex import quote
from typing import Literal, TypeVar

from attncheck.backends.declarations import OTHER_PATHS, needs_of
from attncheck.cases.keys import split_variant, with_defaults
from attncheck.cases.loader import load_suite, select, suite_names, telling_ranks
from attncheck.cases.model import Case, Suite
from attncheck.errors import CaseFileError, SelectionError, SeveralMistakesError, UnknownNameError, shorten
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.problem.sizes import needed_bytes
from attncheck.harness.run.options import split_commas
from attncheck.harness.run.outcomes import Backend, BackendDescription
from attncheck.reference.spec import BACKEND_CHECKS, CHECKS, FORMER_CHECKS, default_checks
from attncheck.reports.run_file.timings import TIMING

# Resolves the names, shell patterns and keyword expressions that a user types to checks and cases. Loads no torch.
#
# A pattern without a match is an error. The message suggests a name that the same option accepts.


def choose_checks(words: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the checks that ``words`` select: names or shell patterns, separated by commas.

    A pattern selects the checks that match it and run by default on some device. If none matches, it selects the
    others that do.

    Raises:
        UnknownNameError: no check has this name, or matches this pattern.
        SelectionError: a word begins with ``!``.
    """
    chosen: list[str] = []
    for word in split_commas(words):
        word = FORMER_CHECKS.get(word, word)  # noqa: PLW2901 (the current name of a renamed check)
        if word.startswith("!"):
            raise SelectionError(f"check {shorten(word)}: to leave a check out, give --skip {word[1:]}")
        matching = [word] if word in CHECKS else fnmatch_filter(CHECKS, word)
        if not matching:
            raise UnknownNameError("check", word, list(CHECKS))
        chosen += [name for name in matching if name in default_checks("cuda")] or matching
    return tuple(dict.fromkeys(chosen))


def _advice(cases: Sequence[Case], pattern: str, refs: Sequence[str]) -> str:
    """Suggest a similar name of one of ``cases``, a built-in suite with a match, or a command that lists the ids."""
    if note := _why_left_out(pattern, refs):
        return note
    # Prefer a name that every suite has: a run without --suite uses only one of them for each backend.
    suites = [[case for case in cases if case.suite == name] for name in dict.fromkeys(case.suite for case in cases)]
    names = [{name for case in own for name in _names(case)} for own in suites]
    for known in (set.intersection(*names), names[0], set.union(*names)):
        if near := get_close_matches(pattern, sorted(known), n=1):
            return f"did you mean {near[0]!r}?"
    others = (name for name in suite_names() if name not in refs)
    if found := next((name for name in others if select(load_suite(name), [pattern])), None):
        return f"suite {found} has it: give --suite {found}"
    return f"`attncheck list cases --suite {quote(refs[0])}` shows the ids"


def _why_left_out(pattern: str, refs: Sequence[str]) -> str:
    """Return the note on a case that matches ``pattern``, if the defaults of a suite in ``refs`` make it invalid."""
    for ref in refs:
        suite, braces, _ = ref.partition("{")
        ids = {case.id for case in select(load_suite(suite), [pattern])} if braces else set()
        if note := next((note for note in load_suite(ref).notes if note.partition(" ")[0] in ids), ""):
            return note
    return ""


def _names(case: Case) -> list[str]:
    """Return the names that select ``case``: its id with and without variants, each alone and after ``suite/``."""
    parts = case.id.split(".")
    ids = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return [*ids, *(f"{case.suite}/{name}" for name in ids)]


def cases_by_keywords(cases: Sequence[Case], expression: str) -> tuple[Case, ...]:
    """Return the cases for which ``expression`` is true.

    An expression joins words by ``and``, ``or`` and ``not``, as in pytest's -k. A word is true for a case if it occurs
    in ``suite/id``, in the description, or in what the case needs (``sliding_window``, ``head_size=64``). Case is
    ignored.

    Raises:
        SelectionError: the expression is malformed, or true for no case.
    """
    from _pytest.mark.expression import Expression  # importing it takes 0.1 s

    try:
        compiled = Expression.compile(_as_word(expression))
    except Exception as error:  # the class differs between versions of pytest
        reason = getattr(error, "msg", None) or getattr(error, "message", None) or error
        raise SelectionError(
            f"-k {shorten(expression)}: {reason}; join words by and, or, not and parentheses, such as "
            "'window and not fp8'"
        ) from error
    texts = {case.key: _searched(case) for case in cases}
    words: set[str] = set()

    def is_in(text: str, word: str) -> bool:
        words.add(word)
        return word.lower() in text

    found = tuple(
        case
        for case in cases
        if compiled.evaluate(lambda word, /, **_: is_in(texts[case.key], word))  # noqa: B023 (called here)
    )
    if found:
        return found
    known = {word for text in texts.values() for word in text.split()}
    unknown = [word for word in sorted(words) if not any(word.lower() in text for text in texts.values())]
    near = [each[0] for word in unknown if (each := get_close_matches(word.lower(), sorted(known), n=1))]
    hint = f"; did you mean {near[0].replace(':', '=')!r}?" if near else ""
    searched = f"matches no id, description or need of the {len(cases)} cases that the other options select"
    raise SelectionError(f"-k {shorten(expression)} {searched}{hint}")


def _searched(case: Case) -> str:
    needs = " ".join(needs_of(case.layer, case.cache, case.batch, frozenset()))
    return _as_word(f"{case.key} {case.description} {needs}").lower()


def _as_word(text: str) -> str:
    """Return ``text`` with ``:`` for ``=``, which pytest's expressions reserve for arguments of marks."""
    return text.replace("=", ":")


# Divides the cases of a run into shards of similar cost; shard 2/7 of a run has the same cases on every machine.
#
# Cases of one layer and cache stay in one shard, since they share one CUDA-graph level.

_LEVEL = 3.0
"""Cost of one CUDA-graph level relative to a small case (1.0), measured on a CPU."""

_BYTES = 2**26
"""Size in bytes that adds 1 to the cost of a case."""


@dataclass(frozen=True)
class Shard:
    """Shard ``number`` of ``count``; ``number`` starts at 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def numbers(self, cases: Sequence[Case]) -> dict[str, int]:
        """Return the number of the shard of each case, by key; ``cases`` are those of the whole run.

        Raises:
            SelectionError: there are more shards than cases.
        """
        if self.count > len(cases):
            raise SelectionError(f"--shard {self}: {len(cases)} cases are selected; give at most as many shards")
        groups: dict[object, list[Case]] = {}
        for case in cases:
            layer = case.layer, case.cache.unplaced
            groups.setdefault(layer, []).append(case)
        parts = list(groups.values()) if len(groups) >= self.count else [[case] for case in cases]
        costs = [0.0] * self.count
        numbers = dict[str, int]()
        for part in sorted(parts, key=_cost, reverse=True):  # a stable sort: equal costs keep their order
            least = costs.index(min(costs))
            costs[least] += _cost(part)
            numbers |= {case.key: least + 1 for case in part}
        return numbers


def read_shard(text: str) -> Shard:
    """Return the shard that an option gives as ``2/7``.

    Raises:
        SelectionError: the text is not of this form, or the number is out of range.
    """
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise SelectionError(f"--shard {text}: give I/N with I from 1 to N, such as 2/7 for the second of seven shards")
    return Shard(int(number), int(count))


def _cost(cases: Sequence[Case]) -> float:
    return _LEVEL + sum(1 + needed_bytes(case) / _BYTES for case in cases)


# Resolves names to the suites, cases and checks of a run. Loads no torch.
#
# The command line, the pytest plugin and `attncheck.examine` all select here, so that they report the same errors.

DEFAULT_SUITES = ("smoke", "interpreted", "state")
"""Suites of a run that names none; each backend gets the one that its ``default_suite`` returns."""

ALL_SUITES = "all"
"""What selects every built-in suite."""

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

_LATENT_PATHS = frozenset({"mla", "spec_decode", "cascade", "split_kv", "dcp", "pcp", "micro_batch"})
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
    faults: Mapping[str, CaseFileError] = field(default_factory=dict)
    """Why some of :data:`DEFAULT_SUITES` cannot have the settings of the run; such suites are left out."""

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
    """Load suites (names, paths, or ``all``; default: :data:`DEFAULT_SUITES`) and apply the filters.

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
    if ALL_SUITES in names:
        names = (*suite_names(), *(name for name in names if name != ALL_SUITES and name not in suite_names()))
    typed = {with_defaults(name, settings): name for name in names}
    options = " ".join(f"--set {each}" for each in settings)
    named = " with ".join(filter(None, [" or ".join(names), options]))
    found: dict[str, Suite] = {}
    faults: dict[str, CaseFileError] = {}
    for ref, name in typed.items():
        try:
            found[ref] = _loaded(ref, f"{name} with {options}" if options else name)
        except CaseFileError as error:
            if suites:
                raise
            faults[name] = error  # a fault of the run only if a backend gets this suite
    first_fault = next(iter(faults.values()), None)
    if first_fault is not None and not found:
        raise first_fault
    refs, loaded = tuple(found), tuple(found.values())
    for position, suite in enumerate(loaded):
        twin = next((index for index, other in enumerate(loaded[:position]) if other.name == suite.name), None)
        if twin is not None:
            allowed = "examine them in two runs" if loaded[twin].path == suite.path else "give them two names"
            raise SelectionError(f"{refs[twin]} and {refs[position]} are both called {suite.name!r}; {allowed}")
    cases = tuple(case for suite in loaded for case in suite.cases if not keys or case.key in keys)
    if patterns := split_commas(patterns):
        for pattern in patterns:
            if not select(cases, [pattern]):
                raise first_fault or SelectionError(
                    f"no case of {named} matches {pattern!r}; {_advice(cases, pattern, refs)}"
                )
        cases = tuple(select(cases, patterns))
    if keywords:
        cases = cases_by_keywords(cases, keywords)
    if wanted is not None:
        cases = tuple(case for case in cases if checks_of(case, wanted))
    if not cases:
        that = " that matches" if patterns or keywords or keys else ""
        with_checks = f" asks for {', '.join(wanted)}" if wanted else ""
        raise first_fault or SelectionError(f"no case of {named}{that}{with_checks}")
    names_cases = bool(patterns or keywords or keys)
    leaves_out = not split_commas(checks)
    by_default = not suites
    return Selection(loaded, refs, cases, wanted, leaves_out, by_default, names_cases, faults=faults)


def _wanted_checks(checks: Sequence[str], skip: Sequence[str]) -> tuple[str, ...] | None:
    """Return the requested checks of backends, in the order of reports, or None for all that apply.

    Raises:
        QuestionError: a check is unknown or examines no backend, or none is left.
    """
    chosen, skipped = choose_checks(checks), choose_checks(skip)
    for check in chosen:
        if check not in BACKEND_CHECKS:
            of_engine = CHECKS[check].applies_to == "engine"
            what, use = ("a serving engine", "`attncheck engine`") if of_engine else ("a provider", "--provider")
            raise SelectionError(f"check {check!r} examines {what}, not a backend; use {use}")
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
    """Return the default suite of each backend, by reference; ``selection`` must be one ``by_default``.

    Raises:
        CaseFileError: the suite of a backend cannot have the settings of the run.
    """
    for each in backends:
        if each.default_suite in selection.faults:
            raise selection.faults[each.default_suite]
    names = {split_variant(ref)[0]: suite.name for ref, suite in zip(selection.refs, selection.suites, strict=True)}
    return {each.ref: names.get(each.default_suite, each.default_suite) for each in backends}


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


# The plan of a run as plain data: cases, checks, device and settings. Loads no torch.


@dataclass(frozen=True)
class RunPlan:
    """What a run examines.

    ``checks``: names of checks. If it is None, each case gets the checks it names, or all.
    ``backends``: the backends that this process examines.
    ``chosen``: the keys of a backend's cases, by its reference. A backend without an entry gets all cases.
    ``timing``: settings of the check ``timing``.
    ``rounds``: the number of processes of each backend that are timed, one after another.
    ``shard``: the part of the run, or None if it is not divided. CUDA-graph probes are divided among all cases of the
    run, in any shard, so that merged shards equal an undivided run.
    ``shards``: the number of the shard of each case, by key; empty if the run is not divided.
    ``found``: the records that an earlier part of the run has: reference, case key, check and round.
    ``shares_probes``: whether cases of one layer and cache divide the CUDA-graph probes among them. If not, each case
    runs all of them.
    ``truths``: the folder of stored truths, or None to compute all of them.
    ``until_failure``: ``check`` stops each check of a backend at its first failure, ``backend`` stops the whole
    backend. Empty runs everything.
    ``telling_first``: whether the questions that find most come first, as :func:`telling_first` orders them.
    """

    cases: tuple[Case, ...]
    backends: tuple[Backend, ...] = ()
    checks: tuple[str, ...] | None = None
    device: str = "cpu"
    seed: int = 0
    dump: Path | None = None
    chosen: Mapping[str, frozenset[str]] = field(default_factory=dict)
    shard: Shard | None = None
    shards: Mapping[str, int] = field(default_factory=dict)
    timing: TimingSettings = field(default_factory=TimingSettings)
    rounds: int = 1
    found: frozenset[tuple[str, str, str, int]] = frozenset()
    shares_probes: bool = True
    truths: Path | None = None
    until_failure: Literal["", "check", "backend"] = ""
    telling_first: bool = False

    def cases_of(self, ref: str) -> tuple[Case, ...]:
        """Return the cases selected for the backend of this reference, in any shard."""
        return tuple(case for case in self.cases if self.includes(ref, case))

    def includes(self, ref: str, case: Case) -> bool:
        """Return whether ``case`` is selected for the backend of this reference, in any shard."""
        return ref not in self.chosen or case.key in self.chosen[ref]

    def checks_left(self, ref: str, case: Case, number: int = 0) -> tuple[str, ...]:
        """Return the checks of ``case`` that have no record yet for this backend in round ``number``."""
        return tuple(check for check in self.checks_of(case) if (ref, case.key, check, number) not in self.found)

    def is_in_shard(self, case: Case) -> bool:
        """Return whether ``case`` is in this run's shard."""
        return self.shard is None or self.shards[case.key] == self.shard.number

    def examined_cases_of(self, ref: str) -> tuple[Case, ...]:
        """Return the cases of :meth:`cases_of` that are in this run's shard."""
        return tuple(case for case in self.cases_of(ref) if self.is_in_shard(case))

    def checks_of(self, case: Case) -> tuple[str, ...]:
        """Return the checks to run for ``case``, in the order of reports."""
        return checks_of(case, self.checks, self.device)

    def cases_with(self, ref: str, check: str) -> tuple[Case, ...]:
        """Return the cases on which this backend runs ``check``, except those of paths that do not call attention.

        Empty if cases do not share probes.
        """
        if not self.shares_probes:
            return ()
        return tuple(
            case
            for case in self.cases_of(ref)
            if check in self.checks_of(case)
            and case.batch.path.name not in OTHER_PATHS
            and not unanswered_reasons(case)
        )


# Rounds: which cases and checks each process of a backend gets, and in which order backends take turns.
#
# The check `timing` runs in rounds, each in a fresh process of the backend, because timings from one process are
# correlated. All other checks run once, before the rounds and in other processes, so that they do not disturb the
# timings.

Question = tuple[Case, tuple[str, ...]]
"""A case, and the checks to run on it; at least one."""

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class RoundQuestions:
    """The cases and checks of a backend in one round; ``round`` goes into its records."""

    questions: tuple[Question, ...]
    round: int = 0


def untimed_questions(plan: RunPlan, ref: str) -> RoundQuestions:
    """Return all checks except ``timing`` for the cases of this backend."""
    cases = plan.examined_cases_of(ref)
    questions = ((case, tuple(name for name in plan.checks_left(ref, case) if name != TIMING)) for case in cases)
    due = tuple((case, checks) for case, checks in questions if checks)
    return RoundQuestions(telling_first(due) if plan.telling_first else due)


def telling_first(questions: Sequence[Question]) -> tuple[Question, ...]:
    """Return ``questions``, divided so that the pairs of case and check of ``cases/telling.json`` come first.

    All others follow in their order. Checks of one case that follow one another stay one question.
    """
    order = telling_ranks()
    pairs = [(case, check) for case, checks in questions for check in checks]
    pairs.sort(key=lambda pair: order.get((pair[0].key, pair[1]), len(order)))  # stable: others keep their order
    return tuple(
        (case, tuple(check for _, check in together)) for case, together in groupby(pairs, lambda pair: pair[0])
    )


def timed_questions(plan: RunPlan, ref: str, number: int = 0, left_out: Collection[str] = ()) -> RoundQuestions:
    """Return the check ``timing`` for the cases of this backend, except those whose keys are in ``left_out``."""
    cases = (case for case in plan.examined_cases_of(ref) if case.key not in left_out)
    timed = (case for case in cases if TIMING in plan.checks_left(ref, case, number))
    return RoundQuestions(tuple((case, (TIMING,)) for case in timed), number)


def count_questions(plan: RunPlan, refs: Collection[str]) -> int:
    """Return how many times the whole run gives a case to a process of a backend."""
    once = sum(len(untimed_questions(plan, ref).questions) for ref in refs)
    return once + sum(
        len(timed_questions(plan, ref, number).questions) for ref in refs for number in range(plan.rounds)
    )


def rotated(items: Sequence[_Item], number: int) -> tuple[_Item, ...]:
    """Return ``items`` rotated by ``number``, so that a different item comes first in each round.

    >>> rotated("abc", 1), rotated("abc", 5)
    (('b', 'c', 'a'), ('c', 'a', 'b'))
    """
    first = number % len(items) if items else 0
    return (*items[first:], *items[:first])


# Selects page sizes and cache layouts for suites whose defaults the backends of a run reject. Loads no torch.

_SMALLEST = 16
"""Smallest page size chosen for a backend that accepts multiples, in tokens."""


def fit_pages(
    selection: Selection, backends: Sequence[BackendDescription], suites: Mapping[str, str]
) -> tuple[Selection, tuple[str, ...]]:
    """Return ``selection`` with defaults that most of ``backends`` accept, and notes on the changes.

    A suite does not change if every backend accepts its defaults. Values set by a case or by ``--set`` never change.
    ``suites``: by reference, the only suite a backend is examined with; a backend without an entry gets every suite.
    """
    able = [each for each in backends if each.is_loaded and not each.unavailable_reasons]
    refs = list(selection.refs)
    loaded = list(selection.suites)
    notes = list[str]()
    for index, suite in enumerate(selection.suites):
        examined = [each for each in able if suites.get(each.ref, suite.name) == suite.name]
        examined = [each for each in examined if not each.is_mla] or examined
        chosen = {key: _best(key, value, examined) for key, value in suite.page_defaults.items()}
        changed = [f"{key}={value}" for key, value in chosen.items() if value != suite.page_defaults[key]]
        if changed:
            try:
                ref = with_defaults(refs[index], changed)
                loaded[index] = load_suite(ref)
            except CaseFileError:  # the new defaults are invalid for this suite
                chosen = dict(suite.page_defaults)
            else:
                refs[index] = ref
        notes += _notes(suite, chosen, examined)
    if tuple(refs) == selection.refs:
        return selection, tuple(notes)
    keys = {case.key for case in selection.cases}
    cases = tuple(case for suite in loaded for case in suite.cases if case.key in keys)
    return replace(selection, suites=tuple(loaded), refs=tuple(refs), cases=cases), tuple(notes)


def _best(key: str, default: str, backends: Sequence[BackendDescription]) -> str:
    """Return the value of ``key`` that most backends accept. Ties go to the default, then to the smallest size."""
    if key == "cache.layout":
        values = [default, *(layout for each in backends for layout in each.layouts)]
    else:
        sizes = {size for each in backends for size in each.page_sizes}
        sizes |= {base * -(-_SMALLEST // base) for each in backends for base in each.page_multiples}
        values = [default, *map(str, sorted(sizes))]
    return max(values, key=lambda value: sum(_takes(each, key, value) for each in backends))


def _takes(backend: BackendDescription, key: str, value: str) -> bool:
    if key == "cache.layout":
        return not backend.layouts or value in backend.layouts
    sizes, multiples = backend.page_sizes, backend.page_multiples
    is_unknown = not sizes and not multiples
    return is_unknown or int(value) in sizes or any(int(value) % base == 0 for base in multiples)


def _notes(suite: Suite, chosen: Mapping[str, str], backends: Sequence[BackendDescription]) -> list[str]:
    notes, defaults = [], suite.page_defaults
    changed = [key for key, value in chosen.items() if value != defaults[key]]
    if changed:
        what = ", ".join(f"{key}={chosen[key]} instead of {defaults[key]}" for key in changed)
        names = [each.name for each in backends if not all(_takes(each, key, defaults[key]) for key in changed)]
        notes.append(f"suite {suite.name}: {what}, for {', '.join(names)}; --set chooses others")
    unfit = [each.name for each in backends if not all(_takes(each, key, value) for key, value in chosen.items())]
    if unfit:
        what = ", ".join(f"{key}={value}" for key, value in chosen.items())
        notes.append(
            f"suite {suite.name}: {', '.join(unfit)} does not take {what}; in a run of its own others are chosen"
        )
    return notes
