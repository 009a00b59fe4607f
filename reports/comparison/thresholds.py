"""How much slower is too slow: what ``--fail-on`` says, for which cases and parts.

``5%`` is about everything, ``decode: 5%`` about a suite, ``decode/long-*: 5%`` about cases, ``@build: 20%`` and
``decode@build: 20%`` about one part of a step. Of several that concern a case, the last one counts.
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
    """A slowdown of ``share`` of the time or more is too much, in cases that match and in ``part`` (None: any).

    ``pattern``: a shell pattern of suites, or with a slash of ``suite/id``.
    """

    pattern: str
    part: StepPart | None
    share: float
    text: str

    def concerns(self, case: str) -> bool:
        """Whether the pattern matches this ``suite/id``."""
        return fnmatchcase(case if "/" in self.pattern else case.partition("/")[0], self.pattern)


@dataclass(frozen=True)
class SlowdownThresholds:
    """Every threshold asked for; none: any slowdown that is told is one too many."""

    members: tuple[SlowdownThreshold, ...] = ()

    def share(self, case: str, part: StepPart) -> float | None:
        """How much slower, as a share of the time, is too slow for ``part`` of ``case``; None: it cannot be."""
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
    """Read what was typed after ``--fail-on``. ``least``: the least difference that is told, as a share.

    Raises:
        QuestionError: a text of another form, a part nobody knows, a share of less than ``least``.
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
            f"--fail-on {shorten(text)}: differences below {100 * least:.3g}% are not told; give that or more, or a "
            "lower --min-effect"
        )
    return SlowdownThreshold(match["pattern"] or EVERYTHING, part, share, text)
