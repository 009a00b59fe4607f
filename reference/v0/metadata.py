"""The base of a first-generation metadata object: the fields every backend's metadata starts with.

The fields and their order are vLLM's.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from torch import Tensor

from attncheck.reference.v0.placeholders import IndexMap


@dataclass
class AttentionMetadata(ABC):
    """One step's batch: prompts first, then decodes of one token each, in every row and every token field.

    A backend's metadata class is a dataclass that adds its own fields behind these. What
    :class:`~attncheck.reference.v0.builder.CommonMetadataBuilder` and
    :class:`~attncheck.reference.v0.state.CommonAttentionState` pass by keyword stands there.
    """

    num_prefills: int
    """Prompt sequences of the batch."""
    num_prefill_tokens: int
    """New tokens of the prompts."""
    num_decode_tokens: int
    """New tokens of the decodes, which is the number of decode sequences."""
    slot_mapping: Tensor
    """``[tokens]`` int64: the cache slot of every new token; -1: nothing is stored."""
    multi_modal_placeholder_index_maps: dict[str, IndexMap] | None
    """Per modality, which embedding row replaces which token; None in metadata for a capture."""
    enable_kv_scales_calculation: bool
    """Whether the cache's scales may be computed in this step; False while they must not change, as in a capture."""

    @property
    @abstractmethod
    def prefill_metadata(self) -> "AttentionMetadata | None":
        """The prompts alone, or None if the batch has none.

        Rows and tokens are cut, lengths and maxima recomputed, start locations begin at 0. Made once and kept on this
        object; whoever changes the batch in place must drop it.
        """
        raise NotImplementedError

    @property
    @abstractmethod
    def decode_metadata(self) -> "AttentionMetadata | None":
        """The decodes alone, or None if the batch has none; as ``prefill_metadata`` otherwise."""
        raise NotImplementedError

    def asdict_zerocopy(self, skip_fields: set[str] | None = None) -> dict[str, Any]:
        """Field name to value, the values being the objects themselves: nothing is copied, nothing descended into.

        ``skip_fields`` names fields to leave out (unknown names do no harm): handles that no other rank can be sent.
        Properties and attributes that are no dataclass fields do not appear.
        """
        skipped = skip_fields or ()
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in skipped}


TAttentionMetadata = TypeVar("TAttentionMetadata", bound=AttentionMetadata)
"""The metadata class of one backend."""
