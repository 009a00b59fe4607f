"""The check ``builder``: honest builders of several designs pass, with their waits as notes; others are found out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl
from attncheck.backends.conventions import Conventions
from attncheck.backends.registry import LoadedBackend, import_file
from attncheck.cases.loader import load_suite
from attncheck.harness.run.evaluate import Examiner, RunPlan

ROOT = Path(__file__).parents[3]
SYNC_FREE = Conventions(sync_free_build=True)
HONEST = import_file("graphs_honest.py", ROOT / "tests" / "miniatures" / "graphs_honest.py")


def backend(build: Any = None, forward: Any = None, **members: Any) -> type[ReferenceBackend]:
    """The reference with ``build(builder, common)``, which returns common metadata to build from, in front of its own.

    ``forward(impl, metadata)`` is called in front of its forward.
    """

    class Builder(ReferenceBuilder):
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            common = build(self, common_attn_metadata) if build else None
            return super().build(common_prefix_len, common or common_attn_metadata, fast_build)

    class Impl(ReferenceImpl):
        def forward(self, *arguments: Any, **more: Any) -> Any:
            if forward and arguments[5] is not None:
                forward(self, arguments[5])
            return super().forward(*arguments, **more)

    made = {"get_builder_cls": staticmethod(lambda: Builder), "get_impl_cls": staticmethod(lambda: Impl)}
    return type("Mine", (ReferenceBackend,), made | members)


def examine(candidate: Any, case: Any) -> Any:
    loaded = LoadedBackend(name="mine", ref="./x.py:Mine", backend=candidate, version="", origin="test")
    (record,) = Examiner(RunPlan(cases=(case,), backends=(loaded,), checks=("builder",))).run()
    return record


def test_a_read_of_a_host_twin_is_no_wait(make_case: Any) -> None:
    def build(_builder: Any, common: Any) -> None:
        common.seq_lens_cpu.tolist()
        common.query_start_loc_cpu.diff().max().item()

    record = examine(backend(build, conventions=SYNC_FREE), make_case())
    assert (record.outcome, record.notes) == ("passed", ())


def test_a_host_buffer_that_the_builder_keeps_is_no_wait(make_case: Any) -> None:
    def build(builder: Any, common: Any) -> Any:
        held = builder.host[: common.num_reqs].copy_(common.seq_lens_cpu)
        held.sum().item()
        lens = torch.empty_like(common.seq_lens)
        return replace(common, seq_lens=lens.copy_(held, non_blocking=True))

    class Builder(backend(build).get_builder_cls()):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.host = torch.zeros(64, dtype=torch.int32, device="cpu")

    keeps = type("Keeps", (ReferenceBackend,), {"get_builder_cls": lambda: Builder, "conventions": SYNC_FREE})
    assert examine(keeps, make_case()).outcome == "passed"


@pytest.mark.parametrize(
    ("kind", "build"),
    [
        ("host read: .tolist()", lambda _builder, common: common.seq_lens.tolist() and None),
        ("host read: .cpu()", lambda _builder, common: common.block_table_tensor.cpu() and None),
        ("host copy: .copy_()", lambda _builder, common: torch.empty_like(common.seq_lens).copy_(common.seq_lens_cpu)),
        ("data-dependent shape", lambda _builder, common: common.slot_mapping.nonzero()),
    ],
)
def test_a_wait_is_a_note_or_a_broken_promise(make_case: Any, kind: str, build: Any) -> None:
    case = make_case((1, 5))

    def waits(builder: Any, common: Any) -> None:
        build(builder, replace(common, block_table_tensor=common.block_table_tensor[:1, 0]))

    found = examine(backend(waits), case)
    assert found.outcome == "passed"
    assert any(kind in note and "test_builder.py" in note for note in found.notes)
    promised = examine(backend(waits, conventions=SYNC_FREE), case)
    assert promised.outcome == "failed"
    assert "sync_free_build is declared" in promised.summary


@pytest.mark.parametrize("name", ["RefillsBuffers", "PlansOnTheHost", "SplitsAtAThreshold", "LazyOnMetadata"])
def test_builders_of_other_designs_pass(name: str) -> None:
    cases = {case.id: case for case in load_suite("smoke").cases}
    for chosen in ("decode.float16", "mixed.NHD", "padded-mixed"):
        assert examine(getattr(HONEST, name), cases[chosen]).outcome == "passed"


@pytest.mark.parametrize("field", ["query_start_loc", "num_computed_tokens_cpu", "slot_mapping", "max_seq_len"])
def test_a_changed_field_is_named(make_case: Any, field: str) -> None:
    def build(_builder: Any, common: Any) -> Any:
        own = replace(common)
        setattr(common, field, getattr(common, field) + 1)
        return own

    record = examine(backend(build), make_case())
    assert (record.outcome, record.summary) == ("failed", f"build changed metadata.{field}")


def test_a_field_that_forward_changes_is_named_without_a_cache(make_case: Any) -> None:
    def forward(_impl: Any, metadata: Any) -> None:
        metadata.common.seq_lens_cpu.add_(1)

    case = make_case((7, 7), (20, 20), attn_type="encoder_only", path="encoder_only")
    record = examine(backend(forward=forward), case)
    assert (record.outcome, record.summary) == ("failed", snapshot("forward changed metadata.seq_lens_cpu"))


def test_what_raises_beside_another_builder_is_reported_with_its_stage() -> None:
    built: list[Any] = []

    def build(builder: Any, _common: Any) -> None:
        if built and built[-1] is not builder and builder.ready:
            raise RuntimeError("another plan is in use")
        built.append(builder)

    def forward(_impl: Any, _metadata: Any) -> None:
        built.clear()

    candidate = backend(build, forward)
    candidate.get_builder_cls().ready = True  # type: ignore[attr-defined]
    case = next(case for case in load_suite("smoke").cases if case.id == "extend")
    record = examine(candidate, case)
    assert record.outcome == "errored"
    assert record.stage == "build beside another builder"


def test_a_backend_that_is_wrong_alone_is_no_matter_of_builders(make_case: Any) -> None:
    def build(_builder: Any, common: Any) -> Any:
        return replace(common, seq_lens=(common.seq_lens - 1).clamp(min=1))

    assert examine(backend(build), make_case((1, 30), (5, 40))).outcome == "passed"


def test_what_cannot_run_under_a_watch_is_a_note(make_case: Any) -> None:
    def build(_builder: Any, _common: Any) -> None:
        if torch.overrides._get_current_function_mode() is not None:
            raise RuntimeError("not under a mode")

    record = examine(backend(build, conventions=SYNC_FREE), make_case())
    assert record.outcome == "passed"
    assert any("is unknown" in note for note in record.notes)
