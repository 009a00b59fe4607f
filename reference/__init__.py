"""The right answers: attention in pure torch, float64 unless a call asks for less, and vLLM's metadata utilities.

``attention/`` computes attention, ``utilities/`` makes metadata, ``v0/`` keeps the first generation of the utilities.
``spec`` and its parts define layers, caches and batches for all rooms, without torch. Begin with
``attention/params.py`` and ``attention/online_softmax.py``.

All public names are importable from here. ``__init__.pyi`` lists them; each is loaded when it is first used.

>>> from attncheck.reference import AttentionParams, paged_attention
"""

from attncheck.reference.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
