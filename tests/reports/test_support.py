"""Features by measurement: what became of the cases that need them."""

import pytest

from attncheck.reports.analysis.support import ANSWERED, REFUSED, UNCLEAR, counted_cases, support_rows
from attncheck.reports.document.support import support_blocks
from attncheck.reports.markdown.text import render
from attncheck.reports.run_file.header import BackendInfo

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
