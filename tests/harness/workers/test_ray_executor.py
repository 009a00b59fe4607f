"""The head of a run on many nodes, by scripted nodes: order, lost nodes, refusals, groups."""

from collections import deque
from collections.abc import Callable
from typing import Any, cast

import pytest
from inline_snapshot import snapshot

from attncheck.cases.model import Case
from attncheck.errors import BackendUnavailableError, ClusterError
from attncheck.harness.run.outcomes import BackendDescription, Circumstances, record_of
from attncheck.harness.run.selection import RunPlan
from attncheck.harness.workers import ray
from attncheck.harness.workers.executor import BackendQuestion
from attncheck.harness.workers.pool import WorkerError
from attncheck.harness.workers.protocol import HarnessFailure, Refused
from attncheck.harness.workers.ray import ActorRecords, Answer, Lost, Node, RayCluster, RayExecutor
from attncheck.reports.run_file.header import BackendInfo, Environment
from attncheck.reports.run_file.records import Crashed, Record, format_line

MakeCase = Callable[..., Case]
BACKEND = BackendDescription(info=BackendInfo(name="fast", ref="fast"))
FACTS = dict.fromkeys(("python", "torch", "numpy", "platform", "cpu", "device", "device_name"), "")
ENVIRONMENT = Environment(attncheck="0.1.0", cores=1, **FACTS)


def examined(question: BackendQuestion, blind: str | None = None) -> ActorRecords:
    circumstances = Circumstances(0, ENVIRONMENT.digest, "0.1.0")
    records = (
        record_of(circumstances, question.case, question.backend, check, BackendUnavailableError("made", ["made up"]))
        for check in question.checks
    )
    return ActorRecords(tuple(format_line(record).encode() for record in records), blind)


class FakeCluster:
    """Nodes that answer by ``script``, those that join first, then the latest sent to; a lost node is replaced."""

    def __init__(self, script: Callable[[str, BackendQuestion], Answer], nodes: int = 2) -> None:
        self._script = script
        self._nodes = [Node(None, f"node {number}") for number in range(nodes)]
        self._joining: list[Node] = []
        self._answers: deque[tuple[Node, Answer]] = deque()
        self.sent: list[tuple[str, str]] = []

    def start(self, most: int) -> Node:
        self._joining = self._nodes[1:most]
        return self._nodes[0]

    def send(self, node: Node, question: BackendQuestion) -> None:
        self.sent.append((node.name, question.case.id))
        self._answers.append((node, self._script(node.name, question)))

    def wait(self) -> list[tuple[Node, Answer]]:
        if self._joining:
            return [(self._joining.pop(), None)]
        if not self._answers:
            raise ClusterError("here", "no node is left")
        node, answer = self._answers.pop()
        if isinstance(answer, Lost):
            self._joining.append(Node(None, f"{node.name}+"))
        return [(node, answer)]


def executor(cluster: FakeCluster, *cases: Case, checks: tuple[str, ...] = ("numerics",)) -> RayExecutor:
    plan = RunPlan(cases=cases, checks=checks)
    return RayExecutor(plan, (BACKEND,), cast(RayCluster, cluster), ENVIRONMENT)


def ids(records: list[Record]) -> list[str]:
    return [record.case_id for record in records]


@pytest.fixture
def cases(make_case: MakeCase) -> list[Case]:
    return [make_case(name=name) for name in "abcdef"]


@pytest.mark.parametrize("nodes", [1, 2, 5, 9])
def test_records_come_in_the_order_of_a_serial_run(cases: list[Case], nodes: int) -> None:
    cluster = FakeCluster(lambda node, question: examined(question), nodes)
    assert ids(list(executor(cluster, *cases).run())) == list("abcdef")
    assert sorted(case for _, case in cluster.sent) == list("abcdef")
    assert len({node for node, _ in cluster.sent}) == min(nodes, 6)


def test_a_plan_without_questions_starts_no_node() -> None:
    assert list(executor(FakeCluster(lambda node, question: None)).run()) == []


def test_the_question_of_a_lost_node_goes_to_another_one(cases: list[Case]) -> None:
    cluster = FakeCluster(lambda node, question: Lost("power") if node == "node 1" else examined(question))
    assert ids(list(executor(cluster, *cases).run())) == list("abcdef")
    (lost,) = [case for node, case in cluster.sent if node == "node 1"]
    assert [case for _, case in cluster.sent].count(lost) == 2


def test_a_question_that_loses_every_node_is_crashed_and_the_others_are_examined(cases: list[Case]) -> None:
    cluster = FakeCluster(
        lambda node, question: Lost("out of memory") if question.case.id == "b" else examined(question)
    )
    records = list(executor(cluster, *cases, checks=("numerics", "lse")).run())
    assert ids(records) == [name for name in "abcdef" for _ in range(2)]
    crashed, skipped = (record for record in records if record.case_id == "b")
    assert isinstance(crashed, Crashed)
    assert crashed.cause == snapshot("its node was lost 3 times: out of memory")
    assert skipped.outcome == "unsupported"  # the backend declares no LSE, so that no check would have applied


def test_a_node_that_refuses_a_backend_gets_no_more_questions(cases: list[Case]) -> None:
    cluster = FakeCluster(lambda node, question: Refused(reason="another") if node == "node 1" else examined(question))
    assert ids(list(executor(cluster, *cases).run())) == list("abcdef")
    assert [node for node, _ in cluster.sent].count("node 1") == 1


def test_a_run_ends_when_no_node_is_left(cases: list[Case]) -> None:
    def script(node: str, question: BackendQuestion) -> Answer:
        return Refused(reason="another") if question.case.id == "c" else examined(question)

    records = executor(FakeCluster(script, nodes=1), *cases).run()
    assert ids([next(records), next(records)]) == ["a", "b"]
    with pytest.raises(ClusterError) as refused:
        next(records)
    assert str(refused.value) == snapshot("Ray cluster 'here': no node is left")


def test_a_fault_of_attncheck_on_a_node_ends_the_run(cases: list[Case]) -> None:
    cluster = FakeCluster(lambda node, question: HarnessFailure(error="KeyError: 3", traceback="here"))
    with pytest.raises(WorkerError) as refused:
        list(executor(cluster, *cases).run())
    assert str(refused.value) == snapshot("KeyError: 3 (in the process of fast)")


def test_a_blind_case_is_named_once(cases: list[Case]) -> None:
    other = BackendDescription(info=BackendInfo(name="other", ref="other"))
    cluster = FakeCluster(lambda node, question: examined(question, "blind" if question.case.id == "a" else None))
    head = RayExecutor(
        RunPlan(cases=tuple(cases), checks=("numerics",)), (BACKEND, other), cast(RayCluster, cluster), ENVIRONMENT
    )
    assert len(list(head.run())) == 12
    assert list(map(str, head.blind)) == ["blind"]


@pytest.mark.parametrize("loses", [False, True])
def test_cases_that_share_a_graph_level_go_to_one_node(make_case: MakeCase, loses: bool) -> None:
    """``loses``: the node of the second of them is lost, and another one examines the rest."""
    names = ("a1", "b1", "a2", "b2", "a3")
    cases = [make_case(name=name, num_heads=8 if name[0] == "a" else 4) for name in names]
    lost: list[Any] = []

    def script(node: str, question: BackendQuestion) -> Answer:
        if loses and question.case.id == "a2" and not lost:
            lost.append(node)
            return Lost("power")
        return examined(question)

    cluster = FakeCluster(script)
    assert ids(list(executor(cluster, *cases, checks=("cudagraph",)).run())) == list(names)
    nodes = {name: [node for node, case in cluster.sent if case == name] for name in names}
    assert nodes["b1"] == nodes["b2"]
    assert nodes["a2"][-1:] == nodes["a3"]
    assert (nodes["a1"] == nodes["a3"]) is not loses
    assert len(nodes["a2"]) == 1 + loses


def test_few_results_wait_for_a_slow_question(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first question is answered when nothing else can be begun; then only two others are over."""
    monkeypatch.setattr(ray, "_AHEAD", 3)

    class Slow(FakeCluster):
        def wait(self) -> list[tuple[Node, Answer]]:
            if self._joining:
                return super().wait()
            self._answers = deque(sorted(self._answers, key=lambda pair: is_first(pair[1])))
            return [self._answers.popleft()]

    def is_first(answer: Answer) -> bool:
        return isinstance(answer, ActorRecords) and b'"a"' in answer.records[0]

    cluster = Slow(lambda node, question: examined(question))
    records = executor(cluster, *cases).run()
    assert next(records).case_id == "a"
    assert [case for _, case in cluster.sent] == ["a", "b", "c"]
    assert ids(list(records)) == list("bcdef")
