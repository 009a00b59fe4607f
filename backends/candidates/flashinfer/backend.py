"""The declarations of candidate ``flashinfer``, and whether it can run here. Imports neither flashinfer nor Triton.

The library itself is imported only on a GPU, if nothing else prevents its use. According to the source of the pinned
version, these features are not supported:

- ALiBi: the library computes the slopes from the number of heads; none can be passed.
- Sinks: ``run`` accepts them but does not pass them to its fa2 kernels, which would silently ignore them.
- Windows without a causal mask: there is a left bound only.
- More rows than keys under a causal mask: the tiles that need the mask are computed in unsigned integers, which wrap
  around for such a request.
- Scales close to 0 or negative: the kernels use 5e4 as infinity and also scale masked scores.
- Rows of a request without keys: their LSE would be about -5e4. Padding in a graph has no keys either; its outputs are
  0.

The soft cap is declared but may be too coarse: it uses ``tanh.approx.f32``, whose relative error is up to ``2**-11``.
"""

import importlib.util
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import attncheck
from attncheck.backends import interpreter
from attncheck.backends.base import machine
from attncheck.backends.candidates.flashinfer.settings import LEAST_SCALE, SUPPORTED_DTYPES
from attncheck.backends.contract import AttentionType, Conventions, MultipleOf
from attncheck.backends.paged import PagedBackend
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec

if TYPE_CHECKING:
    from attncheck.backends.candidates.flashinfer.builder import FlashInferBuilder
    from attncheck.backends.candidates.flashinfer.impl import FlashInferImpl
    from attncheck.backends.candidates.flashinfer.metadata import FlashInferMetadata

DISTRIBUTION = "flashinfer-python"

PINNED = "0.6.8.post1"
"""The only version whose signatures, checks and kernels were read. It belongs to torch 2.11, as vLLM pairs them."""

LOWEST_CAPABILITY = (8, 0)
"""Minimum compute capability of the kernels, for bfloat16 and for direct copies from global to shared memory."""

_COMPILED_KERNELS = "flashinfer_jit_cache"
"""Package of kernels precompiled by the library's authors; with it nothing needs to be compiled."""


def library_reasons(device: str) -> list[str]:
    """Return why the pinned flashinfer cannot run on ``device``, such as ``"cuda:1"``; an empty list if it can."""
    installed = machine.installed_version(DISTRIBUTION)
    reasons = []
    if installed is None:
        reasons.append(f"{DISTRIBUTION} is not installed")
    elif machine.public(installed) != PINNED:
        reasons.append(f"{DISTRIBUTION} {installed} is installed, and what is relied on was read in {PINNED}")
    if torch.device(device).type != "cuda":
        return reasons
    reasons += [*machine.gpu_reasons(device, LOWEST_CAPABILITY), *interpreter.unavailable_reasons(device)]
    if installed is not None and not _can_get_kernels():
        reasons.append(
            f"there is neither nvcc, by which flashinfer compiles its kernels, nor the package {_COMPILED_KERNELS}"
        )
    return reasons or machine.import_reasons("flashinfer")


def library_version() -> str:
    """Return the version of each part under test: the attention kernels and the cache writer."""
    theirs = machine.installed_version(DISTRIBUTION) or "of no version"
    return interpreter.marked(f"{DISTRIBUTION} {theirs} (fa2), attncheck {attncheck.__version__} (cache writer)")


def _can_get_kernels() -> bool:
    """Return whether kernels exist or can be compiled; nvcc is searched for where the library searches."""
    if importlib.util.find_spec(_COMPILED_KERNELS) is not None:
        return True
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and shutil.which("nvcc") is not None:
        return True
    return (Path(home or "/usr/local/cuda") / "bin" / "nvcc").is_file()


class FlashInferBackend(PagedBackend):
    """Backend for pages of any size, each with keys before values as in the library's tutorial; both layouts.

    attncheck's own Triton kernel writes new rows. The library's ``append_paged_kv_cache`` addresses rows by position,
    and has no slot value for a row that must not be written.
    """

    packing = "split_second"
    features = frozenset({"sliding_window", "logits_soft_cap", "non_causal", "lse", "kv_sharing", "fp8_kv"})
    conventions = Conventions(lse_base="2", padded_rows="finite")
    supported_kv_cache_dtypes = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
    supported_attn_types = tuple(AttentionType)
    supported_dtypes = SUPPORTED_DTYPES
    supported_devices = ("cuda",)

    get_name = staticmethod(lambda: "FLASHINFER")

    @staticmethod
    def get_impl_cls() -> type["FlashInferImpl"]:
        from attncheck.backends.candidates.flashinfer.impl import FlashInferImpl

        return FlashInferImpl

    @staticmethod
    def get_builder_cls() -> type["FlashInferBuilder"]:
        from attncheck.backends.candidates.flashinfer.builder import FlashInferBuilder

        return FlashInferBuilder

    @staticmethod
    def get_metadata_cls() -> type["FlashInferMetadata"]:
        from attncheck.backends.candidates.flashinfer.metadata import FlashInferMetadata

        return FlashInferMetadata

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [64, 128, 256]

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        return [*super().unavailable_reasons(device), *library_reasons(device)]

    @classmethod
    def unsupported_reasons(cls, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        reasons = super().unsupported_reasons(layer, cache, batch)
        if layer.sliding_window is not None and not layer.is_causal:
            reasons.append(f"sliding_window {layer.sliding_window} without a causal mask: there is a left bound only")
        if layer.attn_type == AttentionType.ENCODER_DECODER and any(
            request.query_len and not request.encoder_len for request in batch.requests
        ):
            reasons.append("encoder_len 0: rows of a request without keys")
        if layer.softmax_scale < LEAST_SCALE:
            reasons.append(f"scale {layer.softmax_scale}: must be at least {LEAST_SCALE}")
        return reasons

    @classmethod
    def version(cls) -> str:
        return library_version()
