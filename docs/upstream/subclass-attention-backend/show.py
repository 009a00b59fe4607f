"""Show that get_builder_cls of a class that vLLM's subclass_attention_backend makes fails on an instance.

    python show.py

Exits 0 while the defect is there, and 1 when it is gone.
"""

import sys

from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.utils import subclass_attention_backend


def main() -> int:
    """Ask the original class and the new one for their builders, each by the class and by an instance."""
    made = subclass_attention_backend("Made", CPUAttentionBackend, AttentionMetadataBuilder)
    refused = {}
    for backend in (CPUAttentionBackend, made):
        backend.get_builder_cls()
        try:
            object.__new__(backend).get_builder_cls()
        except TypeError as error:
            refused[backend] = str(error)
        print(f"{backend.__name__}: by the class right; by an instance: {refused.get(backend, 'right')}")
    return 0 if list(refused) == [made] else 1


if __name__ == "__main__":
    sys.exit(main())
