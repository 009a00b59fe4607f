"""Compare the parameters of two functions: each must exist by name, in its position, with its default."""

import inspect
from collections.abc import Callable
from typing import Any

from attncheck.harness.providers.answers import ABSENT, AnswerDifference

PARAMETERS = "parameters"
"""Prefix of the places of these differences."""

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def signature_differences(
    ours: Callable[..., Any], theirs: Callable[..., Any], newer: frozenset[str] = frozenset()
) -> list[AnswerDifference]:
    """Return parameters of ``ours`` that ``theirs`` lacks or has with another position or default, and additional ones.

    An additional optional parameter is tolerated, and so is the absence of a ``newer`` one. Empty for a function that
    takes ``*args`` or ``**kwargs``, or whose signature Python cannot determine; it is judged by its answers alone.
    """
    try:
        known, seen = (inspect.signature(function).parameters for function in (ours, theirs))
    except (TypeError, ValueError):
        return []
    if any(parameter.kind not in _NAMED for parameter in seen.values()):
        return []
    expected = {name: parameter for name, parameter in known.items() if name in seen or name not in newer}
    return [*_changed(expected, seen), *_further(known, seen)]


def _changed(known: Any, seen: Any) -> list[AnswerDifference]:
    found = []
    for place, (name, parameter) in enumerate(known.items()):
        expected = _format(place, parameter)
        other = _format(list(seen).index(name), seen[name]) if name in seen else ABSENT
        if expected != other:
            found.append(AnswerDifference(f"{PARAMETERS}.{name}", expected, other))
    return found


def _further(known: Any, seen: Any) -> list[AnswerDifference]:
    return [
        AnswerDifference(
            f"{PARAMETERS}.{name}",
            ABSENT,
            _format(place, parameter),
            tolerated=parameter.default is not inspect.Parameter.empty,
        )
        for place, (name, parameter) in enumerate(seen.items())
        if name not in known
    ]


def _format(place: int, parameter: inspect.Parameter) -> str:
    only = ", by keyword only" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else ""
    if parameter.default is inspect.Parameter.empty:
        return f"parameter {place + 1}, required{only}"
    return f"parameter {place + 1}, default {parameter.default!r}{only}"
