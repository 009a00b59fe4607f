"""vLLM as a provider: where its utilities are, and how its objects are translated to the reference's and back.

The adapters accept several versions of vLLM: a pair instead of one object, or a missing field, does not break them.
Importing this module does not import vLLM.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from attncheck.backends import registry
from attncheck.backends.candidates.vllm.builder import their_fields
from attncheck.errors import ProviderLoadError
from attncheck.harness.providers.provider import Provider, provider_file
from attncheck.harness.providers.vllm_departures import DEPARTURES
from attncheck.reference import CommonAttentionMetadata, UBatchSlice

MODULES = (
    "vllm.v1.attention.backends.utils",
    "vllm.v1.attention.backend",
    "vllm.v1.worker.ubatch_utils",
    "vllm.v1.worker.ubatch_splitting",
)
"""Modules searched for the current generation; some exist only in some versions."""

V0_MODULES = (
    "vllm.attention.backends.utils",
    "vllm.attention.backends.abstract",
    "vllm.attention.backends.mla.utils",
    "vllm.multimodal.base",
)
"""Modules of the first generation."""


def load_vllm(ref: str) -> Provider:
    """Return the installed vLLM as a provider, or a file of functions in its objects: ``vllm:path/to/file.py``.

    A file is compared under the same known departures; fixing one of them is not a failure.

    Raises:
        ProviderLoadError: vLLM is not installed, or vLLM or the file cannot be imported.
    """
    try:
        package = importlib.import_module("vllm")
        modules = [module for name in MODULES if (module := _module(name)) is not None]
        v0 = [module for name in V0_MODULES if (module := _module(name)) is not None]
    except (Exception, SystemExit) as error:
        raise ProviderLoadError(ref, registry.import_failure(error)) from error
    installed = Provider(
        name="vllm",
        ref=ref,
        version=str(package.__version__),
        modules=modules,
        v0=v0,
        adapt=with_reference_objects,
        adapters=ADAPTERS,
        departures=DEPARTURES,
    )
    path = ref.partition(":")[2]
    if not path:
        return installed
    if not path.endswith(".py"):
        raise ProviderLoadError(ref, "is neither 'vllm' nor 'vllm:path/to/file.py'")
    return replace(
        installed,
        name=f"vllm:{Path(path).stem}",
        version=f"{installed.version}, changed by {Path(path).name}",
        modules=[provider_file(ref, path)],
        v0=[],
        departures=replace(DEPARTURES, gone=()),
    )


def _module(name: str) -> ModuleType | None:
    """Return the module, or None if this version has none of that name; other import errors are raised."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            return None
        raise


class _Nowhere:
    """A placeholder for a class that this version lacks; nothing is an instance of it."""


@cache
def _their(name: str) -> Any:
    """Return the class of this name from the first module that has it."""
    modules = [module for place in MODULES if (module := _module(place)) is not None]
    return next((getattr(module, name) for module in modules if hasattr(module, name)), _Nowhere)


class _Translation:
    """The translation of one call; it maps an object that is returned unchanged back to the original."""

    def __init__(self) -> None:
        self._handed_over: list[tuple[Any, Any]] = []

    def to_vllm(self, value: Any) -> Any:
        """Return the value in vLLM's objects."""
        if isinstance(value, list):
            return [self.to_vllm(item) for item in value]
        if isinstance(value, UBatchSlice):
            return _their("UBatchSlice")(value.request_slice, value.token_slice)
        if isinstance(value, CommonAttentionMetadata):
            theirs = _their("CommonAttentionMetadata")(**their_fields(value, _their("CommonAttentionMetadata")))
            self._handed_over.append((theirs, value))
            return theirs
        return value

    def from_vllm(self, value: Any) -> Any:
        """Return the value in the reference's objects; an object made by :meth:`to_vllm` is mapped to its original."""
        if isinstance(value, list):
            return [self.from_vllm(item) for item in value]
        if isinstance(value, _their("CommonAttentionMetadata")):
            for theirs, ours in self._handed_over:
                if value is theirs:
                    return ours
            return _our_metadata(value)
        return value


def _our_metadata(theirs: Any) -> CommonAttentionMetadata:
    """Return vLLM's metadata as the reference's.

    A missing ``seq_lens_cpu`` is vLLM's upper bound, or a copy of ``seq_lens`` if that is None.
    """
    given = {
        field.name: getattr(theirs, field.name)
        for field in fields(CommonAttentionMetadata)
        if hasattr(theirs, field.name)
    }
    if "seq_lens_cpu" not in given:
        bound = theirs.seq_lens_cpu_upper_bound
        given["seq_lens_cpu"] = theirs.seq_lens.cpu() if bound is None else bound
    if "num_computed_tokens_cpu" not in given:
        given["num_computed_tokens_cpu"] = theirs.compute_num_computed_tokens().cpu()
    return CommonAttentionMetadata(**given)


def with_reference_objects(target: Any) -> Any:
    """Return a function of vLLM's that takes and returns the reference's objects; a class is returned as it is."""
    if not inspect.isfunction(target):
        return target

    def call(*positional: Any, **arguments: Any) -> Any:
        one = _Translation()
        given = {name: one.to_vllm(value) for name, value in arguments.items()}
        return one.from_vllm(target(*map(one.to_vllm, positional), **given))

    return call


def _first_of_pair(target: Callable[..., Any]) -> Callable[..., Any]:
    """Newer versions return the metadata, and a function that maps any other block table to a virtual one."""

    def call(**arguments: Any) -> Any:
        one = _Translation()
        given = {name: one.to_vllm(value) for name, value in arguments.items()}
        returned = target(**given)
        if not isinstance(returned, tuple):
            return one.from_vllm(returned)
        metadata, virtual_table = returned
        table = given["common_attn_metadata"].block_table_tensor
        if not torch.equal(virtual_table(table + 1000), metadata.block_table_tensor + 1000):
            raise ValueError("the function beside the metadata takes other blocks of a table than the metadata has")
        return one.from_vllm(metadata)

    return call


def _with_mamba_spec(target: Callable[..., Any]) -> Callable[..., Any]:
    """Pass the cache's spec as a MambaSpec, the only kind that vLLM accepts here."""

    def call(kv_cache_spec: Any, **arguments: Any) -> Any:
        home = _module("vllm.v1.kv_cache_interface")
        made: Any = home and home.MambaSpec(
            block_size=kv_cache_spec.block_size,
            shapes=(),
            dtypes=(),
            num_speculative_blocks=kv_cache_spec.num_speculative_blocks,
        )
        return target(kv_cache_spec=made, **arguments)

    return call


def _with_device(target: Callable[..., Any]) -> Callable[..., Any]:
    """Newer versions take the start locations on the host, and the device of the results."""

    def call(query_start_loc_p: torch.Tensor) -> Any:
        if "device" in inspect.signature(target).parameters:
            return target(query_start_loc_p.cpu(), device=query_start_loc_p.device)
        return target(query_start_loc_p)

    return call


def _with_attention_layers(target: Callable[..., Any]) -> Callable[..., Any]:
    """Newer versions recognise an attention layer by its base class, and not by its attribute."""

    def call(vllm_config: Any, layer_names: list[str], cls_: type) -> Any:
        ours = vllm_config.compilation_config.static_forward_context
        theirs = {name: _attention_layer(layer) if hasattr(layer, "impl") else layer for name, layer in ours.items()}
        config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=theirs))
        return target(config, layer_names, cls_)

    return call


def _attention_layer(layer: Any) -> Any:
    """Return ``layer`` as an instance of vLLM's base class, if that exists."""
    home = _module("vllm.model_executor.layers.attention_layer_base")
    if home is None:
        return layer
    base = home.AttentionLayerBase
    made = type("Layer", (base,), dict.fromkeys(base.__abstractmethods__))()
    made.impl = layer.impl
    return made


def _with_translating_builder(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backend with a builder that accepts the reference's metadata."""

    def call(prefix: str, underlying_attn_backend: type) -> Any:
        backend: Any = target(prefix, underlying_attn_backend)
        builder: Any = backend.get_builder_cls()

        class Builder(builder):  # type: ignore[misc]
            def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
                theirs = _Translation().to_vllm(common_attn_metadata)
                return super().build(common_prefix_len, theirs, fast_build)

        return type(backend.__name__, (backend,), {"get_builder_cls": staticmethod(lambda: Builder)})

    return call


ADAPTERS = {
    "make_local_attention_virtual_batches": _first_of_pair,
    "compute_causal_conv1d_metadata": _with_device,
    "get_per_layer_parameters": _with_attention_layers,
    "create_fast_prefill_custom_backend": _with_translating_builder,
    "mamba_get_block_table_tensor": _with_mamba_spec,
}
