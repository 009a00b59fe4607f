"""Features and combinations of needs: counts, what became of their cases, and what failing ones have in common."""

from random import Random
from time import process_time

import pytest

from attncheck.reports import github
from attncheck.reports.analysis.contrast import contrast_of, parts_of
from attncheck.reports.analysis.measured import Time, measured_run, subjects
from attncheck.reports.analysis.phrases import cut
from attncheck.reports.analysis.reasons import joined, listed, without_first_figure
from attncheck.reports.analysis.recommendation import checked_needs, known_needs, recommend
from attncheck.reports.analysis.summary import summarise
from attncheck.reports.analysis.support import ANSWERED, REFUSED, UNCLEAR, counted_cases, support_rows
from attncheck.reports.document.support import support_blocks
from attncheck.reports.markdown import run as markdown
from attncheck.reports.markdown.text import render
from attncheck.reports.run_file.header import BackendInfo
from attncheck.reports.run_file.records import BUDGET_SHARE
from attncheck.reports.run_file.store import Run
from attncheck.reports.terminal import run as terminal

REFUSAL = {"outcome": "passed", "notes": (f"{REFUSED} construct: no",)}


@pytest.fixture
def rows(header):
    def support(*records, features=()):
        stated = header.model_copy(update={"backends": (BackendInfo(name="reference", ref="r", features=features),)})
        return {row.feature: row for row in support_rows(counted_cases(records), stated.declared)}

    return support


@pytest.fixture
def outside(make):
    """The records of an undeclared case; ``claim``: what ``refusals`` found, None: it did not try."""

    def records(case, *needs, claim, reasons=("no",)):
        refusals = [make("unsupported", case_id=case, needs=needs, reasons=reasons)]
        return refusals if claim is None else [*refusals, make(**claim, case_id=case, needs=needs, check="refusals")]

    return records


def test_declared_cases_are_right_or_fall_short(rows, make):
    found = rows(
        make("passed", case_id="one", needs=("alibi", "sinks")),
        make("passed", case_id="one", check="refusals", needs=("alibi", "sinks")),
        make("passed", case_id="two", needs=("alibi",)),
        make("failed", case_id="two", check="cache_write", needs=("alibi",)),
        make("xfailed", case_id="three", needs=("alibi",)),
        make("errored", case_id="four", needs=("alibi",)),
        make("crashed", case_id="five", needs=("alibi",)),
        make("passed", case_id="six", needs=("alibi",)),
        make("failed", case_id="six", check="containment", needs=("alibi",)),
        features=("alibi", "sinks", "lse"),
    )
    assert found["alibi"].in_words == "wrong in 4 of 6"
    assert found["sinks"].in_words == "right (1)"
    assert "lse" not in found


def test_cases_outside_the_declarations_speak_of_what_is_not_declared_alone(rows, make, outside):
    answered = {"outcome": "passed", "notes": (f"{ANSWERED}: sinks",)}
    found = rows(
        make("passed", case_id="in", needs=("alibi",)),
        *outside("refused", "alibi", "sinks", claim=REFUSAL),
        *outside("answered", "sinks", claim=answered),
        *outside("wrong", "sinks", claim={"outcome": "failed"}),
        *outside("raised", "tree", claim={"outcome": "failed", "summary": f"{UNCLEAR}: RuntimeError at forward"}),
        *outside("died", "head_size_v", claim={"outcome": "crashed"}),
        *outside("left", "short_keys", claim=None),
        features=("alibi", "lse"),
    )
    assert found["alibi"].in_words == "right (1)"
    assert (found["sinks"].refused, found["sinks"].answered, found["sinks"].wrong) == (1, 1, 1)
    assert (
        found["sinks"].in_words
        == "not declared: refused (1); right all the same (1); accepted, and the output is wrong (1)"
    )
    assert found["tree"].in_words == "not declared: refused unclearly (1)"
    assert found["head_size_v"].in_words == "not declared: died (1)"
    assert found["short_keys"].in_words == "not declared: not examined"


def test_what_was_expected_counts_as_what_it_is(rows, make, outside):
    unclear = f"{UNCLEAR}: RuntimeError at forward"
    found = rows(
        *outside("died", "sinks", claim={"outcome": "xfailed", "underlying": "crashed"}),
        *outside("raised", "tree", claim={"outcome": "xfailed", "underlying": "failed", "summary": unclear}),
        *outside("wrong", "alibi", claim={"outcome": "xfailed", "underlying": "failed"}),
        make("xpassed", case_id="in", needs=("lse",)),
        *outside("out", "mla", claim={"outcome": "xpassed"}),
        features=("lse",),
    )
    assert (found["sinks"].died, found["tree"].unclear, found["alibi"].wrong) == (1, 1, 1)
    assert found["lse"].in_words == "right (1)"
    assert found["mla"].in_words == "not declared: not examined"


def test_a_case_that_the_backend_had_no_time_for_is_not_examined(rows, make, outside):
    late = {"cause": "earlier cases used up the time of the backend by --within", "limit_s": 9.0, "stage": ""}
    found = rows(
        make("passed", case_id="cut", needs=("alibi",)),
        make("timed_out", case_id="cut", check="cache_write", needs=("alibi",), **late),
        make("timed_out", case_id="next", needs=("alibi", "sinks"), **late),
        *outside("big", "lse", claim=None),
        make("failed", case_id="graph", check="cudagraph", needs=("tree",)),
        features=("alibi", "sinks", "lse", "tree"),
    )
    assert {name: row.in_words for name, row in found.items()} == {
        "alibi": "right (1)",
        "sinks": "declared: not examined",
        "lse": "declared: not examined",
        "tree": "wrong in 1 of 1",
    }


def test_a_form_is_declared_where_a_case_of_it_was_put(rows, make, outside):
    form = "attn_type=encoder_only"
    found = rows(
        make("passed", case_id="in", needs=(form, "head_size=64")),
        *outside("capped", "sinks", form, "head_size=256", claim=REFUSAL, reasons=("feature 'sinks' is not declared",)),
        *outside("odd", form, "head_size=72", claim=REFUSAL),
    )
    assert found[form].in_words == "right (1)"
    assert found["head_size=72"].refused == 1
    assert found["head_size=256"].in_words == "not declared: not examined"  # it was refused for the sinks
    assert found["sinks"].refused == 1


def test_a_refused_case_counts_for_the_needs_its_reasons_name(rows, outside):
    needs = ("sinks", "dtype=float16", "head_size=72", "layout=NHD")
    reasons = (
        "head_size 72: supported are 64",
        "layout NHD_2: no",
        "vLLM says no (dtype float16)",
        "feature 'sinks' is not declared",
    )
    found = rows(*outside("two", *needs, claim=REFUSAL, reasons=reasons))
    assert (found["head_size=72"].refused, found["sinks"].refused) == (1, 1)
    assert (found["layout=NHD"].refused, found["dtype=float16"].refused) == (0, 0)


def test_markdown_puts_the_values_of_a_form_under_their_verdicts(header, make, outside):
    sizes = [make("passed", case_id=f"h{size}", needs=("alibi", f"head_size={size}")) for size in (128, 64)]
    short = make("failed", case_id="h96", needs=("head_size=96",))
    fine = make("passed", case_id="h96b", needs=("head_size=96",))
    records = (*sizes, short, fine, *outside("h72", "head_size=72", claim=REFUSAL))
    text = render(support_blocks(header, ["reference"], support_rows(counted_cases(records), header.declared)))
    assert "| `alibi` | right (2) |" in text
    assert "| `head_size` | 64 (1), 128 (1); **wrong**: 96 (1 of 2 right); refused: 72 |" in text


def test_a_case_that_falls_short_for_another_reason_counts_for_none_of_its_needs(header, make):
    needs = ("alibi", "sinks", "head_size=64")
    fine = make("passed", case_id="fine", needs=("sinks",))
    records = [make("failed", case_id="wrong", needs=needs), fine]
    stated = header.model_copy(
        update={"backends": (BackendInfo(name="reference", ref="r", features=("alibi", "sinks")),)}
    )
    found = {
        row.feature: row for row in support_rows(counted_cases(records), stated.declared, {"reference": {"alibi"}})
    }
    assert {name: row.verdict for name, row in found.items()} == {
        "alibi": "short",
        "head_size=64": "unproven",
        "sinks": "right",
    }
    assert found["alibi"].in_words == "wrong in 1 of 1"
    assert found["sinks"].in_words == "right (1); 1 fail for other reasons"
    text = render(support_blocks(stated, ["reference"], tuple(found.values())))
    assert "not known, all fail for other reasons: 64 (0 of 1 right)" in text


def test_a_backend_of_latent_caches_is_recognised_by_layers_that_have_one(rows, make, outside):
    found = rows(
        make("passed", case_id="in", needs=("mla", "layout=NHD")),
        *outside("plain", "alibi", "layout=HND", claim=REFUSAL, reasons=("the layer has no latent cache",)),
        *outside(
            "odd", "mla", "alibi", claim=REFUSAL, reasons=("the layer has ALiBi: feature 'alibi' is not declared",)
        ),
        features=("mla",),
    )
    assert sorted(found) == ["alibi", "layout=NHD", "mla"]
    assert found["alibi"].in_words == "not declared: refused (1)"


def test_verdicts(make):
    for outcomes, verdict in (
        (["passed", "xfailed"], "passed"),
        (["passed", "xpassed"], "failed"),
        (["passed", "errored"], "failed"),
        (["passed", "crashed"], "failed"),
        (["unsupported", "unavailable"], "not examined"),
        ([], "not examined"),
    ):
        records = [make(outcome, case_id=str(number)) for number, outcome in enumerate(outcomes)]
        assert summarise(records).verdict == verdict


def test_equal_reasons_are_one_gap(make):
    small, large = ["head_size 80"], ["head_size 256", "no window"]
    records = [
        *(make("unsupported", case_id=f"c{i}", check=check, reasons=small) for i in range(2) for check in ("a", "b")),
        *(make("unsupported", case_id=f"d{i}", check="a", reasons=large) for i in range(3)),
        make("unsupported", case_id="e", check="a", reasons=small, by="attncheck"),
        make("unavailable", case_id="f", check="a", reasons=small),
    ]
    gaps = summarise(records).gaps
    assert [(gap.outcome, gap.by, gap.reasons, gap.cases, gap.checks) for gap in gaps] == [
        ("unsupported", "backend", tuple(large), 3, ("a",)),
        ("unsupported", "backend", tuple(small), 2, ("a", "b")),
        ("unsupported", "attncheck", tuple(small), 1, ("a",)),
        ("unavailable", "machine", tuple(small), 1, ("a",)),
    ]


def round_records(make, *outcomes):
    return [make(outcome, check="timing", round=index) for index, outcome in enumerate(outcomes)]


def test_the_worst_outcome_of_its_rounds_counts_once(make):
    for outcomes, worst in (
        (("passed", "passed"), "passed"),
        (("passed", "failed", "passed"), "failed"),
        (("failed", "errored", "crashed"), "crashed"),
        (("failed", "errored"), "errored"),
        (("xfailed", "failed"), "failed"),
        (("xpassed", "xfailed"), "xpassed"),
        # What could not be examined once was not examined in as many rounds as requested.
        (("passed", "unavailable"), "unavailable"),
    ):
        summary = summarise(round_records(make, *outcomes))
        assert summary.total.counts == ((worst, 1),)
        assert summary.most_rounds == len(outcomes)
    for shares, worst in (((0.2, 0.9, 0.4), 0.9), ((0.2, "NaN", 3.0), float("inf"))):
        records = [make("passed", check="timing", round=n, figures={BUDGET_SHARE: x}) for n, x in enumerate(shares)]
        assert summarise(records).total.worst_share == worst
    assert summarise([make("passed"), make("failed", check="lse")]).rounds == {}


def test_a_failure_in_one_of_two_rounds_states_both_numbers(make, header):
    header = header.model_copy(update={"checks": ("timing",), "rounds": 2})
    text = terminal.render(header, round_records(make, "passed", "failed"))
    assert "check timing (in 1 of 2 rounds)\n" in text


def test_reports_list_a_failure_of_several_rounds_once(make, header):
    header = header.model_copy(update={"checks": ("timing",), "rounds": 4})
    records = round_records(make, "failed", "passed", "failed", "failed")
    text = terminal.render(header, records)
    assert text.count("repeat: ") == 1
    assert "  case: smoke/edge, check timing (in 3 of 4 rounds)\n" in text
    assert "\nfailed: 2 backends (1 failed, 1 not examined), 1 case (the worst of 4 rounds counts)" in text
    run = Run("run.jsonl", header, tuple(records))
    page = markdown.render_run(run)
    assert "- case: smoke/edge, check timing (in 3 of 4 rounds)\n" in page
    assert "- Rounds: 4, each in a process of its own\n" in page
    assert page.count("### reference: ") == 1
    assert github.annotations([run]).count("smoke/edge: 7 of 40 rows (in 3 of 4 rounds)") == 1


def test_what_differs_in_its_line_alone_is_joined_and_whatever_differs_in_more_stays():
    for reason, short in (
        (
            "not captured (8 tokens): x[...] at a b.py:7 in f; x[...] at a b.py:9 in f",
            "not captured (8 tokens): x[...] at a b.py:7, 9 in f",
        ),
        (
            ".item() at g.py:1 in f; .tolist() at g.py:2 in f; .item() at g.py:3 in f; why not",
            ".item() at g.py:1, 3 in f; .tolist() at g.py:2 in f; why not",
        ),
    ):
        assert joined(reason) == short
    for reason in (
        "a; b; a",
        ".item() at g.py:1 in f; .item() at g.py:2 in g",
        ".item() at g.py:1 in f; .item() at h.py:2 in f",
        "host read: .item() at g.py:1 in f; host copy: .item() at g.py:2 in f",
        "without a graph: .item() at g.py:1 in f; with a graph: .item() at g.py:2 in f",
    ):
        assert joined(reason) == reason
    assert (cut("abcdef", 6), cut("abcdefg", 6)) == ("abcdef", "abc...")


def test_reasons_that_differ_in_their_first_figure_list_it():
    sizes = [f"block_size {size}: supported are multiples of 32" for size in (16, 8, 128, 8)]
    assert listed(sizes) == "block_size 8, 16, 128: supported are multiples of 32"
    assert len(set(map(without_first_figure, sizes))) == 1
    dtypes = [f"dtype {name}: supported are bfloat16" for name in ("float16", "float32")]
    assert list(map(without_first_figure, dtypes)) == dtypes
    assert without_first_figure("head_size 72: 64, 128") != without_first_figure("head_size 72: 64")


@pytest.fixture
def ranked(run_of):
    """``ranked("sinks,lse", *records)``: the suitability of each backend, in the order of the answer."""

    def by_backend(needs, *records, times=None, **features):
        names = dict.fromkeys(record.backend for record in records)
        backends = tuple(BackendInfo(name=name, ref=name, features=features.get(name, ())) for name in names)
        run = run_of(records, backends=backends)
        timed = {key: Time(median, median, median, 1, "a machine") for key, median in (times or {}).items()}
        members = subjects([measured_run(run, "run", timed)])
        return {each.subject.name: each for each in recommend(checked_needs(needs, known_needs(members)), members)}

    return by_backend


def standings(found):
    return {name: each.standing for name, each in found.items()}


def test_a_case_that_needs_all_proves_more_than_a_case_for_each(ranked, make):
    both = ("sinks", "block_size=32")
    found = ranked(
        "sinks,block_size=32",
        make("passed", backend="Each", case_id="a", needs=("sinks",)),
        make("passed", backend="Each", case_id="b", needs=("block_size=32",)),
        make("passed", backend="All", case_id="c", needs=both),
        make("passed", backend="All", case_id="d", needs=(*both, "alibi")),
        make("passed", backend="Half", case_id="a", needs=("sinks",)),
    )
    assert standings(found) == {"All": "right", "Each": "right in each", "Half": "not examined"}
    assert list(found) == ["All", "Each", "Half"]
    assert found["All"].right == 2
    assert found["Each"].why == "sinks: right (1); block_size=32: right (1)"
    assert found["Half"].why == "block_size=32: no case"


def test_a_backend_is_wrong_with_the_finding_of_the_cases_that_need_all(ranked, make):
    ignored = {"finding": "the sinks are ignored", "meaning": "the sinks are ignored", "concerns": ("sinks",)}
    records = [
        make("failed", backend="Liar", case_id="a", needs=("sinks", "lse"), **ignored),
        make("passed", backend="Liar", case_id="b", needs=("lse",)),
        make("failed", backend="Liar", case_id="c", needs=("sinks",), **ignored),
    ]
    liar = ranked("sinks,lse", *records)["Liar"]
    assert (liar.standing, liar.right, liar.wrong) == ("wrong", 0, 1)
    assert [finding.title for finding in liar.findings] == ["likely: the sinks are ignored"]
    assert ranked("sinks", *records)["Liar"].wrong == 2
    # A false claim of a need that was not requested explains the failure.
    lse = ranked("lse", *records)["Liar"]
    assert (lse.standing, lse.right, lse.why) == ("right", 1, "fails only with sinks")


def test_a_failure_that_no_false_claim_explains_counts(ranked, make):
    records = [
        make("passed", case_id="a", needs=("lse", "head_size=64")),
        make("passed", case_id="b", needs=("lse",)),
        make("failed", case_id="c", needs=("lse", "head_size=64")),
    ]
    (only,) = ranked("lse", *records).values()
    assert (only.standing, only.why) == ("wrong", "wrong in 1 of 3")
    # A need that is wrong alone makes the combination wrong.
    (only,) = ranked("lse,sinks", *records[:2], make("failed", case_id="d", needs=("sinks",))).values()
    assert (only.standing, only.why) == ("wrong", "sinks: wrong in 1 of 1")


def test_declared_alone_and_refused_are_different(ranked, make):
    out = {"case_id": "a", "needs": ("sinks",)}
    found = ranked(
        "sinks",
        make("unavailable", backend="Away", **out),
        make("passed", backend="Idle", case_id="b", needs=("lse",)),
        make("unsupported", backend="Refusing", **out),
        make("passed", backend="Refusing", check="refusals", notes=(f"{REFUSED} construct: no",), **out),
        Away=("sinks",),
        Idle=("sinks", "lse"),
    )
    assert standings(found) == {"Away": "not examined", "Idle": "not examined", "Refusing": "refused"}
    assert found["Away"].why == "sinks: declared: not examined"
    assert found["Idle"].why == "sinks: declared: no case"
    assert found["Refusing"].why == "sinks: not declared: refused (1)"


def test_right_backends_are_ordered_by_their_multiple_of_the_fastest(ranked, make):
    records = [
        make("passed", backend=name, case_id=case, needs=("lse",))
        for name in ("Slow", "Fast", "Untimed")
        for case in ("a", "b", "c")
    ]
    case = records[0].case.replace("/a", "/{}").format
    times = {("Slow", case("a")): 4e3, ("Slow", case("b")): 9e3, ("Fast", case("a")): 1e3, ("Fast", case("b")): 1e3}
    found = ranked("lse", *records, times=times | {("Slow", case("c")): 6e3})
    assert list(found) == ["Fast", "Slow", "Untimed"]
    assert [found[name].median_ns for name in found] == [pytest.approx(1e3), pytest.approx(6e3), None]
    assert [each.pace and each.pace.ratio for each in found.values()] == [1, pytest.approx(6), None]
    assert found["Slow"].timed == 3


def cases(key, *values):
    """Return a case for each value of one key. For None, the case lacks the key."""
    return [{} if value is None else {key: value} for value in values]


def conditions_of(contrast):
    return [(each.key, each.bound, each.values) for each in contrast.conditions]


@pytest.mark.parametrize(
    ("wrong", "right", "condition", "text"),
    [
        ((8, 8), (1, 1), ("", (8,)), "size is 8 in all 2 that fail; 1 in all 2 that pass"),
        ((1, 1), (16, 16), ("", (1,)), "size is 1 in all 2 that fail; 16 in all 2 that pass"),
        (
            (1, 8, 8, 128),
            (16, 32),
            ("", (1, 8, 128)),
            "size is 1, 8 or 128 in all 4 that fail; 16 or 32 in all 2 that pass",
        ),
        (
            (64, 96, 128, 160, 192),
            (16, 32, 48),
            ("at least", (64,)),
            "size is at least 64 in all 5 that fail; in none that passes",
        ),
        (
            (1, 2, 4, 8, 12),
            (16, 32, 48),
            ("at most", (12,)),
            "size is at most 12 in all 5 that fail; in none that passes",
        ),
        ((7, 8, 9), (None, None), ("given", ()), "size is given in all 3 that fail; in none that passes"),
        ((7,), (None, None), ("", (7,)), "size is 7 in the one case that fails; in none that passes"),
        ((None, None), (7, 8), ("", (None,)), "size is not given in all 2 that fail; 7 or 8 in all 2 that pass"),
        (("HND", "HND"), ("NHD",), ("", ("HND",)), "size is HND in all 2 that fail; NHD in the one that passes"),
        ((True, True), (None,), ("", (True,)), "size is given in all 2 that fail; not in the one that passes"),
    ],
)
def test_one_key_separates_failing_cases_from_passing_ones(wrong, right, condition, text):
    contrast = contrast_of(cases("size", *wrong), cases("size", *right))
    assert conditions_of(contrast) == [("size", *condition)]
    assert (contrast.wrong, contrast.right, contrast.exceptions) == (len(wrong), len(right), 0)
    assert str(contrast) == text


def test_two_keys_separate_cases_that_neither_does_alone():
    wrong = [{"heads": heads, "dtype": "fp8", "size": 64} for heads in (10, 10)]
    right = [{"heads": 10, "dtype": "bf16", "size": 64}, {"heads": 8, "dtype": "fp8", "size": 64}]
    contrast = contrast_of(wrong, right)
    assert sorted(conditions_of(contrast)) == [("dtype", "", ("fp8",)), ("heads", "", (10,))]
    assert str(contrast).endswith(" in all 2 that fail; in none that passes")


def test_no_more_than_three_keys_or_four_values_are_a_pattern():
    wrong = [{"a": True, "b": True, "c": True}]
    right = [{"a": True, "b": True}, {"a": True, "c": True}, {"b": True, "c": True}]
    assert [key for key, _, _ in conditions_of(contrast_of(wrong, right))] == ["a", "b", "c"]
    four = [{key: True for key in "abcd" if key != other} for other in "abcd"]
    assert contrast_of([dict.fromkeys("abcd", True)], four) is None
    scattered = cases("size", 1, 3, 5, 7, 9)
    assert contrast_of(scattered[:4], cases("size", 2, 4, 6, 8)) is not None
    assert contrast_of(scattered, cases("size", 2, 4, 6, 8, 10)) is None


def test_all_that_separates_the_cases_equally_is_named_or_counted():
    wrong = {"layer.sinks": True, "cache.block_size": 8, "inputs": "zeros", "other": 1}
    right = cases("cache.block_size", 16)
    contrast = contrast_of([wrong], right)
    assert conditions_of(contrast) == [("layer.sinks", "", (True,))]
    assert str(contrast).endswith(" (other differences: cache.block_size is 8; inputs is zeros; other is 1)")
    contrast = contrast_of([wrong | {"path": "x", "more": 2}] * 4, right)
    assert str(contrast).endswith(" (other differences: cache.block_size is 8; path is x; inputs is zeros; and 2 more)")


def test_a_kind_of_request_that_is_absent_is_written_in_words():
    contrast = contrast_of(cases("size", 1, 1), [{"batch has a decode": True, "size": 1}] * 2)
    assert str(contrast) == "batch has no decode in all 2 that fail; in none that passes"


def test_where_nothing_excludes_all_what_excludes_nine_of_ten_is_the_answer():
    wrong = cases("window", 9, 9)
    right = [*cases("window", 9), *cases("window", *[None] * 9)]
    contrast = contrast_of(wrong, right)
    assert conditions_of(contrast) == [("window", "", (9,))]
    assert contrast.exceptions == 1
    assert str(contrast) == "window is 9 in all 2 that fail; in 1 of 10 that pass"
    assert contrast_of(wrong, [*right, *cases("window", 9)]) is None
    assert contrast_of(wrong, []) is contrast_of([], right) is None


def test_what_a_layer_has_explains_better_than_its_sizes_a_length_and_a_dtype():
    features = {"layer.logits_soft_cap": 30.0, "layer.head_size": 80, "layer.dtype": "float16"}
    wrong = [features | {"batch.max_seq_len": length} for length in (300, 90, 120)]
    right = [{"layer.dtype": "float32", "batch.max_seq_len": 40, "layer.head_size": 64}]
    contrast = contrast_of(wrong, right)
    found = [contrast.conditions[0], *contrast.alternatives]
    keys = ["layer.logits_soft_cap", "layer.head_size", "batch.max_seq_len", "layer.dtype"]
    assert [each.key for each in found] == keys
    assert (found[2].bound, found[2].values) == ("at least", (90,))


def test_values_are_compared_with_their_types():
    """A sentence names the value that the failing cases have, though True == 1."""
    assert str(contrast_of(cases("v_scale", 1, 1), cases("v_scale", 2))).startswith("v_scale is 1 in all 2")
    assert str(contrast_of(cases("sinks", True, True), cases("sinks", 2))).startswith("sinks is given in all 2")
    assert conditions_of(contrast_of(cases("alibi", True), cases("alibi", 1))) == [("alibi", "", (True,))]
    contrast = contrast_of(cases("k_scale", 0.5, "2 values", 0.5), cases("k_scale", None, 1, True, "per head"))
    assert conditions_of(contrast) == [("k_scale", "", (0.5, "2 values"))]


def test_many_conditions_without_an_answer_take_less_than_a_second():
    """No three of forty conditions exclude all passing cases, and all combinations are tried; nor do any of 600."""
    luck = Random(0)
    wrong = [{f"key{place}": 0 for place in range(40)}] * 100
    right = [{f"key{place}": luck.randrange(10) // 9 for place in range(40)} for _ in range(200)]
    names = [f"key-{number}" for number in range(600)]
    without = [{name: True for name in names if name != missing} for missing in names]
    before = process_time()
    assert contrast_of(wrong, right) is None
    assert parts_of(wrong, right) == []
    assert process_time() - before < 1
    before = process_time()
    assert contrast_of([dict.fromkeys(names, True)], without) is None
    assert process_time() - before < 2


def test_failing_cases_of_two_causes_are_two_parts():
    right = [{"window": 0, "heads": 8}, {"heads": 4}]
    wrong = [
        {"window": 9, "heads": 8},
        {"heads": 10},
        {"window": 9, "heads": 4},
        {"heads": 10},
        {"window": 9},
    ]
    parts = parts_of(wrong, right)
    assert [(conditions_of(contrast), positions) for contrast, positions in parts] == [
        ([("window", "", (9,))], [0, 2, 4]),
        ([("heads", "", (10,))], [1, 3]),
    ]
    assert [(contrast.wrong, contrast.right) for contrast, _ in parts] == [(3, 2), (2, 2)]


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(cases("a", 1, 1), id="one part is no split"),
        pytest.param([{name: 1} for name in "abcde"], id="five are too many"),
        pytest.param([{"a": 1}, {}], id="one does not differ from those that pass"),
    ],
)
def test_what_is_not_separable_as_a_whole_is_not_split(wrong):
    assert parts_of(wrong, [{}]) == []
