"""New classes from a backend or from its metadata, as vLLM makes them: the originals stay as they are."""

from dataclasses import is_dataclass, make_dataclass
from types import new_class
from typing import Any

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.utilities.builder import AttentionMetadataBuilder, M


def subclass_attention_backend(
    name_prefix: str, attention_backend_cls: type[Any], builder_cls: type[AttentionMetadataBuilder[M]]
) -> type[Any]:
    """A new subclass, ``name_prefix`` before its name, whose ``get_builder_cls()`` returns ``builder_cls``.

    ``get_builder_cls`` is static: to be called on the class or on an instance (in vLLM on the class only). Every call
    makes another class, said to be of the module of the original.
    """

    def get_builder_cls() -> type[AttentionMetadataBuilder[M]]:
        return builder_cls

    name = name_prefix + attention_backend_cls.__name__
    members = {"get_builder_cls": staticmethod(get_builder_cls), "__module__": attention_backend_cls.__module__}
    return new_class(name, (attention_backend_cls,), exec_body=lambda body: body.update(members))


def subclass_attention_metadata(name_prefix: str, metadata_cls: Any, fields: list[tuple[str, Any, Any]]) -> type[Any]:
    """A new dataclass, ``name_prefix`` before its name: the fields of ``metadata_cls``, then the given ones.

    fields: ``(name, type, default)``. One of a name that ``metadata_cls`` has changes that field where it stands. The
        class is said to be of the module of the original.

    Raises :class:`~attncheck.errors.ReferenceArgumentError` where ``metadata_cls`` is no dataclass; what a dataclass
    cannot have (a field without default behind one with) is its own ``TypeError``.
    """
    if not (isinstance(metadata_cls, type) and is_dataclass(metadata_cls)):
        raise ReferenceArgumentError("metadata_cls", metadata_cls, "a dataclass")
    made = make_dataclass(name_prefix + metadata_cls.__name__, fields, bases=(metadata_cls,))
    made.__module__ = metadata_cls.__module__
    return made
