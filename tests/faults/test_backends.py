"""An attack on the harness costs a backend its case, and changes no other record of the run.

All backends share a run. With ``-k`` it has those of the selected tests.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the attacks use Linux' /proc"),
    pytest.mark.xdist_group("faults"),
]

OURSELVES = "attncheck itself"
CASES = ("before", "faulty", "between", "later")
INTRUDED = ({"crashed"}, "attncheck's own pipe")
WRONG = ({"failed", "errored"}, "")


def ref_of(name: str) -> str:
    return f"./hostile.py:{name}"


Records = dict[tuple[str, str], dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """A run of the backends, and a clean one of ``torch_sdpa`` and ``Good``."""

    code: int
    printed: str
    records: Records
    clean: Records


@pytest.fixture(scope="module")
def run(
    folder: Path,
    attncheck: Callable[..., tuple[int, str]],
    records: Callable[[str], Records],
    forked: None,
    request: pytest.FixtureRequest,
) -> Run:
    selected = (getattr(item, "callspec", None) for item in request.session.items if item.path == request.path)
    names = dict.fromkeys(spec.params["name"] for spec in selected if spec is not None)
    suite = ("--suite", "small.yaml")
    code, printed = attncheck("run", ref_of("Good"), "torch_sdpa", *suite, "--output", "clean.jsonl")
    assert code == 0, printed
    words = (*suite, "--jobs", "3", "--case-timeout", "10", "--show-output", "--output", "found.jsonl")
    code, printed = attncheck("run", *map(ref_of, names), "torch_sdpa", *words)
    assert (folder / "found.jsonl").exists(), printed
    return Run(code, printed, records("found.jsonl"), records("clean.jsonl"))


def assert_only_cases_fall(run: Run, name: str, cases: tuple[str, ...], outcomes: set[str], text: str) -> None:
    for case in CASES:
        record = run.records[ref_of(name), case]
        if case in cases:
            assert record["outcome"] in outcomes
            assert text in str(record)
            assert OURSELVES not in str(record)
        else:
            own = {"backend", "backend_ref"}
            right = run.clean[ref_of("Good"), case]
            assert {**record, **dict.fromkeys(own)} == {**right, **dict.fromkeys(own)}


@pytest.mark.parametrize(
    ("name", "outcomes", "text"),
    [
        pytest.param("refused", *INTRUDED, id="the answer to another request"),
        pytest.param("load_again", *INTRUDED, id="the first line once more"),
        pytest.param("done", *INTRUDED, id="the end of the case before its record"),
        pytest.param("no_record", *INTRUDED, id="no record"),
        pytest.param("done_blind", *INTRUDED, id="a case that is too weak"),
        pytest.param("fault", *INTRUDED, id="a failure of attncheck"),
        pytest.param("before_again", *INTRUDED, id="the record of the case before it"),
        pytest.param("other_backend", *INTRUDED, id="a record of another backend"),
        pytest.param("no_backend", *INTRUDED, id="a record of no backend"),
        pytest.param("other_seed", *INTRUDED, id="a record of another seed"),
        pytest.param("other_case", *INTRUDED, id="a record of another case"),
        pytest.param("other_hash", *INTRUDED, id="a record of a case with other contents"),
        pytest.param("other_machine", *INTRUDED, id="a record of another machine"),
        pytest.param("stage_again", {"crashed", "timed_out"}, "", id="a time limit that never ends"),
        pytest.param("freed_query", *WRONG, id="a query without storage"),
        pytest.param("hostile_output", *WRONG, id="an output of a class that raises"),
        pytest.param("hostile_in_place", *WRONG, id="an output that gets such a class"),
        pytest.param("hostile_query", *WRONG, id="a query that gets such a class"),
        pytest.param("transposed", *WRONG, id="an output with two exchanged dimensions"),
        pytest.param("prints", {"passed"}, "", id="printed commands of a terminal"),
    ],
)
def test_an_attack_costs_its_case(run: Run, name: str, outcomes: set[str], text: str) -> None:
    assert_only_cases_fall(run, name, ("faulty",), outcomes, text)


@pytest.mark.parametrize(
    ("name", "text"),
    [("NameRaises", "no name today"), ("NoName", "get_name"), ("NoImpl", "get_impl_cls"), ("FloatShape", "shape")],
)
def test_a_bad_declaration_costs_its_backend(run: Run, name: str, text: str) -> None:
    assert_only_cases_fall(run, name, CASES, {"errored", "failed"}, text)


def test_the_run_ends_as_one_with_failures(run: Run) -> None:
    assert run.code == 1
    assert OURSELVES not in run.printed
    for case in CASES:
        assert run.records["torch_sdpa", case] == run.clean["torch_sdpa", case]


@pytest.mark.parametrize("name", ["prints"])
def test_what_a_backend_prints_cannot_command_the_terminal(run: Run, name: str) -> None:
    assert "end" in run.printed
    assert not set("\x1b\x9b\u202e\0") & set(run.printed)
