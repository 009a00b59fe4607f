"""``attncheck run`` with a backend that takes too much memory, or prints without end: the record, and what goes on."""

from collections.abc import Callable
from pathlib import Path

import pytest

from attncheck.reports.run_file.records import Crashed, Errored, Passed
from attncheck.reports.run_file.store import read_run

MINE = """\
import os, threading
import torch
from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl

def leak():
    kept = []
    while True:
        kept.append(torch.ones(2**20))

def print_without_end():
    while True:
        os.write(1, b"the same line again\\n" * 1000)

def backend(deed):
    class Impl(ReferenceImpl):
        def forward(self, attn_layer, query, *args, **keywords):
            if len(query) == 2:  # decode
                deed()
            return super().forward(attn_layer, query, *args, **keywords)
    class Mine(ReferenceBackend):
        get_impl_cls = classmethod(lambda cls: Impl)
    return Mine

Leaking = backend(leak)
Huge = backend(lambda: torch.empty(2**34))
Printing = backend(lambda: threading.Thread(target=print_without_end, daemon=True).start())
"""

Attncheck = Callable[..., int]


@pytest.fixture
def run(run: Attncheck, folder: Path) -> Attncheck:
    (folder / "mine.py").write_text(MINE)
    return lambda *more: run("--check", "numerics", "--output", "out.jsonl", *more)


def test_one_over_the_limit_is_killed_and_the_next_case_is_examined(run: Attncheck) -> None:
    assert run("mine.py:Leaking", "--memory-limit", "640MiB") == 1
    leaking, other = read_run("out.jsonl").records
    assert isinstance(leaking, Crashed)
    assert leaking.stage == "check numerics"
    assert leaking.cause.startswith("out of memory (limit 640 MiB, it took ")
    assert isinstance(other, Passed)


def test_an_allocation_far_beyond_the_limit_is_refused_and_the_error_names_it(run: Attncheck) -> None:
    Path("pyproject.toml").write_text('[tool.attncheck]\nmemory_limit = "1GiB"\n')
    assert run("mine.py:Huge") == 1
    huge, other = read_run("out.jsonl").records
    assert isinstance(huge, Errored)
    assert "can't allocate memory: you tried to allocate 68719476736 bytes" in huge.message
    assert huge.message.endswith("(--memory-limit: 1 GiB)")
    assert isinstance(other, Passed)


def test_a_backend_that_prints_without_end_does_not_stop_a_run(run: Attncheck) -> None:
    assert run("mine.py:Printing", "reference") == 0
    assert [record.outcome for record in read_run("out.jsonl").records] == ["passed"] * 4


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--memory-limit", "much"), "--memory-limit 'much': give a size, such as 512MiB, 4GiB or a number of bytes"),
        (("--memory-limit", "0"), "--memory-limit 0 MiB: torch needs more; give 512 MiB or more"),
        (("--memory-limit", "100MiB"), "--memory-limit 100 MiB: torch needs more; give 512 MiB or more"),
        (("--memory-limit", "1GiB", "--in-process"), "--in-process starts none; leave out one of them"),
        (("--device-memory-limit", "2GiB"), "--device-memory-limit is for a GPU, and --device cpu has none"),
    ],
)
def test_a_limit_that_cannot_be_kept_is_refused(
    run: Attncheck, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], reason: str
) -> None:
    assert run("mine.py:Huge", *words) == 2
    assert reason in " ".join(capfd.readouterr().err.split())
