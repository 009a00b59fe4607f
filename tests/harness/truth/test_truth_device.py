"""Where a truth is computed: on the GPU, or on the host where that is estimated to be faster."""

from types import SimpleNamespace

import pytest
import torch

from attncheck.harness.device import float64_rate
from attncheck.harness.truth import truth as module
from attncheck.harness.truth.truth import device_seconds, host_seconds, truth_device, truth_notes

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def gpu(major, minor, num_sms, **others):
    sizes = {"total_memory": 2**34, "L2_cache_size": 2**25, "multi_processor_count": num_sms}
    return SimpleNamespace(name="GPU", major=major, minor=minor, **sizes, **others)


H100, RTX_4090, RTX_3050 = gpu(9, 0, 132), gpu(8, 9, 128, clock_rate=2_520_000), gpu(8, 6, 20)


@pytest.fixture
def prefill(make_case):
    return make_case((4096, 4096), num_heads=8, num_kv_heads=2, head_size=64)


@pytest.mark.parametrize(
    ("properties", "cores", "place"),
    [
        (H100, 16, GPU),
        (H100, 64, GPU),
        (RTX_4090, 16, GPU),
        (RTX_4090, 96, CPU),
        (RTX_3050, 2, GPU),
        (RTX_3050, 16, CPU),
    ],
)
def test_the_faster_of_both_computes_a_long_prefill(monkeypatch, prefill, properties, cores, place):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(module, "_num_cores", lambda: cores)
    assert truth_device(prefill, GPU) == place
    assert bool(truth_notes(prefill, GPU)) == (place == CPU)


def test_a_short_decode_is_not_worth_the_copies(monkeypatch, make_case):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: RTX_3050)
    monkeypatch.setattr(module, "_num_cores", lambda: 16)
    assert truth_device(make_case((1, 33), (1, 17)), GPU) == GPU


def test_on_the_cpu_nothing_is_estimated(monkeypatch, prefill):
    monkeypatch.delattr(torch.cuda, "get_device_properties")
    assert truth_device(prefill, CPU) == CPU
    assert truth_notes(prefill, CPU) == ()


def test_the_seconds_are_operations_over_rates(prefill):
    pairs = sum(range(1, 4097))  # of a causal prefill
    products, values = 2 * 8 * 64 * pairs, 2 * 8 * 64 * pairs
    # An SM of H100 has 64 float64 units; half of their rate is counted on.
    assert device_seconds(prefill, float64_rate(H100)) == pytest.approx((products + 2 * values) / (132 * 64 * 1.5e9))
    copied = 8 * 4096 * 8 * (64 + 4) / 10e9 + 0.0002
    operations = products + 2 * values + (products + values) / 2
    assert host_seconds(prefill, 4) == pytest.approx(operations / (4 * 16e9) + copied)
    assert device_seconds(prefill, float64_rate(gpu(12, 0, 132))) == pytest.approx(
        32 * device_seconds(prefill, float64_rate(H100))
    )
