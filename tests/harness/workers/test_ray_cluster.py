"""Ray: slots on the nodes of a cluster, and the actor of a slot."""

import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from inline_snapshot import snapshot

import attncheck
from attncheck.errors import ClusterError, MissingExtraError
from attncheck.harness.run.options import RaySettings
from attncheck.harness.run.outcomes import BackendDescription, Circumstances, not_loaded
from attncheck.harness.run.run import file_digest
from attncheck.harness.run.selection import RunPlan, select_cases
from attncheck.harness.workers.examination import Place
from attncheck.harness.workers.limits import TimeLimits, WorkerSettings
from attncheck.harness.workers.pool import assignment_of
from attncheck.harness.workers.process import WorkerError
from attncheck.harness.workers.protocol import HarnessFailure, Refused
from attncheck.harness.workers.ray import ActorRecords, RayActor, RayCluster
from attncheck.harness.workers.schedule import BackendQuestion, Chosen
from attncheck.harness.workers.worker import DeviceChosen, Imports
from attncheck.reports.run_file.header import Environment
from attncheck.reports.run_file.records import Crashed, format_line, parse_line

FACTS = dict.fromkeys(("python", "numpy", "platform", "cpu", "device", "device_name"), "")
SAME = Environment(attncheck=attncheck.__version__, torch="2.13.0", cores=2, **FACTS)
OTHER = SAME.model_copy(update={"torch": "2.12.0"})


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class FakeRay(ModuleType):
    """A fake of ray: ``joins`` has what each actor answers when it joins, ``answers`` what to each question."""

    class exceptions:  # noqa: N801 (the name of ray's module)
        RayError = RayError
        RayTaskError = RayTaskError

    def __init__(self, **offered):
        super().__init__("ray")
        self.offered = {"CPU": 3.0, **offered}
        self.joins = []
        self.answers = []
        self.options = []
        self.joined_with = []
        self.killed = []
        self.initialised = {}
        self.is_shut_down = False

    def init(self, **settings):
        self.initialised = settings

    def shutdown(self):
        self.is_shut_down = True

    def cluster_resources(self):
        return self.offered

    def put(self, value):
        return value

    def get(self, reference):
        if isinstance(reference[0], Exception):
            raise reference[0]
        return reference[0]

    def wait(self, references, num_returns=1, timeout=None):
        return [each for each in references if each[0] != "never"][:num_returns], []

    def kill(self, actor):
        self.killed.append(actor)

    def remote(self, _):
        return FakeActorClass(self)


class Reference(list[Any]):
    __hash__ = object.__hash__


class FakeActorClass:
    def __init__(self, ray):
        self._ray = ray

    def options(self, **given):
        self._ray.options.append(given)
        return self

    def remote(self):
        return FakeActor(self._ray)


class FakeActor:
    def __init__(self, ray):
        self.join, self.begin = FakeMethod(ray.joins, ray.joined_with), FakeMethod([None])
        self.examine = FakeMethod(ray.answers)


class FakeMethod:
    def __init__(self, answers, called=None):
        self._answers, self._called = answers, called

    def remote(self, *given):
        if self._called is not None:
            self._called.append(given)
        return Reference([self._answers.pop(0) if self._answers else "never"])


def joining(environment=SAME, reason=""):
    if environment is None:
        return {"name": "far", "refused": reason}
    chosen = DeviceChosen(device="cpu", notes=(), environment=environment)
    return {"name": "near", "chosen": chosen.model_dump_json()}


@pytest.fixture
def ray(monkeypatch):
    made = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return made


@pytest.fixture
def notes():
    return []


@pytest.fixture
def opened(ray, notes):
    """``opened(settings, **options)``: a cluster whose first node has joined and begun the run."""

    def make(settings=None, **options):
        ray.joins.insert(0, joining())
        cluster = RayCluster(settings or RaySettings(), Imports(), notes.append, **options)
        assert cluster.choose_device((), None) == ("cpu", (), SAME)
        selection = select_cases(["smoke"])
        cluster.begin(selection, RunPlan(cases=selection.cases), SAME)
        return cluster

    return make


def place():
    backend = BackendDescription.model_validate({"info": {"name": "reference", "ref": "reference"}})
    question = BackendQuestion(backend, select_cases(["smoke"]).cases[0], ("numerics", "lse"))
    return Place(question, Circumstances(0, SAME.digest, attncheck.__version__), ["numerics", "lse"])


CHOSEN = Chosen("reference", True)


@pytest.mark.parametrize(
    ("offered", "device", "resources", "jobs", "expected"),
    [
        ({}, None, {}, None, (3, 1.0, 0)),
        ({}, None, {"CPU": 2.0}, None, (1, 2.0, 0)),
        ({"GPU": 2.0}, None, {}, None, (2, 1.0, 1.0)),
        ({"GPU": 2.0}, "cpu", {}, None, (3, 1.0, 0)),
        ({"GPU": 2.0}, "cuda", {}, 5, (5, 1.0, 1.0)),
        ({}, "cpu", {}, 2, (2, 1.0, 0)),
    ],
)
def test_actors_are_one_a_gpu_or_one_a_core(ray, opened, offered, device, resources, jobs, expected):
    ray.offered |= offered
    cluster = opened(RaySettings(resources=resources), device=device, jobs=jobs)
    (options,) = ray.options
    assert (len(cluster.slots(100)), options["num_cpus"], options["num_gpus"]) == expected
    assert len(cluster.slots(1)) == 1


def test_other_resources_are_requested_by_their_names(ray, opened):
    ray.offered |= {"memory": 2e9, "accelerator_type:H100": 1.0}
    opened(RaySettings(resources={"memory": 1e9, "accelerator_type:H100": 0.001}))
    assert (ray.options[0]["memory"], ray.options[0]["resources"]) == (1e9, {"accelerator_type:H100": 0.001})


def test_a_cluster_without_room_is_refused(ray, notes):
    with pytest.raises(ClusterError) as refused:
        RayCluster(RaySettings(resources={"FPGA": 2.0}), Imports(), notes.append)
    assert str(refused.value) == snapshot(
        "Ray cluster 'auto': has no room for an actor that takes CPU=1, FPGA=2; add nodes, or give --jobs N to wait for them"
    )
    assert ray.is_shut_down


def test_nodes_work_in_the_folder_of_the_run_unless_ray_brings_one(ray, opened):
    opened()
    opened(RaySettings(runtime_env={"working_dir": "."}))
    assert [folder for _, folder, *_ in ray.joined_with] == [str(Path.cwd()), None]
    assert ray.initialised["runtime_env"] == {"working_dir": "."}


def test_a_node_with_another_environment_takes_no_part(ray, opened, notes):
    cluster = opened()
    ray.joins += [joining(OTHER), joining()]
    _, second, third = cluster.slots(3)
    reason = "it has torch '2.12.0', and the run torch '2.13.0'"
    with pytest.raises(ClusterError, match="no node is left; near takes no part"):
        second.begin(CHOSEN)
    with pytest.raises(ClusterError, match="no node is left"):
        second.begin(CHOSEN)  # it asks no other node
    assert third.begin(CHOSEN)
    assert notes == [f"near takes no part: {reason}"]
    assert ray.killed == [second.actor]
    assert len(ray.options) == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (joining(None, "it has attncheck 0.0.9"), "far takes no part: it has attncheck 0.0.9"),
        ("never", "no node has joined the run within 600 s"),
    ],
)
def test_without_a_first_node_the_run_ends(ray, notes, answer, reason):
    ray.joins.append(answer)
    cluster = RayCluster(RaySettings(address="local"), Imports(), notes.append, jobs=1)
    with pytest.raises(ClusterError) as refused:
        cluster.choose_device((), None)
    assert str(refused.value) == f"Ray cluster 'local': {reason}"


@pytest.mark.parametrize("error", [RayTaskError("No module named 'attncheck'"), RayError("gone")])
def test_an_actor_that_fails_before_it_has_joined_is_not_replaced(ray, opened, notes, error):
    cluster = opened()
    ray.joins.append(error)
    slot = cluster.slots(2)[1]
    for _ in range(2):
        with pytest.raises(ClusterError, match=f"no node is left; a node .*{error}"):
            slot.begin(CHOSEN)
    assert str(error) in notes[0]
    assert len(ray.options) == 2


def test_a_lost_node_is_replaced_up_to_three_times_at_one_question(ray, opened, notes):
    (slot,) = opened().slots(1)
    question, actors = place(), [slot.actor]
    for _ in range(3):
        assert slot.begin(CHOSEN)
        ray.answers.append(RayError("The node died.\n\n  its raylet was killed \n"))
        ray.joins.append(joining())
        assert not slot.examine(question)
        assert ray.killed == actors
        assert slot.begin(CHOSEN)
        actors.append(slot.actor)
    assert notes == snapshot(["near was lost: its raylet was killed"])
    assert slot.examine(question)
    crashed, skipped = question.waiting()
    assert isinstance(crashed, Crashed)
    assert crashed.cause == snapshot("its node was lost 3 times: its raylet was killed")
    assert skipped.outcome == "unsupported"  # the backend declares no LSE, so that no check would have applied
    record = format_line(crashed).encode()
    ray.answers.append(ActorRecords((record,), "blind"))
    other = place()
    assert slot.examine(other)
    assert (list(other.waiting()), other.blind) == ([crashed], "blind")


def test_all_actors_start_at_once_and_the_end_of_the_run_is_no_loss_of_a_node(ray, opened, notes):
    cluster = opened()
    ray.joins += [RayError("killed")] * 2
    first, second, third = cluster.slots(3)
    assert len(ray.options) == len(ray.joined_with) == 3
    for slot in (first, second):
        slot.stop()
    ray.answers.append(RayError("killed"))
    assert not first.examine(place())
    with pytest.raises(ClusterError, match="no node is left"):
        second.begin(CHOSEN)
    assert (ray.killed, notes) == ([first.actor, second.actor], [])
    with pytest.raises(ClusterError, match="a node was lost: killed"):
        third.begin(CHOSEN)


def test_a_node_that_refuses_a_backend_gets_no_more_questions(ray, opened):
    (slot,) = opened().slots(1)
    ray.answers.append(Refused(reason="another file"))
    question = place()
    assert not slot.examine(question)
    assert question.losses == []
    with pytest.raises(ClusterError, match="no node is left; near takes no part: another file"):
        slot.begin(CHOSEN)


@pytest.mark.parametrize("call", ["wait", "get"])
def test_a_lost_connection_ends_the_run(ray, opened, monkeypatch, call):
    def lost(*_, **__):
        raise OSError("Broken pipe")

    (slot,) = opened().slots(1)
    ray.answers.append(ActorRecords(()))
    monkeypatch.setattr(ray, call, lost)
    with pytest.raises(ClusterError) as refused:
        slot.examine(place())
    assert str(refused.value) == snapshot("Ray cluster 'auto': the connection was lost: Broken pipe")


@pytest.mark.parametrize(
    "answer", [RayTaskError("Traceback ...\nKeyError: 3"), HarnessFailure(error="KeyError: 3", traceback="")]
)
def test_a_fault_of_attncheck_on_a_node_ends_the_run(ray, opened, answer):
    (slot,) = opened().slots(1)
    ray.answers.append(answer)
    with pytest.raises(WorkerError) as refused:
        slot.examine(place())
    assert str(refused.value) == snapshot("KeyError: 3 (in the process of reference)")


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [("local", "10.0.0.1:1", "local"), (None, "ray://head:1", "ray://head:1"), (None, None, "auto")],
)
def test_the_address_is_that_of_the_option_then_of_the_environment(
    ray, notes, monkeypatch, given, environment, expected
):
    if environment:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    with RayCluster(RaySettings(address=given), Imports(), notes.append):
        assert ray.initialised["address"] == expected
    assert ray.is_shut_down


def test_an_address_at_which_nothing_listens_is_refused_at_once(ray, notes):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ClusterError, match=rf"Ray cluster '{address}': cannot be used: .*refused"):
            RayCluster(RaySettings(address=address), Imports(), notes.append)
    assert ray.initialised == {}


def test_a_cluster_that_does_not_start_in_time_is_refused(ray, notes, monkeypatch):
    def init(**_):
        raise Exception("The current node timed out during startup.")  # noqa: TRY002 (as ray does)

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ClusterError) as refused:
        RayCluster(RaySettings(address="local"), Imports(), notes.append)
    assert str(refused.value) == snapshot(
        "Ray cluster 'local': cannot be used: The current node timed out during startup; if this machine is busy, try again later"
    )


def test_without_ray_the_extra_is_named(monkeypatch, notes):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError) as refused:
        RayCluster(RaySettings(), Imports(), notes.append)
    assert str(refused.value) == snapshot(
        "--executor ray needs ray, which is not installed; pip install 'attncheck[ray]'"
    )


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
