"""Base class of first-generation metadata: the fields with which every backend's metadata starts.

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

    A backend's metadata class is a dataclass that adds its own fields after these. They include the keywords that
    :class:`~attncheck.reference.v0.builder.CommonMetadataBuilder` and
    :class:`~attncheck.reference.v0.state.CommonAttentionState` pass.
    """

    num_prefills: int
    """Prompt sequences of the batch."""
    num_prefill_tokens: int
    """New tokens of the prompts."""
    num_decode_tokens: int
    """New tokens of the decodes, equal to the number of decode sequences."""
    slot_mapping: Tensor
    """``[tokens]`` int64: the cache slot of every new token; -1 if it is not stored."""
    multi_modal_placeholder_index_maps: dict[str, IndexMap] | None
    """Per modality, which embedding row replaces which token; None in metadata for a capture."""
    enable_kv_scales_calculation: bool
    """Whether the cache's scales may be computed in this step; False if they must not change, as in a capture."""

    @property
    @abstractmethod
    def prefill_metadata(self) -> "AttentionMetadata | None":
        """The prompts alone, or None if the batch has none.

        Rows and tokens are sliced, lengths and maxima recomputed, and start locations begin at 0. The result is cached
        on this object; code that changes the batch in place must clear it.
        """
        raise NotImplementedError

    @property
    @abstractmethod
    def decode_metadata(self) -> "AttentionMetadata | None":
        """The decodes alone, or None if the batch has none; otherwise like ``prefill_metadata``."""
        raise NotImplementedError

    def asdict_zerocopy(self, skip_fields: set[str] | None = None) -> dict[str, Any]:
        """Return the dataclass fields as a dict of the field values themselves, without copies and without recursion.

        ``skip_fields`` names fields to leave out, such as handles that cannot be sent to another rank; unknown names
        are ignored. Properties and attributes that are not dataclass fields are not included.
        """
        skipped = skip_fields or ()
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in skipped}


TAttentionMetadata = TypeVar("TAttentionMetadata", bound=AttentionMetadata)
"""The metadata class of one backend."""
