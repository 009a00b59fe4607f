"""vLLM's words for a quantised format. Must not know: who asks, what is quantised."""

from typing import Any

from attncheck.backends.candidates.vllm import package
from attncheck.backends.impl import QuantKey


def fuses(impl: Any, key: QuantKey) -> bool:
    """Whether vLLM's ``impl`` says that a quantisation behind attention may be folded into it."""
    keys = package.module("vllm.model_executor.layers.quantization.utils.quant_utils")
    scale = key.scale
    described = keys.ScaleDesc(scale.dtype, scale.static, keys.GroupShape(*scale.group_shape))
    return bool(impl.fused_output_quant_supported(keys.QuantKey(key.dtype, described)))
