"""What runs on a node, without a cluster: whom it refuses, and that it examines as a run does."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from inline_snapshot import snapshot

import attncheck
from attncheck.harness.run.outcomes import BackendDescription
from attncheck.harness.run.run import file_digest
from attncheck.harness.run.selection import RunPlan, Selection, select_cases
from attncheck.harness.workers.executor import BackendQuestion
from attncheck.harness.workers.limits import TimeLimits, WorkerSettings
from attncheck.harness.workers.pool import assignment_of
from attncheck.harness.workers.protocol import Refused
from attncheck.harness.workers.ray import ActorRecords, RayActor
from attncheck.harness.workers.worker import Assignment, DeviceChosen, Imports
from attncheck.reports.run_file.records import parse_line

pytestmark = pytest.mark.usefixtures("preloaded")

MINE = """\
from attncheck.backends.candidates.torch_sdpa import SDPABackend


class Mine(SDPABackend):
    pass
"""
REF = "./mine.py:Mine"


def joined(actor: RayActor, *, version: str = attncheck.__version__, folder: Path, device: str = "cpu") -> object:
    answer = actor.join(version, str(folder), Imports().model_dump_json(), (device, []))
    assert answer["name"]
    if "refused" in answer:
        return Refused(reason=answer["refused"])
    return DeviceChosen.model_validate_json(answer["chosen"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


@pytest.fixture
def actor() -> Iterator[RayActor]:
    made = RayActor()
    yield made
    made._pool.close()


def begun(actor: RayActor, folder: Path) -> tuple[Selection, Assignment]:
    """An actor that has joined a run of two cases and has begun it."""
    chosen = joined(actor, folder=folder)
    assert isinstance(chosen, DeviceChosen)
    selection = select_cases(["smoke"], ["decode.float32", "decode.float16"], ["numerics", "lse"])
    assignment = assignment_of(selection, RunPlan(selection.cases), chosen.environment)
    actor.begin(assignment, WorkerSettings(TimeLimits(600.0)))
    return selection, assignment


def test_a_node_examines_questions_to_a_backend_of_the_same_file(actor: RayActor, folder: Path) -> None:
    selection, _ = begun(actor, folder)
    (description,) = actor.describe({REF: file_digest(REF)})
    assert isinstance(description, BackendDescription)
    for case in selection.cases:
        found = actor.examine(BackendQuestion(description, case, ("numerics", "lse")))
        assert isinstance(found, ActorRecords)
        records = [parse_line(line) for line in found.records]
        assert [(each.case, each.check, each.outcome) for each in records] == [
            (case.key, "numerics", "passed"),
            (case.key, "lse", "unsupported"),
        ]
        assert found.blind is None


def test_another_file_or_another_description_is_refused(actor: RayActor, folder: Path) -> None:
    selection, _ = begun(actor, folder)
    (description,) = actor.describe({REF: file_digest(REF)})
    assert isinstance(description, BackendDescription)
    files = dict.fromkeys(description.info.files, "0" * 12)
    assert "mine.py" in files
    for change in ({"files": files}, {"features": ("lse",)}):
        info = description.info.model_copy(update=change)
        other = BackendQuestion(description.model_copy(update={"info": info}), selection.cases[0], ("lse",))
        found = actor.examine(other)
        assert isinstance(found, Refused)
        assert found.reason == f"backend {REF!r} is another one there"
    (reason,) = actor.describe({REF: "0" * 12})
    assert reason == f"{folder} has another file for {REF}, or none"


def test_a_backend_that_cannot_be_loaded_is_unavailable(actor: RayActor, folder: Path) -> None:
    selection, _ = begun(actor, folder)
    (reason,) = actor.describe({"no.such:Thing": ""})
    assert isinstance(reason, str)
    gone = BackendDescription.model_validate(
        {"info": {"name": "gone", "ref": "no.such:Thing"}, "is_loaded": False, "unavailable_reasons": [reason]}
    )
    found = actor.examine(BackendQuestion(gone, selection.cases[0], ("numerics",)))
    assert isinstance(found, ActorRecords)
    (record,) = map(parse_line, found.records)
    assert (record.outcome, record.reasons) == ("unavailable", (reason,))


def test_a_node_with_another_attncheck_takes_no_part(actor: RayActor, folder: Path) -> None:
    answer = joined(actor, version="9.9.9", folder=folder)
    assert isinstance(answer, Refused)
    assert answer.reason == f"it has attncheck {attncheck.__version__}, and the run 9.9.9"


def test_a_node_without_the_folder_of_the_run_takes_no_part(actor: RayActor, folder: Path) -> None:
    answer = joined(actor, folder=folder / "elsewhere")
    assert isinstance(answer, Refused)
    assert f"cannot use the folder {folder}/elsewhere (No such file or directory)" in answer.reason
    assert "working_dir" in answer.reason


def test_a_device_that_is_not_there_is_a_reason(actor: RayActor, folder: Path) -> None:
    answer = joined(actor, folder=folder, device="xpu")
    assert isinstance(answer, Refused)
    assert "device 'xpu'" in answer.reason


def test_suites_that_read_otherwise_on_the_node_are_refused(
    plain: Callable[[str], str], actor: RayActor, folder: Path
) -> None:
    selection, first = begun(actor, folder)
    suite = replace(selection.suites[0], cases=selection.suites[0].cases[:1])
    changed = replace(selection, suites=(suite,))
    assignment = assignment_of(changed, RunPlan(changed.cases), first.environment)
    actor.begin(assignment.model_copy(update={"digests": ("0" * 12,)}), WorkerSettings())
    (reason,) = actor.describe({"reference": ""})
    assert isinstance(reason, str)
    assert plain(reason) == snapshot("ROOT/src/attncheck/cases/suites/smoke.yaml has changed since the run began")
