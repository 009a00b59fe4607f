"""GitHub's step summary and annotations: short, below the limit, and no backend can give the runner a command."""

import itertools
import re
from urllib.parse import unquote

from attncheck.reports import github
from attncheck.reports.run_file.header import BackendInfo, CaseInfo
from attncheck.reports.run_file.records import RunFooter
from attncheck.reports.run_file.store import Run

COMMAND = re.compile(r"::(?P<kind>error|warning) (?P<properties>[^:]*)::(?P<message>.*)")


def run_of(header, *records, errors=(), complete=True):
    footer = RunFooter(finished="2026-01-01T00:01:00+00:00", counts={}, errors=errors)
    return Run("run.jsonl", header, records, footer if complete else None)


def commands(run):
    """Annotations as the runner reads them: it unescapes properties and message."""
    found = []
    for line in github.annotations([run]).splitlines():
        match = COMMAND.fullmatch(line)
        assert match, line
        named = dict(each.split("=", 1) for each in match["properties"].split(","))
        named = {key: unquote(value) for key, value in named.items()}
        found.append((match["kind"], named, unquote(match["message"])))
    return found


def test_a_function_of_a_provider_and_a_run_that_was_cut_off_are_errors(make, header):
    record = make("failed", suite="utilities", check="utilities", case_id="cdiv", summary="3 of 9 differ")
    ((kind, named, message),) = commands(run_of(header, record))
    assert (kind, named) == ("error", {"title": "reference: cdiv: failed"})
    assert message.startswith("3 of 9 differ\nrepeat: attncheck run --provider ")
    ((kind, _, message),) = commands(run_of(header, make("passed"), make("passed", backend="Wrong"), complete=False))
    assert kind == "error"
    assert "was cut off before its footer" in message


def test_an_expected_finding_is_no_error_and_states_what_cases_share(make, header):
    keys = {"a": {"cache.block_size": 1}, "b": {"cache.block_size": 16}}
    infos = tuple(CaseInfo(suite="smoke", id=name, shape="", keys=own) for name, own in keys.items())
    records = (make("failed", case_id="a"), make("passed", case_id="b"), make("xfailed", case_id="b", check="lse"))
    ((_, _, message),) = commands(run_of(header.model_copy(update={"cases": infos}), *records))
    assert "\nunlike passing cases: cache.block_size is 1 in the one case that fails" in message


def test_no_more_are_printed_than_github_shows(make, header):
    failures = [make("failed", case_id=name, summary=f"{name} is wrong") for name in "abcdefghijkl"]
    ten = commands(run_of(header, *failures[:10]))
    assert [named["title"] for _, named, _ in ten] == [f"reference: {name} is wrong" for name in "abcdefghij"]
    many = commands(run_of(header, *failures))
    assert len(many) == 10
    assert many[-1][1]["title"] == "and 3 more"


def test_warnings_are_of_backends_that_did_not_run_and_of_doubtful_times(make, timed, header):
    slow = timed(
        {"forward": 1e6}, timing={"device": {"throttle_reasons": ["sw_power_cap"]}}, work={"is_settled": False}
    )
    found = commands(run_of(header, slow, make("unavailable", backend="Wrong")))
    assert [kind for kind, _, _ in found] == ["warning"] * 3
    assert found[0][1:] == ({"title": "Wrong: nothing was examined"}, "needs CUDA")
    assert "held back (sw_power_cap)" in found[1][2]
    assert found[2][2].startswith("too noisy")
    assert commands(run_of(header, make("passed"), make("passed", backend="Wrong"))) == []
    # Several processes give their spread, whatever one of them did not settle.
    rounds = [timed({"forward": 1e6}, work={"is_settled": False}, round=number) for number in range(2)]
    assert commands(run_of(header.model_copy(update={"rounds": 2}), *rounds)) == []


def test_the_summary_stays_below_the_limit_and_states_what_it_left_out(make, header, monkeypatch):
    monkeypatch.setattr(github, "MAX_SUMMARY_BYTES", 2**16)
    words = ["".join(letters) for letters in itertools.product("abcdefgh", repeat=2)]
    many = [make("failed", case_id=word, summary=f"{word} {'é' * 1500}") for word in words]
    text = github.summary([run_of(header, *many)])
    assert 50_000 < len(text.encode()) <= 2**16
    assert text.count("<details>") == text.count("</details>") == 1
    assert text.rstrip().endswith("The rest was cut, since a summary holds 1 MiB: the run file has it all.")
    both = github.summary([run_of(header, *many), run_of(header, *many)])
    assert len(both.encode()) <= 2**16
    assert both.count("## attncheck: failed") == 2
    assert "was cut" not in github.summary([run_of(header, *many[:3])])
    # Even tables that are too long are cut.
    names = [f"{'b' * 2000}{number}" for number in range(40)]
    header = header.model_copy(update={"backends": tuple(BackendInfo(name=name, ref=name) for name in names)})
    text = github.summary([run_of(header, *(make("passed", backend=name) for name in names))])
    assert len(text.encode()) <= 2**16
    assert text.rstrip().endswith("the run file has it all.")
