"""Limits that a backend's process keeps itself, and its records of them."""

import subprocess
import sys

import pytest
import torch
from pretend_cuda import Settings, present

from attncheck.harness.run.options import size_in_words
from attncheck.harness.workers.limits import MemoryLimits, keep_within, with_limit_named

MIB, GIB = 2**20, 2**30


def test_sizes_are_stated_in_the_unit_that_suits():
    sizes = (0, 600 * MIB, 4 * GIB, int(4.13 * GIB), 128 * GIB)
    assert list(map(size_in_words, sizes)) == ["0 MiB", "600 MiB", "4 GiB", "4.13 GiB", "128 GiB"]


def test_on_a_cpu_memory_far_beyond_the_limit_is_refused_at_once_and_a_narrower_limit_of_the_system_stays():
    code = """
import resource
from attncheck.harness.host import free_own_bytes
from attncheck.harness.workers.limits import MemoryLimits, keep_within
assert free_own_bytes() is None
keep_within(MemoryLimits(), "cpu")
assert free_own_bytes() is None
keep_within(MemoryLimits(host=2**30), "cpu")
assert 2**29 < free_own_bytes() < 2**30 + 2**27
bytearray(2**29)
try:
    bytearray(2**31)
except MemoryError:
    print("refused")
resource.setrlimit(resource.RLIMIT_DATA, (2**29, 2**29))
keep_within(MemoryLimits(host=2**30), "cpu")
assert resource.getrlimit(resource.RLIMIT_DATA) == (2**29, 2**29)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"


@pytest.mark.parametrize(("device_limit", "is_refused"), [(None, False), (2 * GIB, False), (16 * MIB, True)])
def test_on_a_gpu_torch_takes_no_more_than_its_limit(device_limit, *, is_refused):
    with present(Settings(total_memory=GIB)):
        keep_within(MemoryLimits(host=1, device=device_limit), "cuda:0")
        if is_refused:
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        else:
            assert torch.empty(32 * MIB, dtype=torch.uint8, device="cuda").is_cuda


@pytest.mark.parametrize(
    ("error_type", "message", "named"),
    [
        ("MemoryError", "(no message)", "(no message) (--memory-limit: 1 GiB)"),
        ("_ArrayMemoryError", "Unable", "Unable (--memory-limit: 1 GiB)"),
        ("RuntimeError", "DefaultCPUAllocator: can't allocate memory", None),
        ("OutOfMemoryError", "CUDA out of memory", "CUDA out of memory (--device-memory-limit: 2 GiB)"),
        ("ValueError", "no such thing", "no such thing"),
    ],
)
def test_the_message_of_a_refused_allocation_names_the_limit(make_record, error_type, message, named):
    record = make_record("errored", error_type=error_type, message=message)
    limits = MemoryLimits(host=GIB, device=2 * GIB)
    found = with_limit_named(record, limits)
    assert (
        found.model_dump()
        == record.model_copy(update={"message": named or f"{message} (--memory-limit: 1 GiB)"}).model_dump()
    )
    assert with_limit_named(record, MemoryLimits()) == record
    assert with_limit_named(make_record("failed"), limits) == make_record("failed")
