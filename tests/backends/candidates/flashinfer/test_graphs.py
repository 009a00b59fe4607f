"""A graph reads what ``build`` refills: every step is planned anew, in buffers that keep their addresses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot

import attncheck
from attncheck.backends.contract import AttentionBackend

Make = Callable[..., Any]

SUITE = """
suite: graphs
cases:
  - id: decode
    batch: q1s1_q1s17
    layer: {num_heads: 1, num_kv_heads: 1, head_size: 64, dtype: float16}
    cache: {block_size: 32}
"""

BUFFERS = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")


def replayed(run: Any) -> Any:
    """What a graph that holds this call of ``run`` would leave behind: the same call again, no line of ours."""
    given = dict(run.arguments)
    query, cache = given.pop("q"), given.pop("paged_kv_cache")
    del given["args"]
    run.wrapper.run(query, cache, **given)
    return given["out"].clone()


def test_a_decode_of_an_announced_size_is_planned_in_buffers_that_stay(
    library: Any, make_engine: Make, make_batch: Make
) -> None:
    engine = make_engine(graphs=(2, 4))
    engine.build(make_batch([(1, 5), (1, 9), (1, 1), (1, 24)]))
    (constructed,) = library.of("__init__")
    buffers = [constructed.arguments[name] for name in BUFFERS]
    places = [buffer.data_ptr() for buffer in buffers]
    assert constructed.arguments["use_cuda_graph"] is True
    assert [len(buffer) for buffer in buffers] == [5, 24, 4]
    assert buffers[0].tolist() == [0, 2, 5, 6, 12]
    assert buffers[1][:12].tolist() == [1, 2, 11, 12, 13, 21, 31, 32, 33, 34, 35, 36]
    assert buffers[2].tolist() == [1, 1, 1, 4]

    engine.build(make_batch([(1, 8), (1, 2), (0, 0), (0, 0)], tokens=4))
    assert len(library.of("__init__")) == 1
    assert len(library.of("plan")) == 2
    assert [constructed.arguments[name].data_ptr() for name in BUFFERS] == places
    assert buffers[0].tolist() == [0, 2, 3, 3, 3]
    assert buffers[1][:3].tolist() == [1, 2, 11]
    assert buffers[2].tolist() == [4, 2, 0, 0]


def test_a_replay_sees_the_plan_of_its_step(library: Any, make_engine: Make, make_batch: Make) -> None:
    torch.manual_seed(0)
    engine = make_engine(graphs=(2,))
    engine.kv_cache.copy_(torch.randn(engine.kv_cache.shape))
    captured = engine.forward(engine.build(make_batch([(1, 5), (1, 9)])))
    (run,) = library.of("run")
    at_capture = captured.output.clone()
    assert torch.equal(replayed(run), at_capture)

    engine.build(make_batch([(1, 3), (0, 0)], tokens=2))
    found = replayed(run)
    key, value = (half[1, :3].double().repeat_interleave(2, dim=1) for half in engine.kv_cache.unbind(1))
    scores = torch.einsum("hd,khd->hk", run.arguments["q"][0].double(), key) * 0.25
    torch.testing.assert_close(found[0], torch.einsum("hk,khd->hd", scores.softmax(-1), value).half())
    assert not torch.equal(found[0], at_capture[0])
    assert found[1].eq(0).all()


def test_padding_has_no_keys_whatever_its_length(library: Any, make_engine: Make, make_batch: Make) -> None:
    make_engine(graphs=(2,)).build(make_batch([(1, 5), (0, 9)], tokens=2))
    (plan,) = (call.arguments for call in library.of("plan"))
    assert (plan["indptr"].tolist(), plan["last_page_len"].tolist()) == ([0, 2, 2], [1, 0])


def test_sizes_have_wrappers_of_their_own(library: Any, make_engine: Make, make_batch: Make) -> None:
    engine = make_engine(graphs=(1, 2))
    for step in ([(1, 5), (1, 9)], [(1, 5)], [(1, 6), (1, 9)], [(1, 2)]):
        engine.build(make_batch(step))
    assert [len(call.arguments[BUFFERS[2]]) for call in library.of("__init__")] == [2, 1]
    assert [call.wrapper for call in library.of("plan")] == [call.wrapper for call in library.of("__init__")] * 2


@pytest.mark.parametrize(
    ("requests", "tokens"),
    [([(1, 5), (1, 9)], 3), ([(1, 5)], 1), ([(2, 5), (0, 0)], 2), ([(1, 5), (2, 9)], 3)],
    ids=["tokens-behind", "no-such-size", "drafts", "mixed"],
)
def test_other_steps_are_planned_without_graphs(
    library: Any, make_engine: Make, make_batch: Make, requests: list[tuple[int, int]], tokens: int
) -> None:
    make_engine(graphs=(2,)).build(make_batch(requests, tokens=tokens))
    assert not any(call.arguments["use_cuda_graph"] for call in library.of("__init__"))


def test_metadata_of_an_earlier_step_cannot_be_run(make_engine: Make, make_batch: Make) -> None:
    engine = make_engine()
    earlier = engine.build(make_batch([(1, 5), (2, 7)]))
    later = engine.build(make_batch([(1, 6), (2, 8)]))
    with pytest.raises(RuntimeError) as refused:
        engine.forward(earlier)
    assert str(refused.value) == snapshot(
        "FLASHINFER: attn_metadata of an earlier step: its builder has planned another since"
    )
    engine.forward(later)


def test_what_other_wrappers_were_planned_for_can_still_be_run(make_engine: Make, make_batch: Make) -> None:
    engine = make_engine()
    decode = engine.build(make_batch([(1, 5)]))
    engine.build(make_batch([(2, 7)]))
    engine.forward(decode)


def test_a_step_that_no_graph_was_announced_for_is_not_captured(
    library: Any, make_engine: Make, make_batch: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(graphs=(2,))
    monkeypatch.setattr("attncheck.backends.candidates.flashinfer.backend._is_captured", lambda tensor: True)
    with pytest.raises(RuntimeError) as refused:
        engine.forward(engine.build(make_batch([(2, 5)])))
    assert str(refused.value) == snapshot("FLASHINFER: a graph is captured of a step that was planned for no graph")
    assert library.of("run") == []
    engine.forward(engine.build(make_batch([(1, 5), (1, 6)])))


@pytest.fixture
def measure(library: Any, tmp_path: Path) -> Callable[[type[AttentionBackend]], Any]:
    """``measure(backend)``: the figures of the check ``cudagraph``, recorded and replayed by attncheck's emulation."""
    suite = tmp_path / "suite.yaml"
    suite.write_text(SUITE, encoding="utf-8")

    def run(backend: type[AttentionBackend]) -> Any:
        (record,) = attncheck.examine(backend, str(suite), checks="cudagraph", device="cpu").records
        return record

    return run


def test_the_declared_level_holds_as_far_as_the_library_does_what_it_documents(
    measure: Callable[..., Any], backend: type[AttentionBackend]
) -> None:
    record = measure(backend)
    assert record.outcome == "passed"


def test_a_plan_that_is_baked_into_a_graph_is_found(
    measure: Callable[..., Any], backend: type[AttentionBackend]
) -> None:
    """The mistake that this backend has to avoid: captured with the wrapper of eager steps, whose plans move."""

    class Builder(backend.get_builder_cls()):  # type: ignore[misc]
        def _may_be_captured(self, step: Any) -> bool:
            return False

    class Baked(backend):  # type: ignore[misc, valid-type]
        @staticmethod
        def get_builder_cls() -> type[Any]:
            return Builder

    record = measure(Baked)
    assert record.outcome == "failed"
