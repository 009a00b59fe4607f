"""What users type after --case, --check, --skip, --suite and -k, and what is suggested where it means nothing."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from attncheck.cases.loader import load_suite
from attncheck.errors import QuestionError, SelectionError
from attncheck.harness.run.selection import (
    RunPlan,
    Selection,
    cases_by_keywords,
    choose_checks,
    select_cases,
    split_commas,
)
from attncheck.reference.spec import default_checks
from attncheck.reports.run_file.timings import TIMING

SMOKE = load_suite("smoke").cases
BY_DEFAULT = default_checks("cuda")


def ids(selection: Selection) -> list[str]:
    return [case.id for case in selection.cases]


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
def test_checks_are_named_by_commas_and_patterns(words: list[str], expected: tuple[str, ...]) -> None:
    assert set(choose_checks(words)) == set(expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lse,numeric", "unknown check 'numeric'; did you mean 'numerics'? (known: ...)"),
        ("zz*", "unknown check 'zz*' (known: ...)"),
        ("!cudagraph", "check '!cudagraph': to leave a check out, give --skip cudagraph"),
    ],
)
def test_a_pattern_of_no_check_is_an_error_with_a_suggestion(
    plain: Callable[[str], str], words: str, message: str
) -> None:
    with pytest.raises(QuestionError) as refused:
        choose_checks([words])
    assert plain(str(refused.value)) == message


def test_skip_leaves_checks_out() -> None:
    selection = select_cases(["smoke"], skip=["cudagraph,l*"])
    assert selection.checks == tuple(check for check in BY_DEFAULT if check not in ("cudagraph", "lse"))
    assert select_cases(["smoke"], (), ["lse,numerics"], skip=["lse"]).checks == ("numerics",)
    with pytest.raises(SelectionError, match=r"^--skip lse removes every selected check; leave out --skip, or select "):
        select_cases(["smoke"], (), ["lse"], skip=["lse"])


def test_commas_within_brackets_and_in_names_of_files_separate_nothing(tmp_path: Path) -> None:
    (tmp_path / "a,b.yaml").write_text("")
    assert split_commas([str(tmp_path / "a,b.yaml"), "c,d"]) == (str(tmp_path / "a,b.yaml"), "c", "d")
    varied = "decode{cache.block_size: 32, layer.head_size: 64}"
    assert [suite.name for suite in select_cases([f"smoke,{varied}"]).suites] == ["smoke", "decode"]


def test_an_id_without_its_variants_means_all_of_them() -> None:
    expected = [case.id for case in SMOKE if re.fullmatch(r"(decode|prefill)(\..*)?", case.id)]
    assert len(expected) > 2
    assert ids(select_cases(["smoke"], ["decode,prefill"])) == expected
    assert ids(select_cases(["smoke"], ["smoke/decode", "smoke/prefill"])) == expected
    assert ids(select_cases(["smoke"], ["decode.float16"])) == ["decode.float16"]
    groups = [case.id for case in SMOKE if case.id.startswith("groups.")]
    assert "groups.16" in groups
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
def test_a_suggestion_is_one_that_works(suites: list[str], pattern: str) -> None:
    with pytest.raises(SelectionError) as wrong:
        select_cases(suites, [pattern])
    match = re.search(r"did you mean '(.*)'\?", str(wrong.value))
    assert match, wrong.value
    found = select_cases(suites, [match[1]])
    if not suites:  # a backend is examined by one of the two suites
        found = found.of_suites(["smoke"])
    assert found.cases


def test_a_case_of_another_suite_is_suggested_with_its_suite() -> None:
    with pytest.raises(SelectionError) as wrong:
        select_cases(["prefill"], ["verify-drafts"])
    match = re.search(r"give --suite (\w+)", str(wrong.value))
    assert match, wrong.value
    assert select_cases([match[1]], ["verify-drafts"]).cases


def test_a_case_that_the_defaults_make_invalid_is_named_with_the_reason() -> None:
    with pytest.raises(SelectionError) as wrong:
        select_cases(["smoke{layer.num_heads: 7}"], ["decode.float32"])
    assert str(wrong.value) == snapshot(
        "no case of smoke{layer.num_heads: 7} matches 'decode.float32'; decode.float32 is left out, since it is invalid with these defaults: num_heads 7 is not a multiple of num_kv_heads 2"
    )
    assert "num_kv_heads" in str(wrong.value)
    assert "--suite" not in str(wrong.value)
    with pytest.raises(
        SelectionError, match=r"no case of smoke with --set layer\.num_heads=7 matches 'decode\.float32'; "
    ):
        select_cases(["smoke"], ["decode.float32"], settings=["layer.num_heads=7"])


def test_the_checks_that_are_made_of_any_case_are_in_the_order_of_reports() -> None:
    selection = select_cases(["smoke"], ["prefill"], ["lse", "numerics"])
    assert selection.selected_checks == selection.checks == ("numerics", "lse")
    assert "timing" not in select_cases(["smoke"]).selected_checks
    assert select_cases(["smoke"], (), ["timing"]).selected_checks == ("timing",)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("sliding_window", lambda case: case.layer.sliding_window is not None),
        ("head_size=128", lambda case: case.layer.head_size == 128),
        ("SINKS and not fp8", lambda case: case.layer.sinks is not False),
        ("smoke/decode or smoke/prefill", lambda case: case.id.startswith(("decode", "prefill"))),
    ],
)
def test_keywords_are_looked_for_in_id_description_and_needs(expression, expected) -> None:
    found = [case.id for case in cases_by_keywords(SMOKE, expression)]
    wanted = [case.id for case in SMOKE if expected(case)]
    assert wanted
    assert set(wanted) <= set(found)
    unexpected = [case for case in SMOKE if case.id in set(found) - set(wanted)]
    words = re.findall(r"\w+", expression.lower())
    assert all(any(word in f"{case.key} {case.description}".lower() for word in words) for case in unexpected)


SYNTAX = "join words by and, or, not and parentheses, such as 'window and not fp8'"
NO_MATCH = "matches no id, description or need of the 78 cases that the other options select"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("a b", f"expected end of input; got identifier; {SYNTAX}"),
        ("(sinks", f"expected right parenthesis; got end of input; {SYNTAX}"),
        ("sincs", f"{NO_MATCH}; did you mean 'sinks'?"),
        ("head_size=12345", f"{NO_MATCH}; did you mean 'head_size=256'?"),
    ],
)
def test_the_message_of_a_wrong_expression_states_what_is_wrong(expression: str, message: str) -> None:
    with pytest.raises(QuestionError) as refused:
        select_cases(["smoke"], keywords=expression)
    assert str(refused.value).removeprefix(f"-k {expression!r}").lstrip(": ") == message


@pytest.mark.parametrize(
    ("options", "on_cpu", "on_cuda"),
    [
        ({}, False, True),
        ({"skip": ["lse"]}, False, True),
        ({"skip": ["streams"]}, False, False),
        ({"checks": ["streams"]}, True, True),
    ],
)
def test_streams_run_by_default_on_cuda_alone_and_everywhere_by_name(
    options: dict[str, Any], on_cpu: bool, on_cuda: bool
) -> None:
    selection = select_cases(["smoke"], ["alibi"], **options)
    runs = {}
    for device in ("cpu", "cuda"):
        plan = RunPlan(selection.cases, checks=selection.checks_on(device), device=device)
        runs[device] = "streams" in plan.checks_of(selection.cases[0])
    assert runs == {"cpu": on_cpu, "cuda": on_cuda}


@pytest.mark.parametrize(("device", "has_streams"), [("", False), ("cpu", False), ("cuda", True), ("xpu:1", True)])
def test_a_check_of_accelerators_is_no_default_elsewhere(device: str, has_streams: bool) -> None:
    assert ("streams" in default_checks(device)) is has_streams
