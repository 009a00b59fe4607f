"""New classes derived from a backend or its metadata class, as in vLLM; the originals are not modified."""

from dataclasses import is_dataclass, make_dataclass
from types import new_class
from typing import Any

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.utilities.builder import AttentionMetadataBuilder, M


def subclass_attention_backend(
    name_prefix: str, attention_backend_cls: type[Any], builder_cls: type[AttentionMetadataBuilder[M]]
) -> type[Any]:
    """Return a new subclass, named with ``name_prefix``, whose ``get_builder_cls()`` returns ``builder_cls``.

    ``get_builder_cls`` is static and can be called on the class or an instance (in vLLM on the class only). Every call
    creates another class. Its ``__module__`` is that of the original.
    """

    def get_builder_cls() -> type[AttentionMetadataBuilder[M]]:
        return builder_cls

    name = name_prefix + attention_backend_cls.__name__
    members = {"get_builder_cls": staticmethod(get_builder_cls), "__module__": attention_backend_cls.__module__}
    return new_class(name, (attention_backend_cls,), exec_body=lambda body: body.update(members))


def subclass_attention_metadata(name_prefix: str, metadata_cls: Any, fields: list[tuple[str, Any, Any]]) -> type[Any]:
    """Return a new dataclass, named with ``name_prefix``, with the fields of ``metadata_cls`` and then the given ones.

    fields: ``(name, type, default)``. A field whose name ``metadata_cls`` already has is replaced in place. The
        ``__module__`` of the class is that of the original.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` if ``metadata_cls`` is not a dataclass. Fields that a
    dataclass cannot have (one without default after one with) raise its own ``TypeError``.
    """
    if not (isinstance(metadata_cls, type) and is_dataclass(metadata_cls)):
        raise ReferenceArgumentError("metadata_cls", metadata_cls, "a dataclass")
    made = make_dataclass(name_prefix + metadata_cls.__name__, fields, bases=(metadata_cls,))
    made.__module__ = metadata_cls.__module__
    return made
