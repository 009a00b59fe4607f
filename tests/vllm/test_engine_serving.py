"""A server of vLLM, watched while it serves: its tokens are the same, and a fault is found before it ends."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from attncheck.harness.engine.models import make_model
from attncheck.reports.run_file.store import read_run

pytest.importorskip("uvicorn", reason="vLLM's server needs it")
pytest.importorskip("model_hosting_container_standards", reason="vLLM's server needs it")

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

REQUESTS = int(os.environ.get("ENGINE_SERVING_REQUESTS", "16"))
EVERY = os.environ.get("ENGINE_SERVING_EVERY", "2")
START_S = 900

PLANT = """
import os
from vllm.v1.worker.block_table import BlockTable

def register():
    commit = BlockTable.commit_block_table
    if hasattr(commit, "is_planted"):
        return

    left = [6]

    def committed(self, num_reqs):
        rows = self.block_table.np[:num_reqs]
        if os.path.exists(os.environ["FAULT_NOW"]) and num_reqs > 1 and (self.num_blocks_per_row[:2] > 1).all():
            rows[0, 0] = rows[1, 0]  # from now on, the first request reads a block of the second
            left[0] -= 1
            if not left[0]:
                os.remove(os.environ["FAULT_NOW"])
        return commit(self, num_reqs)

    committed.is_planted = True
    BlockTable.commit_block_table = committed
"""


class Server:
    def __init__(self, folder, watched):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.run_file, self.fault = folder / "engine.jsonl", folder / "fault-now"
        self.log = folder / f"log-{watched}.txt"
        serve = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "model")]
        options = {
            "--port": self.port,
            "--dtype": "bfloat16",
            "--max-model-len": 1024,
            "--max-num-seqs": 16,
            "--max-num-batched-tokens": 128,
            "--block-size": 32,
            "--num-gpu-blocks-override": 60,
        }
        serve += ["--skip-tokenizer-init", "--enforce-eager", *(str(word) for pair in options.items() for word in pair)]
        watch = [sys.executable, "-m", "attncheck", "engine", "--every", EVERY, "--output", str(self.run_file), "--"]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "FAULT_NOW": str(self.fault),
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*(watch if watched else []), *serve],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self):
        due = time.monotonic() + START_S
        while time.monotonic() < due and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
            except (urllib.error.URLError, OSError):
                time.sleep(1)
            else:
                return self
        pytest.fail(f"the server did not start:\n{self.log.read_text()[-3000:]}")

    def tokens(self, prompt, most):
        body = {
            "prompt": prompt,
            "max_tokens": most,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            return json.load(answer)["choices"][0]["token_ids"]

    def load(self, seed):
        """The tokens of random requests, of which eight are served at once."""
        draw = random.Random(seed)
        prompts = [[draw.randrange(512) for _ in range(draw.choice([20, 60, 150]))] for _ in range(REQUESTS)]
        limits = [draw.choice([8, 32]) for _ in prompts]
        with ThreadPoolExecutor(8) as clients:
            return list(clients.map(self.tokens, prompts, limits))

    def cpu_seconds(self):
        """The processor's time of all processes of the server."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.process.pid:  # the session
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def end(self):
        self.process.terminate()  # attncheck passes SIGTERM on to the command
        return self.process.wait(300)


@pytest.fixture
def folder(tmp_path):
    """A model, and the entry points of the plugins: attncheck's as it declares it, and one that plants a fault."""
    make_model(tmp_path / "model", "full")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    plugins = {"planted": "planted:register", **project["project"]["entry-points"]["vllm.general_plugins"]}
    site = tmp_path / "site"
    entry_points = "\n".join(["[vllm.general_plugins]", *(f"{name} = {target}" for name, target in plugins.items())])
    (site / "planted-1.dist-info").mkdir(parents=True)
    (site / "planted-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    (site / "planted-1.dist-info" / "entry_points.txt").write_text(entry_points)
    (site / "planted.py").write_text(PLANT)
    yield tmp_path
    shutil.rmtree(tmp_path / "model")


@pytest.fixture
def server(folder):
    started = []

    def server(*, watched):
        started.append(Server(folder, watched))
        return started[-1].wait()

    yield server
    for each in started:
        if each.process.poll() is None:
            os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait(60)


def found(path):
    return {} if not path.exists() else {record.check: record for record in read_run(path).records}


def test_a_server_is_watched(server, record_property):
    plain = server(watched=False)
    before = plain.cpu_seconds()
    tokens = plain.load(seed=0)
    record_property("cpu_s_plain", plain.cpu_seconds() - before)
    plain.end()

    watched = server(watched=True)
    before = watched.cpu_seconds()
    assert watched.load(seed=0) == tokens
    record_property("cpu_s_watched", watched.cpu_seconds() - before)

    watched.fault.touch()
    watched.load(seed=1)
    assert not watched.fault.exists(), "the fault was not planted"
    due = time.monotonic() + 120
    while time.monotonic() < due and getattr(found(watched.run_file).get("output"), "outcome", None) != "failed":
        time.sleep(1)
    assert watched.process.poll() is None
    output = found(watched.run_file)["output"]
    assert output.outcome == "failed"
    assert "is read in place of block" in output.meaning

    watched.load(seed=2)
    time.sleep(5)  # vLLM may kill the process of its engine before that writes at its end
    steps, records = output.figures["steps"], found(watched.run_file)
    assert records["output"].figures["steps"] > steps, "the last steps were not written"
    watched.end()
    assert found(watched.run_file)["output"].figures["steps"] == records["output"].figures["steps"]
    assert read_run(watched.run_file).complete
    passed = {check for check, record in records.items() if record.outcome == "passed"}
    assert passed - {"write"} == {"token", "position", "count"}  # the fault may also write to the wrong block
    assert records["token"].figures["compared"] > records["output"].figures["compared"] > 0
    record_property("figures", json.dumps({check: record.figures for check, record in records.items()}))
