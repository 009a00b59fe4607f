"""Another kind of device than CUDA is one class and its registration: the pretend XPU passes the checks of a GPU."""

from pretend_cuda import Settings

BACKEND = """\
from attncheck.backends.candidates.torch_sdpa import SDPABackend


class OnXpu(SDPABackend):
    supported_devices = ("cpu", "xpu")
"""
WORDS = ["--backend", "on_xpu.py:OnXpu", "--suite", "small.yaml", "--check"]


def test_the_checks_of_a_gpu_pass_on_a_second_kind(run_attncheck, tmp_path):
    (tmp_path / "on_xpu.py").write_text(BACKEND)
    words = [*WORDS, "numerics,cache_write,builder,streams,cudagraph"]
    _, on_cpu = run_attncheck(words)
    header, found = run_attncheck(words, Settings(type="xpu"))
    assert (header.environment.device, header.environment.device_name) == ("xpu", "Pretend GPU")
    assert {record.check: record.outcome for record in found} == dict.fromkeys(
        ("numerics", "cache_write", "builder", "streams", "cudagraph"), "passed"
    )
    assert {record.check: record.outcome for record in on_cpu}["streams"] == "unsupported"
    numerics = [record.figures for record in (*on_cpu, *found) if record.check == "numerics"]
    assert numerics[0] == numerics[1]
    emulated, captured = [record.graph for record in (*on_cpu, *found) if record.check == "cudagraph"]
    assert (emulated.recorder, captured.recorder) == ("emulated", "xpu")
    assert captured.measured == emulated.measured


def test_a_step_is_timed_by_the_events_of_a_second_kind(run_attncheck, tmp_path):
    (tmp_path / "on_xpu.py").write_text(BACKEND)
    small = Settings(type="xpu", total_memory=24 * 2**20, l2_cache_size=2**20)
    words = [*WORDS[:-1], "--time-limit", "0.001", "--rounds", "1"]
    _, (found,) = run_attncheck(words, small, command="time")
    assert found.outcome == "passed"
    assert {part.clock for part in found.timing.latencies} == {"host", "graph"}
