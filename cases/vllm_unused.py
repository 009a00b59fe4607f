"""The keys of vLLM's benchmark configurations that are used, and a note on each that is not."""

from collections.abc import Iterator, Mapping

from attncheck.cases.tree import Items, Table, Tree

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
