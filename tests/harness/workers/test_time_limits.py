"""Time limits: given, scaled by the reference's own time, and in words."""

import math
from dataclasses import replace

import pytest

from attncheck.errors import SelectionError
from attncheck.harness.run.options import read_given
from attncheck.harness.workers.limits import Limit, TimeLimits, read_limit


def test_a_check_gets_ten_times_what_the_reference_takes_a_floor_and_the_time_of_its_samples(make_case):
    limit = TimeLimits().of_stage("check lse", make_case(), 2.5)
    assert limit.seconds == 325.0
    assert (
        str(limit)
        == "the limit was 325 s (300 s, and 10 times the 2.5 s that the reference took; --case-timeout changes it)"
    )
    limits = TimeLimits(sampling_s=0.5)
    assert limits.of_stage("check timing", make_case(), 1.0).seconds == 330.0
    assert limits.of_stage("check lse", make_case(), 1.0).seconds == 310.0


def test_the_preparation_of_a_large_case_takes_longer(make_case):
    small = make_case()
    large = replace(
        small,
        batch=replace(small.batch, requests=tuple(replace(request, count=10_000) for request in small.batch.requests)),
    )
    seconds = [TimeLimits().of_stage("the preparation of the case", case).seconds for case in (small, large)]
    assert 300 < seconds[0] < 310 < seconds[1]


def test_a_given_limit_is_that_of_every_stage_but_loading_has_a_minimum(make_case):
    limits = TimeLimits(7.0)
    for stage in ("check lse", "check timing", "the preparation of the case", "declarations"):
        assert limits.of_stage(stage, make_case(), 100.0) == Limit(7.0, "--case-timeout 7")
    assert limits.of_function.seconds == 7.0
    assert limits.of_loading.seconds == 60.0
    assert str(limits.of_loading) == "the limit was 60 s (--case-timeout 7; the least for loading is 60 s)"
    assert TimeLimits(100.0).of_loading.seconds == 100.0
    assert TimeLimits().of_loading.seconds == TimeLimits().of_function.seconds == 300.0


def test_a_backend_has_its_part_of_the_time_and_what_no_other_needs(monkeypatch):
    """23 backends in 8 processes: three in turn in the fullest process, which has 300 s, a tenth of it for starts."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    limits = TimeLimits(backend_s=5.0).shared(300.0, 23, 8)
    now[0] = 1010.0
    assert limits.of_backend(10.0, 8) == Limit(
        80.0, "the time of the backend by --within"
    )  # 15 wait, for two turns of 90 s
    now[0] = 1050.0
    assert limits.of_backend(50.0, 22).seconds == 130.0  # one waits
    assert limits.of_backend(50.0, 23).seconds == 220.0
    now[0] = 1260.0
    assert limits.of_backend(0.0, 23).seconds == 10.0  # it began late, and has no full part any more
    now[0] = 1300.0
    assert limits.of_backend(0.0, 23).seconds <= 0.0
    assert TimeLimits().shared(-1.0, 2, 8).of_backend(0.0, 1).seconds <= 0.0
    assert TimeLimits().shared(math.inf, 2, 8).of_backend(9.0, 1).seconds == math.inf
    assert TimeLimits(backend_s=5.0).of_backend(2.0, 1) == Limit(3.0, "the time of the backend by --backend-timeout 5")


def test_what_an_option_gives():
    assert [read_limit("--case-timeout", seconds) for seconds in (None, 0, 2.5)] == [None, math.inf, 2.5]
    for seconds in (-1.0, math.nan):
        with pytest.raises(SelectionError, match=r"--case-timeout .*: give seconds, or 0 for no limit"):
            read_limit("--case-timeout", seconds)


def test_a_run_is_given_its_time_in_seconds_or_with_a_unit(monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 1000.0)
    given = {text: read_given("deadline", text) for text in ("60", "60s", "2m", "0")}
    assert given == {"60": 1060.0, "60s": 1060.0, "2m": 1120.0, "0": math.inf}
    for text in ("-1", "nan", "soon", "inf"):
        with pytest.raises(SelectionError, match=rf"^--within '{text}': give a time, such as 90s, 5m or 1h$"):
            read_given("deadline", text)
