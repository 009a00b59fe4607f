"""Backends of which only the metadata builder is driven: right ones pass, and each fault is found and named."""

from dataclasses import dataclass, replace

import pytest
import torch
from inline_snapshot import snapshot
from torch import Tensor

from attncheck.backends.contract import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.loader import load_suite
from attncheck.harness.checks.builder import BuilderChecks
from attncheck.harness.checks.case_checks import finding_of
from attncheck.harness.checks.findings import Holds, NotExamined
from attncheck.harness.run.evaluate import Examiner
from attncheck.harness.run.selection import RunPlan

CASE = next(case for case in load_suite("smoke").cases if case.id == "mixed.NHD")


@dataclass
class States:
    """Metadata of a layer with a state: where that of each request lies."""

    state_indices: Tensor
    num_decodes: int = 0


class Builder(AttentionMetadataBuilder[States]):
    """A right one: a buffer of its own, refilled at every step."""

    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.pages = torch.zeros(vllm_config.scheduler_config.max_num_seqs + 64, dtype=torch.int32, device=device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        table = common_attn_metadata.block_table_tensor
        return States(self.pages[: len(table)].copy_(table[:, 0]))


def right(builder, common):
    return Builder.build(builder, 0, common)


def view(_builder, common):
    """Right as well: a view of the runner's own table."""
    return States(common.block_table_tensor[:, 0])


def moves(_builder, common):
    return States(common.block_table_tensor[:, 0].clone())


def counts(builder, common):
    return replace(right(builder, common), num_decodes=int((common.query_start_loc_cpu.diff() > 0).sum()))


def stale(builder, common):
    return States(builder.pages[: len(common.block_table_tensor)]) if builder.pages.any() else right(builder, common)


def pads(builder, common):
    states = right(builder, common)
    states.state_indices[common.query_start_loc_cpu.diff() == 0] = states.state_indices[0].clone()
    return states


def writes(builder, common):
    common.seq_lens.clamp_(max=7)
    return right(builder, common)


def reads(builder, common):
    common.seq_lens.tolist()
    return right(builder, common)


def backend_of(build, **members):
    class Driven(Builder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            return build(self, common_attn_metadata)

    builder = type("Driven", (Driven,), members)

    class Backend(AttentionBackend):
        builder_only = True
        get_name = staticmethod(lambda: "STATE")
        get_builder_cls = staticmethod(lambda: builder)

    return Backend


def found(build, check, **members):
    return finding_of(BuilderChecks(backend_of(build, **members), CASE, 0, torch.device("cpu"), ()), check)


@pytest.mark.parametrize("build", [right, view])
def test_a_right_builder_passes_and_no_level_is_called_measured(build):
    assert found(build, "builder") == Holds()
    level = found(build, "cudagraph")
    assert isinstance(level, NotExamined)
    assert (level.graph.declared, level.graph.measured) == ("UNIFORM_BATCH", None)
    assert [(probe.level, probe.outcome) for probe in level.graph.probes] == [
        ("UNIFORM_SINGLE_TOKEN_DECODE", "passed"),
        ("UNIFORM_SINGLE_TOKEN_DECODE", "not examined"),
        ("UNIFORM_BATCH", "not examined"),
    ]


@pytest.mark.parametrize(
    ("build", "fault"),
    [
        (moves, "state_indices lies elsewhere than at capture"),
        (counts, "num_decodes was 4 at capture and is 2 now"),
        (stale, "state_indices names pages [9, 1], and the states of the requests lie in [2, 6]"),
        (pads, "state_indices names page 2 for padding, which is a request's"),
    ],
)
def test_what_a_graph_would_read_wrongly_is_named(build, fault):
    level = found(build, "cudagraph")
    assert level.summary == f"declared UNIFORM_BATCH: probe 'metadata of decodes' broke: metadata.{fault}"
    assert level.graph.measured is None


def test_a_builder_that_promises_no_graph_is_not_captured():
    level = found(moves, "cudagraph", cudagraph_support=AttentionCGSupport.NEVER)
    assert isinstance(level, NotExamined)
    assert level.graph.probes == ()


def test_what_a_build_changes_or_waits_for_is_reported(plain):
    assert found(writes, "builder").summary == "build changed metadata.seq_lens"
    (note,) = found(reads, "builder").notes
    assert plain(note) == snapshot(
        "build waits for the device: host read: .tolist() at tests/harness/checks/test_builder_alone.py:N in reads"
    )


def test_the_other_checks_state_why_they_do_not_apply():
    plan = RunPlan(cases=(CASE,), checks=("numerics", "refusals", "builder"), device="cpu")
    backend = backend_of(right)
    backend.unsupported_reasons = staticmethod(lambda *_: [])
    loaded = LoadedBackend("STATE", "STATE", backend, "", "")
    records = {record.check: record for record in Examiner(plan).records(CASE, loaded)}
    outcomes = {check: record.outcome for check, record in records.items()}
    assert outcomes == {"numerics": "unsupported", "refusals": "unsupported", "builder": "passed"}
    assert records["numerics"].reasons[0].startswith("only its metadata builder is driven: ")
