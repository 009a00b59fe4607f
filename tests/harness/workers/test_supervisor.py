"""Cases of several backends through their processes: what each loses when one of them dies, and what none notices."""

import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from inline_snapshot import snapshot

import attncheck
from attncheck.backends.registry import load
from attncheck.errors import QuestionError
from attncheck.harness.checks.findings import Finding, Holds, NotExamined
from attncheck.harness.run.evaluate import Examiner, RunPlan, environment_of
from attncheck.harness.run.options import RunOptions
from attncheck.harness.run.outcomes import (
    OURSELVES,
    BackendDescription,
    Circumstances,
    ProcessEnd,
    identity_of,
    not_loaded,
    record_of,
)
from attncheck.harness.run.preparation import Gpu
from attncheck.harness.run.run import Run
from attncheck.harness.run.selection import select_cases
from attncheck.harness.workers.examination import Place, ProcessExaminer, started
from attncheck.harness.workers.executor import Supervisor
from attncheck.harness.workers.limits import TimeLimits
from attncheck.harness.workers.pool import WorkerPool
from attncheck.harness.workers.process import ProcessEndedError, RefusedError, WorkerError
from attncheck.harness.workers.protocol import HarnessFailure
from attncheck.harness.workers.schedule import BackendQuestion
from attncheck.harness.workers.sharing import SharedDevice
from attncheck.harness.workers.worker import DeviceChosen, Examined, Stage
from attncheck.reports.run_file.header import BackendInfo
from attncheck.reports.run_file.records import Crashed, Errored, Passed, RecordBase, TimedOut

pytestmark = pytest.mark.usefixtures("preloaded")

ENVIRONMENT = environment_of("cpu")
CHECKS = ("numerics", "lse")


class FakePool:
    """A fake of the processes: each case gets the next script of its backend; ``restarts``: which starts fail."""

    chosen = None
    is_stopped = False

    def __init__(self, restarts=None, **scripts):
        self.scripts, self._restarts = scripts, restarts or []
        self.alive = set(scripts)
        self.starts = Counter(scripts.keys())
        self.finished = []
        self.sent = []
        self.unshared = []
        self.limits = TimeLimits()
        self.device = SharedDevice()
        self.examined = []
        self.changed = {}

    def answers(self, ref, _question, _number):
        return self.scripts[ref].pop(0)

    def share(self, device):
        self.device = device

    def stop_sharing_probes(self, ref):
        self.unshared.append(ref)

    def keep_only(self, refs):
        self.alive &= set(refs)

    def process(self, ref):
        return FakeProcess(self, ref) if ref in self.alive else None

    def prepare(self, ref):
        pass

    def restart(self, ref):
        if self._restarts and (error := self._restarts.pop(0)) is not None:
            raise error
        self.alive.add(ref)
        self.starts[ref] += 1
        self.examined.clear()
        return FakeProcess(self, ref)

    def discard(self, ref):
        self.alive.discard(ref)

    def finish(self, ref):
        self.finished.append(ref)


class FakeProcess:
    def __init__(self, pool, ref):
        self.has_ended, self.examined = False, pool.examined
        self.inherited, self.environment = {}, pool.device.variables(ref)
        self._pool, self._ref = pool, ref

    def output(self, case=None, limit=0):
        return f"printed in {case}\n"

    def send(self, method, case, checks, number, _drawn):
        question, self._number = self.examined[-1], number
        self._pool.sent.append(question)
        self._answers = iter(self._pool.answers(self._ref, question, number))

    def receive(self, limit=None):
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Examined) and answer.lost is not None:
            return Examined(lost=self._of_question(answer.lost))
        return self._of_question(answer) if isinstance(answer, RecordBase) else answer

    def intruded(self):
        return ProcessEndedError(ProcessEnd("intruded"))

    def _of_question(self, record):
        """The record, about the question that the process got last."""
        question = self.examined[-1]
        now = Circumstances(0, ENVIRONMENT.digest, attncheck.__version__, self._number)
        who = identity_of(now, question.case, question.backend, record.check)
        return record.model_copy(update=who | self._pool.changed)


def passed(check):
    who = {"suite": "made", "case_id": "case", "case_hash": "0" * 12, "seed": 0, "backend": "a", "backend_ref": "a"}
    return Passed.model_validate(
        who | {"check": check, "backend_version": "", "environment": "e" * 12, "attncheck_version": "0.1.0"}
    )


WELL = [Stage(name="check numerics"), passed("numerics"), passed("lse"), Examined()]
DEATH = ProcessEndedError(ProcessEnd("killed by SIGSEGV", "the end of it"))


def supervisor(workers, *cases, backends=()):
    plan = RunPlan(cases=cases, checks=CHECKS)
    known = backends or (BackendDescription(info=BackendInfo(name="a", ref="a", features=("lse",))),)
    return Supervisor(plan, known, workers, ENVIRONMENT)


def outcomes(records):
    return [
        (record.check, record.outcome, *((record.stage, record.cause) if isinstance(record, Crashed) else ()))
        for record in records
    ]


def test_cases_out_of_turn_end_the_process_of_the_backend_before(make_case):
    a, b = (BackendDescription(info=BackendInfo(name=name, ref=name)) for name in "ab")
    lse = [passed("lse"), Examined()]
    workers, case = FakePool(a=[WELL, lse, WELL], b=[WELL]), make_case()
    examiner = supervisor(workers, case, backends=(a, b))
    assert outcomes(list(examiner.examine_case(a, case, CHECKS))) == [("numerics", "passed"), ("lse", "passed")]
    assert outcomes(list(examiner.examine_case(a, case, ("lse",)))) == [("lse", "passed")]
    assert workers.sent[-1].checks == ("lse",)
    assert workers.finished == []
    list(examiner.examine_case(b, case, CHECKS))
    assert workers.finished == ["a"]
    list(examiner.examine_case(a, case, CHECKS))
    assert workers.finished == ["a", "b"]


def test_a_death_costs_the_checks_without_a_record_and_no_other_case(make_case):
    dying = [Stage(name="check numerics"), passed("numerics"), Stage(name="check lse"), DEATH]
    workers = FakePool(a=[dying, dying[:], WELL])
    records = list(supervisor(workers, make_case(), make_case(name="next")).run())
    assert outcomes(records) == [
        ("numerics", "passed"),
        ("lse", "crashed", "check lse", snapshot("killed by SIGSEGV")),
        ("numerics", "passed"),
        ("lse", "passed"),
    ]
    crashed = records[1]
    assert isinstance(crashed, Crashed)
    assert (crashed.output, crashed.environment) == ("the end of it", ENVIRONMENT.digest)
    assert crashed.recurrence == "always"
    assert workers.finished == ["a"]


def test_a_case_that_passes_when_examined_first_loses_one_check(make_case):
    dying = [Stage(name="check numerics"), DEATH]
    workers = FakePool(a=[WELL, dying, WELL, WELL, dying, WELL])
    cases = [make_case(name=name) for name in ("first", "second", "third")]
    records = list(supervisor(workers, *cases).run())
    assert [record.outcome for record in records] == ["passed", "passed", "crashed", "passed", "passed", "passed"]
    crashed = records[2]
    assert isinstance(crashed, Crashed)
    assert (crashed.recurrence, crashed.after) == ("after", "made/first")
    case_ids = [each.case.id for each in workers.sent]
    assert case_ids == ["first", "second", "second", "first", "second", "third"]


def test_each_finding_is_tried_again_once(make_case):
    dying = [Stage(name="check numerics"), DEATH]
    workers = FakePool(a=[dying, dying, dying])
    records = list(supervisor(workers, make_case(), make_case(name="next")).run())
    assert [record.recurrence for record in records if isinstance(record, Crashed)] == ["always", "always", "", ""]


def test_a_backend_has_so_much_time_for_all_its_cases(make_case):
    workers = FakePool(a=[WELL])
    workers.limits = TimeLimits(backend_s=1e-9)
    first, *_, last = supervisor(workers, make_case(), make_case(name="next")).run()
    assert first.outcome == "passed"
    assert [each.case.key for each in workers.sent] == ["made/case"]
    assert isinstance(last, TimedOut)
    assert (last.case_id, last.stage, last.limit_s) == ("next", "", 1e-9)


def test_printed_output_is_recorded_with_a_failure_and_an_error_alone(make_case):
    who = passed("lse").model_dump(include=set(Errored.model_fields) - {"outcome"})
    wrong = [passed("numerics"), Errored(**who, stage="forward", error_type="ValueError", message="no"), Examined()]
    first, second = supervisor(FakePool(a=[wrong]), make_case()).run()
    assert isinstance(first, Passed)
    assert isinstance(second, Errored)
    assert second.output == "printed in made/case\n"


@pytest.mark.parametrize(
    "lines",
    [
        [RefusedError("")],
        [Examined()],
        [passed("numerics"), Examined()],
        [Stage(name="check numerics"), Examined(blind="too weak")],
        [passed("numerics"), passed("numerics")],
        [passed("cache_write")],
        [Stage(name="check lse"), Stage(name="check numerics")],
        [Stage(name="check numerics"), Stage(name="check numerics")],
        [Stage(name="a nap")],
    ],
    ids=lambda lines: " ".join(type(each).__name__ for each in lines),
)
def test_a_line_out_of_order_ends_the_process(make_case, lines):
    records = list(supervisor(FakePool(a=[lines, lines[:]]), make_case()).run())
    assert {record.cause for record in records if isinstance(record, Crashed)} == {"intruded"}
    assert [record.check for record in records] == list(CHECKS)


@pytest.mark.parametrize(
    ("field", "value"),
    {
        "backend": "torch_sdpa",
        "backend_ref": "torch_sdpa",
        "backend_version": "2",
        "suite": "smoke",
        "case_id": "next",
        "case_hash": "1" * 12,
        "seed": 7,
        "round": 1,
        "environment": "f" * 12,
        "attncheck_version": "0.0.1",
        "needs": ("head_size=1",),
    }.items(),
)
def test_a_record_of_something_else_ends_the_process(make_case, field, value):
    workers = FakePool(a=[[passed("numerics"), passed("lse"), Examined()]] * 2)
    workers.changed = {field: value}
    records = list(supervisor(workers, make_case()).run())
    assert {record.cause for record in records if isinstance(record, Crashed)} == {"intruded"}


def test_one_that_dies_before_the_case_began_loses_it(make_case):
    records = list(supervisor(FakePool(a=[[DEATH], [DEATH]]), make_case()).run())
    assert outcomes(records) == [(check, "crashed", "the wait for this case", "killed by SIGSEGV") for check in CHECKS]


def test_a_check_that_does_not_apply_is_not_lost_to_a_death(make_case):
    workers = FakePool(plain=[[Stage(name="check numerics"), DEATH]] * 2)
    known = (BackendDescription(info=BackendInfo(name="plain", ref="plain")),)
    records = list(supervisor(workers, make_case(), backends=known).run())
    assert [(record.check, record.outcome) for record in records] == [("numerics", "crashed"), ("lse", "unsupported")]


@pytest.mark.parametrize("error", [QuestionError("the suite has changed"), OSError("no more processes")])
def test_one_that_cannot_be_started_again_loses_the_rest_and_the_next_backend_nothing(make_case, error):
    workers = FakePool([error, error], a=[[DEATH]], b=[WELL, WELL, WELL])
    known = tuple(BackendDescription(info=BackendInfo(name=name, ref=name, features=("lse",))) for name in "ab")
    cases = (make_case(), make_case(name="second"), make_case(name="third"))
    records = list(supervisor(workers, *cases, backends=known).run())
    cause = f"its process has ended, and no other could be started: {error}"
    assert outcomes(records[2:6]) == [(check, "crashed", "the start", cause) for check in (*CHECKS, *CHECKS)]
    assert [record.case_id for record in records[:6]] == ["case", "case", "second", "second", "third", "third"]
    assert [record.outcome for record in records[6:]] == ["passed"] * 6


def test_a_process_that_cannot_be_started_again_does_not_end_the_work_of_another_one(make_case):
    """Two processes of one backend: the host has no room to replace the first, and the second goes on."""
    first, second = FakePool([OSError("no more processes")] * 2, a=[[DEATH]]), FakePool(a=[WELL])
    backend = BackendDescription(info=BackendInfo(name="a", ref="a", features=("lse",)))
    examiner = ProcessExaminer(TimeLimits())
    outcomes_by_case = []
    for pool in (first, first, second):
        question = BackendQuestion(backend, make_case(), CHECKS)
        place = Place(question, Circumstances(0, ENVIRONMENT.digest, attncheck.__version__), list(CHECKS))
        examiner.examine(place, pool)
        outcomes_by_case.append([record.outcome for record in place.waiting()])
    assert outcomes_by_case == [["crashed"] * 2, ["crashed"] * 2, ["passed"] * 2]


def lost(check):
    who = passed(check).model_dump(include=set(Crashed.model_fields) - {"outcome"})
    return [Examined(lost=Crashed(**who, stage=f"check {check}", cause="the device was lost", output="line 3\n"))]


def test_a_lost_device_costs_one_check_and_the_checks_behind_get_a_fresh_process(make_case):
    case = make_case()
    workers = FakePool(a=[lost("numerics"), lost("numerics"), [passed("lse"), Examined()]])
    found = supervisor(workers, case).run()
    first, *others = found
    assert outcomes([first, *others]) == [
        ("numerics", "crashed", "check numerics", snapshot("the device was lost")),
        ("lse", "passed"),
    ]
    assert isinstance(first, Crashed)
    assert first.output == "line 3\nprinted in made/case\n"
    assert [each.checks for each in workers.sent] == [CHECKS, CHECKS, CHECKS[1:]]


def test_a_backend_that_always_loses_the_device_loses_every_check_once(make_case):
    workers = FakePool(a=[lost("numerics"), lost("numerics"), lost("lse"), WELL])  # one finding is tried again once
    records = list(supervisor(workers, make_case(), make_case(name="next")).run())
    assert [record.outcome for record in records] == ["crashed", "crashed", "passed", "passed"]


@pytest.mark.parametrize(("check", "unshared"), [("cudagraph", ["a"]), ("numerics", [])])
def test_a_backend_that_dies_in_the_check_of_graphs_shares_no_probes_any_more(make_case, check, unshared):
    backend = BackendDescription(info=BackendInfo(name="a", ref="a"))
    for script in ([Stage(name=f"check {check}"), DEATH], lost(check)):
        workers, case = FakePool(a=[script, script]), make_case()
        found = supervisor(workers, case, backends=(backend,)).examine_case(backend, case, (check,))
        assert [record.outcome for record in found] == ["crashed"]
        assert workers.unshared == unshared


FAULT = WorkerError("a", HarnessFailure(error="ValueError: ours", traceback="Traceback"))


def test_a_fault_in_a_spoilt_process_does_not_recur_in_a_fresh_one(make_case):
    workers = FakePool(a=[[passed("numerics"), FAULT], [passed("lse"), Examined()], WELL])
    records = list(supervisor(workers, make_case(), make_case(name="next")).run())
    assert outcomes(records) == [("numerics", "passed"), ("lse", "passed")] * 2


def test_a_fault_of_ours_costs_a_case_and_is_recorded_as_ours(make_case):
    workers = FakePool(a=[[passed("numerics"), FAULT], [FAULT], WELL])
    records = list(supervisor(workers, make_case(), make_case(name="next")).run())
    assert outcomes(records) == [("numerics", "passed"), ("lse", "errored"), ("numerics", "passed"), ("lse", "passed")]
    ours = records[1]
    assert isinstance(ours, Errored)
    assert (ours.stage, ours.message, ours.traceback) == (OURSELVES, "ValueError: ours", "Traceback")


def test_a_fault_of_ours_in_a_process_that_does_not_come_up_again_ends_the_run(make_case):
    workers = FakePool([FAULT, FAULT], a=[[passed("numerics"), DEATH]])
    found = supervisor(workers, make_case(), make_case(name="next")).run()
    assert [next(found).outcome for _ in CHECKS] == ["passed", "crashed"]
    with pytest.raises(WorkerError, match="ValueError: ours"):
        next(found)


class Shared(FakePool):
    """Processes on a device that another slot uses; its turns overlap all that are not alone."""

    def __init__(self, *, is_gpu=True, mps=None, **scripts):
        super().__init__(**scripts)
        self.device = SharedDevice(is_shared_gpu=is_gpu, start_mps=mps)
        self.device.add(self.end_all)
        self.num_ended = 0

    def end_all(self):
        self.alive.clear()
        self.num_ended += 1

    def answers(self, ref, question, number):
        if not self.device._is_alone:
            with self.device.turn():
                pass
        return super().answers(ref, question, number)


def examined_through(pool, *cases, **limits):
    """The outcomes of ``cases`` of backend ``a``, by case, and how many were examined again alone."""
    backend = BackendDescription(info=BackendInfo(name="a", ref="a", features=("lse",)))
    examiner, found = ProcessExaminer(TimeLimits(**limits)), []
    for case in cases:
        question = BackendQuestion(backend, case, CHECKS)
        place = Place(question, Circumstances(0, ENVIRONMENT.digest, attncheck.__version__), list(CHECKS))
        examiner.examine(place, pool)
        found.append([record.outcome for record in place.waiting()])
    return found, examiner.repeated.total()


def raised(message, error_type="AcceleratorError"):
    who = passed("numerics").model_dump(include=set(Errored.model_fields) - {"outcome"})
    error = Errored(**who, stage="forward", error_type=error_type, message=message)
    return [error, passed("lse"), Examined()]


LATE = ProcessEndedError(ProcessEnd("not finished within the time limit", limit_s=5.0))


@pytest.mark.parametrize(
    ("message", "scripts", "outcomes", "repeated"),
    [
        ("CUDA error: invalid argument", "eee", ["errored", "errored"], 1),
        ("CUDA error: invalid argument", "ewee", ["passed", "errored"], 2),
        ("CUDA out of memory", "eeee", ["errored", "errored"], 2),
        ("CUDA out of memory", "eww", ["passed", "passed"], 1),
        ("no such layout", "ee", ["errored", "errored"], 0),
    ],
)
def test_an_error_of_a_shared_gpu_counts_if_the_case_shows_it_alone(make_case, message, scripts, outcomes, repeated):
    """An error of CUDA that a backend showed alone is believed in later cases; a lack of memory never is."""
    pool = Shared(a=[raised(message) if each == "e" else WELL for each in scripts])
    found, num_repeated = examined_through(pool, make_case(), make_case(name="next"))
    assert found == [[outcome, "passed"] for outcome in outcomes]
    assert (num_repeated, pool.num_ended) == (repeated, repeated)
    assert pool.scripts["a"] == []


@pytest.mark.parametrize("is_gpu", [True, False])
def test_a_case_is_late_if_it_is_late_alone(make_case, is_gpu):
    """The second case is late both times; the third one after that is believed, for the same reason."""
    late = [Stage(name="check numerics"), LATE]
    pool = Shared(is_gpu=is_gpu, a=[late, WELL, late, late, late])
    cases = [make_case(name=name) for name in ("first", "second", "third")]
    found, num_repeated = examined_through(pool, *cases)
    assert found == [["passed"] * 2, ["timed_out"] * 2, ["timed_out"] * 2]
    assert num_repeated == 2
    assert pool.num_ended == 2 * is_gpu


def test_a_process_that_dies_by_itself_is_tried_again_alone_as_ever(make_case):
    """No other process has ended, so the death is a finding, and the case before is its cause."""
    dying = [Stage(name="check numerics"), DEATH]
    pool = Shared(a=[WELL, dying, WELL, WELL, dying])
    found, num_repeated = examined_through(pool, make_case(), make_case(name="next"))
    assert found == [["passed"] * 2, ["crashed", "passed"]]
    assert (num_repeated, pool.num_ended) == (0, 1)


class FakeMps:
    def __init__(self):
        self.variables = {"CUDA_MPS_PIPE_DIRECTORY": "/mps"}

    def close(self):
        pass


LSE = [passed("lse"), Examined()]
"""After the loss of the device in the first check, another process makes the second one."""


def test_without_mps_a_lost_gpu_is_due_to_the_backend_that_loses_it(make_case):
    pool = Shared(a=[lost("numerics"), WELL, LSE])
    assert examined_through(pool, make_case()) == ([["crashed", "passed"]], 0)


def test_the_third_loss_of_a_client_of_mps_is_its_own(make_case):
    """Two losses that do not recur alone may be due to another client; then the backend is no client any more."""
    loss = lost("numerics")
    pool = Shared(mps=FakeMps, a=[loss, WELL, loss, WELL, loss, WELL, LSE])
    pool.alive.clear()  # its processes start as clients
    found, num_repeated = examined_through(pool, *(make_case(name=name) for name in ("first", "second", "third")))
    assert found == [["passed"] * 2, ["passed"] * 2, ["crashed", "passed"]]
    assert num_repeated == 2


def test_a_client_may_die_because_another_one_did_whose_time_was_used_up(make_case):
    """The other one, which hangs, is settled at once; its end counts nevertheless."""
    device = SharedDevice(is_shared_gpu=True, start_mps=FakeMps)

    class Beside(FakePool):
        def answers(self, ref, question, number):
            answers = super().answers(ref, question, number)
            if answers is death:
                examined_through(hanging, make_case(), backend_s=0.001)
            return answers

    class Hanging(FakePool):
        def answers(self, ref, question, number):
            time.sleep(0.01)
            return super().answers(ref, question, number)

    death = [Stage(name="check numerics"), DEATH]
    hanging, dying = Hanging(a=[[Stage(name="check numerics"), LATE]]), Beside(a=[death, WELL])
    for pool in (hanging, dying):
        pool.share(device)
        pool.alive.clear()
        device.add(pool.alive.clear)
    assert examined_through(dying, make_case()) == ([["passed"] * 2], 1)


@pytest.mark.parametrize(("error", "repeated"), [("ValueError: ours", 0), ("CUDA error: invalid argument", 1)])
def test_a_fault_of_ours_beside_others_is_tried_in_its_turn_unless_the_gpu_is_its_cause(make_case, error, repeated):
    fault = WorkerError("a", HarnessFailure(error=error, traceback="Traceback"))
    pool = Shared(a=[[fault], WELL])
    assert examined_through(pool, make_case()) == ([["passed"] * 2], repeated)


@pytest.mark.parametrize("error", [FAULT, OSError("no process")])
def test_a_start_that_fails_beside_others_is_repeated_alone(make_case, error):
    pool = Shared(a=[WELL])
    pool.alive.clear()
    pool._restarts = [error]
    assert examined_through(pool, make_case()) == ([["passed"] * 2], 1)


def test_where_mps_was_given_up_meanwhile_a_start_is_tried_again_without_it():
    class Refusing(Shared):
        def restart(self, ref):
            if self.device.uses_mps:
                self.device.give_up_mps(turn)
                raise OSError("refused")
            return super().restart(ref)

    pool = Refusing(mps=FakeMps, a=[])
    pool.alive.clear()
    with pool.device.turn() as turn:
        assert started(pool, "a", turn)._ref == "a"


def test_the_end_of_a_try_shows_nothing_once_the_time_of_the_backend_is_used_up(make_case):
    class Slow(FakePool):
        def answers(self, ref, question, number):
            time.sleep(0.1 * (len(self.sent) - 1))
            return super().answers(ref, question, number)

    pool = Slow(a=[[Stage(name="check numerics"), DEATH], [Stage(name="check numerics"), LATE]])
    backend = BackendDescription(info=BackendInfo(name="a", ref="a", features=("lse",)))
    place = Place(
        BackendQuestion(backend, make_case(), CHECKS), Circumstances(0, ENVIRONMENT.digest, "1"), list(CHECKS)
    )
    ProcessExaminer(TimeLimits(backend_s=0.1)).examine(place, pool)
    assert [record.recurrence for record in place.waiting()] == ["", ""]
    assert pool.scripts["a"] == []


class Gpus(FakePool):
    """Processes on GPUs; each question is answered once ``together`` has been reached by all processes at work."""

    def __init__(self, together):
        super().__init__(a=[WELL], b=[WELL], c=[WELL])
        gpus = (Gpu("GPU-0"), Gpu("GPU-1"))
        self.chosen = DeviceChosen(device="cuda", notes=(), environment=ENVIRONMENT, gpus=gpus)
        self.twins = []
        self._together = together

    def twin(self, gpu, device):
        self.twins.append(gpu)
        twin = Gpus(self._together)
        twin.share(device)
        return twin

    def answers(self, ref, question, number):
        self._together.wait(10)
        return super().answers(ref, question, number)


def test_more_processes_than_gpus_share_them(make_case):
    workers = Gpus(threading.Barrier(3))
    known = tuple(BackendDescription(info=BackendInfo(name=name, ref=name, features=("lse",))) for name in "abc")
    plan = RunPlan(cases=(make_case(),), checks=CHECKS)
    records = list(Supervisor(plan, known, workers, ENVIRONMENT, jobs=3).run())
    assert [(record.backend, record.outcome) for record in records] == [(ref, "passed") for ref in "aabbcc"]
    assert [gpu.uuid for gpu in workers.twins] == ["GPU-1", "GPU-0"]


Deed = Finding | str
"""What a process does with a case: a finding, or why the case cannot be put."""


class Rounds(FakePool):
    """Processes that take times. ``deeds``: by backend, case and round, all but ``Holds``.

    ``unstartable``: a backend, and the number of its process that does not start.
    """

    def __init__(self, cases, refs):
        super().__init__(**{ref: [] for ref in refs})
        self.cases = tuple(cases)
        self.examined_in = []
        self.deeds = {}
        self.unstartable = ("", 0)

    def isolate(self, ref):
        self.keep_only([ref])

    def finish(self, ref):
        self.alive.discard(ref)

    def restart(self, ref):
        process = super().restart(ref)
        if (ref, self.starts[ref]) == self.unstartable:
            self.alive.discard(ref)
            raise QuestionError("no more memory")
        return process

    def answers(self, ref, question, number):
        case, checks = question.case, question.checks
        self.examined_in.append((case.id, number))
        deed = self.deeds.get((ref, case.id, number), Holds())
        if isinstance(deed, str):
            return [Stage(name="declarations"), Examined(blind=deed)]
        who = Circumstances(0, ENVIRONMENT.digest, attncheck.__version__, number)
        return [*(record_of(who, case, question.backend, check, deed, 0.0) for check in checks), Examined()]


def known(ref):
    return BackendDescription(info=BackendInfo(name=ref, ref=ref))


def timed(pool, *backends):
    plan = RunPlan(cases=pool.cases, checks=("timing",), rounds=3)
    return Supervisor(plan, backends, pool, ENVIRONMENT, jobs=2)


def of_rounds(records):
    return [(record.backend, record.case_id, record.round, record.outcome) for record in records]


@pytest.fixture
def two(make_case):
    return make_case(name="x"), make_case(name="y")


def test_one_that_does_not_come_up_in_a_round_loses_that_round(two):
    pool = Rounds(two, "ab")
    pool.unstartable = ("b", 3)  # its process of the second round
    records = list(timed(pool, *map(known, "ab")).run())
    lost = [record for record in records if isinstance(record, Crashed)]
    assert of_rounds(lost) == [("b", "x", 1, "crashed"), ("b", "y", 1, "crashed")]
    assert {(record.stage, record.cause.rpartition(": ")[2]) for record in lost} == {("the start", "no more memory")}
    assert len(records) == 12


def test_what_the_first_round_did_not_examine_is_recorded_once(two):
    pool = Rounds(two, "ab")
    pool.deeds["a", "x", 0] = NotExamined(("no windows",))
    pool.deeds["b", "x", 0] = pool.deeds["b", "y", 0] = NotExamined(("nothing",))
    records = list(timed(pool, *map(known, "ab"), not_loaded("gone", ("no library",))).run())
    assert of_rounds(records) == [
        *(("a", "x", 0, "unsupported"), ("a", "y", 0, "passed")),
        *(("b", "x", 0, "unsupported"), ("b", "y", 0, "unsupported")),
        *(("gone", "x", 0, "unavailable"), ("gone", "y", 0, "unavailable")),
        *(("a", "y", 1, "passed"), ("a", "y", 2, "passed")),
    ]
    assert pool.starts == {"a": 3, "b": 2}


def test_what_a_later_round_does_not_examine_is_of_that_round(two):
    pool = Rounds(two[:1], "a")
    pool.deeds["a", "x", 1] = NotExamined(("memory is short",))
    found = [record.outcome for record in timed(pool, known("a")).run()]
    assert found == ["passed", "unsupported", "passed"]


def test_a_case_that_cannot_be_put_is_reported_once_and_left_out_of_later_rounds(two):
    pool = Rounds(two, "ab")
    for ref in "ab":
        pool.deeds[ref, "x", 0] = "case made/x: blind"
    both = timed(pool, *map(known, "ab"))
    assert {record.case_id for record in both.run()} == {"y"}
    assert list(map(str, both.blind)) == ["case made/x: blind"]
    assert ("x", 1) not in pool.examined_in


def test_what_is_only_timed_on_a_gpu_is_compiled_before_the_first_round(two):
    """Each case is examined once more, by its numerics; these records are none of the run."""
    pool = Rounds(two, "a")
    plan = RunPlan(cases=pool.cases, checks=("timing",), rounds=1, device="cuda")
    records = list(Supervisor(plan, (known("a"), not_loaded("gone", ("no library",))), pool, ENVIRONMENT).run())
    assert [record.check for record in records] == ["timing"] * 4
    assert [(each.case.id, *each.checks) for each in pool.sent] == [
        *(("x", "numerics"), ("y", "numerics")),
        *(("x", "timing"), ("y", "timing")),
    ]


TOGETHER = """
import os
import pathlib
import time

from attncheck.backends.candidates.torch_sdpa import SDPABackend, SDPAImpl

STARTED, AT_WORK = pathlib.Path("started"), pathlib.Path("at_work")
with STARTED.open("a") as file:
    file.write(f"{os.getpid()}\\n")


class Impl(SDPAImpl):
    def forward(self, *args, **kwargs):
        deadline = time.monotonic() + 120
        while len(STARTED.read_text().split()) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        with AT_WORK.open("a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(0.2)
        return super().forward(*args, **kwargs)


class Together(SDPABackend):
    get_impl_cls = staticmethod(lambda: Impl)
"""
"""Examines nothing before two processes have loaded it."""


@pytest.mark.slow
def test_two_processes_of_a_backend_find_what_one_finds(tmp_path, monkeypatch):
    monkeypatch.setattr("attncheck.harness.workers.schedule._START_S", 0)  # however little is left
    monkeypatch.chdir(tmp_path)
    Path("together.py").write_text(TOGETHER)
    ref = "./together.py:Together"
    selection = select_cases(["smoke"], ["decode.*", "padded-*"], ["numerics"])
    with WorkerPool() as workers:
        workers.start([ref])
        run = Run.open(selection, RunOptions(backends=(ref,), device="cpu", jobs=2), workers)
        records = list(workers.examiner(run).run())
    assert len(set(Path("at_work").read_text().split())) == 2
    plan = RunPlan(cases=selection.cases, backends=(load(ref),), checks=selection.checks)
    timeless = {"duration_s"}
    assert [record.model_dump(exclude=timeless) for record in records] == [
        record.model_dump(exclude=timeless) for record in Examiner(plan).run()
    ]
