"""Base class of metadata builders: what a backend computes from the common metadata once per step.

The behaviour is vLLM's.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from attncheck.reference.spec import AttentionCGSupport
from attncheck.reference.utilities.metadata import CommonAttentionMetadata

M = TypeVar("M")
"""The metadata type a builder produces."""


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Converts one step's common metadata into the metadata of a backend's ``forward``.

    One builder serves one group of layers that share a KV-cache spec. ``__init__`` (whose body subclasses call) and
    ``build`` are abstract.
    """

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    """The CUDA-graph support of the backend; cascade attention is never in a graph. If it depends on the configuration,
    :meth:`get_cudagraph_support` returns it, and this is the level for an unknown configuration.
    """

    reorder_batch_threshold: int | None = None
    """The batch must have requests of at most this query length first; ``None`` if its order does not matter."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Read the level from ``_cudagraph_support`` as well, which is its name in vLLM."""
        super().__init_subclass__(**keywords)
        if "_cudagraph_support" in vars(cls):
            cls.cudagraph_support = vars(cls)["_cudagraph_support"]

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return the level for layers of this config and spec; by default :attr:`cudagraph_support` for all.

        Override it if a level holds for some configurations only. Callers use it before they create a builder.
        """
        return cls.cudagraph_support

    @abstractmethod
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        """Store the four arguments unchanged (the list is not copied). Any object is accepted."""
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    def _init_reorder_batch_threshold(
        self, reorder_batch_threshold: int | None = 1, supports_spec_as_decode: bool = False
    ) -> None:
        """Set the instance's ``reorder_batch_threshold``; the class attribute stays.

        A backend that decodes speculated tokens (``supports_spec_as_decode``) treats requests of up to 1 +
        ``num_speculative_tokens`` rows as decodes, so the threshold is raised to that. ``None`` stays ``None``. The
        config is read only for a threshold with the flag set.
        """
        threshold = reorder_batch_threshold
        if threshold is not None and supports_spec_as_decode:
            speculative = self.vllm_config.speculative_config
            if speculative is not None and speculative.num_speculative_tokens is not None:
                threshold = max(threshold, 1 + speculative.num_speculative_tokens)
        self.reorder_batch_threshold = threshold

    @abstractmethod
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> M:
        """Return the backend's metadata for this step.

        ``common_prefix_len``: length of the prefix that all requests share, 0 for none. ``fast_build``: prefer a quick
        build over fast execution, because few layers or iterations use the result, as in drafting. Must not change the
        common metadata, because several builders get the same object.
        """
        raise NotImplementedError

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """Return the metadata for a graph capture. An override must end in ``self.build`` or in this method."""
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> M:
        """Return the metadata for drafting speculated tokens.

        ``draft_index`` is for overrides: the position in a chain of drafts, or the level in a tree of drafts.
        """
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata, fast_build=True)

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: npt.NDArray[np.int32],
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
    ) -> bool:
        """Return whether the shared prefix should be computed once for all requests; False unless overridden."""
        return False
