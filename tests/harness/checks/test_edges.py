"""Faults at the edges of arithmetic, and in batches of unequal drafts or with padding, as smoke finds them."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attncheck.backends.mutants import graphs
from attncheck.backends.mutants.plain import Base, PlainBuilder, PlainImpl, causal_conv1d
from attncheck.backends.paged_metadata import PagedBuilder
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.loader import load_suite
from attncheck.cases.model import Case
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.reports.run_file.records import Failed, Record

SMOKE = {case.id: case for case in load_suite("smoke")}


class StartsAtZero(PlainImpl):
    """The running maximum of the scores starts at 0."""

    def state(self, scores: Tensor, values: Tensor, *, has_sinks: bool) -> Any:
        top = scores.amax(-1, keepdim=True).clamp(min=0.0)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        weights = weights / total.masked_fill(total == 0, 1.0)
        out = torch.einsum("hqk,khd->qhd", weights, values[:, self.kv_head(values.device)])
        return out, (top + total.log()).squeeze(-1).T


class HidesByNumber(PlainImpl):
    """Hidden keys get the score ``hidden``, not -inf."""

    hidden = -1e4

    def state(self, scores: Tensor, values: Tensor, *, has_sinks: bool) -> Any:
        scores = scores.masked_fill(torch.isneginf(scores), self.hidden)
        return super().state(scores, values, has_sinks=has_sinks)


class CapsLast(PlainImpl):
    """The cap is applied to the masked scores."""

    def state(self, scores: Tensor, values: Tensor, *, has_sinks: bool) -> Any:
        scores = scores.masked_fill(torch.isneginf(scores), -(self.logits_soft_cap or torch.inf))
        return super().state(scores, values, has_sinks=has_sinks)


class CountsTheTile(PlainImpl):
    """Places behind the last key, to the end of a tile of 32, have the score -cap and the value 0."""

    def state(self, scores: Tensor, values: Tensor, *, has_sinks: bool) -> Any:
        rest = -scores.shape[-1] % 32
        beside = torch.full((*scores.shape[:2], rest), -(self.logits_soft_cap or torch.inf))
        return super().state(torch.cat([scores, beside], dim=-1), padded(values, rest), has_sinks=has_sinks)


def padded(values: Tensor, count: int) -> Tensor:
    return torch.cat([values, values.new_zeros(count, *values.shape[1:])])


class Regular(PlainBuilder):
    """If ``is_uniform`` holds for the metadata, all requests get an equal share of the rows."""

    is_uniform: Callable[[Any, int], bool]

    def __init__(self, spec: Any, names: Any, config: Any, device: Any) -> None:
        super().__init__(spec, names, config, device)
        self.drafts = config.speculative_config.num_speculative_tokens if config.speculative_config else 0

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common = common_attn_metadata
        if type(self).is_uniform(common, self.drafts):
            each = common.num_actual_tokens // common.num_reqs
            starts = torch.arange(common.num_reqs + 1, dtype=torch.int32) * each
            common = replace(common, query_start_loc=starts, query_start_loc_cpu=starts)
        return super().build(common_prefix_len, common, fast_build)


def by_the_longest(common: Any, _drafts: int) -> bool:
    return bool(common.num_actual_tokens == common.num_reqs * common.max_query_len)


def by_the_remainder(common: Any, _drafts: int) -> bool:
    return bool(common.num_actual_tokens % common.num_reqs == 0 and common.max_query_len == 1)


def by_the_config(common: Any, drafts: int) -> bool:
    return bool(drafts and common.max_query_len == 1 + drafts)


def tail_of_the_rows(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """The state of the last sequence comes from the last rows, if it is long; they may be padding."""
    y = causal_conv1d(x, *arguments, **options)
    weight, _, states, starts, lines, _ = arguments
    last = int((lines != options["pad_id"]).nonzero()[-1])
    if starts[last + 1] - starts[last] > 16:
        states[lines[last], :, : weight.shape[1] - 1] = x[1 - weight.shape[1] :].T
    return y


def with_impl(impl: type[PlainImpl], **members: Any) -> type[Base]:
    return type("Wrong", (Base,), {"Impl": type("Impl", (impl,), members)})


def with_builder(is_uniform: Any) -> type[Base]:
    return type("Wrong", (Base,), {"Builder": type("Builder", (Regular,), {"is_uniform": staticmethod(is_uniform)})})


WITH_TAIL = type("Wrong", (Base,), {"functions": classmethod(lambda cls: {"causal_conv1d": tail_of_the_rows})})
FINITE = "hidden keys get a finite score, such as -10000, not -inf"

FAULTS: tuple[tuple[str, type[Base], str, str], ...] = (
    ("negative-scores", with_impl(StartsAtZero), "numerics", "the output is all zeros"),
    ("negative-scores", with_impl(HidesByNumber), "numerics", FINITE),
    ("negative-scores", with_impl(HidesByNumber, hidden=-6e3), "numerics", FINITE),
    ("near-minus-the-cap", with_impl(CapsLast), "numerics", "the soft cap is applied after the mask"),
    ("near-minus-the-cap", with_impl(CountsTheTile), "numerics", "up to a multiple of 32, count with a score of -cap"),
    ("verify-fewer-drafts", with_builder(by_the_longest), "numerics", "every request is taken to have 4 rows"),
    ("verify-fewer-drafts", with_builder(by_the_config), "numerics", "every request is taken to have 4 rows"),
    ("padded-to-a-multiple", with_builder(by_the_remainder), "numerics", "every request is taken to have 2 rows"),
    ("convolution", WITH_TAIL, "cache_write", "rows of padding behind the last sequence enter its state"),
)


def record_of(case: Case, backend: type[Base], check: str) -> Record:
    loaded = LoadedBackend(name="made", ref="made.py:Made", backend=backend, version="", origin="test")
    (record,) = Examiner(RunPlan((case,))).records(case, loaded, checks=(check,))
    return record


@pytest.mark.parametrize(("case_id", "backend", "check", "cause"), FAULTS)
def test_a_fault_fails_and_the_cause_is_named(case_id: str, backend: type[Base], check: str, cause: str) -> None:
    assert record_of(SMOKE[case_id], Base, check).outcome == "passed", "the right backend"
    found = record_of(SMOKE[case_id], backend, check)
    assert isinstance(found, Failed)
    assert re.search(re.escape(cause), found.meaning or ""), found.meaning


@pytest.mark.parametrize(("case_id", "backend"), [FAULTS[0][:2], FAULTS[1][:2]])
def test_the_usual_scores_do_not_show_it(case_id: str, backend: type[Base]) -> None:
    assert record_of(replace(SMOKE[case_id], inputs=None), backend, "numerics").outcome == "passed"


class ByTheBucket(graphs.Base):
    """With K drafts in the config, a step of K + 1 tokens a request, with padding, counts as uniform."""

    class Builder(PagedBuilder):
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            drafts = self.vllm_config.speculative_config and self.vllm_config.speculative_config.num_speculative_tokens
            tokens = common_attn_metadata.num_reqs * (1 + (drafts or 0))
            metadata.plan = 1 + drafts if drafts and common_attn_metadata.num_actual_tokens == tokens else None
            return metadata

    class Impl(graphs.PlannedImpl):
        def locate(self, metadata: Any, num_rows: int) -> Any:
            if metadata.plan is None:
                return super().locate(metadata, num_rows)
            return graphs.locate_uniform(metadata.common, num_rows, metadata.plan)


def test_graphs_of_requests_with_fewer_drafts_are_replayed() -> None:
    (case,) = (each for each in load_suite("interpreted") if each.id == "graph")
    right, wrong = (record_of(case, each, "cudagraph").graph for each in (graphs.Base, ByTheBucket))
    assert right is not None
    assert wrong is not None
    assert (right.measured, wrong.measured) == ("ALWAYS", "UNIFORM_BATCH")
    assert [probe.name for probe in wrong.probes if probe.outcome == "failed"] == ["mixed drafts"]
