"""Departures of vLLM's classes: the common metadata, the builder's base, the protocol of fast prefill."""

from collections.abc import Callable
from dataclasses import MISSING, fields, make_dataclass
from typing import Any, Protocol, runtime_checkable

from attncheck.reference import CommonAttentionMetadata


def drop_host_fields(target: type[CommonAttentionMetadata]) -> type[Any]:
    """Return the dataclass with an upper bound of the lengths instead of two fields on the host."""
    gone = ("seq_lens_cpu", "num_computed_tokens_cpu")
    kept = [(each.name, Any, each) for each in fields(target) if each.name not in gone and each.default is MISSING]
    optional = [(each.name, Any, each.default) for each in fields(target) if each.default is not MISSING]
    return make_dataclass("CommonAttentionMetadata", [*kept, *optional, ("seq_lens_cpu_upper_bound", Any, None)])


def _with_threshold(target: type[Any], change: Callable[[Any], None]) -> type[Any]:
    class Builder(target):  # type: ignore[misc]
        def _init_reorder_batch_threshold(self, *arguments: Any) -> None:
            super()._init_reorder_batch_threshold(*arguments)
            change(self)

    return Builder


def need_parallel_config(target: type[Any]) -> type[Any]:
    """Return a builder that reads the config's parallel part."""
    return _with_threshold(target, lambda builder: builder.vllm_config.parallel_config)


def single_token_under_dcp(target: type[Any]) -> type[Any]:
    """Return a builder whose threshold is 1 under decode context parallelism."""

    def change(builder: Any) -> None:
        if builder.vllm_config.parallel_config.decode_context_parallel_size > 1:
            builder.reorder_batch_threshold = 1

    return _with_threshold(target, change)


def widen_for_parallel_drafting(target: type[Any]) -> type[Any]:
    """Return a builder that counts every drafted token twice if it counts drafted tokens at all."""

    class Builder(target):  # type: ignore[misc]
        def _init_reorder_batch_threshold(self, reorder_batch_threshold: Any = 1, as_decode: bool = False) -> None:
            drafts = self.vllm_config.speculative_config.num_speculative_tokens
            super()._init_reorder_batch_threshold(reorder_batch_threshold, as_decode)
            if as_decode and reorder_batch_threshold is not None and drafts is not None:
                self.reorder_batch_threshold = max(reorder_batch_threshold, 1 + 2 * drafts)

    return Builder


def drop_cascade(target: type[Any]) -> type[Any]:
    """Return a builder without ``use_cascade_attention``."""

    def absent(_: Any) -> Any:
        raise AttributeError("use_cascade_attention")

    return type("Builder", (target,), {"use_cascade_attention": property(absent)})


def give_defaults(_: type[Any]) -> type[Any]:
    """Return a protocol whose attributes are None by default."""

    @runtime_checkable
    class KVSharingFastPrefillMetadata(Protocol):
        logits_indices_padded: Any = None
        num_logits_indices: Any = None

    return KVSharingFastPrefillMetadata


def lacks_cudagraph_support(builder: type[Any]) -> bool:
    """Return whether a builder lacks the attribute ``cudagraph_support``."""
    return not hasattr(builder, "cudagraph_support")
