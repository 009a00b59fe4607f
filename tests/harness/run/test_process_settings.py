"""Settings of the process while a backend runs: float32 products, threads, the current device."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.run.evaluate import THREAD_VARIABLES, current_device


@pytest.fixture
def observing(with_impl: Any) -> Any:
    """``observing(read, seen)``: a backend that appends what ``read`` returns to ``seen`` in each call."""

    def observing(read: Any, seen: list[Any]) -> Any:
        def attend(self: Any, *args: Any) -> None:
            seen.append(read())
            ReferenceImpl.attend(self, *args)

        return with_impl(attend=attend)

    return observing


def test_float32_stays_float32_and_the_callers_setting_comes_back(make_case: Any, examine: Any, observing: Any) -> None:
    seen: list[str] = []
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        examine(observing(torch.get_float32_matmul_precision, seen), make_case(), checks=("numerics",))
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


@pytest.mark.parametrize("variable", [None, *THREAD_VARIABLES])
def test_checks_but_timing_have_one_thread_unless_the_user_states_more(
    variable: str | None, monkeypatch: pytest.MonkeyPatch, make_case: Any, examine: Any, observing: Any
) -> None:
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "3")
    seen: list[int] = []
    backend, case = observing(torch.get_num_threads, seen), make_case((1, 20))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        examine(backend, case, checks=("numerics",))
        assert set(seen) == {1 if variable is None else 3}
        seen.clear()
        examine(backend, case, checks=("timing",), timing=TimingSettings(limit_s=60, min_samples=1, max_samples=1))
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
