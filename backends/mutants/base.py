"""The right backend that mutants of the reference derive from."""

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl


class Base(ReferenceBackend):
    """The reference under the name of the subclass, whose nested ``Impl`` or ``Builder`` brings the fault."""

    Impl = ReferenceImpl
    Builder = ReferenceBuilder

    @classmethod
    def get_name(cls):
        return cls.__name__.upper()

    @classmethod
    def get_impl_cls(cls):
        return cls.Impl

    @classmethod
    def get_builder_cls(cls):
        return cls.Builder


def fits_in_memory(cache):
    """Return whether a copy of the cache takes little memory. Pools of some cases are reserved, and hardly touched."""
    return cache.numel() < 2**26
