"""The correct backend from which mutants of the reference derive."""

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl


class Base(ReferenceBackend):
    """The reference under the name of the subclass, whose nested ``Impl`` or ``Builder`` contains the fault."""

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
    """Return whether a copy of the cache takes little memory; pools of some cases are reserved, and hardly used."""
    return cache.numel() < 2**26
