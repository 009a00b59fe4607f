"""The check ``builder``: honest builders of several designs pass, with their waits as notes; others are found out."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl
from attncheck.backends.conventions import Conventions
from attncheck.backends.registry import import_file
from attncheck.cases.loader import load_suite
from attncheck.harness.checks.findings import Holds
from attncheck.harness.driver.foreign_code import StageError

ROOT = Path(__file__).parents[3]
SYNC_FREE = Conventions(sync_free_build=True)
HONEST = import_file("graphs_honest.py", ROOT / "tests" / "miniatures" / "graphs_honest.py")
SMOKE = {case.id: case for case in load_suite("smoke").cases}


def backend(build=None, forward=None, **members):
    """The reference with ``build(builder, common)``, which returns common metadata to build from, in front of its own.

    ``forward(impl, metadata)`` is called in front of its forward.
    """

    class Builder(ReferenceBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            common = build(self, common_attn_metadata) if build else None
            return super().build(common_prefix_len, common or common_attn_metadata, fast_build)

    class Impl(ReferenceImpl):
        def forward(self, *arguments, **more):
            if forward and arguments[5] is not None:
                forward(self, arguments[5])
            return super().forward(*arguments, **more)

    made = {"get_builder_cls": staticmethod(lambda: Builder), "get_impl_cls": staticmethod(lambda: Impl)}
    return type("Mine", (ReferenceBackend,), made | members)


@pytest.fixture
def examine(judge):
    return lambda candidate, case: judge("builder", candidate, case)


def reads_host_twins(_builder, common):
    common.seq_lens_cpu.tolist()
    common.query_start_loc_cpu.diff().max().item()


def keeps_a_host_buffer(builder, common):
    if not hasattr(builder, "host"):
        builder.host = torch.zeros(64, dtype=torch.int32, device="cpu")
    held = builder.host[: common.num_reqs].copy_(common.seq_lens_cpu)
    held.sum().item()
    lens = torch.empty_like(common.seq_lens)
    return replace(common, seq_lens=lens.copy_(held, non_blocking=True))


def is_wrong_alone(_builder, common):
    """A matter of other checks than this one."""
    return replace(common, seq_lens=(common.seq_lens - 1).clamp(min=1))


@pytest.mark.parametrize("build", [reads_host_twins, keeps_a_host_buffer, is_wrong_alone])
def test_what_neither_waits_nor_changes_anything_passes(examine, make_case, build):
    found = examine(backend(build, conventions=SYNC_FREE), make_case())
    assert isinstance(found, Holds)
    assert found.notes == ()


@pytest.mark.parametrize(
    ("kind", "build"),
    [
        ("host read: .tolist()", lambda _builder, common: common.seq_lens.tolist() and None),
        ("host read: .cpu()", lambda _builder, common: common.block_table_tensor.cpu() and None),
        ("host copy: .copy_()", lambda _builder, common: torch.empty_like(common.seq_lens).copy_(common.seq_lens_cpu)),
        ("data-dependent shape", lambda _builder, common: common.slot_mapping.nonzero()),
    ],
)
def test_a_wait_is_a_note_or_a_broken_promise(examine, make_case, kind, build):
    def waits(builder, common):
        build(builder, replace(common, block_table_tensor=common.block_table_tensor[:1, 0]))

    case = make_case((1, 5))
    found = examine(backend(waits), case)
    assert isinstance(found, Holds)
    assert any(kind in note and "test_builder.py" in note for note in found.notes)
    promised = examine(backend(waits, conventions=SYNC_FREE), case)
    assert "sync_free_build is declared" in promised.summary


@pytest.mark.parametrize("name", ["RefillsBuffers", "PlansOnTheHost", "SplitsAtAThreshold", "LazyOnMetadata"])
@pytest.mark.parametrize("case", ["decode.float16", "padded-mixed"])
def test_builders_of_other_designs_pass(examine, name, case):
    assert isinstance(examine(getattr(HONEST, name), SMOKE[case]), Holds)


@pytest.mark.parametrize("field", ["query_start_loc", "num_computed_tokens_cpu", "slot_mapping", "max_seq_len"])
def test_a_changed_field_is_named(examine, make_case, field):
    def build(_builder, common):
        own = replace(common)
        setattr(common, field, getattr(common, field) + 1)
        return own

    assert examine(backend(build), make_case()).summary == f"build changed metadata.{field}"


def test_a_field_that_forward_changes_is_named_without_a_cache(examine, make_case):
    def forward(_impl, metadata):
        metadata.common.seq_lens_cpu.add_(1)

    case = make_case((7, 7), (20, 20), attn_type="encoder_only", path="encoder_only")
    assert examine(backend(forward=forward), case).summary == "forward changed metadata.seq_lens_cpu"


def test_what_raises_beside_another_builder_is_reported_with_its_stage(examine):
    built = []

    def build(builder, _common):
        if built and built[-1] is not builder:
            raise RuntimeError("another plan is in use")
        built.append(builder)

    def forward(_impl, _metadata):
        built.clear()

    with pytest.raises(StageError) as failure:
        examine(backend(build, forward), SMOKE["extend"])
    assert failure.value.raised.stage == "build beside another builder"


def test_what_cannot_run_under_a_watch_is_a_note(examine, make_case):
    def build(_builder, _common):
        if torch.overrides._get_current_function_mode() is not None:
            raise RuntimeError("not under a mode")

    found = examine(backend(build, conventions=SYNC_FREE), make_case())
    assert isinstance(found, Holds)
    assert any("is unknown" in note for note in found.notes)
