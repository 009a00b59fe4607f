"""Thresholds of ``--fail-on``: the slowdown that fails a comparison, by case and part.

``5%`` applies to everything, ``decode: 5%`` to a suite, ``decode/long-*: 5%`` to cases, ``@build: 20%`` and
``decode@build: 20%`` to one part of a step. Of several that apply to a case, the last one counts.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from attncheck.errors import QuestionError, UnknownNameError, shorten
from attncheck.reports.run_file.timings import PARTS, StepPart

EVERYTHING = "*"

_FORM = re.compile(r"(?:(?P<pattern>[^:@\s]*)\s*(?:@(?P<part>[^:@\s]*))?\s*:)?\s*(?P<percent>\d+(?:\.\d+)?)\s*%")

_EXAMPLES = "write '5%', 'decode: 5%', 'decode/long-*: 5%' or 'decode@build: 20%'"


@dataclass(frozen=True)
class SlowdownThreshold:
    """A slowdown by ``share`` of the time or more fails, in matching cases and in ``part`` (any part if None).

    ``pattern``: a shell pattern for suites, or for ``suite/id`` if it contains a slash.
    """

    pattern: str
    part: StepPart | None
    share: float
    text: str

    def concerns(self, case: str) -> bool:
        """Return whether the pattern matches this ``suite/id``."""
        return fnmatchcase(case if "/" in self.pattern else case.partition("/")[0], self.pattern)


@dataclass(frozen=True)
class SlowdownThresholds:
    """All given thresholds; without any, every reported slowdown fails."""

    members: tuple[SlowdownThreshold, ...] = ()

    def share(self, case: str, part: StepPart) -> float | None:
        """Return the slowdown that fails for ``part`` of ``case``, as a share of the time, or None if none does."""
        if not self.members:
            return 0.0
        shares = [each.share for each in self.members if each.part in (None, part) and each.concerns(case)]
        return shares[-1] if shares else None

    def refuse_unmatched(self, cases: Iterable[str]) -> None:
        """Raise QuestionError for a pattern that matches none of ``cases`` (``suite/id``)."""
        names = sorted(set(cases))
        for each in self.members:
            if not any(map(each.concerns, names)):
                suites = ", ".join(dict.fromkeys(name.partition("/")[0] for name in names))
                raise QuestionError(f"--fail-on {shorten(each.text)} matches no case of these runs (suites: {suites})")


def parse_thresholds(texts: Sequence[str], *, least: float) -> SlowdownThresholds:
    """Parse the values of ``--fail-on``. ``least``: the smallest difference that is reported, as a share.

    Raises:
        QuestionError: a text has another form, its part is unknown, or its share is below ``least``.
    """
    return SlowdownThresholds(tuple(_parse(text, least) for text in texts))


def _parse(text: str, least: float) -> SlowdownThreshold:
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise QuestionError(f"--fail-on {shorten(text)} is not understood; {_EXAMPLES}")
    part = next((known for known in PARTS if known == match["part"]), None)
    if match["part"] is not None and part is None:
        raise UnknownNameError("part", match["part"], PARTS)
    share = float(match["percent"]) / 100
    if share < least:
        raise QuestionError(
            f"--fail-on {shorten(text)}: differences below {100 * least:.3g}% are not reported; give more, or a "
            "lower --min-effect"
        )
    return SlowdownThreshold(match["pattern"] or EVERYTHING, part, share, text)
