"""Which of the cases before a crash is found to cause it, and how many processes that takes."""

from types import SimpleNamespace

import pytest

from attncheck.harness.run.outcomes import BackendDescription
from attncheck.harness.workers.examination import Recurrence, find_recurrence
from attncheck.harness.workers.schedule import BackendQuestion
from attncheck.reports.run_file.header import BackendInfo

BACKEND = BackendDescription(info=BackendInfo(name="a", ref="a"))


def question(name, *checks):
    return BackendQuestion(BACKEND, SimpleNamespace(key=f"smoke/{name}"), checks)


EARLIER = [question(str(number), "lse") for number in range(10)]
VICTIM = question("victim", "numerics", "lse")


class Replays:
    """Ends the process at the victim if ``causes`` holds for the cases before it."""

    def __init__(self, causes):
        self._causes = causes
        self.made = []

    def __call__(self, questions):
        *before, last = [each.case.key.partition("/")[2] for each in questions]
        assert last == "victim"
        self.made.append(before)
        return None if self._causes(set(before)) else ()


def find(replays, earlier=EARLIER, seconds=0.0):
    """Each look at the clock takes ``seconds``."""
    now = iter(range(1000))
    return find_recurrence(replays, VICTIM, earlier, lambda: seconds * next(now))


@pytest.mark.parametrize("guilty", ["0", "4", "9"])
def test_a_bisection_finds_the_one_case_that_causes_it(guilty):
    replays = Replays(lambda before: guilty in before)
    assert find(replays) == Recurrence("after", f"smoke/{guilty}")
    assert len(replays.made) <= 7


def test_where_two_cases_cause_it_together_none_is_named():
    assert find(Replays(lambda before: {"2", "7"} <= before)) == Recurrence("after", "")


def test_what_does_not_happen_again_is_flaky():
    replays = Replays(lambda before: False)
    assert find(replays).word == "flaky"
    assert [len(before) for before in replays.made] == [0, 10]
    assert find(Replays(bool), earlier=[]).word == "flaky"


def test_a_search_that_takes_too_long_names_no_case():
    replays = Replays(lambda before: "0" in before)
    assert find(replays, seconds=400.0) == Recurrence("after", "")
    assert len(replays.made) == 3
