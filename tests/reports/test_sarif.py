"""SARIF for code scanning: its form, one result for each finding, and what was not examined as no pass."""

import json

import pytest

from attncheck.reports.run_file.header import SuiteInfo
from attncheck.reports.run_file.records import RunFooter
from attncheck.reports.run_file.store import Run
from attncheck.reports.sarif import render_run

# Of the schema of SARIF 2.1.0: the keys of each object that attncheck writes, those that the schema or GitHub requires
# first. No object may have another key.
KEYS = {
    "log": ("version $schema runs", ""),
    "run": ("tool results", "invocations originalUriBaseIds columnKind"),
    "tool": ("driver", ""),
    "driver": ("name rules", "version"),
    "rule": ("id shortDescription fullDescription help", "defaultConfiguration"),
    "invocation": ("executionSuccessful", "exitCode startTimeUtc endTimeUtc toolExecutionNotifications"),
    "notification": ("message", "level descriptor"),
    "result": ("ruleId message locations partialFingerprints", "level suppressions"),
    "location": ("physicalLocation", "logicalLocations"),
    "physicalLocation": ("artifactLocation region", ""),
    "artifactLocation": ("uri", "uriBaseId"),
    "suppression": ("kind", "justification"),
}
LEVELS = {"error", "warning", "note", "none"}


def check(name, found):
    required, optional = (set(words.split()) for words in KEYS[name])
    assert required <= set(found) <= required | optional, name
    assert found.get("level", "none") in LEVELS
    if "message" in found:
        assert found["message"]["text"]


def document(header, *records, errors=(), complete=True, root=""):
    """The only run of a document whose form is right."""
    footer = RunFooter(finished="2026-01-01T02:00:00+01:00", counts={}, errors=errors) if complete else None
    log = json.loads(render_run(Run("run.jsonl", header, records, footer), root))
    check("log", log)
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    check("run", run)
    check("tool", run["tool"])
    check("driver", run["tool"]["driver"])
    for rule in run["tool"]["driver"]["rules"]:
        check("rule", rule)
    (invocation,) = run["invocations"]
    check("invocation", invocation)
    for each in invocation["toolExecutionNotifications"]:
        check("notification", each)
    for result in run["results"]:
        check("result", result)
        assert result["ruleId"] in [rule["id"] for rule in run["tool"]["driver"]["rules"]]
        (location,) = result["locations"]
        check("location", location)
        check("physicalLocation", location["physicalLocation"])
        check("artifactLocation", location["physicalLocation"]["artifactLocation"])
        for each in result.get("suppressions", ()):
            check("suppression", each)
    return run


def mark(result):
    return result["partialFingerprints"]["attncheckFinding/v1"]


def notes(run):
    (invocation,) = run["invocations"]
    return [(each["level"], each["message"]["text"]) for each in invocation["toolExecutionNotifications"]]


def place(result):
    return result["locations"][0]["physicalLocation"]


def test_a_finding_is_one_result_at_the_file_of_its_backend(make, header):
    wrong = {"backend": "Wrong", "meaning": "the window is ignored"}
    records = (make("failed", case_id="a", **wrong), make("failed", case_id="b", **wrong), make("passed"))
    run = document(header, *records)
    (result,) = run["results"]
    assert (result["ruleId"], result["level"]) == ("numerics", "error")
    lines = result["message"]["text"].splitlines()
    assert "the window is ignored" in lines[0]
    assert lines[1] == "2 cases, check numerics"
    assert lines[-1].startswith("repeat: attncheck run --backend ./wrong.py:Wrong ")
    assert place(result)["artifactLocation"] == {"uri": "wrong.py"}
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["numerics", "lse", "cache_write"]
    (invocation,) = run["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (True, 1)
    assert (invocation["startTimeUtc"], invocation["endTimeUtc"]) == ("2026-01-01T00:00:00Z", "2026-01-01T01:00:00Z")


def test_a_result_is_at_the_line_that_raised(make, header):
    trace = 'Traceback:\n  File "/work/wrong.py", line 9, in forward\n    x'
    (result,) = document(header, make("errored", traceback=trace), root="/work")["results"]
    assert place(result) == {"artifactLocation": {"uri": "wrong.py"}, "region": {"startLine": 9}}


@pytest.mark.parametrize(
    ("ref", "uri"),
    [
        ("smoke{cache.block_size: 16}", "attncheck/cases/suites/smoke.yaml"),
        ("./my suite.yaml", "my%20suite.yaml"),
        ("../cases.yaml{}", "file:///cases.yaml"),
        ("/elsewhere/cases.yml", "file:///elsewhere/cases.yml"),
    ],
)
def test_the_case_file_of_a_suite(make, header, ref, uri):
    own = header.model_copy(update={"suites": (SuiteInfo(name="smoke", ref=ref, cases=1),)})
    (result,) = document(own, make("failed"), root="/work")["results"]
    assert place(result)["artifactLocation"]["uri"] == uri


def test_a_fingerprint_has_the_backend_the_check_and_the_cause_but_no_figure(make, header):
    first = make("failed", summary="7 of 40 rows are wrong")
    others = (
        make("failed", summary="9 of 80 rows are wrong", case_id="b", case_hash="1" * 12),
        make("failed", summary="7 of 40 rows are late"),
        make("failed", summary="7 of 40 rows are wrong", check="lse"),
        make("failed", summary="7 of 40 rows are wrong", backend="Wrong"),
    )
    marks = [mark(document(header, each)["results"][0]) for each in (first, *others)]
    assert marks[0] == marks[1]
    assert len(set(marks)) == 4
    (result,) = document(header, first)["results"]
    assert result["partialFingerprints"]["primaryLocationLineHash"] == f"{marks[0]}:1"


def test_findings_that_nothing_explains_have_fingerprints_of_their_own(make, run_of):
    unknown = "unexplained: no known fault fits"
    records = [
        make("failed", case_id=f"{name}{n}", check=check, finding=name, summary=f"{name} {n} {unknown}")
        for name in ("one", "two")
        for n in range(2)
        for check in ("numerics", "lse")
    ]
    run = run_of(records)
    marks = [mark(result) for result in json.loads(render_run(run))["runs"][0]["results"]]
    assert len(set(marks)) == len(marks) > 1


def test_an_expected_failure_is_a_suppressed_note(make, header):
    only = header.model_copy(update={"backends": header.backends[:1]})
    run = document(only, make("xfailed", reason="chunks are left out", summary="7 of 40 rows"), make("passed"))
    (result,) = run["results"]
    assert result["level"] == "note"
    assert result["suppressions"] == [{"kind": "external", "justification": "chunks are left out"}]
    assert "edge: failed, as expected: 7 of 40 rows" in result["message"]["text"]
    assert run["invocations"][0]["exitCode"] == 0


def test_what_was_not_examined_is_a_notification_and_no_pass(make, header):
    only = header.model_copy(update={"backends": header.backends[:1]})
    run = document(only, make("passed"), make("unsupported", case_id="b", reasons=("no sinks",)))
    assert run["results"] == []
    assert notes(run) == [("note", "reference: 1 case (numerics) unsupported: no sinks")]
    assert run["invocations"][0]["exitCode"] == 0
    run = document(only, make("unavailable", reasons=("no GPU",)))
    assert notes(run) == [("warning", "reference: nothing was examined: no GPU")]
    assert run["invocations"][0]["executionSuccessful"] is False
    assert run["invocations"][0]["exitCode"] == 2


def test_a_run_that_was_cut_off_or_has_errors_was_not_successful(make, header):
    only = header.model_copy(update={"backends": header.backends[:1]})
    cut_off = document(only, make("passed"), complete=False)
    assert [level for level, text in notes(cut_off) if "was cut off" in text] == ["error"]
    with_errors = document(only, make("passed"), errors=("sinks: the case is too weak",))
    assert notes(with_errors) == [("error", "sinks: the case is too weak")]
    for run in (cut_off, with_errors):
        assert run["invocations"][0]["executionSuccessful"] is False
        assert "exitCode" not in run["invocations"][0]


def test_a_failure_of_attncheck_is_no_result_about_the_backend(make, header):
    run = document(header, make("errored", stage="attncheck itself", error_type="KeyError", message="'x'"))
    assert run["results"] == []
    assert [level for level, text in notes(run) if "KeyError" in text] == ["error"]
    (invocation,) = run["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, 3)


def test_a_wrong_function_of_a_provider_is_a_result(make, header):
    record = make("failed", suite="utilities", check="utilities", case_id="cdiv", summary="3 of 9 differ")
    (result,) = document(header, record)["results"]
    assert result["message"]["text"].startswith("reference: cdiv: failed\n3 of 9 differ\nrepeat: ")
    assert place(result)["artifactLocation"]["uri"] == "attncheck/cases/suites/smoke.yaml"
