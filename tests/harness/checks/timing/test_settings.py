"""Settings with which nothing could be measured are refused."""

import math

import pytest

from attncheck.errors import QuestionError
from attncheck.harness.checks.findings import TimingSettings


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"limit_s": -1.0}, "a time limit of -1.0 s"),
        ({"limit_s": math.inf}, "a time limit of inf s"),
        ({"relative_width": -0.1}, "a relative width of -0.1"),
        ({"relative_width": math.nan}, "a relative width of nan"),
        ({"min_samples": 0}, "0 to 200 samples"),
        ({"min_samples": 5, "max_samples": 4}, "5 to 4 samples"),
    ],
)
def test_what_measures_nothing_is_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(QuestionError, match=message):
        TimingSettings(**wrong)  # type: ignore[arg-type]


def test_the_least_that_measures_is_taken() -> None:
    least = TimingSettings(limit_s=1e-6, relative_width=0.0, min_samples=1, max_samples=1)
    assert least.limit_s == 1e-6
