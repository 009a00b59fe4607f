"""The attention utilities and contract classes of vLLM's first generation, known as v0.

Metadata consists of Python lists. In a batch, prompts come before decodes, and a decode has one new token. A state
object owns the tensors that CUDA graphs read. The generations are separate packages, because ``compute_slot_mapping``,
``AttentionMetadataBuilder`` and ``AttentionMetadata`` have other meanings in the second one. Begin with ``builder.py``.

All public names are importable from here. ``__init__.pyi`` lists them. Each is imported at its first use.

>>> from attncheck.reference.v0 import CommonMetadataBuilder, compute_slot_mapping
"""

from attncheck.reference.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
