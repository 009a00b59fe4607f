"""Findings: records of one fault are one, whatever the check; what nothing explains is split by keys of its cases."""

import pytest

from attncheck.reports.analysis.findings import findings, stated_cause
from attncheck.reports.run_file.causes import UNEXPLAINED
from attncheck.reports.run_file.header import CaseInfo
from attncheck.reports.run_file.records import OURSELVES

ROWS = "7 of 40 rows are wrong, the first is row 3 (request 0, position 35), head 1: found 0.5"
WINDOW = "the window is ignored"
FITS = ": a reference with this fault gives the same output in all rows"
SOME = ": a reference with this fault gives the same output in the 7 wrong rows, all with query_len 1"
ALSO = "; also possible: "
MINE = "/home/me/mine.py"
STACK = f'Current thread 0x0 (most recent call first):\n  File "{MINE}", line 2 in forward'


def traceback(line):
    return f'Traceback (most recent call last):\n  File "{MINE}", line {line}, in forward\n    x\nIndexError: no'


@pytest.fixture
def with_cases(header):
    """``with_cases(a={"size": 1})``: a header that describes cases of the suite ``smoke``."""

    def build(**keys):
        infos = tuple(CaseInfo(suite="smoke", id=name, shape=f"shape {name}", keys=own) for name, own in keys.items())
        return header.model_copy(update={"cases": infos})

    return build


def listed(found):
    """The title, the ids of the cases in one text, and the checks of each finding."""
    return [
        (each.title, " ".join(case.removeprefix("smoke/") for case in each.cases), list(each.checks)) for each in found
    ]


WRONG = {"summary": ROWS}
LOST = {"cause": "the device was lost (CUDA error: misaligned address; ...)"}
DIED = "the device was lost (CUDA error: misaligned address"
RAISED = {"error_type": "IndexError", "traceback": traceback(12)}
LEAK = {"check": "containment", "summary": "NaN reaches 1 of 6 rows", "meaning": "more is read"}
LAYER = {"check": "features", "summary": "a layer with a scale of 2, in the same process: 1 of 6 rows are wrong"}
ANSWER = (
    f"the backend does not declare the case (layout HND), accepts it without an error, and its output is wrong: {ROWS}"
)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        pytest.param(
            [
                ("failed", "a", WRONG | {"meaning": f"{WINDOW}{FITS}"}),
                (
                    "failed",
                    "b",
                    WRONG | {"meaning": f"{WINDOW}: a reference with this fault gives the same output in 5 of 9 rows"},
                ),
                ("failed", "a", {"check": "cache_write", "summary": "3 slots are wrong, first: page 2"}),
                ("failed", "d", {"check": "cache_write", "summary": "41 slots are wrong, first: page 0"}),
                ("failed", "b", WRONG | {"check": "containment", "meaning": WINDOW}),
                ("passed", "c", {}),
            ],
            [(WINDOW, "a b", ["numerics", "containment"]), ("3 to 41 slots are wrong", "a d", ["cache_write"])],
            id="one cause is one finding whatever the check",
        ),
        pytest.param(
            [
                ("crashed", "a", LOST | {"stage": "check numerics", "output": STACK}),
                ("crashed", "a", LOST | {"check": "lse", "stage": "check lse"}),
                ("crashed", "a", {"check": "cudagraph", "stage": "check cudagraph", "cause": "killed by SIGSEGV"}),
                ("crashed", "b", LOST | {"check": "lse", "stage": "check lse, in forward"}),
                ("crashed", "b", LOST | {"check": "cudagraph", "stage": "check cudagraph"}),
            ],
            [
                (f"{DIED} at mine.py:2 in forward", "a", ["numerics", "lse"]),
                (DIED, "b", ["lse", "cudagraph"]),
                ("killed by SIGSEGV", "a", ["cudagraph"]),
            ],
            id="after the loss of a device each check of the case dies at another place",
        ),
        pytest.param(
            [
                ("failed", "a", WRONG | {"meaning": f"the scale is that of head size 16{FITS}{ALSO}the scale is 2"}),
                ("failed", "b", WRONG | {"meaning": f"the scale is that of a value{FITS}{ALSO}the scale is 2"}),
                ("failed", "c", WRONG | {"meaning": f"the scale is 2{FITS}"}),
            ],
            [("the scale is 2", "a b c", ["numerics"])],
            id="of several causes that of most records counts",
        ),
        pytest.param(
            [
                ("errored", "a", RAISED | {"message": "index 6"}),
                ("errored", "a", RAISED | {"message": "index 7", "check": "lse"}),
                ("errored", "b", RAISED | {"traceback": traceback(13)}),
                ("errored", "c", RAISED | {"error_type": "KeyError"}),
                ("errored", "d", {"error_type": "IndexError", "stage": "build", "message": "index 6"}),
                ("errored", "e", {"error_type": "IndexError", "stage": "build", "message": "index 7"}),
                ("errored", "f", {"error_type": "IndexError", "stage": "forward", "message": "index 7"}),
            ],
            [
                ("IndexError at mine.py:12 in forward: index 6", "a", ["numerics", "lse"]),
                ("IndexError at mine.py:13 in forward: no such kernel", "b", ["numerics"]),
                ("KeyError at mine.py:12 in forward: no such kernel", "c", ["numerics"]),
                ("IndexError in build: index 6", "d e", ["numerics"]),
                ("IndexError in forward: index 7", "f", ["numerics"]),
            ],
            id="one exception at one line is one finding",
        ),
        pytest.param(
            [
                ("failed", "a", WRONG),
                ("failed", "ab", LEAK),
                ("failed", "bc", LAYER),
                (
                    "failed",
                    "d",
                    {"check": "invariance", "summary": "right at first", "meaning": "an earlier step is kept"},
                ),
                ("failed", "e", {"check": "refusals", "summary": ANSWER}),
            ],
            [(UNEXPLAINED, "a b c d e", ["numerics", "containment", "features", "invariance", "refusals"])],
            id="failures in cases that overlap, which no fault explains",
        ),
        pytest.param(
            [("failed", "a", WRONG), ("failed", "ab", LEAK), ("failed", "b", LAYER)],
            [("more is read", "a b", ["numerics", "containment", "features"])],
            id="of those that overlap most have one cause",
        ),
        pytest.param(
            # A fault of the kernel has one number of splits; several of them that fit show another fault.
            [
                ("failed", "a", WRONG | {"meaning": f"the last of 2 splits{FITS}"}),
                ("failed", "b", WRONG | {"meaning": f"the last of 4 splits{FITS}"}),
                ("failed", "cd", WRONG | {"meaning": f"{WINDOW}{SOME}"}),
            ],
            [
                ("perhaps: the last of 2 to 4 splits", "a b", ["numerics"]),
                (f"{WINDOW}, in rows with query_len 1", "c d", ["numerics"]),
            ],
            id="cases with other figures confirm no cause",
        ),
        pytest.param(
            [
                ("xfailed", "a", {"reason": "issue 5", "summary": ROWS}),
                ("xfailed", "b", {"reason": "issue 5", "underlying": "crashed", "summary": "killed"}),
                ("xpassed", "c", {"reason": "issue 5"}),
            ],
            [("passed, though expected to fail: issue 5", "c", ["numerics"]), ("issue 5", "a b", ["numerics"])],
            id="expected failures of one reason",
        ),
        pytest.param(
            [("failed", "a", {"summary": ROWS, "meaning": "not known; wrong are rows with context"})],
            [(f"{UNEXPLAINED}: wrong are rows with context", "a", ["numerics"])],
            id="a pattern of wrong rows is in the title",
        ),
        pytest.param(
            [
                ("failed", "ab", WRONG | {"meaning": f"{WINDOW}{FITS}"}),
                ("failed", "a", {"check": "cache_write", "meaning": "keys are rounded"}),
            ],
            [("keys are rounded", "a", ["cache_write"]), (WINDOW, "a b", ["numerics"])],
            id="what is written wrongly comes before what follows from it",
        ),
    ],
)
def test_records_of_one_fault_are_one_finding(make, header, groups, expected):
    records = [make(outcome, case_id=case, **fields) for outcome, cases, fields in groups for case in cases]
    assert listed(findings(records, header)) == expected


def test_what_no_cause_explains_joins_its_output(make, header):
    for check in ("lse", "features", "invariance", "containment", "cudagraph"):
        records = [
            make("failed", case_id="a", check=check, summary=ROWS, meaning=None),
            make("failed", case_id="a", summary=ROWS, meaning=f"{WINDOW}{FITS}"),
            make("failed", case_id="b", check=check, summary=ROWS, meaning=None),
        ]
        joined, alone = findings(records, header)
        assert (joined.title, joined.checks) == (f"perhaps: {WINDOW}", ("numerics", check))
        assert joined.example.check == "numerics"
        assert (alone.title, alone.cases) == ("7 of 40 rows are wrong", ("smoke/b",))


def test_what_a_wrong_output_cannot_cause_is_another_finding(make, header):
    for check, meaning in (
        ("determinism", None),
        ("containment", "memory is read; only NaN and Inf leak, a large finite value does not"),
        ("cudagraph", "the same step is right without a graph: numbers are frozen at capture"),
    ):
        records = [
            make("failed", case_id="a", summary=ROWS, meaning=f"{WINDOW}{FITS}"),
            make("failed", case_id="a", check=check, summary="x", meaning=meaning),
        ]
        assert [found.checks for found in findings(records, header)] == [("numerics",), (check,)]


def test_what_fails_only_where_the_cache_is_written_wrongly_joins_that_finding(make, header):
    """A cache that lacks rows looks like a page that is not read; a window that is ignored elsewhere is a fault."""
    lost = f"the last page is missing{FITS}"
    written = "rows at the end of the step are not written, {} of them"
    records = [
        make("failed", case_id="a", check="cache_write", meaning=written.format(1)),
        make("failed", case_id="a", summary=ROWS, meaning=lost),
        make("failed", case_id="a", check="lse", meaning=f"the mask{FITS}"),
        make("failed", case_id="b", check="cache_write", meaning=written.format(3)),
        make("failed", case_id="b", summary=ROWS, meaning="not known; rows with position 7"),
        make("failed", case_id="b", check="features", summary=ROWS),
        make("failed", case_id="d", check="invariance", summary="right at first", meaning="an earlier step is kept"),
    ]
    (found,) = findings(records, header)
    assert (found.title, found.checks) == (
        written.format("1 to 3"),
        ("numerics", "cache_write", "lse", "features", "invariance"),
    )
    assert stated_cause(records[1], found) == f"it may follow from another fault: {found.title}"
    raised = make("errored", case_id="d", check="invariance", traceback=traceback(4))
    assert [each.cases for each in findings([*records, raised], header)][1:] == [("smoke/d",)]
    window = make("failed", case_id="c", summary=ROWS, meaning=lost)
    assert [each.cases for each in findings([*records, window], header)] == [
        ("smoke/a", "smoke/b", "smoke/d"),
        ("smoke/a", "smoke/c"),
    ]


def test_a_cause_is_confirmed_by_a_case_of_another_batch_or_layer(make, with_cases):
    keys = {"a": {"layer.dtype": "float16"}, "b": {"layer.dtype": "float32"}, "c": {"batch.max_seq_len": 9}}
    records = [make("failed", case_id=name, summary=ROWS, meaning=f"{WINDOW}{FITS}") for name in "abc"]
    (alike,) = findings(records[:2], with_cases(**keys))
    (confirmed,) = findings(records, with_cases(**keys))
    assert (alike.title, confirmed.title) == (f"perhaps: {WINDOW}", WINDOW)
    assert stated_cause(records[0], alike) == stated_cause(records[0]) == f"perhaps: {WINDOW}{FITS}"
    assert stated_cause(records[0], confirmed) == f"likely cause: {WINDOW}{FITS}"


def test_a_case_that_excludes_a_cause_removes_it(make, header):
    one = make("failed", case_id="a", summary=ROWS, meaning=f"the scale is 3{FITS}{ALSO}the mask{ALSO}the cap")
    other = make("failed", case_id="b", summary=ROWS, meaning=f"the mask{FITS}{ALSO}the cap")
    third = make("failed", case_id="c", summary=ROWS, meaning=f"the mask{FITS}")
    (found,) = findings([one, other], header)
    assert stated_cause(one, found) == f"perhaps: the mask{FITS}{ALSO}the cap"
    (found,) = findings([one, other, third], header)
    assert stated_cause(one, found) == f"likely cause: the mask{FITS}"
    some = make("failed", case_id="d", summary=ROWS, meaning=f"the scale is 3{SOME}{ALSO}the mask")
    (found,) = findings([some, third], header)
    assert stated_cause(some, found) == "likely cause: the mask"  # the rows are those that the scale fits


def test_explained_findings_come_first_and_of_these_the_larger(make, header):
    records = [
        make("xfailed", case_id="a", reason="issue 5"),
        make("xpassed", case_id="b", reason="issue 6"),
        *(make("failed", case_id=f"c{n}", summary=ROWS) for n in range(3)),
        make("failed", case_id="d", meaning="the sinks are ignored"),
        *(make("failed", case_id=f"e{n}", meaning=WINDOW) for n in range(2)),
        *(make("crashed", case_id=f"f{n}") for n in range(4)),
        make("errored", case_id="g", traceback=traceback(3)),
        make("errored", case_id="h", stage=OURSELVES, message="why"),
    ]
    found = findings(records, header)
    assert [(len(each.records), each.is_explained, each.exit_status) for each in found] == [
        (2, True, 1),
        (1, True, 1),
        (1, True, 1),
        (4, False, 1),
        (1, False, 3),
        (3, False, 1),
        (1, False, 1),
        (1, False, 0),
    ]
    assert [each.example.outcome for each in found][-2:] == ["xpassed", "xfailed"]
    assert [each.is_expected for each in found] == [False] * 7 + [True]


def test_a_finding_states_what_its_cases_share(make, with_cases):
    """Only cases that the same checks examined and passed are held against it."""
    sizes = {"a": 1, "b": 64, "c": 8, "d": 16, "e": 32, "f": 1, "g": 1}
    stated = with_cases(**{name: {"cache.block_size": size} for name, size in sizes.items()})
    records = [make("failed", case_id=name, check="lse", meaning=WINDOW) for name in "ab"]
    records += [make("passed", case_id=name, check="lse") for name in "cde"]
    records += [
        make("passed", case_id="f"),
        make("unsupported", case_id="f", check="lse"),
        make("passed", case_id="g", check="lse", backend="Wrong"),
    ]
    (finding,) = findings(records, stated)
    assert [(each.key, each.values) for each in finding.contrast.conditions] == [("cache.block_size", (1, 64))]
    assert (finding.contrast.wrong, finding.contrast.right) == (2, 3)


def test_a_case_that_was_refused_or_whose_output_was_not_compared_does_not_count_as_right(make, with_cases):
    stated = with_cases(**{name: {"size": place} for place, name in enumerate("abcd")})
    records = [make("failed", case_id="a", check=check, summary=ROWS) for check in ("numerics", "lse")]
    records += [make("passed", case_id="b"), make("passed", case_id="c", check="lse")]
    (finding,) = findings(records, stated)
    assert finding.contrast.right == 1
    refused = {"check": "refusals", "notes": ["refused at build: x"]}
    records = [
        make("failed", case_id="a", check="refusals", summary="x"),
        make("passed", case_id="b", check="refusals"),
        *(make("passed", case_id=name, **refused) for name in "cd"),
    ]
    (finding,) = findings(records, stated)
    assert finding.contrast.right == 1


def test_what_a_backend_had_no_time_for_is_one_finding_without_a_common_property(make, with_cases):
    late = "the limit was 2 s (what was left of the time of the backend by --within)"
    never = "the case did not run, because earlier cases used up the time of the backend by --within"
    records = [
        *(make("passed", case_id=name) for name in "ab"),
        make("timed_out", case_id="c", stage="check numerics", cause=late, output=STACK, limit_s=2.0),
        make("timed_out", case_id="d", stage="", cause=never, limit_s=9.0),
    ]
    (found,) = findings(records, with_cases(a={"size": 1}, b={"size": 1}, c={"size": 9}, d={"size": 9}))
    assert (found.title, found.cases) == ("the time of the backend was used up", ("smoke/c", "smoke/d"))
    assert found.contrast is None


def test_failures_without_an_explanation_are_split_where_keys_separate_them(make, with_cases):
    keys = {f"w{n}": {"layer.sliding_window": 9, "batch": n} for n in range(3)}
    keys |= {f"h{n}": {"layer.num_heads": 10, "batch": n} for n in range(2)}
    good = {f"g{n}": {"layer.num_heads": 8, "batch": n} for n in range(3)}
    records = [make("failed", case_id=name, summary=ROWS) for name in keys]
    records += [make("failed", case_id="w1", check="containment", summary=ROWS)]
    records += [make("passed", case_id=name, check=check) for name in good for check in ("numerics", "containment")]
    found = tuple(each for each in findings(records, with_cases(**keys, **good)) if each.words == UNEXPLAINED)
    assert listed(found) == [
        (UNEXPLAINED, "w0 w1 w2", ["numerics", "containment"]),
        (UNEXPLAINED, "h0 h1", ["numerics"]),
    ]
    contrasts = [each.contrast.conditions[0].key for each in found if each.contrast]
    assert contrasts == ["layer.sliding_window", "layer.num_heads"]
    explained = [record.model_copy(update={"meaning": WINDOW, "finding": WINDOW}) for record in records[:5]]
    assert len(findings([*explained, *records[6:]], with_cases(**keys, **good))) == 1


def test_the_example_is_the_smallest_case(make, with_cases):
    keys = {
        "long": {"batch.num_requests": 2, "batch.max_seq_len": 900, "layer.num_heads": 8},
        "small": {"batch.num_requests": 3, "batch.max_seq_len": 40, "layer.num_heads": 8},
        "wide": {"batch.num_requests": 3, "batch.max_seq_len": 40, "layer.num_heads": 32},
    }
    (finding,) = findings([make("failed", case_id=name, meaning=WINDOW) for name in keys], with_cases(**keys))
    assert (finding.example.case_id, finding.case.shape) == ("small", "shape small")
    assert finding.cases == ("smoke/long", "smoke/small", "smoke/wide")
