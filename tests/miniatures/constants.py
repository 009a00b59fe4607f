"""Backends that do not look at the scores: they fail ``numerics`` in every case where attention is more than this."""

from dataclasses import replace

from attncheck.backends.reference_backend import ReferenceBackend, ReferenceImpl


class Miniature(ReferenceBackend):
    """The reference under the name of the subclass, whose nested ``Impl`` answers without looking."""

    Impl = ReferenceImpl

    @classmethod
    def get_name(cls):
        return cls.__name__.upper()

    @classmethod
    def get_impl_cls(cls):
        return cls.Impl


class Zeros(Miniature):
    """Every row is 0."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            output[: metadata.num_rows] = 0.0


class Constant(Miniature):
    """Every row is 0.5."""

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            output[: metadata.num_rows] = 0.5


class MeanOfV(Miniature):
    """Every visible key weighs the same, whatever its score."""

    class Impl(ReferenceImpl):
        def params(self, metadata):
            return replace(super().params(metadata), scale=0.0, alibi_slopes=None, sinks=None)
