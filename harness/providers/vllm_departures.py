"""The table of vLLM's known departures from the reference, and the version of vLLM from which it was made.

Every entry is verified whenever vLLM is examined.
"""

from attncheck.harness.providers.answers import ABSENT
from attncheck.harness.providers.departures import Departure, Departures
from attncheck.harness.providers.vllm_changes import contract, layers, order, paths, ubatches

_NO_CHECK = "takes without a check what the reference refuses: "


_LAYOUTS = "layouts are resolved once in the engine, over six of them, and recorded in the cache config"
_BY_HAND = "fast prefill makes its metadata class by hand"
_ONE_STORAGE = "host and device tensors share storage where the device is the host; the reference keeps them apart"


def _of_micro_batches(subject: str) -> tuple[Departure, ...]:
    """Return the departures that a function for one micro-batch and a function for several have in common."""
    return (
        Departure(
            subject,
            "judgement",
            _NO_CHECK + "a cut whose tokens and requests end in different places",
            ubatches.any_end,
            tags=frozenset({"wrong end"}),
        ),
        Departure(
            subject,
            "judgement",
            "turns a batch that is not causal into causal micro-batches; the reference keeps it as it is",
            ubatches.causal_pieces,
            tags=frozenset({"not causal"}),
        ),
        Departure(
            subject,
            "drift",
            "max_seq_len is never below the whole batch's: an upper bound",
            ubatches.longest_of_the_batch,
        ),
    )


DEPARTURES = Departures(
    version="0.32.0",
    known=(
        Departure(
            "CommonAttentionMetadata",
            "drift",
            "has no seq_lens_cpu and no num_computed_tokens_cpu: an optional seq_lens_cpu_upper_bound and a method "
            "that derives the computed tokens replace them, and the fields behind them move up, so that it "
            "cannot be made by position as before",
            contract.drop_host_fields,
        ),
        Departure(
            "AttentionMetadataBuilder",
            "drift",
            "has no cudagraph_support: the attribute became private and is read through get_cudagraph_support(config, "
            "spec)",
            shows=contract.lacks_cudagraph_support,
        ),
        Departure(
            "AttentionMetadataBuilder",
            "drift",
            "has no use_cascade_attention: prefixes are no longer shared by cascade",
            contract.drop_cascade,
            tags=frozenset({"use_cascade_attention"}),
        ),
        Departure(
            "AttentionMetadataBuilder",
            "drift",
            "the threshold is forced to 1, even from None, under decode context parallelism unless a third argument "
            "declares that the backend copes",
            contract.single_token_under_dcp,
            tags=frozenset({"context parallelism"}),
        ),
        Departure(
            "AttentionMetadataBuilder",
            "drift",
            "reads the config's parallel part whatever the arguments, where the reference leaves the config alone",
            contract.need_parallel_config,
            tags=frozenset({"config not needed"}),
        ),
        Departure(
            "AttentionMetadataBuilder",
            "drift",
            "the threshold grows to 1 + 2k for k tokens drafted in parallel on the older model runner",
            contract.widen_for_parallel_drafting,
            tags=frozenset({"parallel drafting"}),
        ),
        Departure(
            "KVSharingFastPrefillMetadata",
            "drift",
            "gives both attributes a default of None, so that derived classes always have them",
            contract.give_defaults,
            tags=frozenset({"derived"}),
        ),
        Departure(
            "slice_query_start_locs",
            "judgement",
            "clips a slice that ends beyond the batch and returns fewer entries; the reference refuses it",
            ubatches.clip_slice,
            tags=frozenset({"beyond the batch"}),
        ),
        *_of_micro_batches("_make_metadata_with_slice"),
        *_of_micro_batches("split_attn_metadata"),
        Departure(
            "split_decodes_and_prefills",
            "judgement",
            _NO_CHECK + "a negative threshold",
            order.any_threshold,
            tags=frozenset({"malformed"}),
        ),
        Departure(
            "split_decodes_prefills_and_extends",
            "judgement",
            "returns the tokens of extends and of first chunks as tensors where there are first chunks",
            order.tensor_counts,
            tags=frozenset({"first chunks"}),
        ),
        Departure(
            "split_decodes_prefills_and_extends",
            "judgement",
            "counts no request and no token where all are decodes and max_query_len is a bound above the threshold",
            order.count_none,
            tags=frozenset({"decodes alone"}),
        ),
        Departure(
            "reorder_batch_to_split_decodes_and_prefills",
            "drift",
            "makes four regions (decodes, short extends, long extends, first chunks): a request with no computed "
            "token goes last, however short; those in a wrong region fill the gaps in the order of the regions",
            order.four_regions,
        ),
        Departure(
            "make_local_attention_virtual_batches",
            "drift",
            "returns a pair: the metadata, and a function from block tables to virtual ones; the first is compared",
            shows=paths.returns_a_pair,
        ),
        Departure(
            "make_local_attention_virtual_batches",
            "judgement",
            "gives a padding request a whole chunk of keys, whose pages are counted from the right end of the table "
            "(an IndexError where the table is narrower than a chunk); the reference gives it no key",
            paths.chunks_without_check,
            tags=frozenset({"padding requests"}),
        ),
        Departure(
            "make_local_attention_virtual_batches",
            "judgement",
            "max_query_len is an integer of numpy's",
            paths.numpy_maximum,
        ),
        Departure(
            "make_local_attention_virtual_batches",
            "judgement",
            _ONE_STORAGE,
            paths.one_storage,
            tags=frozenset({"storage"}),
        ),
        Departure(
            "make_local_attention_virtual_batches",
            "judgement",
            _NO_CHECK + "more new tokens than tokens",
            paths.chunks_without_check,
            tags=frozenset({"malformed"}),
        ),
        Departure(
            "make_kv_sharing_fast_prefill_common_attn_metadata",
            "drift",
            "reads the largest count of a request from a further field, max_logits_per_req, which must be set",
            shows=paths.wants_the_largest_count,
        ),
        Departure(
            "make_kv_sharing_fast_prefill_common_attn_metadata",
            "drift",
            "returns a batch without logits indices as it is; the reference refuses it",
            paths.same_batch,
            tags=frozenset({"not armed"}),
        ),
        Departure(
            "make_kv_sharing_fast_prefill_common_attn_metadata",
            "judgement",
            "computes another attention for indices that are unsorted, repeated or not the last tokens of their "
            "request; the reference refuses them",
            paths.any_indices,
            tags=frozenset({"indices that are no tail"}),
        ),
        Departure(
            "make_kv_sharing_fast_prefill_common_attn_metadata",
            "judgement",
            _ONE_STORAGE,
            paths.one_storage_of_starts,
            tags=frozenset({"storage"}),
        ),
        Departure(
            "create_fast_prefill_custom_backend",
            "drift",
            "builds from a batch without logits indices, too; the reference refuses it",
            paths.unarmed_backend,
            tags=frozenset({"not armed"}),
        ),
        Departure(
            "maybe_create_ubatch_slices",
            "judgement",
            "the end of the last micro-batch is an integer of numpy's",
            ubatches.numpy_end,
            tags=frozenset({"cut"}),
        ),
        Departure(
            "compute_causal_conv1d_metadata",
            "drift",
            "takes the start locations on the host, and the device of the results by keyword",
            parameters=(
                ("parameters.query_start_loc_p", ABSENT),
                ("parameters.query_start_loc_p_cpu", "parameter 1, required"),
                ("parameters.device", "parameter 2, required, by keyword only"),
            ),
        ),
        Departure(
            "compute_causal_conv1d_metadata",
            "judgement",
            _NO_CHECK + "start locations that decrease a little, or none at all",
            paths.accepting_decreasing_starts,
            tags=frozenset({"malformed"}),
        ),
        Departure(
            "get_dcp_local_seq_lens",
            "judgement",
            _NO_CHECK + "a rank outside the world, a negative length",
            paths.any_rank,
            tags=frozenset({"malformed"}),
        ),
        Departure(
            "get_per_layer_parameters",
            "drift",
            "recognises attention layers by their base class, and looks for the implementation among an "
            "impl's variants",
            shows=layers.skips_plain_layers,
        ),
        Departure(
            "get_per_layer_parameters",
            "judgement",
            "skips a name that no layer has; the reference refuses it",
            layers.skip_unknown,
            tags=frozenset({"an unknown layer"}),
        ),
        Departure(
            "infer_global_hyperparameters",
            "judgement",
            "writes its verdicts into the caller's first entry and returns that; the reference returns a new object",
            layers.write_into_first,
        ),
        Departure(
            "subclass_attention_backend",
            "judgement",
            "get_builder_cls of the new class fails on an instance; the reference makes it static",
            layers.unbound_builder,
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
