"""The first generation of vLLM's attention utilities and contract classes, known as v0.

Metadata is made of Python lists. In a batch, prompts come before decodes, and a decode has one new token. A state
object owns what CUDA graphs read. The generations are separate packages, because ``compute_slot_mapping``,
``AttentionMetadataBuilder`` and ``AttentionMetadata`` are names of other things in the second one. Begin with
``builder.py``.

All public names are importable from here. ``__init__.pyi`` lists them; each is loaded when it is first used.

>>> from attncheck.reference.v0 import CommonMetadataBuilder, compute_slot_mapping
"""

from attncheck.reference.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
