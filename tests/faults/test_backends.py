"""An attack on the harness costs a backend its case, and changes no other record of the run.

All attacks share a run. With ``-k`` it has those of the selected tests.
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

ATTACKS = [
    *("answer_again", "load_again", "refused", "done", "done_blind", "fault", "no_record", "other_backend"),
    *("no_backend", "other_seed", "other_case", "other_hash", "other_machine", "stage_again", "prints"),
    *("freed_query", "hostile_query", "hostile_output", "hostile_in_place", "transposed"),
]
BEFORE, AFTER = "before", "after"
HOSTILE, GOOD = "./hostile.py:Hostile", "./hostile.py:Good"
SUITE = """\
suite: attacks
defaults: {batch: q5, layer: {num_heads: 2, num_kv_heads: 1, dtype: float32, head_size: 16}}
cases:
"""
Records = dict[tuple[str, str], dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """A run of the backends, and a clean one of ``torch_sdpa`` and ``Good``."""

    code: int
    printed: str
    records: Records
    clean: Records

    def assert_clean(self, backend: str, case: str, own: tuple[str, ...] = ("backend", "backend_ref")) -> None:
        """Assert that a record is that of a clean run, but for the name of the backend."""
        right = self.clean[backend if backend == "torch_sdpa" else GOOD, case]
        assert {**self.records[backend, case], **dict.fromkeys(own)} == {**right, **dict.fromkeys(own)}


@pytest.fixture(scope="module")
def run(
    folder: Path,
    attncheck: Callable[..., tuple[int, str]],
    records: Callable[[str], Records],
    forked: None,
    request: pytest.FixtureRequest,
) -> Run:
    specs = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    attacks = [name for name in ATTACKS if name in [spec.get("attack") for spec in specs]]
    refs = [f"./hostile.py:{spec['declaration']}" for spec in specs if "declaration" in spec]
    layers = {name: f"layer: {{head_size: {24 + 8 * number}}}" for number, name in enumerate(ATTACKS)}
    cases = [f"  - {{id: {name}, {layers.get(name, 'description: right')}}}\n" for name in (BEFORE, *attacks, AFTER)]
    (folder / "attacks.yaml").write_text(SUITE + "".join(cases))
    words = ("run", "torch_sdpa", "--suite", "attacks.yaml", "--jobs", "2")
    code, printed = attncheck(*words, GOOD, "--output", "clean.jsonl")
    assert code == 0, printed
    limits = ("--case-timeout", "10", "--show-output", "--output", "found.jsonl")
    code, printed = attncheck(*words, HOSTILE, *refs, *limits)
    assert (folder / "found.jsonl").exists(), printed
    return Run(code, printed, records("found.jsonl"), records("clean.jsonl"))


def assert_falls(record: dict[str, Any], outcomes: set[str], text: str = "") -> None:
    assert record["outcome"] in outcomes
    assert text in str(record)
    assert "attncheck itself" not in str(record)


@pytest.mark.parametrize("attack", ATTACKS[:13])
def test_a_line_in_the_pipe_costs_its_case(run: Run, attack: str) -> None:
    assert_falls(run.records[HOSTILE, attack], {"crashed"}, "attncheck's own pipe")


@pytest.mark.parametrize("attack", ["stage_again"])
def test_a_backend_cannot_renew_its_time_limit(run: Run, attack: str) -> None:
    assert_falls(run.records[HOSTILE, attack], {"crashed", "timed_out"})


@pytest.mark.parametrize("attack", ["prints"])
def test_what_a_backend_prints_cannot_command_the_terminal(run: Run, attack: str) -> None:
    run.assert_clean(HOSTILE, attack)
    assert "end" in run.printed
    assert not set("\x1b\x9b\u202e\0") & set(run.printed)


@pytest.mark.parametrize("attack", ["freed_query"])
def test_a_query_without_memory_costs_its_case(run: Run, attack: str) -> None:
    assert_falls(run.records[HOSTILE, attack], {"errored"}, "query has 0 of its")


@pytest.mark.parametrize("attack", ["hostile_query"])
def test_a_query_of_another_class_is_no_fault_of_attncheck(run: Run, attack: str) -> None:
    # The output is right: `cache_write` watches the inputs.
    assert_falls(run.records[HOSTILE, attack], {"passed"})


@pytest.mark.parametrize("attack", ATTACKS[17:])
def test_a_hostile_output_costs_its_case(run: Run, attack: str) -> None:
    assert_falls(run.records[HOSTILE, attack], {"failed", "errored"})


@pytest.mark.parametrize(
    ("declaration", "text"),
    [("name_raises", "no name today"), ("no_name", "get_name"), ("no_impl", "get_impl_cls"), ("float_shape", "shape")],
)
def test_a_bad_declaration_costs_its_backend(run: Run, declaration: str, text: str) -> None:
    for case in (BEFORE, AFTER):
        assert_falls(run.records[f"./hostile.py:{declaration}", case], {"failed", "errored"}, text)


def test_nothing_else_changes(run: Run) -> None:
    assert run.code == 1
    assert "attncheck itself" not in run.printed
    for backend, case in run.records:
        if backend == "torch_sdpa" or (backend == HOSTILE and case in (BEFORE, AFTER)):
            run.assert_clean(backend, case)
