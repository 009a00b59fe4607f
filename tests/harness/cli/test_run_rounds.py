"""``attncheck time``: rounds of fresh processes, their records in the run file, and wrong questions."""

import json
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.cli.progress import ProgressLines
from attncheck.harness.cli.run import execute_run
from attncheck.harness.run.options import OPTIONS, RunOptions
from attncheck.harness.run.selection import DEFAULT_ROUNDS
from attncheck.reports.run_file.records import timing_of
from attncheck.reports.run_file.store import read_run

pytestmark = pytest.mark.usefixtures("preloaded")

SUITE = """\
suite: small
defaults:
  layer: {num_heads: 2, num_kv_heads: 1, head_size: 16, dtype: float32}
cases:
  - {id: decode, batch: q1s20_q1s7}
  - {id: prefill, batch: q17, checks: [numerics]}
  - {id: window, batch: q9, layer: {sliding_window: 4}}
"""
MINE = """\
import os
from pathlib import Path
from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl

def note(file):
    "This process's number among those that have called it so."
    with Path(file).open("a") as lines:
        print(os.getpid(), file=lines)
    return len(Path(file).read_text().split())

def is_alive(pid):
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True

note("started.txt")

class Plain(ReferenceBackend):
    @classmethod
    def unsupported_reasons(cls, layer, cache, batch):
        return ["no windows"] if layer.sliding_window else []

class AloneImpl(ReferenceImpl):
    def forward(self, *args, **keywords):
        others = set(Path("started.txt").read_text().split()) - {str(os.getpid())}
        if any(map(is_alive, others)):
            raise RuntimeError("another process is alive")
        return super().forward(*args, **keywords)

class Alone(Plain):
    get_impl_cls = classmethod(lambda cls: AloneImpl)

class MortalImpl(AloneImpl):
    number = None
    def forward(self, attn_layer, query, *args, **keywords):
        MortalImpl.number = self.number or note("mortal.txt")
        if len(query) == 17 and self.number == 2:
            os.abort()
        return super().forward(attn_layer, query, *args, **keywords)

class Mortal(Plain):
    get_impl_cls = classmethod(lambda cls: MortalImpl)

class WrongImpl(ReferenceImpl):
    def forward(self, *args, **keywords):
        return super().forward(*args, **keywords).mul_(1.25)

class Wrong(Plain):
    get_impl_cls = classmethod(lambda cls: WrongImpl)
"""


@pytest.fixture
def time(typed, folder):
    """``time("mine.py:Plain --rounds 2")``: that command, which writes out.jsonl."""
    (folder / "small.yaml").write_text(SUITE)
    (folder / "mine.py").write_text(MINE)
    return lambda words: typed(f"time --suite small.yaml --device cpu --time-limit 0.01 --output out.jsonl {words}")


def records():
    return read_run("out.jsonl").records


def outcomes():
    return [(record.backend, record.round, record.case_id, record.outcome) for record in records()]


def pids():
    return list(map(int, Path("started.txt").read_text().split()))


def test_each_round_is_a_fresh_process_alone_and_a_crash_is_of_its_round(time):
    entry = {"backend": "Mortal", "case": "prefill", "check": "timing", "outcome": "crashed", "says": "*SIGABRT*"}
    Path("known.yaml").write_text(json.dumps([entry | {"reason": "issue 9"}]))
    assert time("mine.py:Mortal mine.py:Alone --rounds 2 --expect known.yaml").code == 0
    assert outcomes() == [
        ("Mortal", 0, "decode", "passed"),
        ("Mortal", 0, "prefill", "passed"),
        ("Mortal", 0, "window", "unsupported"),
        ("Alone", 0, "decode", "passed"),
        ("Alone", 0, "prefill", "passed"),
        ("Alone", 0, "window", "unsupported"),
        ("Alone", 1, "decode", "passed"),
        ("Alone", 1, "prefill", "passed"),
        ("Mortal", 1, "decode", "passed"),
        ("Mortal", 1, "prefill", "xfailed"),
    ]
    assert len(set(pids())) == 5  # of the two that were described, one could not wait for its turn
    header = read_run("out.jsonl").header
    assert (header.rounds, header.checks) == (2, ("timing",))
    timings = [timing_of(record) for record in records() if record.outcome == "passed"]
    assert all(timing is not None and timing.latency("forward") is not None for timing in timings)


def test_the_first_round_that_falls_short_may_be_the_last(time):
    done = time("mine.py:Mortal --rounds 3 --case prefill -x")
    assert done.code == 1
    assert outcomes() == [("Mortal", 0, "prefill", "passed"), ("Mortal", 1, "prefill", "crashed")]
    assert records()[1].stage == "check timing"
    repeat = done.out.partition("repeat: ")[2].splitlines()[0]
    assert repeat.endswith("--suite small.yaml --case prefill --check timing --device cpu --in-process")


def test_other_checks_are_made_before_in_a_process_of_their_own(time):
    options = RunOptions(
        backends=("mine.py:Plain",),
        suites=("small.yaml",),
        cases=("prefill",),
        checks=("numerics", "timing"),
        device="cpu",
        rounds=1,
        time_limit=0.01,
        output=Path("out.jsonl"),
    )
    assert execute_run(options, lambda header: None).ended_by is None
    assert [(record.check, record.outcome) for record in records()] == [("numerics", "passed"), ("timing", "passed")]
    assert len(set(pids())) == 2


def test_an_interrupted_run_keeps_its_rounds_and_leaves_no_process(time, is_alive, monkeypatch):
    see = ProgressLines.see

    def interrupt(self, record):
        see(self, record)
        if record.round == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressLines, "see", interrupt)
    done = time("mine.py:Plain --rounds 3 --case decode")
    assert done.code == 130
    assert "interrupted by SIGINT: " in done.out
    found = read_run("out.jsonl")
    assert not found.complete
    assert [record.round for record in found.records] == [0, 1]
    assert len(pids()) == 2
    assert not any(map(is_alive, pids()))


def test_in_this_process_there_is_one_round_with_a_note_and_what_is_wrong_is_dumped(time):
    done = time("mine.py:Plain mine.py:Wrong --case prefill --in-process --dump dumped")
    assert done.code == 1
    assert outcomes() == [("Plain", 0, "prefill", "passed"), ("Wrong", 0, "prefill", "failed")]
    assert [path.name for path in Path("dumped").iterdir()] == ["small.prefill.Wrong.seed0.pt"]
    header = read_run("out.jsonl").header
    assert (header.checks, header.rounds) == (("timing",), 1)
    assert header.notes == snapshot(
        ("timed in this one process: how far times of different processes lie apart is not known",)
    )
    assert header.notes[0] in done.out


@pytest.mark.parametrize(("option", "default"), [("rounds", DEFAULT_ROUNDS), ("time_limit", TimingSettings().limit_s)])
def test_the_help_names_the_defaults(option, default):
    assert OPTIONS[option].help.endswith(f" Default: {default}.")
