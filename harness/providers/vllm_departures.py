"""The one table of how vLLM is known to depart from the reference, and from which version it was made.

Every entry is verified whenever vLLM is examined.
"""

from types import SimpleNamespace
from typing import Any

import torch

from attncheck.harness.providers.answers import REFUSAL
from attncheck.harness.providers.departures import Departure, Departures

_NO_CHECK = "takes without a check what the reference refuses: "


def _returns_a_pair(function: Any) -> bool:
    return "tuple" in str(function.__annotations__.get("return"))


def _wants_the_largest_count(function: Any) -> bool:
    """Whether an armed batch that lacks the new field is refused."""
    starts, lens = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    batch = SimpleNamespace(
        max_query_len=3,
        logits_indices_padded=torch.tensor([2]),
        num_logits_indices=1,
        num_reqs=1,
        query_start_loc=starts,
        seq_lens=lens,
        max_logits_per_req=None,
    )
    try:
        function(batch)
    except AssertionError:
        return True
    except AttributeError:  # it went on, to a field this batch has not
        return False
    return False


def _skips_plain_layers(function: Any) -> bool:
    """Whether a layer that has an ``impl``, and no base class of vLLM's, is left out."""
    layers = {"layer": SimpleNamespace(impl=SimpleNamespace(scale=1.0))}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    return not function(config, ["layer"], SimpleNamespace)


_LAYOUTS = "layouts are resolved once in the engine, over six of them, and recorded in the cache config"
_BY_HAND = "fast prefill makes its metadata class by hand"
_ONE_STORAGE = "host and device tensors share storage where the device is the host; the reference keeps them apart"


def _of_micro_batches(subject: str, one: str) -> tuple[Departure, ...]:
    """What holds for one micro-batch and for many alike; ``one``: where the metadata of one stands in the answer."""
    return (
        Departure(
            subject,
            "judgement",
            "turns a batch that is not causal into causal micro-batches; the reference keeps it as it is",
            places=(f"{one}.causal",),
            tags=frozenset({"not causal"}),
        ),
        Departure(
            subject,
            "drift",
            "max_seq_len is never below the whole batch's: an upper bound",
            places=(f"{one}.max_seq_len",),
        ),
        Departure(
            subject,
            "judgement",
            _NO_CHECK + "a cut whose tokens and requests end in different places",
            places=(REFUSAL,),
            tags=frozenset({"wrong end"}),
        ),
    )


DEPARTURES = Departures(
    version="0.32.0",
    known=(
        Departure(
            "CommonAttentionMetadata",
            "drift",
            "has no seq_lens_cpu and no num_computed_tokens_cpu: an optional seq_lens_cpu_upper_bound and a method "
            "that derives the computed tokens stand in their place, and the fields behind them move up, so that it "
            "cannot be made by position as before",
            places=("returned.required", REFUSAL),
        ),
        Departure(
            "AttentionMetadataBuilder",
            "drift",
            "has no cudagraph_support: the attribute became private and is read through get_cudagraph_support(config, "
            "spec)",
            places=(REFUSAL,),
            tags=frozenset({"cudagraph_support"}),
        ),
        Departure(
            "AttentionMetadataBuilder",
            "drift",
            "has no use_cascade_attention: prefixes are no longer shared by cascade",
            places=(REFUSAL,),
            tags=frozenset({"use_cascade_attention"}),
        ),
        Departure(
            "AttentionMetadataBuilder",
            "drift",
            "the threshold is forced to 1, even from None, under decode context parallelism unless a third argument "
            "says that the backend copes",
            places=("returned.of the instance",),
            tags=frozenset({"context parallelism"}),
        ),
        Departure(
            "AttentionMetadataBuilder",
            "drift",
            "reads the config's parallel part whatever the arguments, where the reference leaves the config alone",
            places=(REFUSAL,),
            tags=frozenset({"config not needed"}),
        ),
        Departure(
            "AttentionMetadataBuilder",
            "drift",
            "the threshold grows to 1 + 2k for k tokens drafted in parallel on the older model runner",
            places=("returned.of the instance",),
            tags=frozenset({"parallel drafting"}),
        ),
        Departure(
            "KVSharingFastPrefillMetadata",
            "drift",
            "gives both attributes a default of None, so that derived classes always have them",
            places=("returned",),
            tags=frozenset({"derived"}),
        ),
        Departure(
            "slice_query_start_locs",
            "judgement",
            "clips a slice that ends beyond the batch and returns fewer entries; the reference refuses it",
            places=(REFUSAL,),
            tags=frozenset({"beyond the batch"}),
        ),
        *_of_micro_batches("_make_metadata_with_slice", "returned.metadata"),
        *_of_micro_batches("split_attn_metadata", "returned[]"),
        Departure(
            "split_decodes_and_prefills",
            "drift",
            "has a further parameter treat_short_extends_as_decodes; equal at its default",
            places=("parameters.treat_short_extends_as_decodes",),
        ),
        Departure(
            "split_decodes_and_prefills",
            "judgement",
            _NO_CHECK + "a negative threshold",
            places=(REFUSAL,),
            tags=frozenset({"malformed"}),
        ),
        Departure(
            "reorder_batch_to_split_decodes_and_prefills",
            "drift",
            "makes four regions (decodes, short extends, long extends, first chunks): a request with no computed token "
            "goes last, however short",
            places=("returned", "arguments.input_batch"),
            tags=frozenset({"first chunks"}),
        ),
        Departure(
            "reorder_batch_to_split_decodes_and_prefills",
            "drift",
            "another order within the two parts; who is in which part is equal",
            places=("arguments.input_batch.req_ids",),
        ),
        Departure(
            "make_local_attention_virtual_batches",
            "drift",
            "returns a pair: the metadata, and a function from block tables to virtual ones; the first is compared",
            shows=_returns_a_pair,
        ),
        Departure(
            "make_local_attention_virtual_batches",
            "judgement",
            "gives a padding request a whole chunk of keys, whose pages are counted from the right end of the table "
            "(an IndexError where the table is narrower than a chunk); the reference gives it no key",
            places=(
                "returned.metadata.seq_lens",
                "returned.metadata.num_computed_tokens_cpu",
                "returned.metadata.block_table_tensor",
                "returned.metadata.max_seq_len",
                REFUSAL,
            ),
            tags=frozenset({"padding requests"}),
        ),
        Departure(
            "make_local_attention_virtual_batches",
            "judgement",
            "max_query_len is an integer of numpy's",
            places=("returned.metadata.max_query_len.type",),
        ),
        Departure(
            "make_local_attention_virtual_batches",
            "judgement",
            _ONE_STORAGE,
            places=("returned",),
            tags=frozenset({"storage"}),
        ),
        Departure(
            "make_local_attention_virtual_batches",
            "judgement",
            _NO_CHECK + "more new tokens than tokens",
            places=(REFUSAL,),
            tags=frozenset({"malformed"}),
        ),
        Departure(
            "make_kv_sharing_fast_prefill_common_attn_metadata",
            "drift",
            "reads the largest count of a request from a further field, max_logits_per_req, which must be set",
            shows=_wants_the_largest_count,
        ),
        Departure(
            "make_kv_sharing_fast_prefill_common_attn_metadata",
            "drift",
            "returns a batch without logits indices as it is; the reference refuses it",
            places=(REFUSAL,),
            tags=frozenset({"not armed"}),
        ),
        Departure(
            "make_kv_sharing_fast_prefill_common_attn_metadata",
            "judgement",
            "computes another attention for indices that are unsorted, repeated or not the last tokens of their "
            "request; the reference refuses them",
            places=(REFUSAL,),
            tags=frozenset({"indices that are no tail"}),
        ),
        Departure(
            "make_kv_sharing_fast_prefill_common_attn_metadata",
            "judgement",
            _ONE_STORAGE,
            places=("returned",),
            tags=frozenset({"storage"}),
        ),
        Departure(
            "create_fast_prefill_custom_backend",
            "drift",
            "builds from a batch without logits indices, too; the reference refuses it",
            places=(REFUSAL,),
            tags=frozenset({"not armed"}),
        ),
        Departure(
            "compute_causal_conv1d_metadata",
            "drift",
            "takes the start locations on the host, and the device of the results by keyword",
            places=("parameters",),
        ),
        Departure(
            "compute_causal_conv1d_metadata",
            "judgement",
            _NO_CHECK + "start locations that decrease a little, or none at all",
            places=(REFUSAL,),
            tags=frozenset({"malformed"}),
        ),
        Departure(
            "get_dcp_local_seq_lens",
            "judgement",
            _NO_CHECK + "a rank outside the world, a negative length",
            places=(REFUSAL,),
            tags=frozenset({"malformed"}),
        ),
        Departure(
            "get_per_layer_parameters",
            "drift",
            "recognises attention layers by their base class, and looks for the implementation among an "
            "impl's variants",
            shows=_skips_plain_layers,
        ),
        Departure(
            "get_per_layer_parameters",
            "judgement",
            "skips a name that no layer has; the reference refuses it",
            places=(REFUSAL,),
            tags=frozenset({"an unknown layer"}),
        ),
        Departure(
            "infer_global_hyperparameters",
            "judgement",
            "writes its verdicts into the caller's first entry and returns that; the reference returns a new object",
            places=("arguments.per_layer_params.layer 0.has_same_",),
        ),
        Departure(
            "subclass_attention_backend",
            "judgement",
            "get_builder_cls of the new class fails on an instance; the reference makes it static",
            places=("returned.builder, on an instance",),
        ),
    ),
    gone=(
        ("v0.*", "the first generation was removed"),
        ("KVCacheLayoutType", _LAYOUTS),
        ("*_kv_cache_layout", _LAYOUTS),
        ("subclass_attention_metadata", _BY_HAND),
        ("KV_SHARING_FAST_PREFILL_METADATA_FIELDS", _BY_HAND),
    ),
)
