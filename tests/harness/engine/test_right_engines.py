"""An observer finds nothing in engines that are right, but unusual."""

from toy_engine import BLOCK, ToyEngine

from attncheck.harness.engine.events import ObserverSettings
from attncheck.harness.engine.observer import EngineObserver


class CachesAtOnce(ToyEngine):
    """Puts blocks into the prefix cache when they are scheduled, as vLLM does, not when they are computed."""

    def grow(self, request, end):
        new = super().grow(request, end)
        if new is not None:
            for index, key in enumerate(self.keys_of(request, min(end, len(request.tokens)) // BLOCK)):
                for group, table in enumerate(request.table):
                    if (group, key) not in self.cached:
                        self.hash_of[table[index]] = (group, key)
                        self.cached[group, key] = table[index]
        return new


def _serve(engine_class, prompts):
    observer = EngineObserver(ObserverSettings())
    engine = engine_class(observer, budget=40, blocks=60)
    for index, tokens in enumerate(prompts):
        engine.add(f"r{index}", tokens, len(tokens) + 6)
    while engine.waiting or engine.running:
        engine.run_step()
    return observer.result()


def test_a_prefix_hit_may_map_blocks_that_the_same_step_writes():
    prompt = list(range(4 * BLOCK + 2))
    result = _serve(CachesAtOnce, [prompt, prompt, prompt])
    assert result.failure is None
    assert result.counts["tokens of prefix hits"] == 2 * 4 * BLOCK
    assert result.checks["prefix_hit"] == 2 * 4
    assert result.findings == ()
    assert result.not_followed == {}
