"""Metadata and builder of attncheck's own candidates, and the mask of a tree of drafts.

The metadata is the common metadata, and its lengths on the host. The builder reads the tree from vLLM's
``speculative_token_tree``.
"""

import ast
import itertools
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from attncheck.backends.contract import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    KVCacheSpec,
)
from attncheck.backends.declarations import block_size_reason
from attncheck.reference.utilities.metadata import SparseMetadata


@dataclass
class PagedMetadata:
    """The metadata of one step for one group of layers: the common metadata, and its lengths as numbers on the host.

    ``seq_lens`` are exact, unless the builder reads those of the host. ``tree`` is bool ``[Q, Q]`` and marks which new
    keys each row of a request with Q rows may see; None if there is no tree. The class is not frozen, because
    vLLM's wrapper for fast prefill copies its fields into an object of a derived class.
    """

    common: CommonAttentionMetadata
    query_start_loc: tuple[int, ...]
    seq_lens: tuple[int, ...]
    attention_chunk_size: int | None
    tree: torch.Tensor | None = None
    common_prefix_len: int = 0
    rswa_window: int | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows that belong to requests; padding rows follow them."""
        return self.query_start_loc[-1]

    @property
    def topk_indices(self) -> torch.Tensor | None:
        """The keys that an indexer chose for each row, as in :class:`SparseMetadata`; None without an indexer."""
        return topk_indices_of(self.common)

    @property
    def query_lens(self) -> tuple[int, ...]:
        """Number of new tokens of each request."""
        return tuple(end - start for start, end in itertools.pairwise(self.query_start_loc))

    def requests(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield ``(request, first row, end row, seq_len)`` of every request with rows; padding requests have none."""
        bounds = zip(itertools.pairwise(self.query_start_loc), self.seq_lens, strict=True)
        for request, ((start, end), seq_len) in enumerate(bounds):
            if end > start:
                yield request, start, end, seq_len


class PagedBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Builder that reads lengths as numbers, and copies the host tensors, which a model runner may refill.

    A CUDA graph would freeze these numbers. The graph support is therefore ``NEVER``, unless a candidate reads the
    tensors of ``common`` instead and declares another level.
    """

    backend: ClassVar[type[AttentionBackend]]
    metadata_cls: ClassVar[type[PagedMetadata]] = PagedMetadata
    has_exact_lens: ClassVar[bool] = True
    """Whether ``build`` reads ``seq_lens`` from the device, and waits for it.

    If False, or if the backend declares ``sync_free_build`` or ``host_lens="exact"``, it reads those of the host.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refuse_cache(self.backend, kv_cache_spec)
        self._tree = tree_of(vllm_config, device)
        refuse_tree(self.backend, self._tree)
        self._rswa_window = getattr(getattr(vllm_config, "model_config", None), "rswa_window", None)
        refuse_rswa(self.backend, self._rswa_window)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """Build the metadata. A shared prefix may be ignored, since every block table row includes its pages."""
        common, declared = common_attn_metadata, self.backend.conventions
        refuse_image_spans(self.backend, common)
        refuse_topk_indices(self.backend, common)
        waits = self.has_exact_lens and not declared.sync_free_build and declared.host_lens != "exact"
        return self.metadata_cls(
            common=with_own_host_tensors(common),
            query_start_loc=tuple(common.query_start_loc_cpu.tolist()),
            seq_lens=tuple((common.seq_lens if waits else common.seq_lens_cpu).tolist()),
            attention_chunk_size=self.kv_cache_spec.attention_chunk_size,
            tree=self._tree,
            common_prefix_len=common_prefix_len,
            rswa_window=self._rswa_window,
            **self.own_fields(common),
        )

    def own_fields(self, common: CommonAttentionMetadata) -> dict[str, Any]:
        """Return the fields of the step that ``metadata_cls`` adds to those of :class:`PagedMetadata`."""
        return {}


def with_own_host_tensors(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """Return the metadata with copies of the host tensors, which may change before ``forward``."""
    return replace(
        common,
        query_start_loc_cpu=common.query_start_loc_cpu.clone(),
        seq_lens_cpu=common.seq_lens_cpu.clone(),
        num_computed_tokens_cpu=common.num_computed_tokens_cpu.clone(),
        mm_req_doc_ranges=deepcopy(common.mm_req_doc_ranges),
        rswa_prefix_lens=None if common.rswa_prefix_lens is None else common.rswa_prefix_lens.clone(),
    )


def refuse_cache(backend: type[AttentionBackend], spec: KVCacheSpec) -> None:
    """Raise ``ValueError`` for an unsupported block size, ``NotImplementedError`` for chunks that are not declared."""
    if reason := block_size_reason(backend, spec.block_size):
        raise ValueError(f"{backend.get_name()}: {reason}")
    if spec.attention_chunk_size is not None and "local" not in backend.features:
        raise NotImplementedError(
            f"{backend.get_name()}: attention_chunk_size {spec.attention_chunk_size} is not supported"
        )


def refuse_tree(backend: type[AttentionBackend], tree: torch.Tensor | None) -> None:
    """Raise ``NotImplementedError`` for a tree if the backend does not declare the feature."""
    if tree is not None and "tree" not in backend.features:
        raise NotImplementedError(f"{backend.get_name()}: a tree of {len(tree) - 1} draft tokens is not supported")


def refuse_rswa(backend: type[AttentionBackend], rswa_window: int | None) -> None:
    """Raise ``NotImplementedError`` for first keys beyond a window if the backend does not declare the feature."""
    if rswa_window is not None and "rswa" not in backend.features:
        raise NotImplementedError(f"{backend.get_name()}: rswa_window {rswa_window} is not supported")


def refuse_image_spans(backend: type[AttentionBackend], common: CommonAttentionMetadata) -> None:
    """Raise ``NotImplementedError`` for a request with image spans if the backend does not declare the feature."""
    for request, ranges in (common.mm_req_doc_ranges or {}).items():
        if ranges and "mm_prefix" not in backend.features:
            raise NotImplementedError(
                f"{backend.get_name()}: mm_req_doc_ranges {ranges} of request {request} are not supported"
            )


def topk_indices_of(common: CommonAttentionMetadata) -> torch.Tensor | None:
    """Return ``topk_indices`` of a step's metadata; None if its layers have no indexer."""
    return common.topk_indices if isinstance(common, SparseMetadata) else None


def refuse_topk_indices(backend: type[AttentionBackend], common: CommonAttentionMetadata) -> None:
    """Raise ``NotImplementedError`` for keys that an indexer chose if the backend does not declare the feature."""
    if topk_indices_of(common) is not None and "sparse" not in backend.features:
        raise NotImplementedError(f"{backend.get_name()}: topk_indices are not supported")


def tree_of(vllm_config: Any, device: torch.device) -> torch.Tensor | None:
    """Return the mask of the tree in which drafts are verified (bool ``[Q, Q]``), or None if there is no tree."""
    speculative = getattr(vllm_config, "speculative_config", None)
    written = None if speculative is None else speculative.speculative_token_tree
    return None if written is None else tree_mask(written).to(device)


def tree_mask(speculative_token_tree: str) -> torch.Tensor:
    """Return the mask of a tree of drafts, bool ``[Q, Q]``: a row sees itself and its ancestors.

    Q is one more than the number of nodes: row 0 is the root, which the string leaves out. Each node is written as the
    choices that lead to it, parents first. Raise ``ValueError`` for a string that is no such list.

    >>> tree_mask("[(0,), (1,), (0, 0)]").int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 0, 1, 0],
            [1, 1, 0, 1]], dtype=torch.int32)
    """
    nodes = _nodes(speculative_token_tree)
    row_of = {node: row for row, node in enumerate(nodes)}
    mask = torch.zeros(len(nodes), len(nodes), dtype=torch.bool)
    for row, node in enumerate(nodes):
        for depth in range(len(node) + 1):
            ancestor = row_of.get(node[:depth])
            if ancestor is None or ancestor > row:
                raise ValueError(f"speculative_token_tree {speculative_token_tree}: {node} comes before its parent")
            mask[row, ancestor] = True
    return mask


def _nodes(written: str) -> list[tuple[int, ...]]:
    try:
        nodes = [tuple(node) for node in ast.literal_eval(written)]
    except (ValueError, SyntaxError, TypeError) as error:
        raise ValueError(f"speculative_token_tree {written!r} is no list of tuples of choices") from error
    if () in nodes:
        raise ValueError(f"speculative_token_tree {written!r} lists the root (); the tree has it without being listed")
    if len(set(nodes)) != len(nodes):
        raise ValueError(f"speculative_token_tree {written!r} lists a node twice")
    return [(), *nodes]
