"""Resolves the names, shell patterns and keyword expressions that a user types to checks and cases. Loads no torch.

A pattern without a match is an error. The message suggests a name that the same option accepts.
"""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import filter as fnmatch_filter
from pathlib import Path
from shlex import quote

from attncheck.backends.declarations import needs_of
from attncheck.cases.loader import load_suite, select, suite_names
from attncheck.cases.model import Case
from attncheck.errors import SelectionError, UnknownNameError, shorten
from attncheck.reference.spec import CHECKS, FORMER_CHECKS, default_checks

_PARTS = re.compile(r"(?:\[[^\]]*\]|\{[^}]*\}|[^,])+")
"""The parts between commas; commas inside brackets or braces do not separate."""


def split_commas(words: Iterable[str]) -> tuple[str, ...]:
    """Return the names in ``words``, split at commas; the name of an existing file is not split.

    >>> split_commas(["decode,smoke{layer.dtype: float16, cache.block_size: 32}", "[a,b]*"])
    ('decode', 'smoke{layer.dtype: float16, cache.block_size: 32}', '[a,b]*')
    """
    parts = ([word] if Path(word).is_file() else _PARTS.findall(word) for word in words)
    return tuple(part.strip() for own in parts for part in own if part.strip())


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


def matching_cases(cases: Sequence[Case], pattern: str, refs: Sequence[str], named: str) -> Sequence[Case]:
    """Return the cases that match ``pattern``. ``refs``: the suites they are from; ``named``: as the user named them.

    Raises:
        SelectionError: no case matches; the message suggests a pattern that does.
    """
    if found := select(cases, [pattern]):
        return found
    raise SelectionError(f"no case of {named} matches {pattern!r}; {_advice(cases, pattern, refs)}")


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
