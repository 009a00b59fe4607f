"""Questions about layers: their parameters for a plan step, and classes derived from their backends and metadata."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, make_dataclass
from types import SimpleNamespace
from typing import Any

from attncheck.harness.providers.questions import Subject, SubjectCall, SubjectSetting, subject_call
from attncheck.reference import PerLayerParameters

Layer = tuple[Any, ...]
"""Constructor arguments of one layer's parameters: window, cap, scale, sinks, verdicts."""


def _parameter_facts(target: Any, *, arguments: Layer) -> dict[str, Any]:
    one = target(*arguments)
    others = {"the same": (1, None, 0.5), "a cap of 0": (1, 0.0, 0.5), "sinks": (1, None, 0.5, True)}
    return {"fields": one, "equals": {name: one == target(*other) for name, other in others.items()}}


def _parameters(_: SubjectSetting) -> Iterator[SubjectCall]:
    for arguments in [(1, None, 0.5), (1, None, 0.5, False, True, True), (1, 0.0, 0.5), (-1, 30.0, 0.125, True)]:
        yield subject_call(f"made from {arguments}", arguments=arguments)


class Impl:
    """An attention implementation with only the attributes that are read."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def get_impl_variants(self) -> "list[Impl]":
        """Return the implementation alone; newer vLLM calls this method."""
        return [self]


class SpecialImpl(Impl):
    """A subclass, which must be accepted, too."""


class OtherImpl:
    """An implementation of an unrelated class."""

    scale = 0.5

    def get_impl_variants(self) -> "list[OtherImpl]":
        """Return the implementation alone."""
        return [self]


IMPLS: dict[str, Any] = {
    "a": Impl(sliding_window=(127, 0), logits_soft_cap=30.0, scale=0.125, sinks="some"),
    "b": Impl(scale=0.5),
    "c": SpecialImpl(sliding_window=(-1, -1), logits_soft_cap=None, scale=0.5, sinks=None),
    "d": Impl(sliding_window=(0, 0), logits_soft_cap=0.0, scale=1.0),
    "without a scale": Impl(sliding_window=(3, 0)),
    "of another class": OtherImpl(),
    "with a window that is no pair": Impl(sliding_window=127, scale=0.5),
}


def _layers(_: SubjectSetting) -> Iterator[SubjectCall]:
    def call(*names: str, tag: str = "", refused: bool = False) -> SubjectCall:
        layers = {name: SimpleNamespace(impl=impl) for name, impl in IMPLS.items()}
        context = {**layers, "no attention": SimpleNamespace()}
        return subject_call(
            f"layers {', '.join(names) or 'none'}",
            *([tag] if tag else []),
            refused=refused,
            vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context)),
            layer_names=list(names),
            cls_=Impl,
        )

    yield call("c", "no attention", "a", "b")
    yield call("d")
    yield call()
    yield call("a", "unknown", tag="an unknown layer", refused=True)
    yield call("without a scale", refused=True)
    yield call("of another class", refused=True)
    yield call("with a window that is no pair", refused=True)


def _groups(_: SubjectSetting) -> Iterator[SubjectCall]:
    def call(*layers: Layer, refused: bool = False) -> SubjectCall:
        entries = {f"layer {number}": PerLayerParameters(*layer) for number, layer in enumerate(layers)}
        return subject_call(" and ".join(map(str, layers)) or "no layer", refused=refused, per_layer_params=entries)

    yield call((127, None, 0.5), (127, None, 0.5))
    yield call((127, None, 0.5), (127, 30.0, 0.5))
    yield call((-1, None, 0.5, True), (127, None, 0.5))
    yield call((127, None, 0.5), (63, None, 0.5))
    yield call((-1, 30.0, 0.5, True))
    yield call((127, None, 0.5), (127, None, 0.5, False, True, False), (127, None, 0.25))
    yield call(refused=True)


class DerivableBackend:
    """A backend to derive from."""

    kept = "inherited"

    @staticmethod
    def get_builder_cls() -> type:
        """Return a type that differs from every replacement."""
        return int


def _backend_facts(
    target: Any, *, name_prefix: str, attention_backend_cls: type[DerivableBackend], builder_cls: type
) -> dict[str, Any]:
    one, other = (target(name_prefix, attention_backend_cls, builder_cls) for _ in range(2))
    again = target("Again", one, float)
    try:
        on_an_instance: Any = one().get_builder_cls()
    except TypeError:
        on_an_instance = "raises TypeError"
    return {
        "name": one.__name__,
        "bases": list(one.__bases__),
        "builder": one.get_builder_cls(),
        "builder, on an instance": on_an_instance,
        "inherited": one.kept,
        "builder of the base": attention_backend_cls.get_builder_cls(),
        "two calls, two classes": one is not other,
        "derived again": [again.__name__, again.get_builder_cls(), [cls.__name__ for cls in again.__mro__]],
    }


def _backends(_: SubjectSetting) -> Iterator[SubjectCall]:
    for prefix in ("Local", ""):
        yield subject_call(
            f"prefix {prefix!r}", name_prefix=prefix, attention_backend_cls=DerivableBackend, builder_cls=str
        )


FAST: list[tuple[str, Any, Any]] = [("logits_indices_padded", Any, None), ("num_logits_indices", int, 0)]


def _metadata_facts(
    target: Any, *, name_prefix: str, metadata_cls: type, fields: list[tuple[str, Any, Any]], values: tuple[Any, ...]
) -> dict[str, Any]:
    made = target(name_prefix, metadata_cls, fields)
    one = made(*values)
    return {
        "name": made.__name__,
        "is a dataclass": is_dataclass(made),
        "bases": list(made.__bases__),
        "fields": _fields_of(made),
        "values": one,
        "equals an instance of the base": one == metadata_cls(*values),
    }


def _fields_of(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)] if is_dataclass(kind) else []


def _metadata(_: SubjectSetting) -> Iterator[SubjectCall]:
    two = make_dataclass("Meta", [("a", int), ("b", int, 3)])
    one = make_dataclass("Meta", [("a", int, 1)])

    def call(
        prefix: str, base: type, added: list[tuple[str, Any, Any]], values: tuple[Any, ...], *, refused: bool = False
    ) -> SubjectCall:
        further = ", ".join(name for name, _, _ in added) or "nothing"
        return subject_call(
            f"{prefix!r} before {base.__name__}({', '.join(_fields_of(base))}), adding {further}",
            refused=refused,
            name_prefix=prefix,
            metadata_cls=base,
            fields=added,
            values=values,
        )

    yield call("Fast", two, FAST, (1,))
    yield call("", two, [], (5,))
    yield call("Fast", one, [("a", int, 7)], ())
    yield call("Fast", int, FAST, (), refused=True)


SUBJECTS = (
    Subject("PerLayerParameters", _parameters, _parameter_facts, is_function=False),
    Subject("get_per_layer_parameters", _layers),
    Subject("infer_global_hyperparameters", _groups),
    Subject("subclass_attention_backend", _backends, _backend_facts),
    Subject("subclass_attention_metadata", _metadata, _metadata_facts),
)
