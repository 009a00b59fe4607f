"""Layers in a captured graph are observed after each replay, with the rows of that replay."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck.harness.engine.events import LayerRows
from attncheck.harness.engine.graphs import GraphCopies
from attncheck.harness.engine.observer import EngineObserver
from attncheck.harness.engine.vllm_runner import EngineHooks


class Recording(TorchDispatchMode):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, made))
        return made


@pytest.fixture
def graph_class():
    """Records operators, and repeats them in the same memory: what ``torch.cuda.CUDAGraph`` does."""

    class Graph:
        def capture_begin(self, pool=None):
            self.calls = []
            self.mode = Recording(self.calls)
            self.mode.__enter__()

        def capture_end(self):
            self.mode.__exit__(None, None, None)

        def replay(self):
            for func, args, kwargs, made in self.calls:
                again = func(*args, **kwargs)
                if isinstance(made, torch.Tensor) and again is not made and not func.is_view:
                    made.copy_(again)

    return Graph


class Model:
    """Two layers, observed as by an adapter. The second reads the output of the first."""

    def __init__(self, copies):
        self.copies = copies
        self.forwards = 0

    def __call__(self, rows):
        self.forwards += 1
        for layer in ("first", "second"):
            query, key = rows * 2, rows + 1
            output = query + key
            self.copies.layer_rows(LayerRows(layer, query, key, None, output))
            rows = output * 10
            query.zero_(), key.zero_()  # a graph uses their memory again
        return rows


def captured(graph_class, model, inputs):
    graph = graph_class()
    graph.capture_begin()
    model(inputs)
    graph.capture_end()
    return graph


@pytest.fixture
def seen():
    return []


@pytest.fixture
def copies(seen, graph_class):
    copies = GraphCopies(lambda rows: seen.append((rows.layer, rows.query.tolist(), rows.key.tolist())))
    hooks = EngineHooks(EngineObserver())
    copies.install(hooks.wrap, graph_class)
    yield copies
    hooks.remove()


def test_each_replay_is_observed_with_its_own_rows(copies, seen, graph_class):
    model, inputs = Model(copies), torch.zeros(4)
    graph = captured(graph_class, model, inputs)
    assert not seen, "a capture computes nothing"
    for number in (1.0, 2.0):
        inputs.fill_(number)
        graph.replay()
    second = [10 * (3 * number + 1) for number in (1.0, 2.0)]
    assert [(layer, query[0], key[0]) for layer, query, key in seen] == [
        ("first", 2, 2),
        ("second", 2 * second[0], second[0] + 1),
        ("first", 4, 3),
        ("second", 2 * second[1], second[1] + 1),
    ]
    assert model.forwards == 1


def test_graphs_of_several_sizes_share_the_buffers_of_the_largest(copies, seen, graph_class):
    model, inputs = Model(copies), torch.zeros(8)
    large, small = (captured(graph_class, model, inputs[:size]) for size in (8, 2))
    held = {tensor.untyped_storage().data_ptr() for tensor in copies._buffers.values()}
    assert len(held) == 2 * 3  # query, key and output of two layers
    inputs.fill_(1)
    small.replay()
    large.replay()
    assert [len(query) for _, query, _ in seen] == [2, 2, 8, 8]


def test_without_a_graph_rows_are_observed_at_once(copies, seen):
    Model(copies)(torch.ones(3))
    assert [layer for layer, _, _ in seen] == ["first", "second"]


def test_a_graph_without_attention_is_left_alone(copies, seen, graph_class):
    graph = captured(graph_class, lambda rows: rows.add_(1), inputs := torch.zeros(2))
    graph.replay()
    assert inputs.tolist() == [2, 2]
    assert not seen


def test_the_graph_class_is_restored(seen, graph_class):
    before = dict(vars(graph_class))
    hooks = EngineHooks(EngineObserver())
    GraphCopies(lambda *_: None).install(hooks.wrap, graph_class)
    assert vars(graph_class)["replay"] is not before["replay"]
    hooks.remove()
    assert dict(vars(graph_class)) == before
