"""Claims about graphs besides the level: examined where declared, false ones fail the check, others are listed."""

from dataclasses import replace

import pytest
import torch
from made_cases import make_case

from attncheck.backends.mutants import graphs
from attncheck.backends.paged_metadata import PagedBuilder
from attncheck.harness.checks.cudagraph.check import judge_level, measure_level
from attncheck.harness.checks.cudagraph.replay import ProbeProblems
from attncheck.harness.checks.findings import Holds
from attncheck.reference.spec import AttentionCGSupport, LayerSpec
from attncheck.reports.analysis.graph_levels import notes_of

CPU = torch.device("cpu")
LAYER = LayerSpec(num_heads=2, num_kv_heads=1, head_size=16, dtype="float32")
CASE = make_case((3, 9), layer=LAYER, cache={"block_size": 4})
TABLE, DRAFT = "supports_update_block_table", "supports_draft_decode_metadata_update"
VARLEN, MISMATCH = "get_varlen_cudagraph_max_query_len", "supports_device_cpu_query_lens_mismatch"


def with_table(metadata, table, slots):
    return replace(metadata, common=replace(metadata.common, block_table_tensor=table, slot_mapping=slots))


class PassesTheTable(PagedBuilder):
    """Puts the other table into a copy of the metadata, as FLASH_ATTN does."""

    supports_update_block_table = True

    def update_block_table(self, metadata, block_table, slot_mapping):
        return with_table(metadata, block_table, slot_mapping)


class KeepsTheTable(PassesTheTable):
    """Returns the metadata as they are."""

    def update_block_table(self, metadata, block_table, slot_mapping):
        return metadata


class CopiesTheTable(PassesTheTable):
    """Has a table of its own, which only ``build`` fills: a graph reads the one of ``build``."""

    def build(self, *arguments, **keywords):
        metadata = super().build(*arguments, **keywords)
        given = metadata.common.block_table_tensor
        if not hasattr(self, "table"):
            self.table = given.new_zeros(64, given.shape[1])
        self.table[: len(given)] = given
        return with_table(metadata, self.table[: len(given)], metadata.common.slot_mapping)


class CopiesBothTables(CopiesTheTable):
    """Fills its own table with the other one, too."""

    def update_block_table(self, metadata, block_table, slot_mapping):
        self.table[: len(block_table)] = block_table
        return with_table(metadata, self.table[: len(block_table)], slot_mapping)


class ReadsTheBuffers(PagedBuilder):
    """Has nothing to update: ``forward`` reads the lengths in the buffers of the model runner, as TRITON_ATTN does."""

    supports_draft_decode_metadata_update = True

    def update_draft_decode_metadata(self, metadata):
        pass


class CopiesTheLengths(ReadsTheBuffers):
    """Has lengths of its own, which only ``build`` fills."""

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not hasattr(self, "lens"):
            self.lens = torch.zeros(64, dtype=torch.int32, device=self.device)
        metadata.plan = self.lens[: common_attn_metadata.num_reqs]
        metadata.plan.copy_(common_attn_metadata.seq_lens)
        return metadata


class UpdatesTheLengths(CopiesTheLengths):
    """Copies the lengths again inside the graph."""

    def update_draft_decode_metadata(self, metadata):
        metadata.plan.copy_(metadata.common.seq_lens)


class Backend(graphs.Base):
    """Reads the lengths of the builder if it has any."""

    class Impl(graphs.PlannedImpl):
        def locate(self, metadata, num_rows):
            return graphs.locate_by(metadata.common, num_rows, metadata.plan)


def measured(backend):
    questions = ProbeProblems(CASE, 0, CPU)
    questions.probes = tuple(probe for probe in questions.probes if probe.name in ("drafting", "buckets"))
    return measure_level(backend, questions, CPU)


def backend_of(builder, **members):
    return type("Wrong", (Backend,), {"Builder": builder, **members})


@pytest.mark.parametrize(
    ("builder", "claim", "wrong"),
    [
        (PassesTheTable, TABLE, ""),
        (CopiesBothTables, TABLE, ""),
        (ReadsTheBuffers, DRAFT, ""),
        (UpdatesTheLengths, DRAFT, ""),
        (KeepsTheTable, TABLE, "step without a graph"),
        (CopiesTheTable, TABLE, "right without a graph"),
        (CopiesTheLengths, DRAFT, "right without a graph"),
    ],
)
def test_a_false_claim_fails_the_check_and_lowers_no_level(builder, claim, wrong):
    measurement = measured(backend_of(builder))
    assert measurement.reached is AttentionCGSupport.ALWAYS
    (found,) = measurement.levels.claims
    assert (found.name, found.value, found.outcome) == (claim, True, "failed" if wrong else "passed")
    finding = judge_level(measurement)
    if not wrong:
        assert isinstance(finding, Holds)
        assert notes_of(measurement.levels) == ()
        return
    assert finding.summary.startswith(f"declares {claim}, and ")
    assert wrong in finding.summary
    assert notes_of(measurement.levels) == (f"{claim} is declared, failed",)


def test_claims_without_a_probe_are_listed_as_not_examined():
    class Varlen(PagedBuilder):
        @classmethod
        def get_varlen_cudagraph_max_query_len(cls, vllm_config, kv_cache_spec):
            return 1 + vllm_config.speculative_config.num_speculative_tokens

    members = {MISMATCH: classmethod(lambda _: True), "level": AttentionCGSupport.UNIFORM_BATCH}
    levels = measured(backend_of(Varlen, **members)).levels
    assert [(each.name, each.value, each.outcome) for each in levels.claims] == [
        (VARLEN, 4, "not examined"),
        (MISMATCH, True, "not examined"),
    ]
    assert notes_of(levels) == tuple(f"{name} is declared, not examined" for name in (VARLEN, MISMATCH))


def test_without_a_right_graph_no_claim_is_examined():
    class Reads(Backend):
        level = AttentionCGSupport.NEVER
        Builder = PassesTheTable

        class Impl(Backend.Impl):
            def locate(self, metadata, num_rows):
                metadata.common.seq_lens.tolist()
                return super().locate(metadata, num_rows)

    (claim,) = measured(Reads).levels.claims
    assert (claim.outcome, claim.reason) == ("not examined", "no probe of a graph passed")
