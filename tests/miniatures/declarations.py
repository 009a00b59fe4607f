"""Promises broken: refusing what is declared, accepting what is not, refusing too late.

Each class is the reference backend but for its own lines. ``test_miniatures.py`` names the check that must catch it.
"""

from dataclasses import replace
from pathlib import Path

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.registry import import_file

Miniature = import_file("base.py", Path(__file__).with_name("base.py")).Miniature


# Declarations.


class RefusesItsOwnClaim(Miniature):
    """Declares the soft cap, and refuses it."""

    class Impl(ReferenceImpl):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            if self.logits_soft_cap:
                raise NotImplementedError("no soft cap in this build")


class AcceptsUndeclaredSoftCap(Miniature):
    """Does not declare the soft cap, takes it all the same, and leaves it out."""

    features = ReferenceBackend.features - {"logits_soft_cap"}

    class Impl(ReferenceImpl):
        def params(self, metadata):
            return replace(super().params(metadata), logits_soft_cap=None)


class BreaksOnUndeclaredSinks(Miniature):
    """Does not declare sinks, and dies of them instead of refusing them."""

    features = ReferenceBackend.features - {"sinks"}

    class Impl(ReferenceImpl):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            if self.sinks is not None:
                raise KeyError("sinks")


class RefusesTooLate(Miniature):
    """Does not declare windows, and notices one only after it has written the cache."""

    features = ReferenceBackend.features - {"sliding_window"}

    class Impl(ReferenceImpl):
        def attend(self, *arguments):
            if self.sliding_window != (-1, -1):
                raise NotImplementedError("no sliding window")
            super().attend(*arguments)


class CannotProfile(Miniature):
    """Reads the metadata before it looks whether there is any."""

    class Impl(ReferenceImpl):
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, *rest, **more):
            if not attn_metadata.num_rows:
                raise RuntimeError("nothing to do")
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, *rest, **more)


class RaisesInForward(Miniature):
    """Breaks on every batch."""

    class Impl(ReferenceImpl):
        def attend(self, *arguments):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


class RaisesInDeclaration(Miniature):
    """Cannot even say what it supports."""

    @classmethod
    def unsupported_reasons(cls, layer, cache, batch):
        raise AttributeError("'LayerSpec' object has no attribute 'window_size'")
