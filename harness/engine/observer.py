"""Follows an engine and judges its attention, from what it is given about each step."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from attncheck.harness.engine.events import (
    EngineFacts,
    KVGroup,
    LayerFacts,
    ObserverResult,
    ObserverSettings,
    StepPlan,
)


class EngineObserver:
    """Observes one engine: call its methods in the order of the engine's steps."""

    def __init__(self, settings: ObserverSettings | None = None) -> None:
        self.settings = settings or ObserverSettings()

    def engine_starts(
        self, groups: Sequence[KVGroup], layers: Mapping[str, LayerFacts], engine: EngineFacts | None = None
    ) -> None:
        """Take the KV-cache groups and layers; requests may be added before."""
        raise NotImplementedError

    def request_added(self, request_id: str, prompt_token_ids: Sequence[int], not_followed: str | None = None) -> None:
        """Take a new request; ``not_followed``: why it cannot be followed, such as its LoRA adapter."""
        raise NotImplementedError

    def request_finished(self, request_id: str) -> None:
        """Drop a request that ended or was aborted."""
        raise NotImplementedError

    def step_begins(self, plan: StepPlan) -> None:
        """Take the scheduler's plan of the next step."""
        raise NotImplementedError

    def inputs(self, request_ids: Sequence[str], input_ids: Tensor, positions: Tensor) -> None:
        """Take what the model is given; ``request_ids`` in order of the rows; rows beyond the plan are padding."""
        raise NotImplementedError

    def layer_rows(
        self,
        layer: str,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        output: Tensor,
        kv_cache: Tensor | None = None,
    ) -> None:
        """Take the arguments and the output of a layer's ``impl.forward``; without ``kv_cache``, no page is compared.

        For a latent layer, ``key`` is ``kv_c_normed`` and ``value`` is ``k_pe``.
        """
        raise NotImplementedError

    def step_ends(self, sampled: Mapping[str, tuple[int, ...]]) -> None:
        """Take the tokens that were sampled for each request of the step."""
        raise NotImplementedError

    def result(self) -> ObserverResult:
        """Return what was observed so far."""
        raise NotImplementedError
