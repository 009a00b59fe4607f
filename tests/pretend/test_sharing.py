"""Processes that share one pretend GPU: their records are those of one process, and no backend answers for another."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from pretend_cuda import Settings

from attncheck.harness.workers.sharing import Mps
from attncheck.reports.run_file.store import read_run

SERVICE = """\
#!/bin/sh
[ "$1" = -d ] && words=start || read -r words
echo "$words $CUDA_MPS_PIPE_DIRECTORY" >> "$SERVICE_LOG"
[ "$1" != -d ] || sleep "${SERVICE_S:-0}"
"""
BACKENDS = """\
import os
import time
from pathlib import Path

import torch
from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl


def wait_for(name):
    since = time.monotonic()
    while not Path(name).exists():
        assert time.monotonic() - since < 60, name
        time.sleep(0.01)


def is_first(name):
    found = Path(name).exists()
    Path(name).touch()
    return not found


class Bad(ReferenceBackend):
    "Waits for another backend; loses the GPU at 3 rows, ends its process at 7, and never ends at 5."

    class Impl(ReferenceImpl):
        def forward(self, layer, query, *args, **kwargs):
            out = super().forward(layer, query, *args, **kwargs)
            if len(query) == 3:
                Path("bad").touch()
                wait_for("beside")
                torch.cuda.current_stream().pretend.lose()
                Path("lost").touch()
            while len(query) == 5 and Path("hangs").exists():
                Path("bad").touch()
            if len(query) == 7:
                os._exit(3)
            return out

    get_impl_cls = staticmethod(lambda: Bad.Impl)
    get_name = staticmethod(lambda: "BAD")


class Beside(ReferenceBackend):
    "Is at work when the GPU is lost, once too slow, and once without memory: only beside others."

    class Impl(ReferenceImpl):
        def forward(self, layer, query, *args, **kwargs):
            out = super().forward(layer, query, *args, **kwargs)
            if len(query) == 2 and not Path("alone").exists():
                wait_for("bad")
                Path("beside").touch()
                if Path("hangs").exists() and is_first("slow"):
                    time.sleep(60)
                wait_for("lost") if not Path("hangs").exists() else None
            if len(query) == 4 and not Path("alone").exists() and is_first("memory"):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return out

    get_impl_cls = staticmethod(lambda: Beside.Impl)
    get_name = staticmethod(lambda: "BESIDE")
"""
SUITE = """\
suite: rows
description: prefills of 1 to 10 rows
defaults: {layer: {num_heads: 4, num_kv_heads: 2, head_size: 32, dtype: float32}}
cases:
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the suite, the backends, and a program that records how MPS is started and ended."""
    rows = (f"  - {{id: rows-{number}, batch: q{number}}}\n" for number in range(1, 11))
    (tmp_path / "rows.yaml").write_text(SUITE + "".join(rows))
    (tmp_path / "shared.py").write_text(BACKENDS)
    program = tmp_path / "bin/nvidia-cuda-mps-control"
    program.parent.mkdir()
    program.write_text(SERVICE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SERVICE_LOG", str(tmp_path / "service.txt"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def command(folder, preloaded):
    """``command(words, output)`` starts a run on the pretend GPU."""
    paths = [str(Path(__file__).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    env["ATTNCHECK_PRETEND_CUDA"] = json.dumps(asdict(Settings()))

    def command(words, output="run.jsonl"):
        fixed = "--suite rows.yaml --check numerics --device cuda --no-cache --output"
        line = [sys.executable, "-m", "attncheck", "run", *words.split(), *fixed.split(), output]
        return subprocess.Popen(line, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return command


def finished(process, output="run.jsonl"):
    """What a run printed, and its records without durations."""
    printed, _ = process.communicate(timeout=300)
    assert Path(output).exists(), printed
    return printed, [record.model_dump(exclude={"duration_s"}) for record in read_run(Path(output)).records]


def service():
    """What became of each daemon, in order: ``start``, then ``quit``."""
    log = Path("service.txt")
    return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []


def wait_for_end_of_mps():
    """Wait until the latest daemon was ended, and check that each one was."""
    deadline = time.monotonic() + 30
    while service()[-2:] != ["quit", "quit"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert service() == ["start", "quit", "quit"] * (len(service()) // 3)


@pytest.mark.slow
def test_records_are_those_of_one_process_and_mps_is_there_for_the_run(command):
    """The first run has one process, and no MPS."""
    words = "reference torch_sdpa --jobs"
    _, expected = finished(command(f"{words} 1", "1.jsonl"), "1.jsonl")
    assert service() == []
    printed, found = finished(command(f"{words} 8"))
    assert found == expected
    assert len(found) == 20
    assert "alone" not in printed
    assert "MPS" not in printed
    assert service() == ["start", "quit", "quit"]


@pytest.mark.slow
def test_a_lost_gpu_costs_only_the_backend_that_loses_it(command):
    Path("alone").touch()
    _, expected = finished(command("./shared.py:Beside", "alone.jsonl"), "alone.jsonl")
    Path("alone").unlink()
    printed, records = finished(command("./shared.py:Bad ./shared.py:Beside --jobs 2"))
    assert records[10:] == expected
    crashed = {3: "the device was lost", 7: "exited with code 3"}
    for rows, record in enumerate(records[:10], 1):
        assert record["outcome"] == ("crashed" if rows in crashed else "passed")
        assert record.get("cause", "").startswith(crashed.get(rows, ""))
        assert record.get("recurrence") in (None, "always")
    # Beside loses the GPU once, and lacks memory once.
    assert re.search(r"3 cases examined again alone, .*: 1 of Bad, 2 of Beside$", printed, re.MULTILINE)
    assert service() == ["start", "quit", "quit"] * (len(service()) // 3)
    assert len(service()) > 3  # it starts anew after a loss


@pytest.mark.slow
def test_a_backend_is_late_only_if_it_is_late_alone(command):
    Path("hangs").touch()
    printed, records = finished(command("./shared.py:Bad ./shared.py:Beside --jobs 2 --case-timeout 10"))
    outcomes = [record["outcome"] for record in records]
    assert "timed_out" in outcomes
    assert outcomes[4] == "timed_out"
    assert records[4]["recurrence"] == "always"
    assert outcomes[10:] == ["passed"] * 10
    assert "examined again alone" in printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_mps_ends_with_an_interrupted_run(command, number):
    Path("hangs").touch()
    process = command("./shared.py:Bad --jobs 2 ./shared.py:Beside")
    while not Path("bad").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    assert service() == ["start"]
    process.send_signal(number)
    process.communicate(timeout=60)
    wait_for_end_of_mps()


def test_mps_ends_with_a_run_that_is_killed_while_it_starts(folder):
    line = "from attncheck.harness.workers.sharing import Mps; Mps.start()"
    process = subprocess.Popen([sys.executable, "-c", line], env=os.environ | {"SERVICE_S": "0.5"})
    while service() != ["start"]:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    wait_for_end_of_mps()


@pytest.mark.parametrize(
    ("script", "note"),
    [
        ("exit 1", "MPS does not start, so processes continue without it"),
        (
            'touch "$CUDA_MPS_PIPE_DIRECTORY/lost"',
            "MPS is used no more: a process of a backend did not start with it",
        ),
    ],
)
def test_without_a_daemon_that_works_a_run_does_without(command, script, note):
    Path("bin/nvidia-cuda-mps-control").write_text(f"#!/bin/sh\n{script}\n")
    printed, records = finished(command("reference torch_sdpa --jobs 2"))
    assert {record["outcome"] for record in records} == {"passed"}
    assert printed.count(note) == printed.count("MPS") == 1


def test_clients_count_the_gpus_that_the_daemon_sees(folder):
    """The daemon gets the variable of the run; its own numbers begin at 0 again."""
    mps = Mps.start({"CUDA_VISIBLE_DEVICES": "GPU-5,3"})
    assert mps.variables["CUDA_VISIBLE_DEVICES"] == "0,1"
    place = Path(mps.variables["CUDA_MPS_PIPE_DIRECTORY"])
    assert place.is_dir()
    mps.close()
    assert not place.exists()
    assert re.findall(r"^\w+", Path("service.txt").read_text(), re.MULTILINE) == ["start", "quit", "quit"]
