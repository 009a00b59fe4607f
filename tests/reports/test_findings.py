"""Findings: records of one fault are one, whatever the check; what nothing explains is split by keys of its cases."""

import pytest

from attncheck.reports.analysis.findings import CONTRASTED, Finding, findings, stated_cause
from attncheck.reports.run_file.causes import UNEXPLAINED
from attncheck.reports.run_file.header import CaseInfo
from attncheck.reports.run_file.records import OURSELVES

ROWS = "7 of 40 rows are wrong, the first is row 3 (request 0, position 35), head 1: found 0.5"
WINDOW = "the window is ignored"
FITS = ": a reference with this fault gives the same output in all rows"
SOME = ": a reference with this fault gives the same output in the 7 wrong rows, all with query_len 1"
MINE = "/home/me/mine.py"


def traceback(line: int, path: str = MINE) -> str:
    return f'Traceback (most recent call last):\n  File "{path}", line {line}, in forward\n    x\nIndexError: no'


@pytest.fixture
def with_cases(header):
    """``with_cases(a={"size": 1})``: a header that describes cases of the suite ``smoke``."""

    def build(**keys):
        infos = tuple(CaseInfo(suite="smoke", id=name, shape=f"shape {name}", keys=own) for name, own in keys.items())
        return header.model_copy(update={"cases": infos})

    return build


def listed(found: tuple[Finding, ...]) -> list[tuple[str, list[str], list[str]]]:
    return [(each.title, [case.removeprefix("smoke/") for case in each.cases], list(each.checks)) for each in found]


def test_records_of_one_cause_are_one_finding_whatever_the_check(make, header):
    records = [
        make(
            "failed",
            case_id="a",
            summary=ROWS,
            meaning=f"{WINDOW}: a reference with this fault gives the same output in all 7 rows",
        ),
        make(
            "failed",
            case_id="b",
            summary=ROWS,
            meaning=f"{WINDOW}: a reference with this fault gives the same output in 5 of 9 rows",
        ),
        make("failed", case_id="a", check="cache_write", summary="3 slots are wrong, first: page 2"),
        make("failed", case_id="d", check="cache_write", summary="41 slots are wrong, first: page 0"),
        make("failed", case_id="b", check="containment", summary=ROWS, meaning=WINDOW),
        make("passed", case_id="c"),
    ]
    assert listed(findings(records, header)) == [
        (WINDOW, ["a", "b"], ["numerics", "containment"]),
        ("3 to 41 slots are wrong", ["a", "d"], ["cache_write"]),
    ]


def test_a_process_that_ends_in_several_checks_of_a_case_is_one_finding(make, header):
    """After the loss of a device, each check of the case has a process of its own, which dies at another place."""
    stack = f'Current thread 0x0 (most recent call first):\n  File "{MINE}", line 2 in forward'
    lost = {"cause": "the device was lost (CUDA error: misaligned address; ...)"}
    records = [
        make("crashed", case_id="a", stage="check numerics", output=stack, **lost),
        make("crashed", case_id="a", check="lse", stage="check lse", **lost),
        make("crashed", case_id="a", check="cudagraph", stage="check cudagraph", cause="killed by SIGSEGV"),
        make("crashed", case_id="b", check="lse", stage="check lse, in forward", **lost),
        make("crashed", case_id="b", check="cudagraph", stage="check cudagraph", **lost),
    ]
    died = "the device was lost (CUDA error: misaligned address"
    assert listed(findings(records, header)) == [
        (f"{died} at mine.py:2 in forward", ["a"], ["numerics", "lse"]),
        (died, ["b"], ["lse", "cudagraph"]),
        ("killed by SIGSEGV", ["a"], ["cudagraph"]),
    ]


def test_what_a_backend_had_no_time_for_is_one_finding_without_a_common_property(make, with_cases):
    late = (
        "not finished within the time limit; the limit was 2 s (what was left of the time of the backend by --within)"
    )
    never = "the case did not run, because earlier cases used up the time of the backend by --within"
    stack = f'Current thread 0x0 (most recent call first):\n  File "{MINE}", line 2 in forward'
    records = [
        *(make("passed", case_id=name) for name in "ab"),
        make("timed_out", case_id="c", stage="check numerics", cause=late, output=stack, limit_s=2.0),
        make("timed_out", case_id="d", stage="", cause=never, limit_s=9.0),
    ]
    (found,) = findings(records, with_cases(a={"size": 1}, b={"size": 1}, c={"size": 9}, d={"size": 9}))
    assert (found.title, found.cases) == ("the time of the backend was used up", ("smoke/c", "smoke/d"))
    assert found.contrast is None


def test_of_several_causes_that_of_most_records_counts(make, header):
    fits = f"{FITS}; also possible: "
    records = [
        make("failed", case_id="a", summary=ROWS, meaning=f"the scale is that of head size 16{fits}the scale is 2"),
        make("failed", case_id="b", summary=ROWS, meaning=f"the scale is that of a value{fits}the scale is 2"),
        make("failed", case_id="c", summary=ROWS, meaning=f"the scale is 2{FITS}"),
    ]
    assert listed(findings(records, header)) == [("the scale is 2", ["a", "b", "c"], ["numerics"])]


@pytest.mark.parametrize("check", ["lse", "features", "invariance", "containment", "cudagraph"])
def test_what_no_cause_explains_joins_its_output(make, header, check):
    records = [
        make("failed", case_id="a", check=check, summary=ROWS, meaning=None),
        make("failed", case_id="a", summary=ROWS, meaning=f"{WINDOW}{FITS}"),
        make("failed", case_id="b", check=check, summary=ROWS, meaning=None),
    ]
    (joined, apart) = findings(records, header)
    assert listed((joined, apart)) == [
        (f"perhaps: {WINDOW}", ["a"], ["numerics", check]),
        ("7 of 40 rows are wrong", ["b"], [check]),
    ]
    assert joined.example.check == "numerics"


def test_what_fails_only_where_the_cache_is_written_wrongly_joins_that_finding(make, header):
    """A cache that lacks rows looks like a page that is not read; a window that is ignored elsewhere is a fault."""
    lost = {"summary": ROWS, "meaning": f"the last page is missing{FITS}"}
    written = {"check": "cache_write", "meaning": "rows at the end of the step are not written, {} of them"}
    records = [
        make("failed", case_id="a", **written | {"meaning": written["meaning"].format(1)}),
        make("failed", case_id="a", **lost),
        make("failed", case_id="a", check="lse", meaning=f"the mask{FITS}"),
        make("failed", case_id="b", **written | {"meaning": written["meaning"].format(3)}),
        make("failed", case_id="b", summary=ROWS, meaning="not known; rows with position 7"),
        make("failed", case_id="b", check="features", summary=ROWS),
        make("failed", case_id="d", check="invariance", summary="right at first", meaning="an earlier step is kept"),
    ]
    (found,) = findings(records, header)
    assert (found.title, found.checks) == (
        "rows at the end of the step are not written, 1 to 3 of them",
        ("numerics", "cache_write", "lse", "features", "invariance"),
    )
    assert stated_cause(records[1], found) == f"it may follow from another fault: {found.title}"
    raised = make("errored", case_id="d", check="invariance", traceback=traceback(4))
    assert [each.cases for each in findings([*records, raised], header)][1:] == [("smoke/d",)]
    window = make("failed", case_id="c", summary=ROWS, meaning=f"the last page is missing{FITS}")
    assert [each.cases for each in findings([*records, window], header)] == [
        ("smoke/a", "smoke/b", "smoke/d"),
        ("smoke/a", "smoke/c"),
    ]


@pytest.mark.parametrize(
    ("check", "meaning"),
    [
        ("determinism", None),
        ("containment", "memory is read; only NaN and Inf leak, a large finite value does not"),
        ("cudagraph", "the same step is right without a graph: numbers are frozen at capture"),
    ],
)
def test_what_a_wrong_output_cannot_cause_is_another_finding(make, header, check, meaning):
    records = [
        make("failed", case_id="a", summary=ROWS, meaning=f"{WINDOW}{FITS}"),
        make("failed", case_id="a", check=check, summary="x", meaning=meaning),
    ]
    assert [found.checks for found in findings(records, header)] == [("numerics",), (check,)]


def test_failures_of_cases_that_overlap_are_one_finding_if_no_fault_explains_them(make, header):
    """As of a kernel that reads one page too many: several checks fail in several ways, and each in some cases."""
    leak = {"check": "containment", "summary": "NaN reaches 1 of 6 rows", "meaning": "more is read"}
    layer = {"check": "features", "summary": "a layer with a scale of 2, in the same process: 1 of 6 rows are wrong"}
    loop = {"check": "invariance", "summary": "right at first", "meaning": "something of an earlier step is kept"}
    answer = (
        "the backend does not declare the case (layout HND), accepts it without an error, and its output is wrong: "
    )
    records = [
        make("failed", case_id="a", summary=ROWS),
        make("failed", case_id="a", **leak),
        make("failed", case_id="b", **leak),
        make("failed", case_id="b", **layer),
        make("failed", case_id="c", **layer),
        make("failed", case_id="d", **loop),
        make("failed", case_id="e", check="refusals", summary=f"{answer}{ROWS}"),
    ]
    (found,) = findings(records, header)
    assert (found.title, found.checks) == (
        UNEXPLAINED,
        ("numerics", "containment", "features", "invariance", "refusals"),
    )
    (found,) = findings(records[:4], header)
    assert (found.title, found.checks) == ("more is read", ("numerics", "containment", "features"))


def test_a_cause_is_confirmed_by_a_case_of_another_batch_or_layer(make, with_cases):
    keys = {"a": {"layer.dtype": "float16"}, "b": {"layer.dtype": "float32"}, "c": {"batch.max_seq_len": 9}}
    records = [make("failed", case_id=name, summary=ROWS, meaning=f"{WINDOW}{FITS}") for name in "abc"]
    (alike,) = findings(records[:2], with_cases(**keys))
    (confirmed,) = findings(records, with_cases(**keys))
    assert (alike.title, confirmed.title) == (f"perhaps: {WINDOW}", WINDOW)
    assert stated_cause(records[0], alike) == stated_cause(records[0]) == f"perhaps: {WINDOW}{FITS}"
    assert stated_cause(records[0], confirmed) == f"likely cause: {WINDOW}{FITS}"


def test_cases_with_other_figures_confirm_no_cause(make, header):
    """A fault of the kernel has one number of splits; several of them that fit show another fault."""
    splits = [make("failed", case_id=f"a{n}", summary=ROWS, meaning=f"the last of {n} splits{FITS}") for n in (2, 4)]
    decodes = [make("failed", case_id=name, summary=ROWS, meaning=f"{WINDOW}{SOME}") for name in "bc"]
    (perhaps, likely) = findings([*splits, *decodes], header)
    assert (perhaps.title, likely.title) == (
        "perhaps: the last of 2 to 4 splits",
        f"{WINDOW}, in rows with query_len 1",
    )


def test_a_case_that_excludes_a_cause_removes_it(make, header):
    also = "; also possible: "
    one = make("failed", case_id="a", summary=ROWS, meaning=f"the scale is 3{FITS}{also}the mask{also}the cap")
    other = make("failed", case_id="b", summary=ROWS, meaning=f"the mask{FITS}{also}the cap")
    third = make("failed", case_id="c", summary=ROWS, meaning=f"the mask{FITS}")
    (found,) = findings([one, other], header)
    assert stated_cause(one, found) == f"perhaps: the mask{FITS}{also}the cap"
    (found,) = findings([one, other, third], header)
    assert stated_cause(one, found) == f"likely cause: the mask{FITS}"
    some = make("failed", case_id="d", summary=ROWS, meaning=f"the scale is 3{SOME}{also}the mask")
    (found,) = findings([some, third], header)
    assert stated_cause(some, found) == "likely cause: the mask"  # the rows are those that the scale fits


def test_what_is_written_wrongly_comes_before_what_follows_from_it(make, header):
    records = [
        *(make("failed", case_id=case, summary=ROWS, meaning=f"{WINDOW}{FITS}") for case in "ab"),
        make("failed", case_id="a", check="cache_write", summary="3 slots are wrong", meaning="keys are rounded"),
    ]
    assert [title for title, _, _ in listed(findings(records, header))] == ["keys are rounded", WINDOW]


def test_a_pattern_of_wrong_rows_is_in_the_title_and_no_cause(make, header):
    (found,) = findings([make("failed", summary=ROWS, meaning="not known; wrong are rows with context")], header)
    assert (found.title, found.is_explained) == (f"{UNEXPLAINED}: wrong are rows with context", False)


def test_one_exception_at_one_line_is_one_finding(make, header):
    same = {"error_type": "IndexError", "traceback": traceback(12)}
    records = [
        *(make("errored", check=check, message=f"index {n}", **same) for n, check in enumerate(header.checks, 6)),
        make("errored", case_id="b", **same | {"traceback": traceback(13)}),
        make("errored", case_id="c", **same | {"error_type": "KeyError"}),
        make("errored", case_id="d", error_type="IndexError", stage="build", message="index 6"),
        make("errored", case_id="e", error_type="IndexError", stage="build", message="index 7"),
        make("errored", case_id="f", error_type="IndexError", stage="forward", message="index 7"),
    ]
    assert listed(findings(records, header)) == [
        ("IndexError at mine.py:12 in forward: index 6", ["edge"], ["numerics", "lse", "cache_write"]),
        ("IndexError at mine.py:13 in forward: no such kernel", ["b"], ["numerics"]),
        ("KeyError at mine.py:12 in forward: no such kernel", ["c"], ["numerics"]),
        ("IndexError in build: index 6", ["d", "e"], ["numerics"]),
        ("IndexError in forward: index 7", ["f"], ["numerics"]),
    ]


def test_backends_share_no_finding_and_keep_the_order_of_the_header(make, header):
    records = [make("failed", backend=name, meaning=WINDOW) for name in ("Wrong", "reference")]
    assert [finding.backend for finding in findings(records, header)] == ["reference", "Wrong"]


def test_explained_findings_come_first_and_of_these_the_larger(make, header):
    records = [
        make("xfailed", case_id="a", reason="issue 5"),
        make("xpassed", case_id="b", reason="issue 6"),
        *(make("failed", case_id=f"c{n}", summary=ROWS) for n in range(3)),
        make("failed", case_id="d", meaning="the sinks are ignored"),
        *(make("failed", case_id=f"e{n}", meaning=WINDOW) for n in range(2)),
        *(make("crashed", case_id=f"f{n}") for n in range(4)),
        make("errored", case_id="g", traceback=traceback(3)),
    ]
    found = findings(records, header)
    assert [len(each.records) for each in found] == [2, 1, 1, 4, 3, 1, 1]
    assert [each.is_explained for each in found] == [True] * 3 + [False] * 4
    assert [each.is_expected for each in found] == [False] * 6 + [True]
    assert [each.example.outcome for each in found][-2:] == ["xpassed", "xfailed"]
    assert [each.exit_status for each in found] == [1] * 6 + [0]


def test_an_error_of_attncheck_itself_has_an_exit_status_of_its_own(make, header):
    records = [make("errored", stage=OURSELVES, message="why"), make("errored", case_id="b", message="why")]
    assert sorted(finding.exit_status for finding in findings(records, header)) == [1, 3]


def test_a_finding_states_what_its_cases_share(make, with_cases):
    sizes = {"a": 1, "b": 64, "c": 8, "d": 16, "e": 32}
    stated = with_cases(**{name: {"cache.block_size": size} for name, size in sizes.items()})
    records = [make("failed", case_id=name, meaning=WINDOW) for name in "ab"]
    records += [make("passed", case_id=name) for name in "cde"]
    (finding,) = findings(records, stated)
    assert finding.contrast is not None
    assert [(each.key, each.values) for each in finding.contrast.conditions] == [("cache.block_size", (1, 64))]
    assert (finding.contrast.wrong, finding.contrast.right) == (2, 3)


def test_only_cases_that_the_same_checks_examined_and_passed_count_as_right(make, with_cases):
    stated = with_cases(**{name: {"size": place} for place, name in enumerate("abcdef")})
    records = [
        make("failed", case_id="a", check="lse", summary="x"),
        make("passed", case_id="b", check="lse"),
        make("passed", case_id="c", check="numerics"),  # another check
        make("unsupported", case_id="d", check="lse"),
        make("failed", case_id="e", check="lse", summary="another y"),
        make("passed", case_id="f", check="lse", backend="Wrong"),
        make("failed", case_id="a", check="refusals", summary="x"),
        make("passed", case_id="g", check="refusals", notes=["refused at build: float32"]),
    ]
    found = {finding.title: finding.contrast for finding in findings(records, stated)}
    assert found["x"] is not None
    assert found["x"].right == 1


def test_a_case_whose_output_was_not_compared_does_not_count_as_right(make, with_cases):
    stated = with_cases(**{name: {"size": place} for place, name in enumerate("abc")})
    records = [make("failed", case_id="a", check=check, summary=ROWS) for check in ("numerics", "lse")]
    records += [make("passed", case_id="b"), make("passed", case_id="c", check="lse")]
    (finding,) = findings(records, stated)
    assert finding.contrast is not None
    assert finding.contrast.right == 1


def test_failures_without_an_explanation_are_split_where_keys_separate_them(make, with_cases):
    keys = {f"w{n}": {"layer.sliding_window": 9, "batch": n} for n in range(3)}
    keys |= {f"h{n}": {"layer.num_heads": 10, "batch": n} for n in range(2)}
    good = {f"g{n}": {"layer.num_heads": 8, "batch": n} for n in range(3)}
    records = [make("failed", case_id=name, summary=ROWS) for name in keys]
    records += [make("failed", case_id="w1", check="containment", summary=ROWS)]
    records += [make("passed", case_id=name, check=check) for name in good for check in ("numerics", "containment")]
    found = [finding for finding in findings(records, with_cases(**keys, **good)) if finding.words == UNEXPLAINED]
    assert listed(tuple(found)) == [
        (UNEXPLAINED, ["w0", "w1", "w2"], ["numerics", "containment"]),
        (UNEXPLAINED, ["h0", "h1"], ["numerics"]),
    ]
    assert [each.contrast.conditions[0].key for each in found if each.contrast] == [
        "layer.sliding_window",
        "layer.num_heads",
    ]
    explained = [record.model_copy(update={"meaning": WINDOW, "finding": WINDOW}) for record in records[:5]]
    assert len(findings([*explained, *records[6:]], with_cases(**keys, **good))) == 1


def test_the_example_is_the_smallest_case(make, with_cases):
    keys = {
        "long": {"batch.num_requests": 2, "batch.max_seq_len": 900, "layer.num_heads": 8},
        "small": {"batch.num_requests": 3, "batch.max_seq_len": 40, "layer.num_heads": 8},
        "wide": {"batch.num_requests": 3, "batch.max_seq_len": 40, "layer.num_heads": 32},
    }
    (finding,) = findings([make("failed", case_id=name, meaning=WINDOW) for name in keys], with_cases(**keys))
    assert finding.example.case_id == "small"
    assert finding.case is not None
    assert finding.case.shape == "shape small"
    assert finding.cases == ("smoke/long", "smoke/small", "smoke/wide")


def test_an_expected_failure_is_found_by_its_reason(make, header):
    records = [
        make("xfailed", case_id="a", reason="issue 5", summary=ROWS),
        make("xfailed", case_id="b", reason="issue 5", underlying="crashed", summary="killed"),
        make("xpassed", case_id="c", reason="issue 5"),
    ]
    stale, known = findings(records, header)
    assert known.cases == ("smoke/a", "smoke/b")
    assert known.title == "issue 5"
    assert stale.cases == ("smoke/c",)
    assert "issue 5" in stale.title


def test_rounds_of_a_check_count_once_by_the_worst(make, header):
    header = header.model_copy(update={"rounds": 3, "checks": ("timing",)})
    records = [make(outcome, check="timing", round=n) for n, outcome in enumerate(("passed", "failed", "crashed"))]
    (finding,) = findings(records, header)
    assert [record.outcome for record in finding.records] == ["crashed"]


def test_functions_of_providers_are_no_findings(make, header):
    assert findings([make("failed", suite="utilities", check="utilities")], header) == ()


def test_failures_of_a_run_file_without_cases_are_separated_by_needs(make, header):
    assert header.cases == ()
    records = [
        make("failed", case_id="a", meaning=WINDOW, needs=("sliding_window", "head_size=64")),
        make("failed", case_id="b", meaning=WINDOW, needs=("sliding_window", "head_size=80")),
        make("passed", case_id="c", needs=("head_size=64",)),
    ]
    (finding,) = findings(records, header)
    assert finding.case is None
    assert finding.contrast is not None
    assert str(finding.contrast.conditions[0]) == "sliding_window is given"


def test_a_case_of_the_same_name_in_another_suite_is_another(make, with_cases):
    records = [make("failed", case_id="a", meaning=WINDOW), make("passed", case_id="a", suite="mine")]
    (finding,) = findings(records, with_cases(a={"size": 1}))
    assert finding.cases == ("smoke/a",)
    assert finding.contrast is not None
    assert finding.contrast.right == 1


def test_of_very_many_findings_none_is_held_against_the_cases_that_pass(make, header):
    passed = [make("passed", case_id=f"right-{n}", needs=("head_size=64",)) for n in range(20)]
    for count, has_contrast in ((CONTRASTED, True), (CONTRASTED + 1, False)):
        failed = [make("failed", case_id=f"c{n}", finding=f"f{n}", needs=("sinks",)) for n in range(count)]
        found = findings([*passed, *failed], header)
        assert len(found) == count
        assert {finding.contrast is not None for finding in found} == {has_contrast}
