"""Faults of declarations: refusing what is declared, accepting what is not, refusing too late."""

from attncheck.backends.mutants.plain import Base, PlainBackend, PlainImpl

# Declarations.


class RefusesItsOwnClaim(Base):
    """Declares the soft cap, but refuses it."""

    class Impl(PlainImpl):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            if self.logits_soft_cap:
                raise NotImplementedError("no soft cap in this build")


class AcceptsUndeclaredSoftCap(Base):
    """Does not declare the soft cap, but accepts it, and leaves it out."""

    features = PlainBackend.features - {"logits_soft_cap"}

    class Impl(PlainImpl):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            self.logits_soft_cap = None


class BreaksOnUndeclaredSinks(Base):
    """Does not declare sinks, but raises a KeyError instead of refusing them."""

    features = PlainBackend.features - {"sinks"}

    class Impl(PlainImpl):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            if self.sinks is not None:
                raise KeyError("sinks")


class RefusesTooLate(Base):
    """Does not declare windows, but refuses one only after it has written the cache."""

    features = PlainBackend.features - {"sliding_window"}

    class Impl(PlainImpl):
        def attend(self, *arguments):
            if self.sliding_window != (-1, -1):
                raise NotImplementedError("no sliding window")
            super().attend(*arguments)


class CannotProfile(Base):
    """Reads the metadata before it checks whether there are any."""

    class Impl(PlainImpl):
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, *rest, **more):
            if not attn_metadata.num_rows:
                raise RuntimeError("nothing to do")
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, *rest, **more)


class RaisesInForward(Base):
    """Raises on every batch."""

    class Impl(PlainImpl):
        def attend(self, *arguments):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


class RaisesInDeclaration(Base):
    """Raises when its supported cases are queried."""

    @classmethod
    def unsupported_reasons(cls, layer, cache, batch):
        raise AttributeError("'LayerSpec' object has no attribute 'window_size'")
