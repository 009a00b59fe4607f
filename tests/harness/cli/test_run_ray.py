"""``attncheck run --executor ray`` on a real Ray cluster of three nodes on this machine, one of which is killed."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

MINE = """\
import os
import time
from pathlib import Path

from attncheck.backends.candidates.torch_sdpa import SDPABackend, SDPAImpl


class Slow(SDPABackend):
    class Impl(SDPAImpl):
        def forward(self, layer, query, *args, **kwargs):
            Path("at-" + os.environ.get("RAY_RAYLET_PID", "home")).touch()
            time.sleep(0.02)
            if len(query) == 17:
                os.abort()
            return super().forward(layer, query, *args, **kwargs)

    @staticmethod
    def get_impl_cls():
        return Slow.Impl


class Lost(SDPABackend):
    class Impl(SDPAImpl):
        def forward(self, *args, **kwargs):
            raise RuntimeError(f"in {Path.cwd()}")

    @staticmethod
    def get_impl_cls():
        return Lost.Impl
"""
SUITE = """\
suite: small
description: some questions share a CUDA-graph level, the others need none
defaults:
  layer: {num_heads: 4, num_kv_heads: 2, head_size: 32, dtype: float32}
cases:
"""
CHECKS = ("numerics, containment", "numerics, cudagraph")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    cases = [f"  - {{id: case{rows}, batch: q{rows}, checks: [{CHECKS[rows % 4 == 0]}]}}\n" for rows in range(1, 33)]
    (tmp_path / "small.yaml").write_text(SUITE + "".join(cases))
    return tmp_path


@pytest.fixture
def cluster():
    """Three nodes with a core each. Ray's own processes see the attncheck of this process."""
    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    store = {"object_store_memory": 80_000_000, "num_cpus": 1}
    made = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **store})
    try:
        yield made, [made.add_node(**store) for _ in range(2)]
    finally:
        made.shutdown()
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def start(folder, *words):
    command = [sys.executable, "-m", "attncheck", "run", "--device", "cpu", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def records(path):
    """Without durations, and without the address of the thread that crashed."""
    lines = [json.loads(re.sub("thread 0x[0-9a-f]+", "", line)) for line in path.read_text().splitlines()]
    assert lines[-1]["kind"] == "footer"
    return [{k: v for k, v in line.items() if k != "duration_s"} for line in lines[1:-1]]


def test_records_are_those_of_a_serial_run_though_a_node_is_killed(cluster, folder):
    """One backend aborts in a case, which costs this case alone. A node is killed while it is at work."""
    ray, (victim, _) = cluster
    words = ["./mine.py:Slow", "reference", "--suite", "small.yaml", "--pass-env", "RAY_RAYLET_PID"]
    (folder / "ray.yaml").write_text(f"address: {ray.address}\n")
    run = start(folder, *words, "--executor", "ray:ray.yaml", "--output", "ray.jsonl")
    (raylet,) = victim.all_processes["raylet"]
    at_work, deadline = folder / f"at-{raylet.process.pid}", time.monotonic() + 60
    while run.poll() is None and time.monotonic() < deadline and not at_work.exists():
        time.sleep(0.01)
    ray.remove_node(victim, allow_graceful=False)
    printed, _ = run.communicate(timeout=120)
    assert run.returncode == 1, printed
    assert " was lost: " in printed
    assert "raylet" not in printed  # ray's own log of it
    serial = start(folder, *words, "--jobs", "1", "--output", "serial.jsonl")
    assert serial.communicate(timeout=120)[0]
    found = records(folder / "ray.jsonl")
    assert found == records(folder / "serial.jsonl")
    assert {each["case_id"] for each in found if each["outcome"] == "crashed"} == {"case17"}


def test_the_command_of_the_page_runs_in_a_copy_of_the_folder(folder, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "ci-gpus.md").read_text()
    (command,) = re.findall(r"^\$ attncheck run (.* --executor ray:ray.yaml .*)$", page, re.MULTILINE)
    (environment,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (folder / "ray.yaml").write_text(environment)
    (folder / "mine.py").write_text(MINE[: MINE.index("class Slow")] + MINE[MINE.index("class Lost") :])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    run = start(folder, *shlex.split(command), "--output", "run.jsonl")
    printed, _ = run.communicate(timeout=120)
    assert run.returncode == 1, printed
    messages = {record["message"] for record in records(folder / "run.jsonl")}
    assert all(message.startswith("in /") for message in messages)
    assert f"in {folder}" not in messages
