"""Show that CPU_MLA takes a cache of FP8, stores rows as integers, and fails in the first decode.

    python show.py

Exits 0 while the defect is there, and 1 when it is gone. Needs vLLM's CPU build.
"""

import sys

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonDecodeMetadata, MLACommonMetadata
from vllm.platforms import current_platform
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend, AMXMLAImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

PAGE, LATENT, ROTATED, NOPE = 16, 512, 64, 128


def metadata() -> MLACommonMetadata:
    """Return the metadata of one decode with one key."""
    one, starts = torch.tensor([1], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    decode = MLACommonDecodeMetadata(torch.tensor([[0]], dtype=torch.int32), one, None)
    return MLACommonMetadata(1, 1, 1, 1, starts, torch.tensor([0]), 1, 1, 0, decode=decode)


def main() -> int:
    """Do as vLLM's layer does with kv_cache_dtype="fp8": a cache of uint8, a write, a view as FP8, a decode."""
    current_platform.import_kernels()
    sizes = {
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROTATED,
        "qk_head_dim": NOPE + ROTATED,
        "v_head_dim": NOPE,
        "kv_b_proj": torch.nn.Linear(LATENT, 2 * NOPE),
    }
    print(f"CPU_MLA: supports_kv_cache_dtype('fp8') is {CPUMLABackend.supports_kv_cache_dtype('fp8')}", end="; ")
    try:
        impl = CPUMLAImpl(1, LATENT + ROTATED, 0.1, 1, None, None, "fp8", None, "decoder", None, **sizes)
    except (NotImplementedError, ValueError) as error:
        print(f"the impl refuses it: {error}")
        return 1
    print("the impl takes it")
    cache = torch.zeros(1, PAGE, LATENT + ROTATED, dtype=kv_cache_dtype_str_to_dtype("fp8", None))
    latent, rotated = torch.full((1, LATENT), 1.75, dtype=torch.bfloat16), torch.ones(1, 1, ROTATED).bfloat16()
    slots, scale = torch.tensor([0]), torch.tensor(1.0)
    impl.do_kv_cache_update(latent, rotated, cache, slots, "fp8", scale)
    codes = cache.view(current_platform.fp8_dtype())
    print(f"1.75 is stored as byte {cache[0, 0, 0].item()}, which is {codes[0, 0, 0].float().item()} in FP8")
    failure = ""
    try:
        impl.forward_mqa(torch.ones(1, 1, LATENT + ROTATED).bfloat16(), codes, metadata(), None)
    except RuntimeError as error:
        failure = str(error).splitlines()[0]
    print(f"the first decode: {f'RuntimeError: {failure}' if failure else 'an answer'}")
    print(f"AMX_MLA: supports_kv_cache_dtype('fp8') is {AMXMLABackend.supports_kv_cache_dtype('fp8')}", end="; ")
    try:
        AMXMLAImpl.do_kv_cache_update(object.__new__(AMXMLAImpl), latent, rotated, cache, slots, "fp8", scale)
        print("the writer takes it")
    except AssertionError as error:
        print(f"the writer: AssertionError: {error}")
    return 0 if failure else 1


if __name__ == "__main__":
    sys.exit(main())
