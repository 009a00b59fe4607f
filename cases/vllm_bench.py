"""Reads configurations of vLLM's attention benchmarks unchanged.

Every key is used or listed in the suite's notes. The files set no dtype; vLLM runs them in bfloat16, and so do these
cases.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from attncheck.cases.consistency import check_meaning, implied_path
from attncheck.cases.grammar import format_batch, parse_batch
from attncheck.cases.keys import page_defaults
from attncheck.cases.model import Case, Suite
from attncheck.cases.suite_file import MAX_CASES, MAX_CONTENT
from attncheck.cases.validation import known_keys, text_of, validate
from attncheck.cases.yaml_tree import Items, Place, Scalar, Table, Tree, describe, plain
from attncheck.errors import BatchSpecError, SpecError
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import MAX_TOKENS, BatchSpec, CacheSpec, KVCacheDType, RequestSpec

LAYER_KEYS: Mapping[str, str] = {"num_q_heads": "num_heads", "num_kv_heads": "num_kv_heads", "head_dim": "head_size"}
MLA_KEYS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_USED_MODEL_KEYS = (*LAYER_KEYS, *MLA_KEYS, "block_size")
_USED_KEYS = (
    "model",
    "model_parameter_sweep",
    "batch_specs",
    "batch_spec_ranges",
    "batch_sizes",
    "backend",
    "backends",
    "device",
    "description",
    "provenance",
    "benchmark",
    "kv_cache_dtype",
)
_TIMED = "it configures timing; an examination runs each case as often as its checks need"
_REASONS: Mapping[str, str] = {
    "repeats": _TIMED,
    "warmup_iters": _TIMED,
    "cuda_graphs": _TIMED,
    "profile_memory": "memory is not measured",
    "output": "the command line names the run file",
    "mode": "every batch is examined once",
    "reorder_batch_thresholds": "a backend declares its own threshold",
    "chunked_prefill": "a backend chooses its own workspace",
    "parameter_sweep": "it sets options of one backend",
    "decode_backends": "backends are examined whole",
    "prefill_backends": "backends are examined whole",
    "model.num_layers": "it only repeats the call",
    "model.name": "it names the model and changes nothing",
}


def description_notes(root: Table) -> Iterator[str]:
    """Yield a note on the provenance of the file, if it states one."""
    if "provenance" in root.entries:
        yield f"provenance: {_one_line(root.entries['provenance'])}"


def unused(root: Table) -> Iterator[str]:
    """Yield a note for each key that has no effect here, with the reason."""
    for key, value in root.entries.items():
        if key == "benchmark" and isinstance(value, Table):
            yield from (not_used(f"benchmark.{name}", _REASONS.get(name)) for name in value.entries if name != "device")
        elif key not in _USED_KEYS:
            is_backend = isinstance(value, Table) and key not in _REASONS
            yield not_used(key, "it sets options of one backend" if is_backend else _REASONS.get(key))


def not_used(key: str, reason: str | None) -> str:
    """Return the note on a key that is not used."""
    return f"not used here: {key} ({reason or 'no meaning is known for this key'})"


def _one_line(tree: Tree) -> str:
    if isinstance(tree, Table):
        return "; ".join(f"{name}: {_one_line(value)}" for name, value in tree.entries.items())
    if isinstance(tree, Items):
        return " / ".join(_one_line(item) for item in tree.items)
    return tree.text


def unused_model_keys(model: Table) -> list[str]:
    """Return a note for each key of a model that has no effect here."""
    unused = [f"model.{name}" for name in model.entries if name not in _USED_MODEL_KEYS]
    return [not_used(key, _REASONS.get(key)) for key in unused]


_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_RANGE_KEYS = ("start", "stop", "step", "end_inclusive")


@dataclass(frozen=True)
class Batch:
    """One batch: its string, its place in the file, and its requests."""

    text: str
    place: Place
    requests: tuple[RequestSpec, ...]


def read_batches(root: Table, limit: int) -> list[Batch]:
    """Return every batch of the file in order, multiplied by the batch sizes; at most ``limit``.

    Raise :class:`CaseFileError` for an invalid batch, or for more than ``limit`` batches.
    """
    written: list[tuple[str, Place]] = []
    if "batch_specs" in root.entries:
        items = items_of(root.entries["batch_specs"], "batch_specs")
        written.extend((text_of(item, "a batch"), item.place) for item in items)
    if "batch_spec_ranges" in root.entries:
        for item in items_of(root.entries["batch_spec_ranges"], "batch_spec_ranges"):
            written.extend(_expand(item, limit - len(written)))
    batches = [Batch(text, place, _parse(text, place)) for text, place in written]
    if "batch_sizes" not in root.entries:
        return batches
    sizes = items_of(root.entries["batch_sizes"], "batch_sizes")
    if len(sizes) * len(batches) > limit:
        raise root.names["batch_sizes"].fault(f"more than {limit} batches", allowed="shorten a list, or split the file")
    return [_multiplied(batch, size) for size in sizes for batch in batches]


def items_of(tree: Tree, what: str) -> tuple[Tree, ...]:
    """Return the items of a non-empty list; raise :class:`CaseFileError` for any other value."""
    if not isinstance(tree, Items) or not tree.items:
        found = "an empty one" if isinstance(tree, Items) else describe(tree)
        raise tree.place.fault(f"{what} must be a list, and this is {found}", allowed="give a list")
    return tree.items


def whole_number(tree: Tree, what: str, at_least: int) -> int:
    """Return an integer of at least ``at_least``; raise :class:`CaseFileError` for any other value."""
    value = tree.value if isinstance(tree, Scalar) else None
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        shown = tree.text if isinstance(tree, Scalar) else describe(tree)
        raise tree.place.fault(f"{what} must be a whole number, at least {at_least}", value=shown, allowed="give one")
    return value


def _parse(text: str, place: Place) -> tuple[RequestSpec, ...]:
    try:
        return parse_batch(text)
    except BatchSpecError as error:
        reason = f"{error.reason} (at character {error.position + 1})"
        raise place.fault(reason, value=text, allowed=error.allowed) from error


def _multiplied(batch: Batch, size: Tree) -> Batch:
    factor = whole_number(size, "a batch size", 1)
    if len(batch.requests) > 1:
        raise batch.place.fault(
            "batch_sizes multiplies batches of one segment, and this has more",
            value=batch.text,
            allowed="leave batch_sizes out, or write the segments as batches of their own",
        )
    request = batch.requests[0]
    requests = (replace(request, count=min(request.count * factor, MAX_TOKENS)),)
    text = format_batch(requests)
    return Batch(text, batch.place, _parse(text, size.place))


def _expand(tree: Tree, room: int) -> Iterator[tuple[str, Place]]:
    """Yield the strings of one template: all combinations of its ranges in the order written, the last one fastest."""
    if not isinstance(tree, Table) or "template" not in tree.entries:
        raise tree.place.fault(
            "a range is a mapping with a template", allowed="write template: q{n}s1k, n: {start, ...}"
        )
    template = text_of(tree.entries["template"], "template")
    place = tree.entries["template"].place
    names = [name for name in tree.entries if name != "template"]
    fields = _FIELD.findall(template)
    if set(fields) != set(names) or "{" in _FIELD.sub("", template):
        raise place.fault(
            f"the template has the fields {sorted(set(fields))}, and ranges are given for {sorted(names)}",
            value=template,
            allowed="give one range a field",
        )
    ranges = [_range(tree.entries[name], name) for name in names]
    count = math.prod(len(values) for values in ranges)
    if count > room:
        raise place.fault(
            f"this template gives {count} batches",
            value=template,
            allowed=f"there is room for {max(room, 0)} more in one file: shorten a range, or split the file",
        )
    for values in itertools.product(*ranges):
        yield _filled(template, names, values), place


def _filled(template: str, names: list[str], values: tuple[int, ...]) -> str:
    for name, value in zip(names, values, strict=True):
        template = template.replace(f"{{{name}}}", str(value))
    return template


def _range(tree: Tree, name: str) -> range:
    if not isinstance(tree, Table):
        raise tree.place.fault(f"the range of {name} is a mapping", allowed="write {start, stop, step}")
    known_keys(tree, _RANGE_KEYS, "a range")
    for key in ("start", "stop"):
        if key not in tree.entries:
            raise tree.place.fault(f"the range of {name} lacks its {key}", allowed="write {start, stop, step}")
    start = whole_number(tree.entries["start"], "start", 0)
    stop = whole_number(tree.entries["stop"], "stop", 0)
    if stop > MAX_TOKENS:
        raise tree.entries["stop"].place.fault("stop is too large", value=stop, allowed=f"give at most {MAX_TOKENS}")
    step = whole_number(tree.entries["step"], "step", 1) if "step" in tree.entries else 1
    values = range(start, stop + (1 if _is_true(tree.entries.get("end_inclusive")) else 0), step)
    if not values:
        raise tree.place.fault(f"the range of {name} is empty", allowed="let stop lie beyond start")
    return values


def _is_true(tree: Tree | None) -> bool:
    if tree is None:
        return True
    if isinstance(tree, Scalar) and isinstance(tree.value, bool):
        return tree.value
    raise tree.place.fault("end_inclusive must be true or false", allowed="write true or false")


_CURRENT_NAMES: Mapping[str, str] = {
    "flash": "FLASH_ATTN",
    "triton": "TRITON_ATTN",
    "flashinfer": "FLASHINFER",
    "cutlass_mla": "CUTLASS_MLA",
    "flashinfer_mla": "FLASHINFER_MLA",
    "flash_attn_mla": "FLASH_ATTN_MLA",
    "flashattn_mla": "FLASH_ATTN_MLA",
    "flashmla": "FLASHMLA",
}
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class _Geometry:
    """One row of the model sweep: its label in ids ("" without a sweep), layer and cache."""

    label: str
    layer: LayerSpec
    cache: CacheSpec


def is_vllm_bench(root: Table) -> bool:
    """Return whether the keys of a file are those of a benchmark configuration."""
    keys = set(root.entries)
    return not keys & {"suite", "cases"} and bool(keys & {"batch_specs", "batch_spec_ranges", "model"})


def read_vllm_bench(root: Table, path: Path, over: Table | None = None) -> Suite:
    """Return the suite of a benchmark configuration: every batch with every geometry, named after the file.

    ``over`` replaces values of ``model`` and ``kv_cache_dtype``, but not values of the sweep.

    Raise :class:`CaseFileError` for an invalid case.
    """
    if not {"batch_specs", "batch_spec_ranges"} & set(root.entries):
        raise root.place.fault("the file has no batches", allowed="give batch_specs or batch_spec_ranges")
    batches = read_batches(root, MAX_CASES)
    notes = [*description_notes(root), *unused(root)]
    geometries = list(_geometries(root, notes, over))
    if len(batches) * len(geometries) > MAX_CASES:
        raise root.names["model_parameter_sweep"].fault(
            f"{len(batches)} batches of {len(geometries)} models are {len(batches) * len(geometries)} cases",
            allowed=f"at most {MAX_CASES} cases a file: split it",
        )
    requests = sum(len(batch.requests) for batch in batches) * len(geometries)
    if requests > MAX_CONTENT:
        raise root.place.fault(
            f"the cases hold {requests} requests in all", allowed=f"at most {MAX_CONTENT} a file: split it"
        )
    name = _UNSAFE.sub("-", path.stem) or "benchmark"
    cases: dict[str, Case] = {}
    repeated: dict[str, None] = {}
    for geometry in geometries:
        for batch in batches:
            case = _case(name, geometry, batch)
            if case.id in cases:
                repeated[batch.text] = None
            cases.setdefault(case.id, case)
    notes += [f"examined once, though the file has it twice: {text}" for text in repeated]
    return Suite(
        name=name,
        description=text_of(root.entries["description"], "description") if "description" in root.entries else "",
        cases=tuple(cases.values()),
        path=path,
        default_backends=_backends(root, notes),
        default_device=_device(root),
        notes=tuple(notes),
        page_defaults=page_defaults(root.entries.get("model"), over),
    )


def _case(suite: str, geometry: _Geometry, batch: Batch) -> Case:
    spec = BatchSpec(requests=batch.requests, path=implied_path(geometry.layer))
    try:
        check_meaning(geometry.layer, geometry.cache, spec)
    except SpecError as error:
        raise batch.place.fault(error.reason, value=error.value, allowed=error.allowed) from error
    return Case(
        suite=suite,
        id=f"{batch.text}.{geometry.label}" if geometry.label else batch.text,
        layer=geometry.layer,
        cache=geometry.cache,
        batch=spec,
        origin=f"{batch.place.file}:{batch.place.line}",
    )


def _backends(root: Table, notes: list[str]) -> tuple[str, ...]:
    """Return the backends of the file as ``vllm:NAME``; ``backend`` takes precedence over ``backends``, as in vLLM."""
    if "backend" in root.entries and "backends" in root.entries:
        notes.append(not_used("backends", "backend takes precedence"))
    if "backend" in root.entries:
        names = [text_of(root.entries["backend"], "backend")]
    elif "backends" in root.entries:
        given = root.entries["backends"]
        items = (given,) if isinstance(given, Scalar) else items_of(given, "backends")
        names = [text_of(item, "a backend") for item in items]
    else:
        return ()
    return tuple(dict.fromkeys(f"vllm:{_CURRENT_NAMES.get(name, name)}" for name in names))


def _device(root: Table) -> str | None:
    benchmark = root.entries.get("benchmark")
    inner = benchmark.entries.get("device") if isinstance(benchmark, Table) else None
    device = root.entries.get("device", inner)
    return None if device is None else text_of(device, "device")


def _geometries(root: Table, notes: list[str], over: Table | None) -> Iterator[_Geometry]:
    """Yield one geometry for the model, or one for each value of its sweep."""
    model = root.entries.get("model", Table(root.place, {}, {}))
    if not isinstance(model, Table):
        raise model.place.fault(f"model must be a mapping, and this is {describe(model)}", allowed="give a mapping")
    notes += unused_model_keys(model)
    if "model_parameter_sweep" not in root.entries:
        yield _geometry("", model, root, notes, over, swept=())
        return
    labels: set[str] = set()
    for position, (label, overrides) in enumerate(_sweep(root.entries["model_parameter_sweep"], notes), start=1):
        notes += [note for note in unused_model_keys(overrides) if note not in notes]
        merged = Table(overrides.place, {**model.entries, **overrides.entries}, {**model.names, **overrides.names})
        unique = label if label and label not in labels else f"{label}-{position}" if label else f"v{position}"
        labels.add(unique)
        yield _geometry(unique, merged, root, notes, over, swept=tuple(overrides.entries))


def _sweep(tree: Tree, notes: list[str]) -> Iterator[tuple[str, Table]]:
    """Yield a label and the overridden model keys for each value of a sweep, of either form."""
    if not isinstance(tree, Table) or "values" not in tree.entries:
        raise tree.place.fault(
            "a sweep is a mapping with values",
            allowed="write {param_name: num_q_heads, values: [...]}, or {values: [{...}, ...]}",
        )
    unused = [name for name in tree.entries if name not in ("values", "param_name", "label_format")]
    notes += [not_used(f"model_parameter_sweep.{name}", None) for name in unused]
    template = text_of(tree.entries["label_format"], "label_format") if "label_format" in tree.entries else ""
    param_name = tree.entries.get("param_name")
    name = None if param_name is None else text_of(param_name, "param_name")
    for value in items_of(tree.entries["values"], "values"):
        if name is not None:
            overrides = Table(value.place, {name: value}, {name: value.place})
        elif isinstance(value, Table):
            overrides = value
        else:
            raise value.place.fault(
                f"a value must be a mapping of model keys, and this is {describe(value)}",
                allowed="give mappings, or param_name beside the values",
            )
        yield _label(template, overrides, value), overrides


def _label(template: str, overrides: Table, value: Tree) -> str:
    """Return the file's own label without the backend, or the values joined, in characters allowed in an id."""
    fields = {name: tree.text for name, tree in overrides.entries.items() if isinstance(tree, Scalar)}
    joined = "-".join(fields.values())
    if isinstance(value, Scalar):
        fields["value"] = value.text
    own = re.sub(r"[_.-]*\{backend\}[_.-]*", "", template)
    text = re.sub(r"\{(\w+)\}", lambda match: fields.get(match[1], ""), own)
    return _UNSAFE.sub("-", text or joined).strip("-_.")


def _geometry(
    label: str, model: Table, root: Table, notes: list[str], over: Table | None, *, swept: Sequence[str]
) -> _Geometry:
    """Return layer and cache of a model, with ``over`` replacing all but the ``swept`` keys; errors point at keys."""
    entries: dict[str, Tree] = {}
    names: dict[str, Place] = {}
    is_mla = "kv_lora_rank" in model.entries
    for theirs, ours in LAYER_KEYS.items():
        if theirs in model.entries:
            entries[ours], names[ours] = model.entries[theirs], model.names[theirs]
        elif theirs == "num_kv_heads" and is_mla:
            entries[ours] = Scalar(model.place, 1, "1")
        elif not (theirs == "head_dim" and is_mla):
            raise model.place.fault(
                f"{theirs} is missing in model, and the sweep does not give it", allowed=f"give model.{theirs}"
            )
    if is_mla:
        mla = {key: model.entries[key] for key in MLA_KEYS if key in model.entries}
        entries["mla"] = Table(model.place, mla, {key: model.names[key] for key in mla})
        if "head_size" not in entries:
            entries["head_size"] = _latent_width(model)
    elif "v_head_dim" in model.entries:
        entries["head_size_v"] = model.entries["v_head_dim"]
    cache: dict[str, Tree] = {}
    given = {part: _replaced(over, part, swept) for part in ("layer", "cache")}
    if "block_size" in model.entries:
        cache["block_size"] = model.entries["block_size"]
    elif "block_size" not in given["cache"]:
        _note_once(notes, f"the model has no block_size: {CacheSpec().block_size} is taken")
    if "kv_cache_dtype" in root.entries:
        dtype = root.entries["kv_cache_dtype"]
        if isinstance(dtype, Scalar) and dtype.value in get_args(KVCacheDType):
            cache["kv_cache_dtype"] = dtype
        else:
            reason = f"no cache of dtype {plain(dtype)} is known here: the layer's dtype is taken"
            _note_once(notes, not_used("kv_cache_dtype", reason))
    names |= {key: value.place for key, value in given["layer"].items()}
    layer = validate(LayerSpec, Table(model.place, entries | given["layer"], names), "a model")
    places = {key: value.place for key, value in given["cache"].items()}
    return _Geometry(label, layer, validate(CacheSpec, Table(model.place, cache | given["cache"], places), "a cache"))


def _replaced(over: Table | None, part: str, swept: Sequence[str]) -> dict[str, Tree]:
    """Return the keys of the layer or the cache in ``over``, except those that a sweep sets (vLLM's names)."""
    written = None if over is None else over.entries.get(part)
    kept = {LAYER_KEYS.get(name, name) for name in swept}
    return (
        {key: value for key, value in written.entries.items() if key not in kept} if isinstance(written, Table) else {}
    )


def _latent_width(model: Table) -> Scalar:
    values = [plain(model.entries[key]) for key in ("kv_lora_rank", "qk_rope_head_dim") if key in model.entries]
    if len(values) != 2 or not all(isinstance(value, int) for value in values):
        raise model.place.fault("head_dim is missing in model", allowed="give kv_lora_rank + qk_rope_head_dim")
    return Scalar(model.place, sum(values), str(sum(values)))


def _note_once(notes: list[str], note: str) -> None:
    if note not in notes:
        notes.append(note)
