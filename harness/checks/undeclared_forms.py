"""Forms of a declared case that differ from it in one field and that the backend does not declare.

Suite cases combine features, so a backend that refuses one feature of a case never runs the others. Here each dtype,
size, layout, attention type and modifier is tried alone, on a small batch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from attncheck.backends.contract import AttentionBackend
from attncheck.cases.consistency import check_meaning, implied_path
from attncheck.cases.model import Case
from attncheck.errors import SpecError
from attncheck.harness.driver.foreign_code import declared_reasons
from attncheck.reference.spec import AttentionType, BatchSpec, CacheSpec, LayerSpec, OutputQuantSpec, RequestSpec

Changes = Mapping[str, Any]

_DECODER = tuple(RequestSpec(query_len=rows, seq_len=keys) for rows, keys in ((1, 40), (5, 21), (9, 9)))
"""One decode request, one that extends a prefix, and one prompt."""

_ENCODER = (RequestSpec(query_len=11), RequestSpec(query_len=20))
_CROSS = (RequestSpec(query_len=4, encoder_len=23), RequestSpec(query_len=1, seq_len=9, encoder_len=17))
_REQUESTS = {AttentionType.DECODER: _DECODER, AttentionType.ENCODER_DECODER: _CROSS}

_SCALES = {"k_scale": 0.3, "v_scale": 0.07}


@dataclass(frozen=True)
class UndeclaredForm:
    """A case of a form that the backend does not declare: the change in words, and the declared reasons against it."""

    changes: str
    case: Case
    reasons: tuple[str, ...]


def is_plain(case: Case) -> bool:
    """Return whether the case is a causal decoder layer without modifiers, shared cache or output quantisation.

    Its path must be ``paged`` or ``mla``.
    """
    layer = case.layer
    shares = layer.kv_sharing or layer.output_quant is not None
    return case.batch.path.name in ("paged", "mla") and layer.is_causal and not layer.modifiers and not shares


def undeclared_forms(backend: type[AttentionBackend], case: Case, device: str) -> Iterator[UndeclaredForm]:
    """Yield ``case``, on a small batch, in each form that ``backend`` does not declare.

    Yield nothing if the backend does not declare the small batch itself. Raise StageError if a declaration raises.
    """
    base = _with(case, {}, {})
    if _reasons(backend, base):
        return
    for layer, cache in (*_layers(base.layer), *_caches(base.layer, base.cache)):
        try:
            changed = _with(case, layer, cache)
            check_meaning(changed.layer, changed.cache, changed.batch)
        except SpecError:  # the layer cannot have this form
            continue
        specs = changed.layer, changed.cache, changed.batch
        reasons = _reasons(backend, changed)
        if reasons and not declared_reasons(partial(backend.unavailable_case_reasons, device, *specs)):
            words = ", ".join(f"{name} {value}" for name, value in {**layer, **cache}.items() if value is not None)
            yield UndeclaredForm(words, changed, reasons)


def _reasons(backend: type[AttentionBackend], case: Case) -> tuple[str, ...]:
    return declared_reasons(partial(backend.unsupported_reasons, case.layer, case.cache, case.batch))


def _with(case: Case, layer: Changes, cache: Changes) -> Case:
    """Return the case with these fields of layer and cache, on a few short requests. Raise SpecError if invalid."""
    changed = replace(case.layer, **layer)
    return replace(
        case,
        id=f"{case.id}.form",
        layer=changed,
        cache=replace(case.cache, num_blocks=None, first_block=None, **cache),
        batch=BatchSpec(requests=_REQUESTS.get(changed.attn_type, _ENCODER), path=implied_path(changed)),
        tolerance=None,
        inputs=None,
    )


def _layers(layer: LayerSpec) -> Iterator[tuple[Changes, Changes]]:
    """Yield changes of the layer. For a latent layer, yield other dtypes only."""
    for dtype in ("float16", "bfloat16", "float32"):
        yield {"dtype": dtype}, {}
    if layer.mla is not None:
        return
    for head_size in (layer.head_size + 8, 2 * layer.head_size, 272):
        yield {"head_size": head_size}, {}
    for attn_type in AttentionType:
        yield {"attn_type": attn_type, "causal": None}, {}
    modifiers = {"sliding_window": 9, "logits_soft_cap": 20.0, "alibi": True, "sinks": True}
    others = {"causal": False, "head_size_v": 2 * layer.head_size, "output_quant": OutputQuantSpec(scale=0.005)}
    for name, value in {**modifiers, **others, "kv_sharing": True}.items():
        yield {name: value}, {}


def _caches(layer: LayerSpec, cache: CacheSpec) -> Iterator[tuple[Changes, Changes]]:
    for layout in ("NHD", "HND"):
        yield {}, {"layout": layout}
    for block_size in (1, max(1, cache.block_size // 2), cache.block_size + 8, 2 * cache.block_size):
        yield {}, {"block_size": block_size}
    for codes in ("fp8", "fp8_e5m2"):
        yield {}, {"kv_cache_dtype": codes, **_SCALES}
        per_head = {
            name: tuple(scale * (1 + head) for head in range(layer.num_kv_heads)) for name, scale in _SCALES.items()
        }
        yield {}, {"kv_cache_dtype": codes, **per_head}
