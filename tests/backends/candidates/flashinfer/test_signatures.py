"""The stand-in has the library's signatures, and the library's own checks take what the backend hands over."""

import importlib.metadata
import inspect
import sys
import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from attncheck.backends.candidates.flashinfer.backend import DISTRIBUTION, PINNED
from attncheck.backends.candidates.flashinfer.planner import page_indices

METHODS = ("__init__", "plan", "run")


@pytest.fixture
def flashinfer() -> Any:
    """The library itself, where it can be imported; it needs no GPU for that."""
    try:
        installed = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{DISTRIBUTION} is not installed")
    if installed != PINNED:
        pytest.skip(f"{DISTRIBUTION} {installed} is installed, and the stand-in is of {PINNED}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("flashinfer", reason="flashinfer cannot be imported")


def test_the_stand_in_has_the_signatures_of_the_pinned_library(flashinfer: ModuleType, standin: Any) -> None:
    for name in (standin.DECODE, standin.PREFILL, standin.RAGGED):
        for method in METHODS:
            theirs = inspect.signature(getattr(getattr(flashinfer, name), method)).parameters.values()
            ours = standin.signature(name, method).parameters.values()
            assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


def test_the_stand_in_refuses_what_the_library_would_not_bind(library: Any) -> None:
    module = library.module()
    with pytest.raises(TypeError, match="workspace"):
        module.BatchDecodeWithPagedKVCacheWrapper(workspace=None)


def test_a_length_without_pages_is_what_the_library_reads(flashinfer: ModuleType) -> None:
    lens = [5, 0, 8, 16, 17]
    pages = page_indices(torch.arange(20).view(5, 4), 8, range(5), lens)
    assert flashinfer.get_seq_lens(pages.indptr, pages.last_page_len, 8).tolist() == lens


@pytest.fixture
def kernels(flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The library without kernels, which need a GPU: what it would have called them with, from its own wrappers."""
    called: list[tuple[Any, ...]] = []

    def module(*key: Any) -> Any:
        def called_with(name: str) -> Callable[..., str]:
            return lambda *arguments: called.append((name, key, arguments)) or "the plan"  # type: ignore[func-returns-value]

        return SimpleNamespace(**{name: called_with(name) for name in ("plan", "paged_run", "ragged_run")})

    empty = torch.empty

    def unpinned(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", unpinned)
    for part in (flashinfer.decode, flashinfer.prefill):
        monkeypatch.setattr(part, "get_batch_prefill_module", module)
        monkeypatch.setattr(part, "device_support_pdl", lambda device: False)
    return called


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8", "layout": "HND"}, {"attn_type": "encoder_only"}])
def test_the_library_s_own_wrappers_take_every_call(
    kernels: list[tuple[Any, ...]],
    flashinfer: ModuleType,
    make_engine: Callable[..., Any],
    make_batch: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    is_encoder = "attn_type" in options
    engine = make_engine(graphs=(3,), **options)
    steps = [[(3, 3), (2, 2)]] if is_encoder else [[(1, 5), (3, 9)], [(1, 4), (1, 9), (0, 0)]]
    for step in steps:
        common = make_batch(step, tokens=len(step) if step[-1] == (0, 0) else None, causal=not is_encoder)
        changes = {"kv_cache": torch.empty(0, dtype=torch.float16)} if is_encoder else {}
        engine.forward(engine.build(common), with_lse=True, **changes)
    names = [name for name, *_ in kernels]
    paged = ["plan", "plan", "paged_run", "paged_run", "plan", "paged_run"]
    assert names == (["plan", "ragged_run"] if is_encoder else paged)
    assert {key[0] for _, key, _ in kernels} == {"fa2"}
