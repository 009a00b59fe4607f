"""Settings of the process while a backend runs: float32 products, threads, the current device."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.run.evaluate import THREAD_VARIABLES, current_device


def test_float32_stays_float32_and_the_callers_setting_comes_back(make_case: Any, examine: Any, with_impl: Any) -> None:
    seen = []

    def attend(self: Any, *args: Any) -> None:
        seen.append(torch.get_float32_matmul_precision())
        ReferenceImpl.attend(self, *args)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        examine(with_impl(attend=attend), make_case(), checks=("numerics",))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {"highest"}


def test_a_precision_set_per_backend_is_no_obstacle_and_comes_back(make_case: Any, examine: Any) -> None:
    products = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = [product.fp32_precision for product in products]
    try:
        for product in products:
            product.fp32_precision = "tf32"
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        assert examine(ReferenceBackend, make_case(), checks=("numerics",))["numerics"].outcome == "passed"
        assert [product.fp32_precision for product in products] == ["tf32", "tf32"]
    finally:
        torch.set_float32_matmul_precision("highest")
        for product, precision in zip(products, before, strict=True):
            product.fp32_precision = precision
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("stated", "expected"), [({}, 1), ({"OMP_NUM_THREADS": "3"}, 3), ({"MKL_NUM_THREADS": "3"}, 3)]
)
def test_checks_but_timing_have_one_thread_unless_the_user_states_more(
    stated: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch, make_case: Any, examine: Any, with_impl: Any
) -> None:
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in stated.items():
        monkeypatch.setenv(name, value)
    seen: list[int] = []

    def attend(*args: Any) -> None:
        seen.append(torch.get_num_threads())
        ReferenceImpl.attend(*args)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        quick = TimingSettings(limit_s=60, min_samples=1, max_samples=1)
        backend = with_impl(attend=attend)
        examine(backend, make_case((1, 20)), checks=("numerics",))
        assert set(seen) == {expected}
        seen.clear()
        examine(backend, make_case((1, 20)), checks=("timing",), timing=quick)
        assert set(seen) == {3}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_gpu_is_the_current_device_while_a_backend_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = []

    @contextlib.contextmanager
    def device(which: torch.device) -> Iterator[None]:
        entered.append(str(which))
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    for name in ("cpu", "cuda:1"):
        with current_device(torch.device(name)):
            pass
    assert entered == ["cuda:1"]
