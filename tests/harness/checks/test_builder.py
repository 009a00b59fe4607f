"""The check ``builder``: honest builders of several designs pass, with their waits as notes; others are found out."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl
from attncheck.backends.conventions import Conventions
from attncheck.backends.registry import import_file
from attncheck.cases.loader import load_suite
from attncheck.harness.checks.findings import Broken, Holds
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
    Builder.backend = type("Mine", (ReferenceBackend,), made | members)
    return Builder.backend


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
        metadata.common.slot_mapping.add_(1)

    case = make_case((7, 7), (20, 20), attn_type="encoder_only", path="encoder_only")
    assert examine(backend(forward=forward), case).summary == "forward changed metadata.slot_mapping"


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("name", ["seq_lens_cpu", "query_start_loc_cpu"])
def test_a_host_tensor_is_not_read_after_build(examine, make_case, name, kept):
    lent = {}

    class Builder(ReferenceBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            made = super().build(common_prefix_len, common_attn_metadata, fast_build)
            tensor = getattr(common_attn_metadata, name)
            lent[id(made)] = made, tensor if kept else tensor.clone()
            return made

    class Impl(ReferenceImpl):
        def attend(self, *args):
            metadata = args[5]
            tensor = lent[id(metadata)][1].to(metadata.common.seq_lens.device)
            own = replace(metadata.common, **{name.removesuffix("_cpu"): tensor})
            super().attend(*args[:5], replace(metadata, common=own), *args[6:])

    parts = {"get_builder_cls": staticmethod(lambda: Builder), "get_impl_cls": staticmethod(lambda: Impl)}
    found = examine(type("Mine", (ReferenceBackend,), parts), make_case((1, 37), (3, 30)))
    assert isinstance(found, Broken) is kept
    if isinstance(found, Broken):
        assert f"after {name} is refilled between build and forward: " in found.summary
        assert 'host_lens="exact"' in (found.meaning or "")
    exact = {"conventions": replace(ReferenceBackend.conventions, host_lens="exact")}
    assert isinstance(examine(type("Mine", (ReferenceBackend,), parts | exact), make_case((1, 37), (3, 30))), Holds)


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


class Updating(ReferenceBuilder):
    """A builder whose metadata of a second group are those of the first with another block table and slots."""

    supports_update_block_table = True
    keeps: tuple[str, ...] = ()
    in_place = False

    def update_block_table(self, metadata, blk_table, slot_mapping):
        new = {"block_table_tensor": blk_table, "slot_mapping": slot_mapping}
        common = replace(metadata.common, **{name: value for name, value in new.items() if name not in self.keeps})
        if self.in_place:
            metadata.common = common
            return metadata
        return replace(metadata, common=common)


@pytest.mark.parametrize(
    ("members", "group"),
    [
        ({}, ""),
        ({"supports_update_block_table": False, "keeps": ("block_table_tensor",)}, ""),
        ({"keeps": ("block_table_tensor",)}, "second"),
        ({"keeps": ("slot_mapping",)}, "second"),
        ({"in_place": True}, "first"),
    ],
    ids=["right", "not declared", "keeps the table", "keeps the slots", "changes the first group's"],
)
def test_a_second_group_of_layers_updates_the_block_table(examine, make_case, members, group):
    own = type("Builder", (Updating,), members)
    found = examine(backend(get_builder_cls=staticmethod(lambda: own)), make_case())
    if not group:
        assert isinstance(found, Holds)
        return
    assert isinstance(found, Broken)
    assert found.summary.startswith(f"with update_block_table for a second group of layers, the {group} group: ")
    assert ("update_block_table keeps" in (found.meaning or "")) is (group == "second")


def test_what_cannot_run_under_a_watch_is_a_note(examine, make_case):
    def build(_builder, _common):
        if torch.overrides._get_current_function_mode() is not None:
            raise RuntimeError("not under a mode")

    found = examine(backend(build, conventions=SYNC_FREE), make_case())
    assert isinstance(found, Holds)
    assert any("is unknown" in note for note in found.notes)
