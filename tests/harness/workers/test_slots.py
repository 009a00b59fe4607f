"""Slots that examine at once: who gets which question when, the order of records, and how all of them end."""

import signal
import threading
import time
from dataclasses import replace

import pytest

from attncheck.errors import BackendUnavailableError, ClusterError, QuestionError
from attncheck.harness.run.outcomes import BackendDescription, Circumstances, not_loaded, record_of
from attncheck.harness.run.selection import RunPlan
from attncheck.harness.workers.examination import Place
from attncheck.harness.workers.executor import ProcessSlot, SlotExecutor
from attncheck.harness.workers.process import StoppedError, WorkerError
from attncheck.harness.workers.protocol import HarnessFailure
from attncheck.harness.workers.schedule import BackendQuestion, Chosen, Schedule
from attncheck.harness.workers.sharing import SharedDevice
from attncheck.reports.run_file.header import BackendInfo, Environment

FACTS = dict.fromkeys(("python", "torch", "numpy", "platform", "cpu", "device", "device_name"), "")
ENVIRONMENT = Environment(attncheck="0.1.0", cores=1, **FACTS)
CIRCUMSTANCES = Circumstances(0, ENVIRONMENT.digest, "0.1.0")
OURS = WorkerError("b", HarnessFailure(error="RuntimeError: No CUDA GPUs are available", traceback=""))


@pytest.fixture
def cases(make_case):
    return [make_case(name=name) for name in "wxyz"]


def questions_to(refs, cases, check="numerics"):
    backends = [BackendDescription(info=BackendInfo(name=ref, ref=ref)) for ref in refs]
    return [BackendQuestion(backend, case, (check,)) for backend in backends for case in cases]


class Team:
    """Slots that answer at once. ``deed``: what a slot does with a question before; it returns whether it is over."""

    def __init__(self, count, deed=lambda slot, place: True):
        self.steps = []
        self.deed = deed
        self.slots = [FakeSlot(self, number) for number in range(count)]

    def examine(self, questions, costs=None):
        examination = SlotExecutor(RunPlan(cases=()), (), ENVIRONMENT)
        return examination.examine_all(questions, self.slots, costs=costs)


class FakeSlot:
    def __init__(self, team, number):
        self.team, self.number = team, number
        self.cannot_begin = []
        self.left = []
        self.stopped = threading.Event()
        self.error = None

    def begin(self, chosen):
        if self.error is not None:
            raise self.error
        return chosen.ref not in self.cannot_begin

    def examine(self, place):
        question = place.question
        self.team.steps.append((self.number, question.backend.ref, question.case.id))
        if not self.team.deed(self, place):
            return False
        for check in question.checks:
            found = BackendUnavailableError("made", ["made up"])
            place.records.put(record_of(place.circumstances, question.case, question.backend, check, found, 0.0))
        return True

    def leave(self, ref):
        self.left.append(ref)

    def stop(self):
        self.stopped.set()

    def wait_for_stop(self):
        assert self.stopped.wait(30)
        raise StoppedError


def in_order(records):
    return [(record.backend, record.case_id) for record in records]


def everything(refs, cases):
    return [(ref, case.id) for ref in refs for case in cases]


def test_records_keep_the_order_of_a_serial_run_and_none_waits_for_later_ones(cases):
    """The second slot examines ``b`` and ``c`` while the first is at ``a``; ``c`` then waits for a record of ``a``."""
    is_b_done, is_read = threading.Event(), threading.Event()

    def deed(_, place):
        question = place.question
        if question.backend.ref == "a":
            assert is_b_done.wait(30)
        elif question.backend.ref == "c":
            is_b_done.set()
            assert is_read.wait(30)
        return True

    team = Team(2, deed)
    records = team.examine(questions_to("abc", cases))
    first = next(records)
    is_read.set()
    assert in_order([first, *records]) == everything("abc", cases)
    slots_of = {ref: {slot for slot, each, _ in team.steps if each == ref} for ref in "abc"}
    assert slots_of["b"] == slots_of["c"] != slots_of["a"]
    assert sorted(ref for slot in team.slots for ref in slot.left) == ["a", "b", "c"]


def test_a_backend_that_is_not_loaded_needs_no_slot(cases):
    gone = BackendQuestion(not_loaded("gone", ("no library",)), cases[0], ("numerics",))
    team = Team(1)
    records = list(team.examine([gone, *questions_to("a", cases)]))
    assert [record.backend for record in records] == ["gone", *"aaaa"]
    assert records[0].outcome == "unavailable"
    assert [ref for _, ref, _ in team.steps] == list("aaaa")


@pytest.mark.parametrize(("seconds", "helpers"), [(9.0, 1), (0.01, 0)])
def test_slots_help_with_a_backend_that_took_long_in_earlier_runs(make_case, seconds, helpers):
    cases = [make_case((1, number), name=f"case{number}") for number in range(1, 9)]
    has_helper = threading.Event()

    def deed(slot, _):
        if slot.number != team.steps[0][0]:
            has_helper.set()
        return not helpers or has_helper.wait(30)

    team = Team(2, deed)
    costs = {("a", case.hash, "numerics"): seconds for case in cases}
    assert in_order(list(team.examine(questions_to("a", cases), costs))) == everything("a", cases)
    assert sorted(case for *_, case in team.steps) == [case.id for case in cases]
    assert has_helper.is_set() == bool(helpers)


@pytest.mark.parametrize(("each_s", "expected"), [(0.1, None), (0.5, None), (2.0, "a")])
def test_a_slot_helps_where_much_is_left_after_five_cases(make_case, each_s, expected):
    """5 of 20 cases are over. The others take 1.5, 7.5 or 30 s. A second process takes half, but needs 5 s to start."""
    now = [0.0]
    cases = [make_case(name=f"case{number}") for number in range(20)]
    schedule = Schedule(questions_to("a", cases), lambda: now[0])
    assert schedule.choose(0) == Chosen("a", True)
    for number in range(5):
        assert schedule._to_help(1) is None
        assert schedule.take("a", 0) == number
        now[0] += each_s
        schedule.finish(number)
    assert schedule._to_help(1) == expected


def test_a_slot_on_a_machine_of_its_own_helps_at_once(cases):
    schedule = Schedule(questions_to("a", cases), shares_machine=False)
    assert schedule.choose(0) == Chosen("a", True)
    assert schedule.choose(1) == Chosen("a", False)


def test_a_backend_that_a_slot_cannot_begin_is_left_to_the_others(cases):
    team = Team(2)
    team.slots[0].cannot_begin = ["a", "b"]
    assert in_order(list(team.examine(questions_to("ab", cases)))) == everything("ab", cases)
    assert {slot for slot, *_ in team.steps} == {1}
    assert team.slots[0].left == []


def test_the_first_slot_begins_even_a_backend_with_which_it_could_not_help(cases):
    """Here the other slot then loses the backend, too: without the first one the run would never end."""
    schedule = Schedule(questions_to("a", cases))
    for slot in (1, 0):
        assert schedule.choose(slot) == Chosen("a", True)
        schedule.leave("a", slot, is_refused=True)
    assert schedule._to_begin(1) is None
    assert schedule._to_begin(0) == "a"


def test_cases_that_share_a_graph_level_stay_in_one_slot_even_if_it_is_lost(make_case):
    """The level belongs to layer and cache. A slot that is lost leaves all its groups to the other one."""
    first = make_case(name="first")
    wide = replace(first, id="wide", layer=replace(first.layer, num_heads=first.layer.num_heads * 2))
    same = replace(first, id="same", cache=replace(first.cache, first_block=3))
    schedule = Schedule(questions_to("a", [first, wide, same, replace(first, id="last")], check="cudagraph"))
    assert schedule.choose(0) is not None
    assert [schedule.take("a", slot) for slot in (0, 0, 1)] == [0, 1, None]
    schedule.finish(1, is_over=False)
    schedule.leave("a", 0)
    assert schedule.choose(1) == Chosen("a", True)
    assert [schedule.take("a", slot) for slot in (1, 1, 0, 1, 1)] == [1, 2, None, 3, None]
    free = Schedule(questions_to("a", [first, wide, same]))
    assert [free.take("a", slot) for slot in (0, 1, 0)] == [0, 1, 2]


def test_cases_that_need_much_memory_are_examined_one_at_a_time(cases, monkeypatch):
    large = {"x", "y"}
    monkeypatch.setattr(
        "attncheck.harness.workers.schedule.needed_bytes", lambda case: 2**31 if case.id in large else 2**20
    )
    at_work = set()
    together = threading.Barrier(2, timeout=30)

    def deed(slot, place):
        if place.question.case.id == "w":
            together.wait()  # small cases run side by side
        elif place.question.case.id in large:
            assert not at_work
            at_work.add(slot.number)
            slot.stopped.wait(0.01)
            at_work.discard(slot.number)
        return True

    assert in_order(list(Team(2, deed).examine(questions_to("ab", cases)))) == everything("ab", cases)


@pytest.mark.parametrize("ending", ["interrupt", "close", "fault"])
def test_an_end_of_the_run_stops_all_slots(cases, ending):
    """``a`` hangs in its second case while ``b`` is examined. An interrupt still yields the records of ``b``."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it starts with `&`
    is_reading, is_hanging = threading.Event(), threading.Event()

    def deed(slot, place):
        match place.question.backend.ref, place.question.case.id:
            case ("a", "x"):
                is_hanging.set()
                slot.wait_for_stop()
            case ("c", _):
                assert is_hanging.wait(30)
                assert is_reading.wait(30)
                if ending == "fault":
                    raise KeyError(3)
                if ending == "interrupt":
                    time.sleep(0.05)  # until the main thread waits, which a signal to this thread does not end
                    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
                slot.wait_for_stop()
        return True

    team = Team(2, deed)
    records = team.examine(questions_to("abc", cases))
    taken = [next(records)]
    is_reading.set()
    began = time.monotonic()
    if ending == "close":
        assert is_hanging.wait(30)
        records.close()
    else:
        with pytest.raises(KeyboardInterrupt if ending == "interrupt" else KeyError):
            taken.extend(records)  # an exception leaves what came before in the list
    assert time.monotonic() - began < 20  # a slot that is not stopped waits for 30 s
    assert in_order(taken) == [("a", "w"), *(everything("b", cases) if ending == "interrupt" else [])]
    assert any(slot.stopped.is_set() for slot in team.slots)
    assert not [each for each in threading.enumerate() if each.name.startswith("slot ")]


def test_a_question_of_a_lost_slot_goes_to_another(cases):
    def deed(slot, _):
        if slot.number == 0:
            slot.error = ClusterError("here", "no node is left")
        return slot.number != 0

    team = Team(2, deed)
    assert in_order(list(team.examine(questions_to("ab", cases)))) == everything("ab", cases)
    assert [slot for slot, *_ in team.steps].count(0) <= 1


def test_a_run_without_any_slot_left_ends_after_the_records_before(cases):
    def deed(slot, place):
        if place.question.case.id == "y":
            slot.error = ClusterError("here", "no node is left")
        return place.question.case.id != "y"

    taken = []
    with pytest.raises(ClusterError, match="no node is left"):
        taken.extend(Team(2, deed).examine(questions_to("a", cases)))
    assert in_order(taken) == [("a", "w"), ("a", "x")]


class FakePool:
    """A pool of processes: keeps what is done to it. ``gpus``: of the run. ``unstartable``: why no process starts."""

    is_stopped = False

    def __init__(self, name, log, unstartable=None):
        self.name, self.log, self.unstartable = name, log, unstartable
        self.device = SharedDevice()
        self.processes = {}

    def twin(self):
        return FakePool("twin", self.log, self.unstartable)

    def process(self, ref):
        return self.processes.get(ref)

    def restart(self, ref):
        if self.unstartable is not None:
            raise self.unstartable
        self.log.append(f"{self.name} starts {ref}")
        self.processes[ref] = FakeProcess()

    def discard(self, ref):
        self.log.append(f"{self.name} discards {ref}")

    def finish(self, ref):
        self.log.append(f"{self.name} finishes {ref}")
        self.processes.pop(ref, None)


class FakeProcess:
    has_ended = True


class Noting:
    """Examines nothing, and keeps where it would have."""

    def __init__(self, log):
        self.log = log

    def examine(self, place, workers):
        self.log.append(f"{workers.name} examines {place.question.backend.ref}")


def slot_of(log, pool, own=None):
    return ProcessSlot(Noting(log), pool, own)


def test_the_first_slot_at_a_backend_uses_its_process(cases):
    log = []
    pool = FakePool("pool", log)
    pool.processes["b"] = FakeProcess()  # it has ended before its first case
    slot = slot_of(log, pool)
    for ref in ("a", "b"):
        assert slot.begin(Chosen(ref, True))
        assert slot.examine(Place(*questions_to(ref, cases[:1]), CIRCUMSTANCES, ["numerics"]))
        slot.leave(ref)
    assert log == [
        *("pool examines a", "pool finishes a"),
        *("pool discards b", "pool examines b", "pool finishes b"),
    ]


def test_a_slot_that_helps_or_has_a_gpu_of_its_own_uses_processes_of_its_own():
    log = []
    pool = FakePool("pool", log)
    for is_first, own in ((False, None), (True, FakePool("twin", log))):
        slot = slot_of(log, pool, own)
        assert slot.begin(Chosen("a", is_first))
        slot.leave("a")
    assert log == ["twin starts a", "twin finishes a"] * 2


def test_a_slot_that_has_helped_begins_the_next_backend_in_the_process_that_described_it():
    log = []
    slot = slot_of(log, FakePool("pool", log))
    for ref, is_first in (("a", False), ("b", True), ("c", False)):
        assert slot.begin(Chosen(ref, is_first))
        slot.leave(ref)
    assert log == [
        *("twin starts a", "twin finishes a"),
        "pool finishes b",
        *("twin starts c", "twin finishes c"),
    ]


@pytest.mark.parametrize("error", [QuestionError("another GPU"), OSError("no memory"), OURS])
def test_a_process_that_does_not_start_leaves_its_backend_to_others(error):
    log = []
    slot = slot_of(log, FakePool("pool", log, error))
    assert not slot.begin(Chosen("a", False))
    assert log == ["twin discards a"]
