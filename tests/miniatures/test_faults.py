"""Each fault of tests/miniatures/faults.yaml ends as its row states, and changes no other record of its run.

The backends of a section share a run. It tries 8 findings again, so that at most 8 rows of a section have a recurrence.
"""

import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.backends.registry import import_file
from attncheck.harness.cli import app as cli
from attncheck.harness.workers import limits
from attncheck.reports.run_file.records import OURSELVES
from attncheck.reports.run_file.store import read_run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and limits of memory are those of Linux")

BACKENDS = Path(__file__).with_name("faults.py")
SUITE = Path(__file__).with_name("small.yaml")
LOADING = "Faults of loading"
IMPORTED = """\
import os, sys, time
from attncheck.backends.candidates.reference import ReferenceBackend
class {name}(ReferenceBackend): pass
{deed}
"""
DEEDS = {
    "import_hang": "time.sleep(600)",
    "import_error": "import a_library_that_is_not_there",
    "import_segfault": "import ctypes; ctypes.string_at(0)",
    "import_exit": "sys.exit(0)",
    "import_interrupt": "raise KeyboardInterrupt",
    "import_flood": "os.write(1, b'x' * 2**27)",
    "import_damage": "sys.path.clear(); sys.modules.pop('json'); sys.modules.pop('attncheck.cases.loader')",
}
# Eight processes share a busy machine, and torch.use_deterministic_algorithms imports torch._inductor: 10 s are too few.
LIMITS = ["--jobs", "8", "--case-timeout", "20", "--memory-limit", "1GiB", "--pass-env", "FAULT*"]
WORDS = ["run", "--suite", "small.yaml", "--device", "cpu", "--check", "numerics,lse", "--no-cache"]
WORDS += ["--backend", "torch_sdpa"]


@dataclass(frozen=True)
class Row:
    """A fault, and what its row states about its record."""

    section: str
    name: str
    outcome: str
    recurrence: str
    message: str

    @property
    def ref(self) -> str:
        return f"./{self.name}.py:{self.name}" if self.section == LOADING else f"./faults.py:{self.name}"

    @property
    def exit_code(self) -> int:
        return 3 if self.message.startswith(OURSELVES) else int(self.outcome != "passed")

    @property
    def case(self) -> str:
        return "later" if self.section == "Faults that show later" else "faulty"

    def is_about(self, record: dict[str, Any]) -> bool:
        """Whether the record of this backend shows the fault."""
        return self.section == LOADING or record["case_id"] == self.case

    def assert_holds(self, record: dict[str, Any], clean: dict[str, Any]) -> None:
        if self.outcome == "passed":
            assert record == clean
            return
        text = " ".join(
            record[each] for each in ("stage", "cause", "error_type", "message", "summary") if each in record
        )
        assert record["outcome"] == self.outcome, text
        assert self.message in text, self.name
        assert record.get("recurrence", "") == self.recurrence, self.name


def rows() -> list[Row]:
    sections = yaml.safe_load(BACKENDS.with_suffix(".yaml").read_text(encoding="utf-8"))
    return [
        Row(section, name, row["outcome"], row.get("recurrence", ""), row.get("record", ""))
        for section, found in sections.items()
        for name, row in found.items()
    ]


ROWS = rows()
QUICK = ("exit_at_once", "closed_descriptors", "written_pipes", "copy_that_outlives", "heap_corruption", "system_exit")
QUICK += ("unprintable_exception", "default_dtype", "signal_handlers", "twenty_forks", "thread_left", "import_error")
# The first five show in the case that has the fault: workers of pytest-xdist share the cases of a backend.
WORST = ("segfault", "hang_in_c_with_gil", "memory_leak", "closed_descriptors", "exit_at_once", "heap_corruption")
WORST += ("stack_overflow", "written_pipes", "twenty_forks", "unprintable_exception")

Execute = Callable[[list[str]], int]
"""Executes a command of attncheck, and returns its exit code."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for file in (SUITE, BACKENDS):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for name, deed in DEEDS.items():
        (tmp_path / f"{name}.py").write_text(IMPORTED.format(name=name, deed=deed))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAULT_MIB", "128")
    return tmp_path


def on_ray(words: list[str]) -> int:
    """Execute the command on a Ray cluster of its own, which ends with it."""
    Path("ray.yaml").write_text("address: local\n")
    command = [sys.executable, "-m", "attncheck", *words, "--executor", "ray:ray.yaml", "--jobs", "2"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=300, check=False)
    return done.returncode


def records_of(words: list[str], run: Execute) -> tuple[int, list[dict[str, Any]]]:
    code = run([*WORDS, *words, "--output", "run.jsonl"])
    records = read_run("run.jsonl").records
    Path("run.jsonl").unlink()
    return code, [record.model_dump(mode="json", exclude={"duration_s"}) for record in records]


def play(faults: list[Row], folder: Path, monkeypatch: pytest.MonkeyPatch, run: Execute = cli.main) -> None:
    """Run the backends of ``faults``, and compare their records with those of a run in this process without a fault."""
    if any(row.name == "import_hang" for row in faults):  # elsewhere a busy machine may need the usual minute
        monkeypatch.setattr(limits, "LEAST_LOADING_S", 10.0)
    before = processes_in(folder)
    code, clean = records_of(["--backend", "reference", "--in-process"], cli.main)
    assert (code, {record["outcome"] for record in clean}) == (0, {"passed", "unsupported"})
    code, found = records_of([*LIMITS, *(word for row in faults for word in ("--backend", row.ref))], run)
    assert code == max(row.exit_code for row in faults)
    assert wait_for(lambda: processes_in(folder) <= before)
    assert len(found) == len(clean) // 2 * (1 + len(faults))
    of_case = {(each["backend"], each["case_id"], each["check"]): each for each in clean}
    seen = set()
    for record in found:
        (row,) = [row for row in faults if row.ref == record["backend_ref"]] or [None]
        right = of_case["torch_sdpa" if row is None else "reference", record["case_id"], record["check"]]
        right = right | {name: record[name] for name in ("backend", "backend_ref", "backend_version")}
        if row is None or not row.is_about(record):
            assert record == right
        elif row in seen:  # the check behind it runs where the case passes when it is repeated
            assert record == right or record["outcome"] == row.outcome
        else:
            seen.add(row)
            row.assert_holds(record, right)
    assert seen == set(faults)


def wait_for(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def processes_in(folder: Path) -> set[int]:
    """Return the numbers of the processes that are at work in ``folder``."""
    found = set()
    for place in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if place.readlink() == folder:
                found.add(int(place.parent.name))
    return found


def test_every_fault_has_a_row() -> None:
    found = vars(import_file(str(BACKENDS), BACKENDS)).items()
    backends = {name for name, each in found if isinstance(each, type) and issubclass(each, ReferenceBackend)}
    names = [row.name for row in ROWS]
    assert sorted(names) == sorted([*(backends - {"ReferenceBackend"}), *DEEDS])


def test_a_dozen_faults_change_no_other_record(folder: Path, monkeypatch: pytest.MonkeyPatch, preloaded: None) -> None:
    play([row for row in ROWS if row.name in QUICK], folder, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("section", sorted({row.section for row in ROWS}))
def test_no_fault_changes_another_record(
    section: str, folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if section != "Faults that leave something":  # a daemon of a preloaded process looks like any other
        request.getfixturevalue("preloaded")
    play([row for row in ROWS if row.section == section], folder, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "count"), [([], len(WORST)), (["-n", "2"], 5)])
def test_in_pytest_the_worst_fail_their_own_items(
    folder: Path, monkeypatch: pytest.MonkeyPatch, preloaded: None, words: list[str], count: int
) -> None:
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):  # of the run around it
        monkeypatch.delenv(name, raising=False)
    before = processes_in(folder)
    faults = [row for row in ROWS if row.name in WORST[:count]]
    options = {"suite": ["small.yaml"], "device": ["cpu"], "check": ["numerics"], "case-timeout": ["6"]}
    options |= {
        "memory-limit": ["1GiB"],
        "pass-env": ["FAULT*"],
        "backend": ["torch_sdpa", *(row.ref for row in faults)],
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junitxml", "out.xml", *words]
    command += [word for name, values in options.items() for each in values for word in (f"--attncheck-{name}", each)]
    assert subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, timeout=300, check=False).returncode == 1
    found = {each.get("classname", ""): each.find("failure") for each in ET.parse("out.xml").iter("testcase")}
    assert len(found) == 4 * (1 + len(faults))
    for row in faults:
        failure = found.pop(f"attncheck.small.{row.case}.{row.name}")
        assert (failure is None) == (row.outcome == "passed"), row.name
        assert failure is None or row.message in " ".join((failure.text or "").split())
    assert set(found.values()) == {None}
    assert wait_for(lambda: processes_in(folder) <= before)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_on_a_ray_cluster_the_worst_change_no_other_record(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    # A fault that shows in a later case needs one process for both, but actors share the cases of a backend.
    faults = [row for row in ROWS if row.name in WORST and row.recurrence != "after"]
    assert len(faults) > 5
    play(faults, folder, monkeypatch, on_ray)
