"""Times taken on the pretend device: the harness neither waits nor copies while the device is held."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
WAITING = """\
from attncheck.backends.candidates.torch_sdpa import SDPABackend, SDPAImpl

class Impl(SDPAImpl):
    def forward(self, layer, query, *args, **kwargs):
        query.sum().item()
        return super().forward(layer, query, *args, **kwargs)

class Builder(SDPABackend.get_builder_cls()):
    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
        from attncheck.backends.contract import AttentionCGSupport
        return AttentionCGSupport.NEVER

class Waiting(SDPABackend):
    @staticmethod
    def get_impl_cls():
        return Impl
    @staticmethod
    def get_builder_cls():
        return Builder
"""


def test_while_the_device_is_held_nothing_waits_but_the_backend(tmp_path, small_suite, preloaded):
    (tmp_path / "waiting.py").write_text(WAITING)
    paths = [str(HERE), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "timed_on_pretend.py"), "./small.yaml", "torch_sdpa", "./waiting.py:Waiting"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = [("graph", set()), ("events", {"to host"})]
    for timed, (clock, kinds) in zip(json.loads(done.stdout), expected, strict=True):
        assert timed["record"]["outcome"] == "passed"
        forward, _ = timed["record"]["timing"]["latencies"]
        assert forward["clock"] == clock
        if clock == "graph":  # elsewhere the hold changes while it is learnt
            assert len(set(forward["samples_ns"])) == 1
        assert len(timed["held"]) > 5
        found = [act for held in timed["held"] for act in held]
        assert {act["kind"] for act in found} == kinds
        assert {act["place"] for act in found} <= {f"{tmp_path / 'waiting.py'}:5 forward"}
