"""Backends of which only the metadata builder is driven: right ones pass, and each fault is found and named."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from torch import Tensor

from attncheck.backends.contract import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.loader import load_suite
from attncheck.harness.checks.builder import BuilderChecks
from attncheck.harness.checks.case_checks import finding_of
from attncheck.harness.checks.findings import Broken, Holds, NotExamined
from attncheck.harness.run.evaluate import Examiner
from attncheck.harness.run.selection import RunPlan

CASE = next(case for case in load_suite("smoke").cases if case.id == "mixed.NHD")
CPU = torch.device("cpu")


@dataclass
class States:
    """Metadata of a layer with a state: where that of each request lies."""

    state_indices: Tensor
    num_decodes: int = 0


class Builder(AttentionMetadataBuilder[States]):
    """A right one: a buffer of its own, refilled at every step."""

    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.pages = torch.zeros(vllm_config.scheduler_config.max_num_seqs + 64, dtype=torch.int32, device=device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> States:
        table = common_attn_metadata.block_table_tensor
        pages = self.pages[: len(table)]
        pages.copy_(table[:, 0])
        return States(pages)


class View(Builder):
    """Right as well: a view of the runner's own table."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> States:
        return States(common_attn_metadata.block_table_tensor[:, 0])


class Moves(Builder):
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> States:
        return States(common_attn_metadata.block_table_tensor[:, 0].clone())


class Counts(Builder):
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> States:
        states = super().build(common_prefix_len, common_attn_metadata)
        return replace(states, num_decodes=int((common_attn_metadata.query_start_loc_cpu.diff() > 0).sum()))


class Stale(Builder):
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> States:
        if self.pages.any():
            return States(self.pages[: len(common_attn_metadata.block_table_tensor)])
        return super().build(common_prefix_len, common_attn_metadata)


class Pads(Builder):
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> States:
        states = super().build(common_prefix_len, common_attn_metadata)
        empty = common_attn_metadata.query_start_loc_cpu.diff() == 0
        states.state_indices[empty] = states.state_indices[0].clone()
        return states


class Writes(Builder):
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> States:
        common_attn_metadata.seq_lens.clamp_(max=7)
        return super().build(common_prefix_len, common_attn_metadata)


class Reads(Builder):
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> States:
        common_attn_metadata.seq_lens.tolist()
        return super().build(common_prefix_len, common_attn_metadata)


def backend_of(builder: type[Builder]) -> type[AttentionBackend]:
    class Backend(AttentionBackend):
        builder_only = True
        get_name = staticmethod(lambda: "STATE")
        get_builder_cls = staticmethod(lambda: builder)

    return Backend


def found(builder: type[Builder], check: str) -> Any:
    return finding_of(BuilderChecks(backend_of(builder), CASE, 0, CPU, ()), check)


@pytest.mark.parametrize("builder", [Builder, View])
def test_a_right_builder_passes_and_no_level_is_called_measured(builder: type[Builder]) -> None:
    assert found(builder, "builder") == Holds()
    level = found(builder, "cudagraph")
    assert isinstance(level, NotExamined)
    assert level.graph is not None
    assert (level.graph.declared, level.graph.measured) == ("UNIFORM_BATCH", None)
    assert [(probe.level, probe.outcome) for probe in level.graph.probes] == [
        ("UNIFORM_SINGLE_TOKEN_DECODE", "passed"),
        ("UNIFORM_SINGLE_TOKEN_DECODE", "not examined"),
        ("UNIFORM_BATCH", "not examined"),
    ]


@pytest.mark.parametrize(
    ("builder", "summary"),
    [
        (
            Moves,
            snapshot(
                "declared UNIFORM_BATCH: probe 'metadata of decodes' broke: metadata.state_indices lies elsewhere than at capture"
            ),
        ),
        (
            Counts,
            snapshot(
                "declared UNIFORM_BATCH: probe 'metadata of decodes' broke: metadata.num_decodes was 4 at capture and is 2 now"
            ),
        ),
        (
            Stale,
            snapshot(
                "declared UNIFORM_BATCH: probe 'metadata of decodes' broke: metadata.state_indices names pages [9, 1], and the states of the requests lie in [2, 6]"
            ),
        ),
        (
            Pads,
            snapshot(
                "declared UNIFORM_BATCH: probe 'metadata of decodes' broke: metadata.state_indices names page 2 for padding, which is a request's"
            ),
        ),
    ],
)
def test_what_a_graph_would_read_wrongly_is_named(builder: type[Builder], summary: str) -> None:
    fault = found(builder, "cudagraph")
    assert isinstance(fault, Broken)
    assert fault.summary == summary
    assert fault.graph is not None
    assert fault.graph.measured is None


def test_a_builder_that_promises_no_graph_is_not_captured() -> None:
    class Never(Moves):
        cudagraph_support = AttentionCGSupport.NEVER

    level = found(Never, "cudagraph")
    assert isinstance(level, NotExamined)
    assert level.graph is not None
    assert level.graph.probes == ()


def test_what_a_build_changes_or_waits_for_is_reported(plain: Callable[[str], str]) -> None:
    assert plain(found(Writes, "builder").summary) == snapshot("build changed metadata.seq_lens")
    (note,) = found(Reads, "builder").notes
    assert plain(note) == snapshot(
        "build waits for the device: host read: .tolist() at tests/harness/checks/test_builder_alone.py:N in build"
    )


def test_the_other_checks_state_why_they_do_not_apply() -> None:
    plan = RunPlan(cases=(CASE,), checks=("numerics", "refusals", "builder"), device="cpu")
    loaded = LoadedBackend("STATE", "STATE", backend_of(Builder), "", "")
    undeclared: Callable[..., list[str]] = staticmethod(lambda *_: [])
    loaded.backend.unsupported_reasons = undeclared  # type: ignore[method-assign]
    outcomes = {record.check: record for record in Examiner(plan).records(CASE, loaded)}
    assert {check: record.outcome for check, record in outcomes.items()} == {
        "numerics": "unsupported",
        "refusals": "unsupported",
        "builder": "passed",
    }
    assert outcomes["numerics"].reasons[0] == snapshot(
        "only its metadata builder is driven: its kernels take a state and weights, which no case describes"
    )  # type: ignore[union-attr]
