"""What runs on a node, without a cluster: whom it refuses, and that it examines as a run does."""

import pytest
from inline_snapshot import snapshot

import attncheck
from attncheck.harness.run.outcomes import BackendDescription, not_loaded
from attncheck.harness.run.run import file_digest
from attncheck.harness.run.selection import RunPlan, select_cases
from attncheck.harness.workers.limits import TimeLimits, WorkerSettings
from attncheck.harness.workers.pool import assignment_of
from attncheck.harness.workers.protocol import Refused
from attncheck.harness.workers.ray import ActorRecords, RayActor
from attncheck.harness.workers.schedule import BackendQuestion
from attncheck.harness.workers.worker import DeviceChosen, Imports
from attncheck.reports.run_file.records import parse_line

pytestmark = pytest.mark.usefixtures("preloaded")

MINE = """\
from attncheck.backends.candidates.torch_sdpa import SDPABackend


class Mine(SDPABackend):
    pass
"""
REF = "./mine.py:Mine"


def joined(actor, *, folder, version=attncheck.__version__, device="cpu"):
    answer = actor.join(version, str(folder), Imports().model_dump_json(), (device, []))
    assert answer["name"]
    if "refused" in answer:
        return Refused(reason=answer["refused"])
    return DeviceChosen.model_validate_json(answer["chosen"])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


@pytest.fixture
def actor():
    made = RayActor()
    yield made
    made._pool.close()


def test_a_node_examines_questions_to_backends_of_the_same_files(plain, actor, folder):
    chosen = joined(actor, folder=folder)
    assert isinstance(chosen, DeviceChosen)
    selection = select_cases(["smoke"], ["decode.float32", "decode.float16"], ["numerics", "lse"])
    assignment = assignment_of(selection, RunPlan(selection.cases), chosen.environment)
    actor.begin(assignment, WorkerSettings(TimeLimits(600.0)))
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

    files = dict.fromkeys(description.info.files, "0" * 12)
    assert "mine.py" in files
    for change in ({"files": files}, {"features": ("lse",)}):
        info = description.info.model_copy(update=change)
        other = BackendQuestion(description.model_copy(update={"info": info}), selection.cases[0], ("lse",))
        assert actor.examine(other) == Refused(reason=f"backend {REF!r} is another one there")
    assert actor.describe({REF: "0" * 12}) == [f"{folder} has another file for {REF}, or none"]

    (reason,) = actor.describe({"no.such:Thing": ""})
    assert isinstance(reason, str)
    gone = BackendQuestion(not_loaded("no.such:Thing", (reason,)), selection.cases[0], ("numerics",))
    unavailable = actor.examine(gone)
    assert isinstance(unavailable, ActorRecords)
    (record,) = map(parse_line, unavailable.records)
    assert (record.outcome, record.reasons) == ("unavailable", (reason,))

    actor.begin(assignment.model_copy(update={"digests": ("0" * 12,)}), WorkerSettings())
    (reason,) = actor.describe({"reference": ""})
    assert isinstance(reason, str)
    assert plain(reason) == snapshot("ROOT/src/attncheck/cases/suites/smoke.yaml has changed since the run began")


def test_a_node_with_another_attncheck_folder_or_device_takes_no_part(actor, folder):
    reasons = []
    for fields in ({"version": "9.9.9"}, {"folder": folder / "elsewhere"}, {"device": "xpu"}):
        answer = joined(actor, **{"folder": folder, **fields})
        assert isinstance(answer, Refused)
        reasons.append(answer.reason)
    assert reasons[0] == f"it has attncheck {attncheck.__version__}, and the run 9.9.9"
    assert f"cannot use the folder {folder}/elsewhere (No such file or directory)" in reasons[1]
    assert "working_dir" in reasons[1]
    assert "device 'xpu'" in reasons[2]
