"""What many runs come to: one answer for each backend on each device, true whatever a run expected or left out."""

import re
from dataclasses import replace

import pytest

from attncheck.backends.mutants.catalogue import PREFIX
from attncheck.reports.analysis.measured import measured_run, paces, subjects
from attncheck.reports.analysis.recommendation import STANDINGS, need_answer, pace_words, recommend
from attncheck.reports.analysis.support import REFUSED
from attncheck.reports.site.pages import badge, history, verdict


def test_a_known_fault_and_a_fault_beside_right_outputs_make_no_green_verdict(run_file, subjects_of):
    (known,) = subjects_of(run_file(1, {"a": "xfailed", "b": "passed"}))
    assert verdict(known) == ("wrong (known)", "bad", "1 finding, 1 case right, 1 wrong")
    assert "wrong (known): 1 finding" in badge(known)
    (both,) = subjects_of(run_file(1, {"a": "xfailed"}), run_file(2, {"c": "failed"}, finding="the sinks are ignored"))
    assert verdict(both)[:2] == ("wrong", "bad")
    right, wrong = subjects_of(run_file(1, {"a": "passed"}), run_file(1, {"a": "failed"}, backend="Other"))
    ((run, backend),) = right.runs
    mine = replace(right, runs=((run, replace(backend, findings=wrong.runs[0][1].findings)),))
    assert verdict(mine) == ("wrong", "bad", "1 finding, 1 case right")


def test_a_stopped_run_makes_no_green_verdict_and_no_green_badge(run_file, subjects_of):
    (stopped,) = subjects_of(run_file(1, {"a": "passed"}, stopped=("b", "c")))
    assert verdict(stopped) == ("1 of 3 cases, not all reached", "warn", "1 case right")
    assert "1 of 3 cases, not all reached" in badge(stopped)
    # A later run that reaches the other cases completes the answer.
    files = run_file(1, {"a": "passed"}, stopped=("b",)), run_file(2, {"a": "passed", "b": "passed"})
    assert verdict(subjects_of(*files)[0]) == ("right", "good", "2 cases right")


def test_a_run_in_part_makes_no_green_verdict_and_a_case_is_right_only_if_outputs_were_compared(run_file, subjects_of):
    needs = {"a": ("lse",), "b": ("sinks",), "c": ("alibi",)}
    (part,) = subjects_of(run_file(1, {"a": "passed"}, late=("b", "c"), needs=needs))
    assert verdict(part) == ("1 of 3 cases, not all reached", "warn", "1 case right")
    assert "#1b6b35" not in badge(part)
    assert [need_answer(part, *own).standing for own in needs.values()] == [
        "right",
        "not reached",
        "not reached",
    ]
    assert [each.standing for each in recommend(["sinks"], [part])] == ["not reached"]
    files = run_file(1, {"a": "passed"}, late=("b", "c"), needs=needs), run_file(2, {"b": "passed"}, late=("a",))
    assert [subject.counts["right"] for subject in subjects_of(*files)] == [2]


def test_a_backend_that_a_run_in_part_reached_whole_is_right(run_of, make):
    late = {"reasons": ["the case did not run, because earlier cases used up the time of the backend by --within"]}
    records = [make("passed", backend="fast"), make("passed", backend="slow")]
    records += [make("unavailable", backend="slow", check="cudagraph", **late)]
    fast, slow = subjects([measured_run(run_of(records), "run", {})])
    assert verdict(fast) == ("right", "good", "1 case right")
    assert verdict(slow) == ("1 of 1 case, not all reached", "warn", "1 case right")


def test_a_need_of_a_case_that_was_not_reached_is_no_missing_case(run_file, subjects_of):
    needs = {"a": ("lse",), "b": ("sinks",)}
    other = run_file(1, {"a": "passed", "b": "passed"}, backend="other", needs=needs)
    mine, _ = subjects_of(other, run_file(1, {"a": "passed"}, needs=needs, stopped=("b",)))
    assert need_answer(mine, "sinks").words == "not reached (1): the run ended before"
    assert need_answer(mine, "alibi").standing == "not reached"
    assert need_answer(mine, "lse").standing == "right"


def test_what_returns_wrong_output_stands_first(run_file, subjects_of):
    refusal = {"needs": ("sinks",), "check": "refusals", "features": ()}
    accepts = run_file(1, {"a": "failed", "b": "passed"}, backend="Zed", **refusal)
    right = run_file(1, {"a": "passed"}, backend="Able", needs=("sinks",), features=("sinks",))
    refuses = run_file(1, {"a": "passed"}, backend="Noble", notes=(f"{REFUSED} construct: no",), **refusal)
    found = recommend(["sinks"], subjects_of(accepts, right, refuses))
    assert [(each.subject.name, each.standing) for each in found] == [
        ("Zed", "wrong"),
        ("Able", "right"),
        ("Noble", "refused"),
    ]
    assert next(iter(STANDINGS.values())) == "accepts it and returns wrong output"


@pytest.mark.parametrize(
    ("processes", "words"),
    [(1, "53 times the fastest; fewer than 3 processes: no interval"), (3, "53 times the fastest (53 to 53)")],
)
def test_a_slower_backend_is_never_within_the_noise(run_file, subjects_of, processes, words):
    fast = run_file(1, {"a": "passed"}, backend="Fast", times={"a": 1e5}, processes=processes)
    slow = run_file(1, {"a": "passed"}, backend="Slow", times={"a": 53e5}, processes=processes)
    first, second = recommend([], subjects_of(slow, fast))
    assert (first.subject.name, second.subject.name) == ("Fast", "Slow")
    assert second.pace is not None
    assert pace_words(second.pace) == words


def test_a_case_with_other_settings_is_another_case(run_file, subjects_of):
    small = {"needs": ("block_size=16",), "variant": "{cache.block_size: 16}", "times": {"a": 1e5}}
    large = {"needs": ("block_size=256",), "variant": "{cache.block_size: 256}", "times": {"a": 2e5}}
    files = [run_file(1, {"a": "passed"}, **small), run_file(2, {"a": "passed"}, **large)]
    mine, other = subjects_of(*files, run_file(2, {"a": "passed"}, backend="Other", **large))
    assert (len(mine.cases), need_answer(mine, "block_size=16").words) == (2, "right (1)")
    assert [name for each, name in paces([mine, other]) if each == "Other"] == ["smoke{cache.block_size: 256}/a"]


def test_times_of_another_machine_are_not_compared(run_file, subjects_of):
    files = [
        run_file(1, {"a": "passed"}, backend=name, times={"a": 1e5}, machine={"cores": cores})
        for name, cores in (("One", 8), ("Two", 16))
    ]
    assert [each.pace for each in recommend([], subjects_of(*files))] == [None, None]


def test_the_newest_result_of_each_case_of_the_newest_version_counts(run_file, subjects_of):
    old = run_file(1, {"a": "failed", "gone": "failed"}, version="1")
    whole = run_file(2, {"a": "failed", "b": "passed"}, version="2")
    part = run_file(3, {"a": "passed"}, version="2")
    (mine,) = subjects_of(whole, part, old)
    assert {name: case.counted.count for name, case in mine.cases.items()} == {"smoke/a": "right", "smoke/b": "right"}
    assert (mine.version, mine.findings, verdict(mine).word) == ("2", (), "right")
    assert [(len(period.runs), period.backend.version) for period in history(mine)] == [(1, "2"), (1, "2"), (1, "1")]
    # Equal runs of a version are one line, and GPUs come before CPUs.
    days = [run_file(day, {"a": "passed"}, device="z gpu") for day in (1, 2, 3)]
    cpu = run_file(1, {"a": "passed"}, device="a cpu", machine={"capability": None})
    gpu, other = subjects_of(cpu, *days, run_file(4, {"a": "passed"}, device="z gpu", version="2"))
    assert (gpu.device, other.device) == ("z gpu", "a cpu")
    assert [len(period.runs) for period in history(gpu)] == [1, 3]


def test_a_finding_counts_until_all_of_its_cases_are_examined_again(run_file, subjects_of):
    wrong = run_file(1, {"a": "failed", "b": "failed"})
    later = run_file(3, {"a": "passed"})
    unjudged = run_file(2, {"a": "passed", "b": "passed"}, check="poison")  # it compares no outputs
    for runs in ([unjudged], [later]):
        (mine,) = subjects_of(wrong, *runs)
        assert verdict(mine)[:2] == ("wrong", "bad")
        assert [finding.title for finding, _ in mine.findings] == ["the window is ignored"]
    (mine,) = subjects_of(wrong, later, run_file(4, {"b": "passed"}))
    assert (verdict(mine)[:2], mine.findings) == (("right", "good"), ())


def test_every_link_leads_to_a_page_of_the_site_and_only_current_runs_have_one(run_file, build):
    wrong = run_file(1, {"a": "passed", "z": "failed"}, backend="o/ther", device="b gpu")
    site = build(path for path in [run_file(1, {"a": "passed"}), run_file(2, {"a": "passed"}), wrong])
    for page in site.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"?#]+)', page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
    assert sorted(page.stem[:4] for page in (site / "runs").iterdir()) == ["000-", "002-"]
    assert "001.jsonl" in (site / "runs.html").read_text(encoding="utf-8")
    rows = re.findall(r"<tr><th[^>]*>(smoke/\w)", (site / "cases.html").read_text(encoding="utf-8"))
    assert rows == ["smoke/z", "smoke/a"]  # what breaks a backend comes first


def test_files_of_an_earlier_site_are_deleted_and_unread_runs_are_named(run_file, build, tmp_path):
    build([run_file(1, {"a": "passed"}, backend="gone")])
    broken = tmp_path / "runs" / "broken.jsonl"
    broken.write_text("no run", encoding="utf-8")
    site = build([run_file(2, {"a": "passed"}), broken])
    assert [path.name for path in (site / "backends").iterdir()] == ["mine-4fc9bda4.html"] or not (
        site / "backends" / "gone.html"
    ).exists()
    assert "broken.jsonl" in (site / "runs.html").read_text(encoding="utf-8")


def test_a_mutant_is_no_backend_of_a_site(run_file, build):
    mutant = f"{PREFIX}window-one-short"
    site = build([run_file(1, {"a": "failed"}, backend=mutant)])
    assert "No backend was examined" in (site / "index.html").read_text(encoding="utf-8")
    site = build([run_file(1, {"a": "failed"}, backend=mutant), run_file(1, {"a": "passed"})])
    assert mutant not in "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.*") if path.is_file())
