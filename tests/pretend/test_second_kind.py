"""Another kind of device than CUDA is one class and its registration: the pretend XPU passes the checks of a GPU."""

from pretend_cuda import Settings

BACKEND = """\
from attncheck.backends.candidates.torch_sdpa import SDPABackend


class OnXpu(SDPABackend):
    supported_devices = ("cpu", "xpu")
"""
CHECKS = ("numerics", "cache_write", "bitwise", "builder", "streams", "cudagraph")
WORDS = ["--backend", "on_xpu.py:OnXpu", "--suite", "small.yaml"]


def test_the_checks_of_a_gpu_pass_on_a_second_kind(run_attncheck, tmp_path):
    (tmp_path / "on_xpu.py").write_text(BACKEND)
    header, records = run_attncheck([*WORDS, "--check", ",".join(CHECKS)], Settings(type="xpu"))
    assert (header.environment.device, header.environment.device_name) == ("xpu", "Pretend GPU")
    found = {record.check: record for record in records}
    assert {check: record.outcome for check, record in found.items()} == dict.fromkeys(CHECKS, "passed")
    assert (found["cudagraph"].graph.recorder, found["cudagraph"].graph.measured) == ("xpu", "UNIFORM_BATCH")


def test_a_step_is_timed_by_the_events_of_a_second_kind(run_attncheck, tmp_path):
    (tmp_path / "on_xpu.py").write_text(BACKEND)
    small = Settings(type="xpu", total_memory=24 * 2**20, l2_cache_size=2**20)
    _, (found,) = run_attncheck([*WORDS, "--time-limit", "0.001", "--rounds", "1"], small, command="time")
    assert found.outcome == "passed"
    assert {part.clock for part in found.timing.latencies} == {"host", "graph"}
