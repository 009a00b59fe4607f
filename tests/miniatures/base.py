"""What miniatures of the reference share. Their files load this one by its path."""

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl


class Miniature(ReferenceBackend):
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
