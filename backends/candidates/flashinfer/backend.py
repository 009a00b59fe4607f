"""What candidate ``flashinfer`` declares, and whether it can run here. Imports neither flashinfer nor Triton.

The library itself is imported only on a GPU, once nothing else is in the way. Left out, by what was read in the pinned
version:

- ALiBi: the slopes are the library's own, made from the number of heads; none can be given.
- Sinks: ``run`` takes them, and its fa2 kernels are not handed them: they would be ignored without a word.
- Windows without a causal mask: there is a left bound only.
- More rows than keys under a causal mask: which tiles need the mask is computed in unsigned integers, which such a
  request makes wrap around.
- Scales close to 0, and below: the kernels' infinity is 5e4, and they scale what they have hidden by it.
- Rows of a request without keys: their LSE would be about -5e4. Padding in a graph has no keys either: outputs of 0.

Of what is declared, the soft cap may come out too coarse: it is made by ``tanh.approx.f32``, which is wrong by up to
``2**-11`` of its result.
"""

import importlib.util
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attncheck.backends import interpreter
from attncheck.backends.base import machine
from attncheck.backends.candidates.flashinfer.settings import LEAST_SCALE
from attncheck.backends.contract import AttentionType, Conventions, MultipleOf
from attncheck.backends.paged import PagedBackend
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec

if TYPE_CHECKING:
    from attncheck.backends.candidates.flashinfer.builder import FlashInferBuilder
    from attncheck.backends.candidates.flashinfer.impl import FlashInferImpl
    from attncheck.backends.candidates.flashinfer.metadata import FlashInferMetadata

DISTRIBUTION = "flashinfer-python"

PINNED = "0.6.8.post1"
"""The one version whose signatures, checks and kernels were read. It goes with torch 2.11, as vLLM pairs them."""

LOWEST_CAPABILITY = (8, 0)
"""Of the kernels: bfloat16, and copies from global to shared memory that do not pass through registers."""

_COMPILED_KERNELS = "flashinfer_jit_cache"
"""The package of kernels that the library's authors have compiled; with it there is nothing to compile."""


def library_reasons(device: str) -> list[str]:
    """Return why the pinned flashinfer cannot run on ``device`` (``"cpu"``, ``"cuda:1"``) here."""
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
    """Return the version of each part that is examined: what attends, and what writes the cache."""
    theirs, ours = (machine.installed_version(name) or "of no version" for name in (DISTRIBUTION, "attncheck"))
    return interpreter.marked(f"{DISTRIBUTION} {theirs} (fa2), attncheck {ours} (cache writer)")


def _can_get_kernels() -> bool:
    """Whether kernels are there, or can be compiled; nvcc is looked for where the library looks for it."""
    if importlib.util.find_spec(_COMPILED_KERNELS) is not None:
        return True
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and shutil.which("nvcc") is not None:
        return True
    return (Path(home or "/usr/local/cuda") / "bin" / "nvcc").is_file()


class FlashInferBackend(PagedBackend):
    """Keys and values of a page beside each other, as in the library's tutorial; both layouts; pages of any size.

    New rows are written by attncheck's own Triton kernel: the library's ``append_paged_kv_cache`` addresses by
    positions, and knows no slot that says a row is not to be written.
    """

    packing = "split_second"
    features = frozenset({"sliding_window", "logits_soft_cap", "non_causal", "lse", "kv_sharing", "fp8_kv"})
    conventions = Conventions(lse_base="2", padded_rows="finite")
    supported_kv_cache_dtypes = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
    supported_attn_types = tuple(AttentionType)
    supported_devices = ("cuda",)

    @staticmethod
    def get_name() -> str:
        return "FLASHINFER"

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
    def get_supported_dtypes(cls) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

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
