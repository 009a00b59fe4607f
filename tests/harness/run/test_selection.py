"""What --case, --check, --skip, --suite, -k and --shard select, and what is suggested where they mean nothing."""

import re
from collections import defaultdict
from dataclasses import replace

import pytest
from inline_snapshot import snapshot

from attncheck.cases.keys import split_variant
from attncheck.cases.loader import load_suite
from attncheck.errors import CaseFileError, QuestionError, SelectionError
from attncheck.harness.run import selection as selection_module
from attncheck.harness.run.outcomes import BackendDescription
from attncheck.harness.run.selection import (
    RunPlan,
    Shard,
    cases_by_keywords,
    choose_checks,
    default_suites,
    fit_pages,
    read_shard,
    select_cases,
    split_commas,
    telling_first,
    untimed_questions,
)
from attncheck.reference.spec import default_checks
from attncheck.reports.run_file.header import BackendInfo
from attncheck.reports.run_file.timings import TIMING

SMOKE = load_suite("smoke").cases
BY_DEFAULT = default_checks("cuda")


def ids(selection):
    return [case.id for case in selection.cases]


# Checks


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["numerics,lse"], ("numerics", "lse")),
        (["numerics", "lse, cudagraph"], ("numerics", "lse", "cudagraph")),
        (["num*"], ("numerics",)),
        (["*e*", "lse"], tuple(check for check in BY_DEFAULT if "e" in check)),
        (["*"], BY_DEFAULT),
        (["tim*"], (TIMING,)),
        ([], ()),
    ],
)
def test_checks_are_named_by_commas_and_patterns(words, expected):
    assert set(choose_checks(words)) == set(expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lse,numeric", "unknown check 'numeric'; did you mean 'numerics'? (known: ...)"),
        ("zz*", "unknown check 'zz*' (known: ...)"),
        ("!cudagraph", "check '!cudagraph': to leave a check out, give --skip cudagraph"),
    ],
)
def test_a_pattern_of_no_check_is_an_error_with_a_suggestion(plain, words, message):
    with pytest.raises(QuestionError) as refused:
        choose_checks([words])
    assert plain(str(refused.value)) == message


def test_skip_leaves_checks_out():
    selection = select_cases(["smoke"], skip=["cudagraph,l*"])
    assert selection.checks == tuple(check for check in BY_DEFAULT if check not in ("cudagraph", "lse"))
    assert select_cases(["smoke"], (), ["lse,numerics"], skip=["lse"]).checks == ("numerics",)
    with pytest.raises(SelectionError, match=r"^--skip lse removes every selected check; leave out --skip, or select "):
        select_cases(["smoke"], (), ["lse"], skip=["lse"])


def test_the_checks_that_are_made_of_any_case_are_in_the_order_of_reports():
    selection = select_cases(["smoke"], ["prefill"], ["lse", "numerics"])
    assert selection.selected_checks == selection.checks == ("numerics", "lse")
    assert TIMING not in select_cases(["smoke"]).selected_checks
    assert select_cases(["smoke"], (), [TIMING]).selected_checks == (TIMING,)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"cpu": False, "cuda": True, "xpu:1": True}),
        ({"skip": ["lse"]}, {"cpu": False, "cuda": True, "xpu:1": True}),
        ({"skip": ["streams"]}, {"cpu": False, "cuda": False, "xpu:1": False}),
        ({"checks": ["streams"]}, {"cpu": True, "cuda": True, "xpu:1": True}),
    ],
)
def test_streams_run_by_default_on_an_accelerator_alone_and_everywhere_by_name(options, expected):
    selection = select_cases(["smoke"], ["alibi"], **options)
    plans = {device: RunPlan(selection.cases, checks=selection.checks_on(device), device=device) for device in expected}
    assert {device: "streams" in plan.checks_of(selection.cases[0]) for device, plan in plans.items()} == expected


# Cases and suites


def test_commas_within_brackets_and_in_names_of_files_separate_nothing(tmp_path):
    (tmp_path / "a,b.yaml").write_text("")
    assert split_commas([str(tmp_path / "a,b.yaml"), "c,d"]) == (str(tmp_path / "a,b.yaml"), "c", "d")
    varied = "decode{cache.block_size: 32, layer.head_size: 64}"
    assert [suite.name for suite in select_cases([f"smoke,{varied}"]).suites] == ["smoke", "decode"]


def test_an_id_without_its_variants_means_all_of_them():
    expected = [case.id for case in SMOKE if re.fullmatch(r"(decode|prefill)(\..*)?", case.id)]
    assert len(expected) > 2
    assert ids(select_cases(["smoke"], ["decode,prefill"])) == expected
    assert ids(select_cases(["smoke"], ["smoke/decode", "smoke/prefill"])) == expected
    assert ids(select_cases(["smoke"], ["decode.float16"])) == ["decode.float16"]
    assert "groups.16" in [case.id for case in SMOKE]
    with pytest.raises(SelectionError):
        select_cases(["smoke"], ["groups.1"])  # no shorter id of groups.16


@pytest.mark.parametrize(
    ("suites", "pattern"),
    [
        ([], "decod"),
        ([], "groups.100"),
        (["smoke"], "dekode*"),
        (["smoke"], "smoke/decod.float16"),
        (["smoke"], "prefil"),
        (["encoder", "sinks"], "encodr"),
    ],
)
def test_a_suggestion_is_one_that_works(suites, pattern):
    with pytest.raises(SelectionError) as wrong:
        select_cases(suites, [pattern])
    match = re.search(r"did you mean '(.*)'\?", str(wrong.value))
    assert match, wrong.value
    found = select_cases(suites, [match[1]])
    if not suites:  # a backend is examined by one of the two suites
        found = found.of_suites(["smoke"])
    assert found.cases


def test_a_case_of_another_suite_is_suggested_with_its_suite():
    with pytest.raises(SelectionError) as wrong:
        select_cases(["prefill"], ["verify-drafts"])
    match = re.search(r"give --suite (\w+)", str(wrong.value))
    assert match, wrong.value
    assert select_cases([match[1]], ["verify-drafts"]).cases


@pytest.mark.parametrize(("suite", "settings"), [("smoke{layer.num_heads: 7}", []), ("smoke", ["layer.num_heads=7"])])
def test_a_case_that_the_defaults_make_invalid_is_named_with_the_reason(suite, settings):
    with pytest.raises(SelectionError) as wrong:
        select_cases([suite], ["decode.float32"], settings=settings)
    named = f"{suite} with --set {settings[0]}" if settings else suite
    assert str(wrong.value) == (
        f"no case of {named} matches 'decode.float32'; decode.float32 is left out, since it is invalid with these "
        "defaults: num_heads 7 is not a multiple of num_kv_heads 2"
    )


def test_a_setting_of_one_family_is_refused_for_backends_of_another_alone():
    """Latent layers of ``smoke`` and ``interpreted`` have no ``head_size_v``."""
    selection = select_cases([], settings=["layer.head_size_v=64"])
    names = [split_variant(ref)[0] for ref in selection.refs]
    assert (names, list(selection.faults)) == (["state"], ["smoke", "interpreted"])
    of_state, other = backend("one", default_suite="state"), backend("two", default_suite="smoke")
    assert default_suites(selection, [of_state]) == {"one": "state"}
    with pytest.raises(CaseFileError, match=r"smoke with --set layer\.head_size_v=64"):
        default_suites(selection, [of_state, other])


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("sliding_window", lambda case: case.layer.sliding_window is not None),
        ("head_size=128", lambda case: case.layer.head_size == 128),
        ("SINKS and not fp8", lambda case: case.layer.sinks is not False and case.cache.kv_cache_dtype == "auto"),
        ("smoke/decode or smoke/prefill", lambda case: case.id.startswith(("decode", "prefill"))),
    ],
)
def test_keywords_are_looked_for_in_id_description_and_needs(expression, expected):
    found = [case.id for case in cases_by_keywords(SMOKE, expression)]
    wanted = [case.id for case in SMOKE if expected(case)]
    assert wanted
    assert set(wanted) <= set(found)
    words = re.findall(r"\w+", expression.lower())
    for case in SMOKE:
        if case.id in set(found) - set(wanted):
            assert any(word in f"{case.key} {case.description}".lower() for word in words), case.id


SYNTAX = "join words by and, or, not and parentheses, such as 'window and not fp8'"
NO_MATCH = "matches no id, description or need of the 101 cases that the other options select"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("a b", f"expected end of input; got identifier; {SYNTAX}"),
        ("(sinks", f"expected right parenthesis; got end of input; {SYNTAX}"),
        ("sincs", f"{NO_MATCH}; did you mean 'sinks'?"),
        ("head_size=12345", f"{NO_MATCH}; did you mean 'head_size=256'?"),
    ],
)
def test_the_message_of_a_wrong_expression_states_what_is_wrong(expression, message):
    with pytest.raises(QuestionError) as refused:
        select_cases(["smoke"], keywords=expression)
    assert str(refused.value).removeprefix(f"-k {expression!r}").lstrip(": ") == message


# Shards


def sizes(count, cases):
    """The number of cases in each shard."""
    numbers = list(Shard(1, count).numbers(cases).values())
    return [numbers.count(number) for number in range(1, count + 1)]


def test_each_case_is_in_one_shard_and_no_shard_is_empty():
    for count in (1, 2, 3, 7, len(SMOKE)):
        assert all(sizes(count, SMOKE)), count
        assert Shard(1, count).numbers(SMOKE).keys() == {case.key for case in SMOKE}
    alike = [replace(SMOKE[0], id=f"case {number}") for number in range(4)]
    assert sizes(4, alike) == [1, 1, 1, 1]
    with pytest.raises(SelectionError, match=r"^--shard 1/3: 2 cases are selected; give at most as many shards$"):
        Shard(1, 3).numbers(SMOKE[:2])


def test_cases_of_one_layer_and_cache_are_in_one_shard():
    where = Shard(1, 5).numbers(SMOKE)
    shards = defaultdict(set)
    for case in SMOKE:
        shards[case.layer, replace(case.cache, num_blocks=None, first_block=None)].add(where[case.key])
    assert {len(numbers) for numbers in shards.values()} == {1}


def test_large_cases_are_spread():
    cases = []
    for number in range(6):
        layer = replace(SMOKE[0].layer, scale=0.1 + number / 100)
        cache = replace(SMOKE[0].cache, num_blocks=60_000 if number < 2 else 64)
        cases.append(replace(SMOKE[0], id=f"{number}", layer=layer, cache=cache))
    assert sizes(2, cases) == [3, 3]
    numbers = Shard(1, 2).numbers(cases)
    assert numbers[cases[0].key] != numbers[cases[1].key]


@pytest.mark.parametrize("text", ["", "2", "0/7", "8/7", "2/0", "a/b", "2/", "/7", "-1/7", "1/2/3"])
def test_what_names_no_shard_is_refused(text):
    assert read_shard("2/7") == Shard(2, 7)
    with pytest.raises(SelectionError, match="as 2/7"):
        read_shard(text)


# Pages: where backends do not take those of a suite, others are chosen that most of them take.

SUITE = """
suite: own
defaults:
  layer: {num_heads: 2, num_kv_heads: 1, head_size: 16, dtype: float32}
  cache: {block_size: 16, layout: NHD}
cases:
  - {id: left, batch: q1s40}
  - {id: sized, batch: q1s40, cache: {block_size: 8}}
  - {id: laid, batch: q1s40, matrix: {cache.layout: [NHD, HND]}}
"""


@pytest.fixture
def suite(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(SUITE)
    return str(path)


def backend(name="a", *, reasons=(), **declared):
    return BackendDescription(info=BackendInfo(name=name, ref=name), unavailable_reasons=reasons, **declared)


def pages(selection):
    return {case.id: (case.cache.block_size, case.cache.layout) for case in selection.cases}


def test_what_the_suite_leaves_open_is_chosen_and_what_a_case_sets_is_kept(suite):
    fitted, notes = fit_pages(select_cases([suite]), [backend(page_multiples=(32,), layouts=("HND",))], {})
    assert pages(fitted) == {"left": (32, "HND"), "sized": (8, "HND"), "laid.NHD": (32, "NHD"), "laid.HND": (32, "HND")}
    assert notes == snapshot(
        ("suite own: cache.block_size=32 instead of 16, cache.layout=HND instead of NHD, for a; --set chooses others",)
    )
    again = select_cases(fitted.refs)
    assert (again.cases, again.suites[0].hash) == (fitted.cases, fitted.suites[0].hash)
    filtered, _ = fit_pages(select_cases([suite], ["left"]), [backend(page_sizes=(32,))], {})
    assert pages(filtered) == {"left": (32, "NHD")}
    assert len(filtered.suites[0]) == 4


@pytest.mark.parametrize(
    ("declared", "suites"),
    [
        ({}, {}),
        ({"page_multiples": (1,)}, {}),
        ({"page_sizes": (16, 32), "layouts": ("HND", "NHD")}, {}),
        ({"page_sizes": (64,), "reasons": ("no GPU",)}, {}),
        ({"page_sizes": (32,)}, {"a": "another"}),
    ],
)
def test_a_suite_that_fits_the_backends_it_is_for_stays_as_it_is(suite, declared, suites):
    selection = select_cases([suite])
    assert fit_pages(selection, [backend(**declared)], suites) == (selection, ())


def test_what_the_user_sets_is_never_changed(suite):
    selection = select_cases([suite], settings=["cache.block_size=64"])
    fitted, notes = fit_pages(selection, [backend(page_sizes=(32,), layouts=("HND",))], {})
    assert pages(fitted)["left"] == (64, "HND")
    assert "block_size" not in notes[0]


def test_most_backends_decide_and_the_suite_where_as_many_take_its_own(suite):
    selection = select_cases([suite])
    small, large, any_size = backend("s", page_sizes=(16,)), backend("l", page_sizes=(128,)), backend("x")
    kept, notes = fit_pages(selection, [small, large, any_size], {})
    assert pages(kept)["left"] == (16, "NHD")
    assert notes == snapshot(
        ("suite own: l does not take cache.block_size=16, cache.layout=NHD; in a run of its own others are chosen",)
    )
    fitted, _ = fit_pages(selection, [large, any_size], {})
    assert pages(fitted)["left"] == (128, "NHD")


# The order of --within


def test_what_finds_most_comes_first_and_all_else_in_its_order(monkeypatch):
    """Checks of a case that follow one another are one question; a case may come twice."""
    listed = {("smoke/c", "numerics"): 0, ("smoke/a", "cudagraph"): 1, ("smoke/a", "lse"): 2, ("mine/a", "lse"): 3}
    monkeypatch.setattr(selection_module, "telling_ranks", lambda: listed)
    a, b, c = (replace(case, suite="smoke", id=name) for case, name in zip(SMOKE, "abc", strict=False))
    checks = ("numerics", "lse", "cudagraph")
    found = telling_first(tuple((case, checks) for case in (a, b, c)))
    assert found == (
        (c, ("numerics",)),
        (a, ("cudagraph", "lse", "numerics")),
        (b, checks),
        (c, ("lse", "cudagraph")),
    )
    plan = RunPlan(cases=(a, b, c), checks=checks)
    assert untimed_questions(plan, "mine").questions == ((a, checks), (b, checks), (c, checks))
    assert untimed_questions(replace(plan, telling_first=True), "mine").questions == found
