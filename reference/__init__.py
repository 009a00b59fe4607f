"""The reference: attention in pure torch, in float64 by default, and vLLM's metadata utilities.

``attention/`` computes attention, ``utilities/`` builds metadata, and ``v0/`` holds the utilities of vLLM's V0 engine.
``spec`` and its submodules define layers, caches and batches for all packages, without torch. Begin with
``attention/params.py`` and ``attention/online_softmax.py``.

All public names are importable from here. ``__init__.pyi`` lists them. Each is imported at its first use.

>>> from attncheck.reference import AttentionParams, paged_attention
"""

from attncheck.reference.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
