"""Show that AMX_MLA declares a cache of bfloat16 by name, and that its writer asserts "auto".

    python show.py

Exits 0 while the defect is there, 1 when it is gone, and 77 on a CPU without AVX512_BF16. Needs vLLM's CPU build.
"""

import sys

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend, AMXMLAImpl


def main() -> int:
    """Write one row of bfloat16 to a cache of bfloat16, whose dtype is "auto" first and named then."""
    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "concat_and_cache_mla_cpu"):
        print("the kernels that vLLM loads on this CPU are without those of AMX_MLA")
        return 77
    impl = object.__new__(AMXMLAImpl)  # the writer reads no attribute of it
    latent, rotated = torch.ones(1, 512).bfloat16(), torch.ones(1, 1, 64).bfloat16()
    cache, slots, scale = torch.zeros(2, 32, 576).bfloat16(), torch.tensor([32]), torch.tensor(1.0)
    failed = {}
    for name in ("auto", "bfloat16"):
        cache.zero_()
        try:
            impl.do_kv_cache_update(latent, rotated, cache, slots, name, scale)
            failed[name] = False
            what = f"{int((cache[1, 0] == 1).sum())} of 576 numbers are written"
        except AssertionError as error:
            failed[name] = True
            what = f"AssertionError: {error}"
        declared = AMXMLABackend.supports_kv_cache_dtype(name)
        print(f"{name}: supports_kv_cache_dtype is {declared}; the writer: {what}")
    return 0 if declared and failed == {"auto": False, "bfloat16": True} else 1


if __name__ == "__main__":
    sys.exit(main())
