"""The declarations of candidate ``xformers``, and whether the pinned library can run here.

Decodes use the library's Triton split-K operator, which supports neither window nor soft cap. Layers with either use
attncheck's own unified kernel, as do all requests of several rows, for which the library has no paged operator.
xformers is imported only on a GPU, where the version includes the state of its compiled extension.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

import attncheck
from attncheck.backends import interpreter
from attncheck.backends.base import machine
from attncheck.backends.candidates.triton_unified.backend import LARGEST_HEAD_SIZE
from attncheck.backends.contract import Conventions, MultipleOf
from attncheck.backends.interpreter import InterpretedBackend
from attncheck.backends.paged import PagedBackend
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec

if TYPE_CHECKING:
    from attncheck.backends.candidates.xformers.impl import XFormersBuilder, XFormersImpl, XFormersMetadata

PINNED = "0.0.35"
"""The only version whose private names and operator behaviour are known; see ``constraints.txt``."""

LOWEST_CAPABILITY = (8, 0)
"""Minimum compute capability for which the library tries its split-K operator."""


def library_reasons(device: str) -> list[str]:
    """Return why xformers' split-K operator cannot run on ``device``, such as ``"cuda:1"``; an empty list if it can."""
    reasons = interpreter.unavailable_reasons(device)
    installed = machine.installed_version("xformers")
    if installed is None:
        return [*reasons, "xformers is not installed"]
    if machine.public(installed) != PINNED:
        return [*reasons, f"xformers {installed} is installed, and private names of {PINNED} are relied on"]
    return [*reasons, *machine.gpu_reasons(device, LOWEST_CAPABILITY)]


def library_version(operator: str = "triton split-K") -> str:
    """Return the versions under test: the library's kernel for decodes, and attncheck's for other rows.

    On a GPU the text also states whether the library's compiled extension is missing. Its operators then refuse GPU
    tensors; the one named here is still allowed, since it does not use the extension.
    """
    missing = ", its compiled extension not loaded" if torch.cuda.is_available() and not _has_extension() else ""
    xformers, triton = (machine.installed_version(name) or "of no version" for name in ("xformers", "triton"))
    theirs = f"xformers {xformers} (decode: {operator}{missing})"
    ours = f"attncheck {attncheck.__version__} (other rows)"
    return interpreter.marked(f"{theirs}, {ours}, triton {triton}")


def _has_extension() -> bool:
    """Return whether the library's compiled extension, built for one torch and one CUDA, can be loaded here."""
    if machine.installed_version("xformers") is None:
        return False
    with quiet_import():
        from xformers._cpp_lib import _built_with_cuda
    return bool(_built_with_cuda)


@contextmanager
def quiet_import() -> Iterator[None]:
    """Silence the library's logger inside the context, around the first import of xformers.

    What it then logs about its compiled extension is part of the version.
    """
    logger = logging.getLogger("xformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class XFormersBackend(InterpretedBackend, PagedBackend):
    """Backend whose pages have tokens before heads, with keys and values in two halves of the cache.

    The library requires the pool as one run of tokens.
    """

    features = frozenset({"sliding_window", "logits_soft_cap", "lse", "short_keys"})
    conventions = Conventions(padded_rows="finite", sync_free_build=True, cache_strides="pages")
    supported_layouts = ("NHD",)
    supported_block_sizes = (MultipleOf(16),)  # which a tile of the operator divides

    get_name = staticmethod(lambda: "XFORMERS")

    @staticmethod
    def get_impl_cls() -> type["XFormersImpl"]:
        from attncheck.backends.candidates.xformers.impl import XFormersImpl

        return XFormersImpl

    @staticmethod
    def get_builder_cls() -> type["XFormersBuilder"]:
        from attncheck.backends.candidates.xformers.impl import XFormersBuilder

        return XFormersBuilder

    @staticmethod
    def get_metadata_cls() -> type["XFormersMetadata"]:
        from attncheck.backends.candidates.xformers.impl import XFormersMetadata

        return XFormersMetadata

    @classmethod
    def get_supported_dtypes(cls) -> list[torch.dtype]:
        """Return the operator's dtypes, and float32 if it is interpreted, which multiplies float32 exactly."""
        half = [torch.float16, torch.bfloat16]
        return [*half, torch.float32] if interpreter.is_interpreted() else half

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the operator's head sizes, up to the limit of the kernel for other rows."""
        from attncheck.backends.candidates.xformers.impl import supported_head_sizes

        return [size for size in supported_head_sizes() if size <= LARGEST_HEAD_SIZE]

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        return [*super().unavailable_reasons(device), *library_reasons(device)]

    @classmethod
    def unavailable_case_reasons(cls, device: str, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """Add a reason for bfloat16 layers that use the operator, since the interpreter multiplies it wrongly.

        attncheck's own kernel works around that.
        """
        reasons = super().unavailable_case_reasons(device, layer, cache, batch)
        is_operators = layer.sliding_window is None and layer.soft_cap is None
        has_gap = interpreter.is_interpreted() and layer.dtype == "bfloat16" and is_operators
        return [interpreter.BFLOAT16_GAP, *reasons] if has_gap else reasons

    @classmethod
    def version(cls) -> str:
        return library_version()
